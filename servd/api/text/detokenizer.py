"""Detokenizer: decodes the tokens of a choice incrementally, and finds stop strings."""

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from servd.api.text.tokenizer import Tokenizer
from servd.messages.params import SamplingParams

Utf8Decoder = codecs.getincrementaldecoder("utf8")  # looking it up takes longer than making one
NEVER = re.compile("(?!)")


class AnswerFinder(Protocol):
    """Separates an output's reasoning, in which no stop string counts, from its answer."""

    def push(self, text: str, /) -> tuple[str, str]: ...
    def finish(self) -> tuple[str, str]: ...


class Detokenizer:
    """An incremental decoder of token ids into text, at a constant cost per token.

    The pieces together equal the text of all tokens, up to the first complete stop string. Of the
    stop strings that are complete at the same character, the longest counts. How calls split the
    tokens has no effect. After a `stop_reason`, push no more tokens. `num_tokens` counts up to the
    token that completes the stop string.

    If no prompt token has text, the output starts the text, and some tokenizers drop a space
    there. `visible_ids` are special tokens to show even with skip_special_tokens. With `answer`,
    stop strings count in the answer alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        visible_ids: frozenset[int] = frozenset(),
        answer: AnswerFinder | None = None,
    ) -> None:
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._table = tokenizer.byte_table(params.skip_special_tokens, visible_ids)
        self._utf8 = Utf8Decoder("replace")
        self._drops_space = tokenizer.strips_leading_space and not any(
            self._table[i] for i in prompt_token_ids
        )
        self._stop = params.stop
        self._answer = answer
        self._first_char = NEVER
        if params.stop:
            self._first_char = re.compile("|".join({re.escape(stop[0]) for stop in params.stop}))
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._held = ""  # end of the text that may be the beginning of a stop string

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens. Return the new text that cannot become part of a stop string."""
        if not self._stop:
            self.num_tokens += len(token_ids)
            return self._text(b"".join([self._table[i] for i in token_ids]))
        text = ""
        for token_id in token_ids:
            self.num_tokens += 1
            piece = self._text(self._table[token_id])
            if self._answer is not None:
                before, piece = self._answer.push(piece)
                text += self._skip(before)
            # The first min_tokens tokens are not searched for stop strings.
            text += piece if self.num_tokens <= self._min_tokens else self._release(piece)
            if self.stop_reason is not None:
                break
        return text

    def flush(self) -> str:
        """Return the rest after the last token. An incomplete character becomes U+FFFD."""
        if self.stop_reason is not None:
            return ""
        tail = self._utf8.decode(b"", final=True)
        text = ""
        if self._answer is not None and self._stop:
            for before, piece in (self._answer.push(tail), self._answer.finish()):
                text += self._skip(before) + self._release(piece)
                if self.stop_reason is not None:
                    return text
            tail = ""
        text += self._release(tail)
        if self.stop_reason is None:
            text += self._held
        return text

    def _skip(self, text: str) -> str:
        """Return the held text and `text`, which is no part of a stop string."""
        if not text:
            return ""
        held, self._held = self._held, ""
        return held + text

    def _text(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text

    def _release(self, text: str) -> str:
        """Append `text` to the held text. Return the text that cannot be part of a stop string."""
        text = self._held + text
        if not self._first_char.search(text):  # most text: no stop string begins in it
            return text
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            end, start, self.stop_reason = min(matches)
            return text[: end if self._include_stop else start]
        num_held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def overlap(text: str, marker: str, start: int = 0) -> int:
    """Return the length of the longest proper prefix of `marker` at the end of `text[start:]`."""
    start = max(start, len(text) - len(marker) + 1) - 1
    while (start := text.find(marker[0], start + 1)) >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
    return 0
