"""RequestState: all that an API process knows of a prompt, from the Processor to its last delta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from servd.api.choice import Choice
from servd.api.delta_stream import DeltaStream
from servd.api.output_parser import ExpectedOutput
from servd.api.progress import Unfinished
from servd.api.routing import Routed
from servd.api.timeline import Timeline
from servd.messages import EngineCoreRequest
from servd.outputs import RequestOutput
from servd.params import SamplingParams
from servd.tracing import Mark


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A prompt of a request. `Processor.process` makes it, `start` gives it its choices, and
    `AsyncLLM.requests` has it while it runs.
    """

    prompt: str | None  # None if given as token ids
    params: SamplingParams  # with seed and max_tokens filled in; PROMPT_ONLY for PoolingParams
    request: EngineCoreRequest
    expected: ExpectedOutput = field(default_factory=ExpectedOutput)
    marks: list[Mark] = field(default_factory=list)  # of its preparation
    part_of: str = ""  # id of the request it is a part of, which metrics and timelines count once
    choices: list[Choice] = field(default_factory=list)  # none until `start`
    # Set by `AsyncLLM` when the prompt starts.
    timeline: Timeline = field(init=False)
    stream: DeltaStream = field(init=False)
    first_index: int = 0  # of its choices in the stream
    rank: int = 0  # of its engine
    routed: Routed | None = None  # with several engines
    sent_ns: int = 0
    output: RequestOutput | None = None  # offline: all that has come so far

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def is_counted(self) -> bool:
        """Whether it is a request of its own in the metrics."""
        return not self.part_of

    @property
    def is_open(self) -> bool:
        """Whether a choice has not ended."""
        return any(choice.is_open for choice in self.choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def start(self, arrival_ns: int, exemplar: dict[str, str] | None = None) -> None:
        """Make its choices.

        Args:
            arrival_ns: when its request came.
            exemplar: for OpenMetrics, the label of its trace.
        """
        num_prompt_tokens = len(self.prompt_token_ids)
        self.choices = [
            Choice(
                arrival_ns, num_prompt_tokens, index=index, engine_id=engine_id, exemplar=exemplar
            )
            for index, engine_id in enumerate(self.request.choice_ids)
        ]

    def open_engine_ids(self) -> list[str]:
        """Return the engine's ids of the choices that have not ended."""
        return [choice.engine_id for choice in self.choices if choice.is_open]

    def open_token_ids(self) -> dict[int, list[int]]:
        """Return the tokens so far of the choices that have not ended, by index."""
        return {each.index: each.token_ids.tolist() for each in self.choices if each.is_open}

    def unfinished(self) -> Unfinished:
        """Return its state for /health, which detects an engine that makes no progress."""
        has_begun = bool(self.choices[0].marks)
        # Before its first step a structured output waits for its grammar.
        is_due = has_begun or self.params.structured_output is None
        return Unfinished(self.sent_ns, len(self.prompt_token_ids), has_begun, is_due)


def find_choice(
    requests: Mapping[str, RequestState], engine_id: str
) -> tuple[RequestState, Choice] | None:
    """Return the request and the choice that the engine knows by this id (see `choice_ids` of
    EngineCoreRequest); None if it has ended.
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
