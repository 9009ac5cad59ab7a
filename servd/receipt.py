"""Receipt: everything needed to reproduce a response token by token, or to explain a difference."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

import servd
from servd import hf
from servd.config import Config
from servd.messages import WorkerReady
from servd.params import SamplingParams

PACKAGES = ("torch", "tokenizers", "llguidance", "fastapi", "uvicorn")
# Paths have no influence on outputs.
PLACES = ("model", "served_model_name", "tokenizer", "revision", "download_dir")

_hashing = threading.Lock()


class RepeatablePrompt(msgspec.Struct):
    """A prompt, its sampling parameters and its output."""

    prompt_token_ids: list[int]
    params: SamplingParams  # with the seed that was drawn
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    token_ids: list[list[int]]  # by choice


class Receipt(msgspec.Struct):
    """Everything that determined a response. Hashes are SHA-256."""

    versions: dict[str, str]
    configuration: str  # hash of all options and of the model's shape
    weights: str  # hash of the files
    device: str
    dtype: str
    attention_backend: str
    prompts: list[RepeatablePrompt]

    @classmethod
    def of(
        cls,
        config: Config,
        spec: hf.ModelSpec,
        worker: WorkerReady,
        prompts: list[RepeatablePrompt],
    ) -> Receipt:
        """Reads all weights, once in the life of a process: about a second per gigabyte, or none
        where the hub's cache has their hashes.
        """
        model = msgspec.structs.replace(config.model, **dict.fromkeys(PLACES))
        shape = msgspec.structs.replace(spec, folder="")
        deciding = [model, shape, config.cache, config.scheduler, config.parallel]
        return cls(
            versions=versions(),
            configuration=hashlib.sha256(msgspec.json.encode(deciding)).hexdigest(),
            weights=hash_weights(spec.folder) if spec.folder else "",
            device=worker.device,
            dtype=worker.dtype,
            attention_backend=worker.attention_backend,
            prompts=prompts,
        )

    def differences(self, other: Receipt) -> list[str]:
        """The differences to another receipt, except for prompts, one per line."""
        mine, others = _facts(self), _facts(other)
        return [
            f"{name}: {mine.get(name, 'none')} then, {others.get(name, 'none')} now"
            for name in sorted(mine.keys() | others.keys())
            if mine.get(name) != others.get(name)
        ]


def versions() -> dict[str, str]:
    """Versions of Python, servd, and the packages that may influence outputs."""
    found = {"python": platform.python_version(), "servd": servd.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # torch may come from elsewhere
            continue
    return found


def hash_weights(folder: str) -> str:
    """One hash over the names and contents of a checkpoint's weights."""
    with _hashing:  # threads that ask meanwhile need not read them all, too
        return _hash_weights(folder)


@lru_cache(maxsize=1)
def _hash_weights(folder: str) -> str:
    lines = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        name = file.resolve().name  # in the hub's cache the SHA-256 of what is in it
        if len(name) != 64 or not file.is_symlink():
            with file.open("rb") as opened:
                name = hashlib.file_digest(opened, "sha256").hexdigest()
        lines.append(f"{file.name} {name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _facts(receipt: Receipt) -> dict[str, Any]:
    facts = {name: getattr(receipt, name) for name in receipt.__struct_fields__}
    del facts["prompts"]
    return facts | facts.pop("versions")
