"""NumberLimit: ends numbers in JSON, which a schema lets grow without end."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_DIGITS = 20  # in a row: before the point, after it, and in the exponent
DIGITS = b"0123456789"
IN_TEXT = '"z'  # one of these may follow digits in a string or in free text, not in a number
ENDS = ",}]<>\n"  # one of these or the end of the sequence may follow every number
ENDLESS = 256  # more digits than a list of values, or a bound, lets through


class NumberLimit:
    """The tokens of a vocabulary that continue a number, and those that show where one is."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._digits = 0  # bitmasks as integers, bit i for token i
        for token_id in range(vocabulary.vocab_size):
            if vocabulary.decode_bytes([token_id])[:1].isdigit():
                self._digits |= 1 << token_id
        self._in_text = self._bits(IN_TEXT)
        self._ends = self._bits(ENDS) | 1 << vocabulary.eos_token
        self._many_digits = ENDLESS * vocabulary.greedy_tokenize("1")

    def _bits(self, chars: str) -> int:
        return sum(1 << self._vocabulary.greedy_tokenize(char)[0] for char in chars)

    def count_digits(self, num_digits: int, token_id: int) -> int:
        """Return the number of digits at the end of the output, after `num_digits` and a token."""
        text = self._vocabulary.decode_bytes([token_id])
        run = len(text) - len(text.rstrip(DIGITS))
        return num_digits + run if run == len(text) else run

    def forbid_digits(self, bitmask: bytes, matcher: LLMatcher) -> bytes:
        """Return the bitmask without tokens that begin with a digit, if the output is in a number
        that may end here, but may also go on without end.
        """
        allowed = int.from_bytes(bitmask, "little")
        may_end = allowed & self._ends and not allowed & self._in_text
        if not may_end or matcher.validate_tokens(self._many_digits) < ENDLESS:
            return bitmask
        return (allowed & ~self._digits).to_bytes(len(bitmask), "little")


@lru_cache(maxsize=2)
def number_limit(vocabulary: LLTokenizer) -> NumberLimit:
    """Return the limit for a vocabulary. The first call takes 0.1 s for 100,000 tokens."""
    return NumberLimit(vocabulary)
