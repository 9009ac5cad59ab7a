"""RequestState: the API server's state of a prompt while the engine computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from servd.api.output.output_parser import ExpectedOutput
from servd.api.request.choice import Choice
from servd.api.request.output_collector import RequestOutputCollector
from servd.api.request.request_output import RequestOutput
from servd.api.request.timeline import Timeline
from servd.base.tracing import Mark, StepRecord, now_ns
from servd.messages.engine import EngineCoreRequest
from servd.messages.outputs import CompletionOutput, PromptProgress
from servd.messages.params import SamplingParams


class Unfinished(msgspec.Struct):
    """An unfinished request of the engine, as /health needs it."""

    sent_ns: int
    num_prompt_tokens: int
    has_begun: bool  # the first token has arrived
    is_due: bool = True  # it waits for engine steps only, not for a grammar or another resource
    has_pictures: bool = False


class Routed(Protocol):
    """A prompt that the load balancer counts toward an engine's pending tokens."""

    rank: int

    def end_prompt(self) -> None: ...

    def end(self) -> None: ...


@dataclass(slots=True)
class ProcessedInputs:
    """The result of `Processor.process_inputs`: a valid request, and what the API keeps of it."""

    request: EngineCoreRequest
    params: SamplingParams  # seed and max_tokens filled in; PROMPT_ONLY for pooling
    prompt: str | None = None  # None if given as token ids
    expected: ExpectedOutput = ExpectedOutput()
    marks: list[Mark] = field(default_factory=list)
    pictures: Sequence[object] = ()  # kept for as long as workers may read them


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one prompt of a request, from its start to its last token."""

    request: EngineCoreRequest
    params: SamplingParams  # see ProcessedInputs
    prompt: str | None
    expected: ExpectedOutput
    timeline: Timeline  # of the request that a client sent
    choices: list[Choice]
    collector: RequestOutputCollector | None  # offline None
    index: int = 0  # among the prompts of its request
    is_part: bool = False  # of a beam search or a decision: metrics count the whole
    rank: int = 0  # of its engine
    routed: Routed | None = None  # with several engines
    sent_ns: int = 0
    progress: PromptProgress | None = None  # the last report
    computing_since_ns: int = 0
    pictures: Sequence[object] = ()  # see ProcessedInputs

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens so far, of all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def is_open(self) -> bool:
        """Whether a choice is unfinished."""
        return any(choice.is_open for choice in self.choices)

    def move_to(self, rank: int, cache_number: int) -> None:
        """Record that the engine `rank` continues the request."""
        timeline = self.timeline
        timeline.earlier = (*timeline.earlier, (timeline.rank, now_ns()))
        timeline.cache_number = cache_number
        timeline.rank = rank
        self.rank = rank

    def open_engine_ids(self) -> list[str]:
        """Return the engine's ids of the unfinished choices."""
        return [choice.engine_id for choice in self.choices if choice.is_open]

    def open_token_ids(self) -> dict[int, list[int]]:
        """Return the output tokens of the unfinished choices, by index."""
        choices = [choice for choice in self.choices if choice.is_open]
        return {choice.index: choice.token_ids.tolist() for choice in choices}

    def report_progress(self, step: StepRecord, engine_id: str) -> None:
        """Put the progress of the prompt in the collector, until the first token."""
        if self.collector is None or self.choices[0].marks:
            return
        num_computed = step.computed[engine_id]
        if self.progress is None:
            self.computing_since_ns = step.started_ns
            num_cached = num_computed - step.prefills[engine_id]
            self.progress = PromptProgress(len(self.prompt_token_ids), num_cached, 0, 0.0)
        time_ms = round((step.collected_ns - self.computing_since_ns) * 1e-6, 3)
        self.progress = msgspec.structs.replace(
            self.progress, processed=num_computed, time_ms=time_ms
        )
        self.collector.put(self.index, CompletionOutput(progress=self.progress))

    def unfinished(self) -> Unfinished:
        """Return the state for /health, which detects an engine without progress."""
        has_begun = bool(self.choices[0].marks)
        # Before its first step a structured output waits for its grammar.
        is_due = has_begun or self.params.structured_output is None
        num_tokens = len(self.prompt_token_ids)
        return Unfinished(self.sent_ns, num_tokens, has_begun, is_due, bool(self.pictures))


def make_output(
    inputs: ProcessedInputs, timeline: Timeline, index: int, outputs: list[CompletionOutput]
) -> RequestOutput:
    """Return an output of the prompt `index` of a request."""
    return RequestOutput(
        request_id=inputs.request.request_id,
        prompt=inputs.prompt,
        prompt_token_ids=inputs.request.prompt_token_ids,
        outputs=outputs,
        index=index,
        params=inputs.params,
        expected=inputs.expected,
        timeline=timeline,
    )


def find_choice(
    requests: Mapping[str, RequestState], engine_id: str
) -> tuple[RequestState, Choice] | None:
    """Return the unfinished request and choice that the engine calls `engine_id` (see `choice_ids`
    of EngineCoreRequest), or None.
    """
    state = requests.get(engine_id)
    index = 0
    if state is None or len(state.choices) > 1:
        request_id, _, number = engine_id.rpartition("_")
        state = requests.get(request_id)
        if state is None or not number.isdecimal() or int(number) >= len(state.choices):
            return None
        index = int(number)
    choice = state.choices[index]
    return (state, choice) if choice.is_open else None
