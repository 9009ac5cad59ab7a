"""Builds log-probabilities in OpenAI's two formats, for chats and for completions.

A token's log-probabilities are encoded as JSON at once: 70 bytes a candidate instead of 400.
"""

import codecs
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from servd.api.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from servd.api.protocol.completions import CompletionLogprobs
from servd.api.text.tokenizer import Tokenizer
from servd.messages.engine import TokenLogprobs
from servd.messages.outputs import Logprob

MIN_LOGPROB = -9999.0  # JSON has no minus infinity

T = TypeVar("T")


def encoded(value: T) -> T:
    """Return a part of a response as raw JSON, typed as the part that it replaces."""
    return cast(T, msgspec.Raw(msgspec.json.encode(value)))


@dataclass(eq=False, slots=True)
class TokenTexts:
    """The texts of the tokens of one choice, which its log-probabilities name tokens by.

    Tokens are decoded in context, as in vLLM: a token that ends within a character is the empty
    string, and the token that completes the character holds all of it.
    """

    tokenizer: Tokenizer
    skipped: frozenset[int] = frozenset()  # tokens that are not in the choice's text
    shows_ids: bool = False
    shows_sampled: bool = False  # in the `top_logprobs` of chats, though it may not be likely
    pending: bytes = b""  # of the character that the tokens so far end within
    offset: int = 0  # in the choice's text, in complete characters

    def name(self, token_id: int) -> str:
        """Return the text of a token that may come next, or its id with `shows_ids`."""
        if self.shows_ids:
            return f"token_id:{token_id}"
        piece = self.tokenizer.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return codecs.utf_8_decode(self.pending + piece, "replace")[0]

    def append(self, token_id: int) -> str:
        """Add a token to the choice's text. Return the characters that it completes."""
        if token_id in self.skipped:
            return ""
        written = self.pending + self.tokenizer.token_bytes(token_id)
        text, num_bytes = codecs.utf_8_decode(written, "replace")
        self.pending = written[num_bytes:]
        self.offset += len(text)
        return text

    def chat_logprobs(self, positions: list[TokenLogprobs] | None) -> ChoiceLogprobs | None:
        """Return the log-probabilities of the next tokens in OpenAI's format for chats. `bytes` are
        those of the token alone, so that clients can join them, as at OpenAI.
        """
        if positions is None:
            return None
        content: list[TokenLogprob] = []
        for position in positions:
            tokens = [
                TopLogprob(
                    self.name(i), max(logprob, MIN_LOGPROB), list(self.tokenizer.token_bytes(i))
                )
                for i, logprob in zip(position.token_ids, position.logprobs, strict=True)
            ]
            sampled = tokens[0]
            # A token that was asked for by its id may be among the most likely, too.
            start = 0 if self.shows_sampled else 1
            top = dict(zip(position.token_ids[start:], tokens[start:], strict=True))
            entry = TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, list(top.values()))
            content.append(encoded(entry))
            self.append(position.token_ids[0])
        return ChoiceLogprobs(content)

    def completion_logprobs(
        self, positions: list[TokenLogprobs], result: CompletionLogprobs | None = None
    ) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens in OpenAI's format for completions. All
        tokens of a character have its offset.
        """
        result = result or CompletionLogprobs([], [], [], [])
        for position in positions:
            self._add(result, position.token_ids[0], position, len(position.token_ids))
            self.append(position.token_ids[0])
        return result

    def echo_logprobs(
        self, text: str, token_ids: list[int], positions: list[TokenLogprobs], num_logprobs: int
    ) -> CompletionLogprobs:
        """Return log-probabilities of an echoed prompt, in OpenAI's format for completions."""
        result = CompletionLogprobs([], [], [], [])
        prompt = TokenTexts(self.tokenizer, shows_ids=self.shows_ids)
        is_beginning = True
        for token_id, position in zip(token_ids, [None, *positions], strict=True):
            prompt._add(result, token_id, position, num_logprobs)
            start = prompt.offset
            piece = prompt.append(token_id)
            if is_beginning:  # tokens added by the tokenizer are not in the text
                if token_id in self.tokenizer.special_ids and not text.startswith(piece):
                    piece = ""
                elif not text.startswith(" "):
                    piece = piece.removeprefix(" ")
                is_beginning = not piece
            prompt.offset = min(start + len(piece), len(text))
        self.offset = len(text)
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


def by_token(
    positions: Iterable[TokenLogprobs],
    k: int,
    texts: TokenTexts,
    limit: int | None = None,
    minimum: float = -math.inf,
) -> Iterator[dict[int, Logprob]]:
    """Yield the next tokens' log-probabilities in vLLM's format: the first `limit` of each position
    by token id, and `k` of them with ranks. Lower numbers become `minimum`.
    """
    for position in positions:
        sampled, *likely = position.token_ids[:limit]
        entries = {
            i: Logprob(max(logprob, minimum), None, texts.name(i))
            for i, logprob in zip([sampled, *likely], position.logprobs, strict=False)
        }
        for rank, i in enumerate(likely[:k], 1):
            entries[i].rank = rank
        entries[sampled].rank = position.rank
        texts.append(sampled)
        yield entries
