"""Timeline: what is kept of a request: when it reached each stage, and its choices."""

from __future__ import annotations

from array import array

import msgspec

from servd.api.protocol.requests import RequestSummary
from servd.api.request.choice import NO_TOKENS, Choice
from servd.api.request.latency import Breakdown
from servd.base.tracing import Mark, first, now_ns
from servd.messages.engine import FinishReason
from servd.messages.params import SamplingParams


class Timeline(msgspec.Struct, gc=False):
    """The data that is kept of a finished request, or of one of its prompts. Thousands are kept, so
    each should have few objects: a full garbage collection visits them all.
    """

    request_id: str
    owner: str = ""  # name of the API key
    route: str = ""  # "" if no client sent it: then it is not shown
    model: str = ""  # as the response names it
    marks: list[Mark] = []
    params: SamplingParams | None = None  # until it is finished
    choices: list[Choice] = []  # empty until the request is sent to the engine
    reads_prompt: bool = False  # the client asked for results of every prompt token
    tokens: array[int] = NO_TOKENS  # tokens of the prompt; empty once dropped
    salt: tuple[str | None, ...] = (None, None)  # see `RequestOptions.cache_keys`
    num_bytes: int = 0  # size of its message to the engine, if measured
    rank: int = 0  # rank of the engine that runs or ran the request
    earlier: tuple[tuple[int, int], ...] = ()  # previous engines, and when they lost it
    cache_number: int = 0  # how often the engine's prefix cache had been reset before
    is_finished: bool = False
    outcome: str = ""  # once finished: stop, length, abort, error or refused
    http_id: str = ""  # X-Request-Id of its answer
    http_status: int = 0  # of the response; 0: the client left before it
    breakdown: Breakdown | None = None  # computed early for a slow request with aging steps
    summary: RequestSummary | None = None  # cached once it has finished and was listed

    def is_shown_to(self, owner: str) -> bool:
        """Return whether a client with this API key's name sent the request."""
        return self.owner == owner and bool(self.route) and bool(self.marks)

    @property
    def begin_ns(self) -> int:
        """The time of the first mark in nanoseconds, or now without marks."""
        return self.marks[0].at_ns if self.marks else now_ns()

    @property
    def wall_ns(self) -> int:
        """The nanoseconds from the first mark to the last mark, or to now while unfinished."""
        return (self.marks[-1].at_ns if self.is_finished else now_ns()) - self.begin_ns

    @property
    def ttft_ns(self) -> int | None:
        """The time to first token in nanoseconds; None before the first token."""
        at_ns = first(self.marks, "first_token")
        return None if at_ns is None else at_ns - self.begin_ns

    @property
    def generated(self) -> FinishReason:
        """The reason why generation ended: stop, length, abort or error."""
        reasons = {choice.finish_reason for choice in self.choices}
        for reason in (FinishReason.ERROR, FinishReason.LENGTH):
            if reason in reasons:
                return reason
        has_ended = reasons - {None, FinishReason.ABORT} or not reasons
        return FinishReason.STOP if has_ended else FinishReason.ABORT

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens; 0 until the prompt is sent to the engine."""
        return self.choices[0].num_prompt_tokens if self.choices else 0

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens found in the prefix cache."""
        return self.choices[0].num_cached_tokens if self.choices else 0

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens so far, of all choices."""
        return sum(choice.num_tokens for choice in self.choices)
