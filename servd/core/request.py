"""Request: the engine's state of a request: tokens, counters, blocks and limits."""

import os
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import lru_cache
from typing import Self

from servd.base.tracing import Mark
from servd.config.speculative import MAX_GRAMMAR_TOKENS
from servd.core.draft_length import Acceptance
from servd.core.repetition import RepetitionDetector
from servd.messages.adapter import Adapter
from servd.messages.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    NewRequest,
    RequestOptions,
    ScheduledRequest,
    TokenLogprobs,
)
from servd.messages.multimodal import MultiModalFeature
from servd.messages.params import PoolingParams, SamplingParams


class RequestStatus(IntEnum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # waits again, without blocks
    SWAPPED = auto()  # likewise; the KV connector saves its blocks
    # From here on, the request is finished.
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_REPETITION = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.REPETITION: RequestStatus.FINISHED_REPETITION,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}
# The stages that marks report. The last output of a finished request has its mark.
STAGES = {
    RequestStatus.WAITING: "queued",
    RequestStatus.RUNNING: "scheduled",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.SWAPPED: "swapped",
}


@dataclass(slots=True, frozen=True)
class OutputEnd:
    """The end of an output at a token: its grammar is complete, or no token is allowed there."""

    num_tokens: int = 1  # number of sampled tokens up to and including this token
    error: str | None = None  # None: complete; else the token is not part of the output


class PictureFile:
    """A picture's memory, open until nobody refers to this. An API server closes it, and may use
    its number again, when a client leaves: a step in flight would fail, or read another picture.
    Raises OSError if it is closed already.
    """

    def __init__(self, feature: MultiModalFeature) -> None:
        self.number = os.open(feature.memory, os.O_RDONLY | os.O_NONBLOCK)
        self.path = f"/proc/{os.getpid()}/fd/{self.number}"
        if os.fstat(self.number).st_ino != feature.inode:
            raise FileNotFoundError(feature.memory)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def prompt_too_long(num_prompt_tokens: int, max_model_len: int, by_cache: bool) -> str:
    """Return the error for a too long prompt. `by_cache`: the KV cache is the limit."""
    error = (
        f"the prompt has {num_prompt_tokens} tokens, but prompt and output together are limited"
        f" to {max_model_len} tokens"
    )
    if by_cache:
        error += ", the size of the KV cache; raise --kv-cache-memory or --gpu-memory-utilization"
    return error


def failure(
    request_id: str, marks: list[Mark], error: str, now_ns: int, step: int = -1
) -> EngineCoreOutput:
    """Return the output that ends a request with an error. `step`: the step that failed, or -1."""
    marks = [*marks, Mark("finished", now_ns, step)]
    return EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, marks=marks, error=error)


@lru_cache
def _token_set(*token_ids: int) -> frozenset[int]:
    return frozenset(token_ids)


@dataclass(slots=True, eq=False)
class Request:
    """The engine's state of a request.

    `token_ids` holds the known tokens: prompt and collected output. The counters are ahead of it: a
    token counts as sampled when its step is scheduled, and is a placeholder until it is collected.
    A draft also counts, as if it were accepted. The `n` choices of a prompt share its token ids and
    block hashes; each choice copies them when its output begins.
    """

    request_id: str
    client: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams | PoolingParams
    eos_token_ids: list[int]
    options: RequestOptions
    adapter: Adapter | None
    order: tuple[int, int, int]  # (priority class, priority, arrival): lower is served first
    max_num_tokens: int  # prompt and output together
    stop_token_ids: frozenset[int]  # of the model and of the request
    min_tokens: int
    reads_prompt: bool  # needs outputs of every prompt token: none may come from the prefix cache
    repetition: RepetitionDetector | None
    is_prompt_only: bool  # ends when its prompt is computed; the sampled token is dropped
    mm_features: list[MultiModalFeature] = field(default_factory=list)
    picture_files: list[PictureFile] = field(default_factory=list)  # what these features refer to

    status: RequestStatus = RequestStatus.WAITING
    num_tokens: int = 0  # known tokens and placeholders
    num_computed_tokens: int = 0  # scheduled so far
    # While num_computed_tokens is below this, the next token needs no new block, and the step is a
    # plain decode; 0: it has not decoded yet, or the workers draft for it.
    decodes_until: int = 0
    num_drafts: int = 0  # of the workers, for the next step
    num_found_drafts: int = 0  # by the workers, as of the last output
    acceptance: Acceptance | None = None  # None: it is never drafted for
    num_cached_tokens: int = 0  # found in the prefix cache when first scheduled
    num_external_tokens: int = 0  # cached tokens that the KV connector loaded
    evicted_at_ns: int = 0  # see EngineCoreOutput
    num_preemptions: int = 0
    deferred_since: int = -1  # step since which it has waited for an adapter slot
    slot: int = -1  # row in the workers while running
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks of known tokens
    num_registered_blocks: int = 0  # first blocks that are in the prefix cache
    num_attached_blocks: int = 0  # first blocks that came from the prefix cache
    # Models with states, as of the last look: how many blocks a checkpoint covers, what the KV
    # connector must load for that (blocks, then parts of the checkpoint), and cached tokens after
    # the checkpoint.
    border: int | None = None
    loads: list[bytes] | None = None
    num_uncovered_tokens: int = 0
    marks: list[Mark] = field(default_factory=list)  # not yet sent to the client
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second token on

    @classmethod
    def from_message(
        cls, message: EngineCoreRequest, order: tuple[int, int, int], max_model_len: int
    ) -> Self:
        """Return a new request, limited to `max_model_len` tokens and to its max_tokens."""
        params = message.params
        num_prompt_tokens = len(message.prompt_token_ids)
        assert num_prompt_tokens > 0
        if isinstance(params, PoolingParams):
            max_output = 0
            min_tokens = 0
            own_stops: list[int] = []
            detection = None
            reads_prompt = params.pooling not in (None, "last")
            is_drafted_for = False
        else:
            max_output = max_model_len if params.max_tokens is None else params.max_tokens
            min_tokens = params.min_tokens
            reads_prompt = params.prompt_logprobs is not None
            is_drafted_for = params.speculative and max_output > 1
            own_stops = params.stop_token_ids
            detection = params.repetition_detection
        # A prompt-only request may fill the model's length: its sampled token is dropped.
        max_num_tokens = num_prompt_tokens + 1
        stop_token_ids: frozenset[int] = frozenset()
        if max_output:
            max_num_tokens = min(num_prompt_tokens + max_output, max_model_len)
            stop_token_ids = _token_set(*own_stops, *message.eos_token_ids)
        request = cls(
            request_id=message.request_id,
            client=message.client,
            token_ids=message.prompt_token_ids,
            block_hashes=message.block_hashes,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_prompt_tokens,
            params=params,
            eos_token_ids=message.eos_token_ids,
            options=message.options,
            adapter=message.options.adapter,
            order=order,
            max_num_tokens=max_num_tokens,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            reads_prompt=reads_prompt,
            repetition=RepetitionDetector(detection) if detection else None,
            is_prompt_only=max_output == 0,
            acceptance=Acceptance() if is_drafted_for else None,
            marks=message.marks.copy(),
            mm_features=message.mm_features,
        )
        if output := message.output_token_ids.get(0):
            request.token_ids = request.token_ids.copy()
            request._extend(output)
            request.num_tokens = len(request.token_ids)
        return request

    def to_new_request(self) -> NewRequest:
        return NewRequest(
            slot=self.slot,
            token_ids=self.token_ids.copy(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=self.block_ids.copy(),
            params=self.params,
            eos_token_ids=self.eos_token_ids,
            cache_salt=self.options.cache_salt,
            adapter=self.adapter,
            mm_features=self.mm_features,
        )

    def set_status(self, status: RequestStatus, now_ns: int, step: int = -1) -> None:
        """Change the status, and mark its time for the client."""
        assert not self.is_finished, (self.request_id, self.status, status)
        self.status = status
        if status in STAGES:
            self.marks.append(Mark(STAGES[status], now_ns, step))

    @property
    def is_finished(self) -> bool:
        return self.status > RequestStatus.SWAPPED

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_placeholders(self) -> int:
        """The number of tokens that steps in flight have sampled or will sample."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def reads_picture(self) -> bool:
        """Whether a token that is not computed belongs to a picture."""
        return bool(self.mm_features) and self.mm_features[-1].end > self.num_computed_tokens

    def grammar_drafts(self, token_ids: list[int]) -> list[int]:
        """Return drafts from `token_ids`, the only tokens that the grammar allows next. Skips
        tokens that steps in flight sample, and leaves room for one token after the drafts.
        """
        room = self.max_num_tokens - self.num_tokens - 1
        first = self.num_placeholders
        return token_ids[first : first + min(room, MAX_GRAMMAR_TOKENS)]

    def add_prompt_output(self, result: ModelRunnerOutput, row: int) -> None:
        """Append a step's prompt logprobs, except those known from before a preemption."""
        if (part := result.prompt_logprobs.get(row)) is not None:
            num_known = len(self.prompt_logprobs) + 1 - part.start
            assert num_known >= 0, "parts come in order"
            self.prompt_logprobs += part.positions[num_known:]

    def append_decoded(self, token_id: int) -> bool:
        """Append a token and return True; return False if the token might end the output."""
        known_ids = self.token_ids
        if token_id in self.stop_token_ids or len(known_ids) + 1 >= self.max_num_tokens:
            return False
        if self.repetition is not None:
            return False
        known_ids.append(token_id)
        return True

    def settle(
        self, row: ScheduledRequest, output: EngineCoreOutput, num_sampled: int, num_found: int
    ) -> int:
        """Correct the counters, which count all drafts of a step as accepted. Returns how many
        drafts are part of the output.

        Adds the counts of the workers' drafts to `output`. The engine's own drafts are all accepted
        and not counted. If the output has ended, some of the `num_sampled` tokens may be cut off.
        `num_found`: drafts that the workers found for the next step.
        """
        num_rejected = row.num_drafts + 1 - num_sampled
        self.num_tokens -= num_rejected
        self.num_computed_tokens -= num_rejected
        num_kept = min(num_sampled - 1, len(output.new_token_ids))
        num_drafts = min(row.num_drafts, self.num_found_drafts)
        if num_drafts and not row.scheduled_spec_decode_tokens:
            output.num_drafts = num_drafts
            output.num_accepted = num_kept
        self.num_found_drafts = num_found
        if self.num_placeholders == 0:  # otherwise, a step in flight has them already
            self.num_drafts = num_found
        return num_kept

    def collect_output(
        self, result: ModelRunnerOutput, row: int, end: OutputEnd | None, now: int, step: int
    ) -> EngineCoreOutput:
        """Append the tokens of a step, up to a token that ends the output. Return the output for
        the client. `end`: how the grammar ends the output at one of these tokens.
        """
        token_ids = result.tokens_of(row)
        if end is not None:
            token_ids = token_ids[: end.num_tokens]
        is_first = len(self.token_ids) == self.num_prompt_tokens
        if is_first:
            self.token_ids = self.token_ids.copy()
        num_tokens, finish_reason = self._extend(token_ids)
        new_token_ids = [] if self.is_prompt_only else token_ids[:num_tokens]
        output = EngineCoreOutput(self.request_id, new_token_ids, finish_reason)
        if row in result.pooled:
            output.pooled = result.pooled[row]
        if row in result.logprobs and not self.is_prompt_only:
            output.logprobs = result.logprobs[row][:num_tokens]
        if is_first:
            output.num_cached_tokens = self.num_cached_tokens
            output.num_external_tokens = self.num_external_tokens
            output.evicted_at_ns = self.evicted_at_ns
            output.num_uncovered_tokens = self.num_uncovered_tokens
            output.prompt_logprobs = self.prompt_logprobs or None
            self.marks.append(Mark("first_token", now, step))
        if self.options.is_watched and (is_first or finish_reason or end):
            output.block_ids = self.block_ids.copy()
        if self.marks:
            output.marks, self.marks = self.marks, []
        if end is not None and num_tokens == end.num_tokens:
            self._end(output, end)
        if output.finish_reason is None:
            return output
        output.marks.append(Mark("finished", now, step))
        if (
            output.finish_reason is FinishReason.STOP
            and not output.ended_by_grammar
            and self.token_ids[-1] not in self.eos_token_ids
        ):
            output.stop_reason = self.token_ids[-1]
        return output

    def _end(self, output: EngineCoreOutput, end: OutputEnd) -> None:
        if end.error is not None:
            output.finish_reason = FinishReason.LENGTH
            output.stop_reason = end.error
            output.new_token_ids = output.new_token_ids[:-1]
            output.logprobs = (output.logprobs or [])[:-1] or None
        elif output.finish_reason is not FinishReason.STOP:
            output.finish_reason = FinishReason.STOP
            output.ended_by_grammar = True

    def _extend(self, token_ids: list[int]) -> tuple[int, FinishReason | None]:
        """Append tokens up to one that ends the output; return their number and the reason."""
        known_ids = self.token_ids
        for count, token_id in enumerate(token_ids, 1):
            known_ids.append(token_id)
            if token_id in self.stop_token_ids and self.num_output_tokens >= self.min_tokens:
                return count, FinishReason.STOP
            if len(known_ids) >= self.max_num_tokens:
                return count, FinishReason.LENGTH
            if self.repetition and self.repetition.append(known_ids, self.num_prompt_tokens):
                if self.num_output_tokens >= self.min_tokens:
                    return count, FinishReason.REPETITION
        return len(token_ids), None
