"""Reads the tensors of a checkpoint's files, unconverted."""

import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from servd.base.errors import ModelNotFound, NotEnoughMemory
from servd.checkpoint.weight_files import index_of, read_index
from servd.worker.compat import without_function_modes

MAX_PICKLE = 1 << 26  # bytes of the pickled metadata of a .bin file


def read_tensors(
    files: list[Path], is_wanted: Callable[[str], object] = bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and mapped tensors of files in a folder, unconverted, without those that the
    folder's index maps to other files. Raises ModelNotFound if a file is broken,
    NotEnoughMemory if it is larger than memory and swap space together.
    """
    index = index_of(files[0].parent, files[0].suffix)
    is_whole = files[0].name == index.name.removesuffix(".index.json")
    places = {} if is_whole else read_index(index)

    def choose(path: Path, names: Iterable[str]) -> Iterator[str]:
        here = (name for name in names if places.get(name, path.name) == path.name)
        return filter(is_wanted, here)

    for path in files:
        try:
            if path.suffix == ".bin":
                tensors = _unpickle(path)
                for name in choose(path, tensors):
                    yield name, tensors[name]
                continue
            with safe_open(path, framework="pt") as file:
                for name in choose(path, file.keys()):
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelNotFound(f"{path} cannot be read: {error}") from None
        except RuntimeError as error:  # of torch, which maps files as memory that may change
            raise NotEnoughMemory(
                f"{path} cannot be mapped: {error}; add swap space, or plan 16-bit weights with "
                "--load-format dummy"
            ) from None


def _unpickle(path: Path) -> dict[str, Tensor]:
    """Return unpickled tensors by name. Anything else in the file is rejected."""
    _check_archive(path)
    # These tensors have storage even in a dry run.
    with without_function_modes():
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # broken bytes may raise anything
            raise OSError(error) from None
    if not isinstance(tensors, dict) or not all(map(_is_plain, tensors.items())):
        raise OSError("it contains more than named plain tensors")
    return tensors


def _check_archive(path: Path) -> None:
    """Reject compressed members, which torch never writes: none may expand beyond the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise OSError(f"{error}: save it with torch 1.6 or later") from None
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise OSError(f"{entry.filename} is compressed")
        if entry.filename.endswith(".pkl") and entry.file_size > MAX_PICKLE:
            raise OSError(f"{entry.filename} has {entry.file_size} bytes, at most {MAX_PICKLE}")


def _is_plain(entry: tuple[Any, Any]) -> bool:
    """Return whether an item is a name and a dense, real tensor with data within the file."""
    name, tensor = entry
    return (
        isinstance(name, str)
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_complex() or tensor.is_quantized)
    )
