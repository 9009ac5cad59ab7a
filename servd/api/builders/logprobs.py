"""Builds log-probabilities in OpenAI's two formats, for chats and for completions.

A token's log-probabilities are encoded as JSON at once: 70 bytes a candidate instead of 400.
"""

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from servd.api.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from servd.api.protocol.completions import CompletionLogprobs
from servd.api.text.tokenizer import Tokenizer
from servd.messages.engine import TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no minus infinity

T = TypeVar("T")


def encoded(value: T) -> T:
    """Return a part of a response as raw JSON, typed as the part that it replaces."""
    return cast(T, msgspec.Raw(msgspec.json.encode(value)))


def choice_logprobs(
    tokenizer: Tokenizer,
    positions: list[TokenLogprobs] | None,
    name: Callable[[int], str] | None = None,
) -> ChoiceLogprobs | None:
    """Return log-probabilities at `positions`, with texts by `name` (default: the tokenizer's)."""
    if positions is None:
        return None
    name = name or tokenizer.token_string
    content: list[TokenLogprob] = []
    for position in positions:
        tokens = [
            TopLogprob(name(i), max(logprob, MIN_LOGPROB), list(tokenizer.token_bytes(i)))
            for i, logprob in zip(position.token_ids, position.logprobs, strict=True)
        ]
        sampled = tokens[0]
        # A token that was asked for by its id may be among the most likely, too.
        top = dict(zip(position.token_ids[1:], tokens[1:], strict=True))
        entry = TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, list(top.values()))
        content.append(encoded(entry))
    return ChoiceLogprobs(content)


@dataclass(eq=False)
class TextOffsets:
    """The offsets at which the tokens of one choice begin in its text.

    Offsets count complete characters. A character of several tokens thus begins where its first
    token begins.
    """

    tokenizer: Tokenizer
    skipped: frozenset[int]  # tokens that are not in the text
    name: Callable[[int], str]  # names tokens

    def __post_init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0

    def prompt(
        self, text: str, token_ids: list[int], positions: list[TokenLogprobs], num_logprobs: int
    ) -> CompletionLogprobs:
        """Return log-probabilities of an echoed prompt, in OpenAI's format for completions."""
        result = CompletionLogprobs([], [], [], [])
        is_beginning = True
        for token_id, position in zip(token_ids, [None, *positions], strict=True):
            self._add(result, token_id, position, num_logprobs)
            piece = self.decoder.decode(self.tokenizer.token_bytes(token_id))
            if is_beginning:  # tokens added by the tokenizer are not in the text
                if token_id in self.tokenizer.special_ids and not text.startswith(piece):
                    piece = ""
                elif not text.startswith(" "):
                    piece = piece.removeprefix(" ")
                is_beginning = not piece
            self.offset = min(self.offset + len(piece), len(text))
        self.offset = len(text)
        self.decoder.reset()
        return result

    def logprobs(
        self, positions: list[TokenLogprobs], result: CompletionLogprobs | None = None
    ) -> CompletionLogprobs:
        result = result or CompletionLogprobs([], [], [], [])
        for position in positions:
            token_id = position.token_ids[0]
            self._add(result, token_id, position, len(position.token_ids))
            if token_id not in self.skipped:
                self.offset += len(self.decoder.decode(self.tokenizer.token_bytes(token_id)))
        return result

    def _add(
        self,
        result: CompletionLogprobs,
        token_id: int,
        position: TokenLogprobs | None,
        num_logprobs: int,
    ) -> None:
        result.tokens.append(self.name(token_id))
        result.text_offset.append(self.offset)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            return
        result.token_logprobs.append(max(position.logprobs[0], MIN_LOGPROB))
        top: dict[str, float] = {}
        for other_id, logprob in zip(
            position.token_ids[: 1 + num_logprobs], position.logprobs, strict=False
        ):
            top.setdefault(self.name(other_id), max(logprob, MIN_LOGPROB))
        result.top_logprobs.append(encoded(top))
