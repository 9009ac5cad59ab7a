"""The parts of libraries' private APIs that servd uses, each with its reason.

`servd/worker/compat.py` has the parts that need torch. Look here first when a newer version fails.
Optional packages are imported inside functions.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import struct
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFValueType

# The oldest and the newest with which the tests run; `make test-oldest` has the oldest.
TESTED = {"argparse": "Python 3.11-3.13", "gguf": "0.17-0.19", "prometheus_client": "0.23-0.26"}
MAX_TENSORS = 1 << 17  # in a GGUF file


class ArgumentParser(argparse.ArgumentParser):
    """A parser that lists its flags and can keep flags whole, by argparse's private methods."""

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    def is_whole(self, flag: str) -> bool:
        """Return whether `flag` is one flag, as `-ngl` is, rather than `-n` with the value `gl`."""
        return False

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return [] if self.is_whole(option_string) else super()._get_option_tuples(option_string)


def make_gguf_reader(max_length: int, max_text: int, has_texts: bool) -> type[GGUFReader]:
    """Return a reader that rejects lists of more than `max_length` values, texts of more than
    `max_text` bytes, and more than MAX_TENSORS tensors, and skips texts in lists without
    `has_texts`. gguf's own reader takes 8 s instead of 0.3 s for a vocabulary of 150,000, and reads
    past the end of a damaged file. No public method reads a list.
    """
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_str(self, offset: int) -> tuple[Any, Any]:
            size, text = super()._get_str(offset)
            if size[0] > max_text:
                raise ValueError(f"a text of {size[0]} bytes")
            return size, text

        def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[Any]]:
            if count > MAX_TENSORS:
                raise ValueError(f"{count} tensors")
            return super()._build_tensor_info(offs, count)

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data = self.data.data
            kind, length = struct.unpack_from("<IQ", data, orig_offs)
            if kind == GGUFValueType.ARRAY or length > max_length:
                raise ValueError(f"a list of {length} values of type {kind}")
            offset = orig_offs + 12
            parts: list[Any] = []
            if kind == GGUFValueType.STRING:
                for _ in range(length):
                    (size,) = struct.unpack_from("<Q", data, offset)
                    if size > max_text:
                        raise ValueError(f"a text of {size} bytes")
                    offset += 8 + size
                    if has_texts:
                        parts.append(data[offset - size : offset])
            else:
                parts.append(self._get(offset, self.gguf_scalar_to_np[GGUFValueType(kind)], length))
                offset += parts[0].nbytes
            types = [GGUFValueType.ARRAY, GGUFValueType(kind)]
            return offset - orig_offs, parts, list(range(len(parts))), types

    return Reader


def observe_values(histogram: Any, values: list[float]) -> None:
    """Add many values to a histogram of prometheus_client. Its public method takes 1.2 to 2
    microseconds per value instead of 0.1, and an answer has a value per token.
    """
    values = sorted(values)
    bounds = histogram._upper_bounds
    begin = 0
    while begin < len(values):
        bucket = bisect_left(bounds, values[begin])
        end = bisect_right(values, bounds[bucket], lo=begin)
        histogram._buckets[bucket].inc(end - begin)
        begin = end
    histogram._sum.inc(sum(values))
