"""RunManifest: the data to reproduce a response token by token, or to explain a difference."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import platform
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import lru_cache
from pathlib import Path

import msgspec

import servd
from servd.api.context import Context
from servd.api.request.request_output import RequestOutput
from servd.base.errors import EngineDeadError
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.messages.engine import EngineReady, WorkerReady
from servd.messages.params import SamplingParams

PACKAGES = ("torch", "tokenizers", "llguidance", "fastapi", "uvicorn")
# Paths have no influence on outputs.
PLACES = ("model", "served_model_name", "tokenizer", "revision", "download_dir")

_hashing = threading.Lock()


class RepeatablePrompt(msgspec.Struct):
    """A prompt with its sampling parameters and its output."""

    prompt_token_ids: list[int]
    params: SamplingParams  # with the seed that was drawn
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    token_ids: list[list[int]]  # by choice


class RunManifest(msgspec.Struct):
    """All facts that determined a response. Hashes are SHA-256."""

    versions: dict[str, str]
    configuration: str  # hash of all options and of the model's shape
    weights: str  # hash of the files
    device: str
    dtype: str
    attention_backend: str
    prompts: list[RepeatablePrompt]

    def find_differences(self, other: RunManifest) -> list[str]:
        """Return the differences to another manifest, one per entry, without the prompts."""
        facts: list[dict[str, str]] = []
        for manifest in (self, other):
            fields = msgspec.structs.asdict(manifest)
            del fields["prompts"]
            facts.append(fields | fields.pop("versions"))
        then, now = facts
        return [
            f"{name}: {then.get(name, 'none')} then, {now.get(name, 'none')} now"
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        ]


def make_manifest(
    config: Config,
    spec: ModelSpec,
    worker: WorkerReady,
    prompts: list[RepeatablePrompt],
    num_updates: int = 0,
) -> RunManifest:
    """Return the manifest of a run with the weights in the folder of `spec`. The first call in a
    process, and after an update, hashes all weights, which takes about a second per gigabyte, or no
    time if the hub's cache has the hashes.
    """
    model = msgspec.structs.replace(config.model, **dict.fromkeys(PLACES))
    shape = msgspec.structs.replace(spec, folder="")
    deciding = [model, shape, config.cache, config.scheduler, config.parallel]
    configuration = hashlib.sha256(msgspec.json.encode(deciding)).hexdigest()
    weights = ""
    if spec.folder:
        with _hashing:  # other threads wait, and find the hash cached
            weights = hash_weights(spec.folder, num_updates)
    device = (worker.device, worker.dtype, worker.attention_backend)
    return RunManifest(find_versions(), configuration, weights, *device, prompts)


class ManifestRecorder:
    """Records the outputs of a request, and adds its run manifest to the response."""

    def __init__(self, context: Context, prompts: Sequence[RequestOutput]) -> None:
        self.context = context
        self.ready: EngineReady | None = None  # the engine when it sent the last output
        self.prompts = [
            RepeatablePrompt(
                prompt.prompt_token_ids, prompt.params, 0, [[] for _ in range(prompt.params.n)]
            )
            for prompt in prompts
        ]

    async def watch(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the same outputs."""
        async with aclosing(outputs):
            async for output in outputs:
                if output.timeline is not None:
                    status = self.context.async_llm.engines[output.timeline.rank].status
                    self.ready = status if isinstance(status, EngineReady) else None
                prompt = self.prompts[output.index]
                for delta in output.outputs:
                    prompt.token_ids[delta.index] += delta.token_ids
                    if delta.index == 0:  # later choices find the blocks of the first choice
                        num_cached = max(prompt.num_cached_tokens, delta.num_cached_tokens)
                        prompt.num_cached_tokens = num_cached
                yield output

    async def append_comment(
        self, frames: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the frames of a stream, and the manifest as a comment, which clients skip."""
        async with aclosing(frames):
            async for frame in frames:
                yield frame
        yield b": run_manifest " + msgspec.json.encode(await self.make()) + b"\n\n"

    async def append_key(self, body: bytes) -> bytes:
        """Return the JSON object `body` with the manifest as its last key."""
        manifest = msgspec.json.encode({"run_manifest": await self.make()})
        return body[:-1] + b"," + manifest[1:]

    async def make(self) -> RunManifest:
        ready = self.ready
        if ready is None:  # the engine died after the last token
            raise EngineDeadError("the engine has ended")
        spec = self.context.async_llm.spec
        if ready.num_updates:
            spec = msgspec.structs.replace(spec, folder=ready.folder)
        return await asyncio.to_thread(
            make_manifest, self.context.config, spec, ready.worker, self.prompts, ready.num_updates
        )


def find_versions() -> dict[str, str]:
    """Return the versions of Python, servd, and the packages that may affect outputs."""
    versions = {"python": platform.python_version(), "servd": servd.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # torch may come from elsewhere
            continue
    return versions


@lru_cache(maxsize=1)
def hash_weights(folder: str, num_updates: int = 0) -> str:
    """Return a hash of the names and contents of a checkpoint's weight files. They are read again
    if `num_updates` differs.
    """
    lines: list[str] = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        name = file.resolve().name  # in the hub's cache: the SHA-256 of the content
        if len(name) != 64 or not file.is_symlink():
            with file.open("rb") as opened:
                name = hashlib.file_digest(opened, "sha256").hexdigest()
        lines.append(f"{file.name} {name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()
