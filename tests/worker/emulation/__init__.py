"""CPU kernels of another machine, run by an emulator beside this Python.

As a plugin of pytest (`-p tests.worker.emulation`), this replaces the library of every test in the
process by the one that SERVD_EMULATED names, and SERVD_EMULATOR the command that runs it.
"""

import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from ctypes import c_char_p
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from servd.worker.ops import native

Span = tuple[int, int]  # begin and end of memory


class EmulatedLibrary(native.Library):
    """A library in another process. Memory that a kernel is given is sent there, and comes back."""

    def __init__(self, path: Path, emulator: list[str]) -> None:
        self.name = path.name.split(".")[0].lstrip("_")
        command = [*emulator, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = Lock()
        self._spans: dict[int, Span] = {}  # by address, of what has been encoded
        self._tables: dict[int, list[Span]] = {}  # where the addresses of a table point
        self._packed_size = cache(self._ask_packed_size)
        self.is_usable = bool(self._read_word())
        names = {"packed_size": self._packed_size}
        self.signatures = {}
        for number in range(self._read_word()):
            kernel = native.Kernel(*(c_char_p(self._read_text()) for _ in range(3)), None)
            signature = native.Signature(number, kernel, names)
            self.signatures[kernel.name.decode()] = signature
        self._names = list(self.signatures)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=10)
        self.process.stdout.close()

    def encode(self, kernel: str, *arguments: Any) -> bytes:
        graph = super().encode(kernel, *arguments)
        signature = self.signatures[kernel]
        for type, value in zip(signature.types, arguments, strict=True):
            if isinstance(value, Tensor):
                self._spans[value.data_ptr()] = span_of(value)
                if type == "A":
                    self._tables[value.data_ptr()] = self._find_targets(signature, arguments, value)
        return graph

    def run(self, graph: bytes) -> None:
        spans = self.spans_in(graph)
        request = [b"R", struct.pack("=q", len(graph) // 8), graph, struct.pack("=q", len(spans))]
        for begin, end in spans:
            request += (
                struct.pack("=qq", begin, end - begin),
                ctypes.string_at(begin, end - begin),
            )
        with self._lock:
            self._write(b"".join(request))
            status = self._read_word()
            message = self._read(200)
            for _ in range(self._read_word()):
                begin, end = spans[self._read_word()]
                ctypes.memmove(begin, self._read(end - begin), end - begin)
        if status:
            raise native.FAILURES[status](message.split(b"\0")[0].decode())

    def names_in(self, graph: bytes) -> list[str]:
        """Return the kernel of each call."""
        return [self._names[number] for number, _ in self._calls_in(graph)]

    def spans_in(self, graph: bytes) -> list[Span]:
        """Return the memory that the calls of a graph may use."""
        spans = []
        for number, words in self._calls_in(graph):
            for type, word in zip(self.signatures[self._names[number]].types, words, strict=True):
                if type not in native.WORDS and word:
                    spans.append(self._spans[word])
                    spans += self._tables.get(word, []) if type == "A" else []
        return merge(spans)

    def _calls_in(self, graph: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
        words = struct.unpack(f"={len(graph) // 8}q", graph)
        place = 0
        while place < len(words):
            number = words[place]
            end = place + 1 + len(self.signatures[self._names[number]].types)
            yield number, words[place + 1 : end]
            place = end

    def _find_targets(
        self, signature: native.Signature, arguments: Any, table: Tensor
    ) -> list[Span]:
        values = dict(zip(signature.names, arguments, strict=True))
        n = values["n"]
        k = values["k"]
        name = next(name for name, value in values.items() if value is table)
        if name == "packed":
            type = values["type"]
            size = self._packed_size(type, values["terms"], n, k)
        elif name == "factors":
            type = native.TYPES[torch.float16]
            num_factors = 1 if values["offsets"] is None else 2
            size = self._packed_size(type, 0, n, -(-k // 256) * num_factors)
        elif values["group_size"]:
            type = values["scale_type"]
            size = self._packed_size(type, 0, n, -(-k // values["group_size"]))
        else:
            type = 0
            size = n
        num_bytes = size * native.DTYPES[type].itemsize
        return [(address, address + num_bytes) for address in table.tolist()]

    def _ask_packed_size(self, type: int, terms: int, n: int, k: int) -> int:
        with self._lock:
            self._write(struct.pack("=cqqqq", b"P", type, terms, n, k))
            return self._read_word()

    def _write(self, request: bytes) -> None:
        self.process.stdin.write(request)
        self.process.stdin.flush()

    def _read(self, size: int) -> bytes:
        got = self.process.stdout.read(size)
        assert len(got) == size, f"the emulator ended with {self.process.wait(10)}"
        return got

    def _read_word(self) -> int:
        return struct.unpack("=q", self._read(8))[0]

    def _read_text(self) -> bytes:
        text = b""
        while (letter := self._read(1)) != b"\0":
            text += letter
        return text


def span_of(tensor: Tensor) -> Span:
    """Return the memory from the first element of a tensor to its last one."""
    count = 0
    if tensor.numel():
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.itemsize


def merge(spans: list[Span]) -> list[Span]:
    """Return spans that overlap as one, so that they stay the same memory."""
    merged: list[Span] = []
    for begin, end in sorted(set(spans)):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif begin < end:
            merged.append((begin, end))
    return merged


def pytest_configure() -> None:
    """Let every test of this process have the emulated library, and no other."""
    emulated = EmulatedLibrary(
        Path(os.environ["SERVD_EMULATED"]), os.environ["SERVD_EMULATOR"].split()
    )

    @cache
    def library() -> native.Library | None:
        choice = os.environ.get(native.SWITCH, "")
        return emulated if choice in ("", emulated.name) else None

    native.library = library
    torch.set_num_threads(1)
