"""Pictures of a prompt, as the engine and its workers get them. Their tensors are in memory that
processes share: a file without a name, which one process holds open for as long as it is needed.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec


class TensorPlace(msgspec.Struct, array_like=True, frozen=True):
    """A tensor in shared memory."""

    name: str  # an argument of the vision tower, e.g. "pixel_values"
    dtype: Literal["float32", "int64"]
    shape: list[int]
    offset: int  # bytes


class MultiModalFeature(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """A picture of a prompt, or a part of one that the tower encodes by itself.

    Its range of tokens has `num_embeds` image tokens, whose embeddings the tower computes in order.
    The other tokens of the range, such as ends of rows, have embeddings of their own.
    """

    # SHA-256 of the salt, of the picture's bytes and of how it is processed: equal pictures of
    # requests that share cached blocks have the same.
    identifier: bytes
    offset: int  # index in the prompt of the range's first token
    length: int  # tokens
    num_embeds: int
    # Rows and columns of image tokens, for models with a position for each (M-RoPE); (0, 0): one
    # position, as text has.
    grid: tuple[int, int] = (0, 0)
    memory: str = ""  # path of the shared memory
    tensors: list[TensorPlace] = []
    inode: int = 0  # of the memory: another file may get its path

    @property
    def end(self) -> int:
        """The index in the prompt of the first token after the range."""
        return self.offset + self.length


def identifiers_between(features: Iterable[MultiModalFeature], start: int, end: int) -> list[bytes]:
    """Return the identifiers of the pictures that have some of the tokens [start, end)."""
    return [f.identifier for f in features if f.offset < end and f.end > start]
