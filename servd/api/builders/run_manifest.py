"""RunManifest: the data to reproduce a response token by token, or to explain a difference."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import threading
from functools import lru_cache
from pathlib import Path

import msgspec

import servd
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.messages.engine import WorkerReady
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
        for each in (self, other):
            found = msgspec.structs.asdict(each)
            del found["prompts"]
            facts.append(found | found.pop("versions"))
        then, now = facts
        return [
            f"{name}: {then.get(name, 'none')} then, {now.get(name, 'none')} now"
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        ]


def make_manifest(
    config: Config, spec: ModelSpec, worker: WorkerReady, prompts: list[RepeatablePrompt]
) -> RunManifest:
    """Return the manifest of a run. The first call in a process hashes all weights, which takes
    about a second per gigabyte, or no time if the hub's cache has the hashes.
    """
    model = msgspec.structs.replace(config.model, **dict.fromkeys(PLACES))
    shape = msgspec.structs.replace(spec, folder="")
    deciding = [model, shape, config.cache, config.scheduler, config.parallel]
    configuration = hashlib.sha256(msgspec.json.encode(deciding)).hexdigest()
    weights = ""
    if spec.folder:
        with _hashing:  # other threads wait, and find the hash cached
            weights = hash_weights(spec.folder)
    device = (worker.device, worker.dtype, worker.attention_backend)
    return RunManifest(find_versions(), configuration, weights, *device, prompts)


def find_versions() -> dict[str, str]:
    """Return the versions of Python, servd, and the packages that may affect outputs."""
    found = {"python": platform.python_version(), "servd": servd.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # torch may come from elsewhere
            continue
    return found


@lru_cache(maxsize=1)
def hash_weights(folder: str) -> str:
    """Return a hash of the names and contents of a checkpoint's weight files."""
    lines: list[str] = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        name = file.resolve().name  # in the hub's cache: the SHA-256 of the content
        if len(name) != 64 or not file.is_symlink():
            with file.open("rb") as opened:
                name = hashlib.file_digest(opened, "sha256").hexdigest()
        lines.append(f"{file.name} {name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()
