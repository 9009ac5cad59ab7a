"""Delete a model, or one of its GGUF files, from the cache."""

import argparse
import shutil
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from servd.base.errors import ModelNotFound, ServdError
from servd.checkpoint import gguf
from servd.checkpoint.short_names import full_name
from servd.gateway.models import HUB, quantizations


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="id or short name, such as qwen3:0.6b")


def run(arguments: argparse.Namespace) -> int:
    name = full_name(arguments.model)
    repository, _, tag = name.partition(":")
    folder = find_repository(repository)
    check_inside(folder)
    if not (find_file(name) if tag else folder.is_dir()):
        raise ModelNotFound(f"the cache has no model {name!r}; `servd list` shows what it has")
    if not tag:
        shutil.rmtree(folder)
        return 0
    while (file := find_file(name)) is not None:  # of each revision
        check_inside(file.parent)
        for part in filter(Path.exists, gguf.name_parts(file)):
            blob = part.resolve()
            if blob.is_relative_to(folder.resolve() / "blobs"):  # else a file of the user's own
                blob.unlink(missing_ok=True)
            part.unlink()
    return 0


def check_inside(folder: Path) -> None:
    """Raise ServdError if a link leads from the cache to this folder elsewhere."""
    if folder.is_symlink() or not folder.resolve().is_relative_to(Path(HF_HUB_CACHE).resolve()):
        raise ServdError(f"{folder} is a link to a folder elsewhere: remove the link yourself")


def find_repository(name: str) -> Path:
    """Return where the Hugging Face cache keeps a model, if it has it."""
    return Path(HF_HUB_CACHE) / f"{HUB}{name.replace('/', '--')}"


def find_file(name: str) -> Path | None:
    """Return the GGUF file "org/name:Q4_K_M" of the Hugging Face cache; None if it has none."""
    repository, _, tag = name.partition(":")
    return dict(quantizations(find_repository(repository))).get(tag)
