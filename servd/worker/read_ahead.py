"""Weight files come from the disk ahead of their use, in several places at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Condition, Thread

from torch import Tensor

from servd.worker.layers.quantized import Quantized

THREADS = 4
PIECE = 16 << 20  # bytes that the system is asked for at once
AHEAD = (
    2 << 30
)  # bytes beyond those in use: of more than fits memory, the first would be lost again


def reading_ahead(
    files: Sequence[Path], tensors: Iterator[tuple[str, Tensor | Quantized]]
) -> Iterator[tuple[str, Tensor | Quantized]]:
    """The tensors of these files, which the system reads while those before take their form. What
    is in its page cache costs nothing.
    """
    if not hasattr(os, "posix_fadvise"):
        yield from tensors
        return
    ahead = _Ahead(files)
    try:
        for name, tensor in tensors:
            yield name, tensor
            ahead.use(tensor.nbytes)
    finally:
        ahead.end()


class _Ahead:
    def __init__(self, files: Sequence[Path]) -> None:
        self.pieces = (
            (path, start) for path in files for start in range(0, path.stat().st_size, PIECE)
        )
        self.room = AHEAD  # bytes that may be asked for now
        self.changed = Condition()
        for number in range(THREADS):
            Thread(target=self._run, name=f"read-ahead-{number}", daemon=True).start()

    def use(self, num_bytes: int) -> None:
        """So many have been used."""
        with self.changed:
            self.room += num_bytes
            self.changed.notify_all()

    def end(self) -> None:
        """No more is needed."""
        with self.changed:
            self.pieces = iter(())
            self.room = sys.maxsize
            self.changed.notify_all()

    def _next(self) -> tuple[Path, int] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.room >= PIECE)
            piece = next(self.pieces, None)
            self.room -= PIECE if piece else 0
            return piece

    def _run(self) -> None:
        try:
            while piece := self._next():
                path, start = piece
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, start, PIECE, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)
        except OSError:  # whoever reads it says so
            return
