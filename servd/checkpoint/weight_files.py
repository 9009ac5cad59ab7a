"""Lists the weight files of a checkpoint."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from servd.base.errors import ModelNotFound
from servd.checkpoint import gguf
from servd.checkpoint.config_json import read_json

MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
# Mistral's own format, adapters and variants beside a checkpoint.
OTHER_WEIGHTS = ["consolidated*.safetensors", "adapter_*.safetensors", "model.?*.safetensors"]

Offset = Annotated[int, Meta(ge=0)]


class Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[Offset, Offset]


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, without their data. Raises ModelNotFound if
    it is no safetensors file, or is incomplete.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size <= MAX_HEADER else b""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=Tensor) for name, raw in entries.items()}
    except (ValueError, RecursionError):
        raise ModelNotFound(f"{path} is not a safetensors file, or is incomplete") from None
    expected = 8 + size + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if (num_bytes := path.stat().st_size) != expected:
        raise ModelNotFound(f"{path} has {num_bytes} bytes, and its header says {expected}")
    return tensors


def check_regular(folder: Path) -> None:
    """Raise ModelNotFound for a pipe or a device among a model's files: to read it would block."""
    for file in (*folder.glob("*"), *folder.glob("*/*")):
        with suppress(OSError):  # what is missing or closed blocks nobody
            if file.is_fifo() or file.is_char_device():
                raise ModelNotFound(f"{file} is no regular file")


def index_of(folder: Path, suffix: str = ".safetensors") -> Path:
    """Return the place of the index of a folder's weight files."""
    return folder / f"{'pytorch_model' if suffix == '.bin' else 'model'}{suffix}.index.json"


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor by the index of weight files; {} if there is no index. Raises
    ModelNotFound if it is broken.
    """
    places = read_json(index, {}).get("weight_map", {})
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelNotFound(f"{index}: weight_map does not map tensors to files")
    if outside := [name for name in {*places.values()} if leads_out(name)]:
        raise ModelNotFound(f"{index}: {outside[0]:.80} is not in the folder: copy it there")
    return places


def leads_out(name: str) -> bool:
    """Return whether a name in a model's file stands for a path outside of its folder."""
    return name.startswith("/") or ".." in name.split("/")


def find_weight_files(folder: Path | str, load_format: str = "auto") -> list[Path]:
    """Return the safetensors files of a checkpoint as transformers chooses them: the whole one, or
    those of the index, or else the numbered ones; or the GGUF files of a folder from
    `gguf.as_folder`. With load_format "pt", return the pickled files of torch. Raises
    ModelNotFound if there is no file, or a file of the index or of the numbered files is missing.
    """
    folder = Path(folder)
    if (folder / gguf.WEIGHTS).is_symlink():
        files = [folder / gguf.WEIGHTS, *sorted(folder.glob("model-*.gguf"))]
        gguf.check_files(files)
        return files
    stem, suffix = ("pytorch_model", ".bin") if load_format == "pt" else ("model", ".safetensors")
    whole = folder / f"{stem}{suffix}"
    if whole.is_file():
        return [whole]
    if names := set(read_index(index_of(folder, suffix)).values()):
        files = [folder / name for name in sorted(names)]
    else:
        there_are = folder.glob(f"{stem}*{suffix}" if suffix == ".bin" else f"*{suffix}")
        files = [file for file in there_are if not any(map(file.match, OTHER_WEIGHTS))]
        files = [file for file in files if file.name.startswith(f"{stem}-")] or files
        files = sorted({part for file in files for part in gguf.name_parts(file)})
    gguf.check_files(files)
    if not files:
        other = sorted(f.name for pattern in ("*.bin", "*.pt") for f in folder.glob(pattern))
        hint = f"; it has {other[0]}: convert it to safetensors" if other else ""
        if unread := sorted(folder.glob("*.safetensors")):
            hint = f" that servd reads; it has {unread[0].name}: serve the original checkpoint"
        if load_format == "auto" and list(folder.glob("pytorch_model*.bin")):
            hint += ", or use --load-format pt"
        if gguf_files := sorted(folder.glob("*.gguf")):
            hint = f"; it has {gguf_files[0].name}: name that file"
        raise ModelNotFound(f"{folder} has no {suffix} file{hint}")
    return files
