"""What comes next in weight files is in the system's page cache before anybody reads it."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from servd.worker import read_ahead
from servd.worker.read_ahead import reading_ahead

PIECE = 1 << 20
mincore = ctypes.CDLL(None).mincore


def resident(path: Path) -> int:
    """Bytes of a file that the page cache has, as the system says."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        assert mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages) == 0
        del first
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def comes_to_be(path: Path, num_bytes: int) -> bool:
    end = time.monotonic() + 20
    while resident(path) < num_bytes and time.monotonic() < end:
        time.sleep(0.01)
    return resident(path) >= num_bytes


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Of 4 MiB each, on the disk alone."""
    monkeypatch.setattr(read_ahead, "PIECE", PIECE)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        with path.open("wb") as file:
            file.write(os.urandom(4 * PIECE))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident(path):
            pytest.skip("this file system keeps everything in memory")
    return paths


def tensors(num: int) -> Iterator[tuple[str, Tensor]]:
    """Of 1 MiB each."""
    for number in range(num):
        yield str(number), torch.empty(PIECE, dtype=torch.uint8)


def threads() -> int:
    return sum(thread.name.startswith("read-ahead") for thread in threading.enumerate())


def test_what_follows_is_read_so_far_and_no_further(files, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read_ahead, "AHEAD", 6 * PIECE)
    following = reading_ahead(files, tensors(8))
    assert next(following)[0] == "0"
    assert comes_to_be(files[0], 4 * PIECE) and comes_to_be(files[1], 2 * PIECE)
    assert not resident(files[2])
    for _ in range(6):  # six used, so the twelve of all
        next(following)
    assert comes_to_be(files[2], 4 * PIECE)
    assert [name for name, _ in following] == ["7"]


def test_threads_end_with_whoever_reads(files, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read_ahead, "AHEAD", PIECE)
    following = reading_ahead(files, tensors(8))
    next(following)
    assert comes_to_be(files[0], PIECE) and threads()
    following.close()  # as when a tensor has another shape
    end = time.monotonic() + 20
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not threads() and not resident(files[2])


def test_a_file_that_is_gone_is_left_to_whoever_reads_it(files):
    for path in files:
        path.unlink()
    assert len([*reading_ahead(files, tensors(2))]) == 2
