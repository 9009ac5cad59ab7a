"""Downloads a model into --models-dir for POST /api/pull, and tells the progress."""

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Container
from contextlib import suppress
from pathlib import Path
from typing import Any

from servd.base.errors import InvalidRequest, Unavailable
from servd.base.python_command import python_command
from servd.base.sizes import format_bytes
from servd.checkpoint import hub
from servd.gateway.models import HUB

INTERVAL = 0.5  # seconds between two lines


async def pull(model: str, folder: Path) -> AsyncGenerator[dict[str, Any]]:
    """Yield Ollama's lines of progress. If the client leaves, the download stops, and the next one
    resumes it. Raises InvalidRequest: the disk is too small; ModelNotFound; Unavailable: it failed.
    """
    blobs = await asyncio.to_thread(hub.blobs_to_download, model)
    total = sum(blobs.values())
    cached = folder / f"{HUB}{model.partition(':')[0].replace('/', '--')}" / "blobs"
    missing = total - _size(cached, blobs)
    if missing > (free := shutil.disk_usage(folder).free):
        raise InvalidRequest(
            f"{model} needs {format_bytes(missing)}, and --models-dir has {format_bytes(free)} free"
        )
    yield {"status": "pulling manifest"}
    process = await asyncio.create_subprocess_exec(
        *python_command("servd", "pull", "--cache", str(folder), "--", model),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    ending = asyncio.ensure_future(process.communicate())
    try:
        while not ending.done():
            size = min(_size(cached, blobs), total)
            yield {"status": f"pulling {model}", "digest": model, "total": total, "completed": size}
            await asyncio.wait({ending}, timeout=INTERVAL)
    finally:
        if process.returncode is None:
            process.kill()
        _, said = await ending
    if process.returncode:
        lines = said.decode(errors="replace").splitlines() or ["the download was stopped"]
        raise Unavailable(lines[-1].removeprefix("servd: error: "))


def _size(folder: Path, names: Container[str]) -> int:
    """Return the bytes of the blobs of these names, and of their incomplete files."""
    total = 0
    for file in folder.glob("*"):
        with suppress(FileNotFoundError):  # renamed when it is complete
            if file.name.partition(".")[0] in names:
                total += file.stat().st_size
    return total
