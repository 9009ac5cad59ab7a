"""NumberLimit: ends numbers in JSON, which a schema lets grow without end."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_DIGITS = 20  # in a row: before the point, after it, and in the exponent
DIGITS = b"0123456789"
IN_TEXT = b'"z'  # one of these may follow digits in a string or in free text, not in a number
ALL_DIGITS = 128  # in `NumberLimit.runs`: the whole token


class NumberLimit:
    """The tokens of a vocabulary that continue a number. `runs` has the number of digits that each
    token ends with, plus ALL_DIGITS if it has nothing else.
    """

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self.runs = bytearray(vocabulary.vocab_size)
        self._digits = 0  # bitmasks as integers, bit i for token i
        self._in_text = 0
        for token_id in range(vocabulary.vocab_size):
            text = vocabulary.decode_bytes([token_id])
            run = len(text) - len(text.rstrip(DIGITS))
            self.runs[token_id] = min(run, MAX_DIGITS)
            if run and run == len(text):
                self.runs[token_id] |= ALL_DIGITS
            if text[:1].isdigit():
                self._digits |= 1 << token_id
            elif len(text) == 1 and text in IN_TEXT:
                self._in_text |= 1 << token_id

    def count_digits(self, num_digits: int, token_id: int) -> int:
        """Return the number of digits at the end of the output, after `num_digits` and a token."""
        run = self.runs[token_id]
        if run & ALL_DIGITS:
            return num_digits + run - ALL_DIGITS
        return run

    def forbid_digits(self, bitmask: bytes) -> bytes:
        """Return the bitmask without tokens that begin with a digit, if a number may end here."""
        allowed = int.from_bytes(bitmask, "little")
        others = allowed & ~self._digits
        if allowed & self._in_text or not others:
            return bitmask
        return others.to_bytes(len(bitmask), "little")


@lru_cache(maxsize=2)
def number_limit(vocabulary: LLTokenizer) -> NumberLimit:
    """Return the limit for a vocabulary. The first call takes 0.1 s for 100,000 tokens."""
    return NumberLimit(vocabulary)
