"""Identifies what a cached block's bytes depend on, besides the tokens and keys in its hash."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

import servd
from servd.checkpoint import hub, weight_files
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core.kv_cache.connector.disk import at_once
from servd.messages.engine import WorkerReady


def identity(config: Config, spec: ModelSpec, worker: WorkerReady, memory: Path | None) -> bytes:
    """Return 32 bytes that differ whenever keys and values, or their layout, might differ.

    Every byte of the weight files counts. Reading the files takes seconds, once: `memory`, an
    optional folder, keeps the result for a file by path, device, inode, size and times of change.
    The change time (ctime) cannot be set, unlike the modification time, which copies may keep.
    """
    model = config.model
    folders = []
    if model.load_format != "dummy" and spec.folder:
        folders.append((Path(spec.folder), model.load_format))
    draft = model.speculative_config
    if draft is not None and draft.model is not None:
        at = hub.download_weights(draft.model, draft.revision, model.download_dir)
        folders.append((at, "auto"))
    files = [
        (file.name, _digest(file, memory))
        for folder, load_format in folders
        for file in (*weight_files.find_weight_files(folder, load_format), folder / "config.json")
        if file.exists()
    ]
    if model.quantization_imatrix is not None:
        files.append(("imatrix", _digest(Path(model.quantization_imatrix), memory)))
    deciding = [
        servd.__version__,
        msgspec.structs.replace(spec, folder=""),
        files,
        (model.load_format, model.seed if model.load_format == "dummy" else 0),
        (model.model_impl, model.quantization, model.max_model_len, model.compile, draft),
        (model.cpu_activation_dtype, model.widen_weights, config.lora.lora_dtype),
        (worker.dtype, worker.attention_backend, worker.kv_bytes_per_block),
        (worker.state_bytes, "float32"),
        (config.cache.block_size, config.cache.kv_cache_dtype),
        (config.parallel.device, config.parallel.tensor_parallel_size),
    ]
    return hashlib.sha256(msgspec.json.encode(deciding)).digest()


def _digest(file: Path, memory: Path | None) -> str:
    """Return the SHA-256 of a file's bytes. Computed once if `memory` is a folder."""
    path = file.resolve()
    if memory is None:
        with open(path, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    status = path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    known_by = path, status.st_dev, status.st_ino, status.st_size, *times
    note = memory / hashlib.sha256(repr(known_by).encode()).hexdigest()
    with contextlib.suppress(OSError):
        with open(note, encoding="ascii", errors="replace", opener=at_once) as cached:
            if len(text := cached.read(65)) == 64:
                return text
    with open(path, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    with contextlib.suppress(OSError):
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=memory)
        with open(handle, "w", encoding="ascii") as out:
            out.write(digest)
        os.replace(made, note)
    return digest
