"""The responses of introspection routes. Times are in ms since the request's first mark."""

import msgspec
from msgspec import UNSET, UnsetType


class RequestSummary(msgspec.Struct, kw_only=True):
    """A request, and the phase in which it waited longest."""

    id: str
    object: str = "request"
    route: str
    model: str  # the model or adapter, as the response names it
    engine: int  # its rank
    owner: str  # the name of its API key; "" without keys
    status: str  # "running", "finished", "abort" (its client left), "error" or "refused"
    outcome: str | UnsetType = UNSET  # "stop" or "length" if finished, else the status
    http_status: int | UnsetType = UNSET  # status of the response
    created: float  # Unix time
    wall_ms: float
    ttft_ms: float | UnsetType = UNSET
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    longest_wait: str | UnsetType = UNSET  # the longest phase beside its own work
    longest_wait_ms: float | UnsetType = UNSET


class RequestList(msgspec.Struct):
    """A list of requests."""

    data: list[RequestSummary]
    object: str = "list"


class PhaseShare(msgspec.Struct):
    """A phase of a request, with its part of the latency."""

    phase: str
    ms: float
    share: float  # part of the total time, 0 to 1
    meaning: str


class TimelineSpan(msgspec.Struct, omit_defaults=True):
    """A period of time with one phase."""

    phase: str
    begin_ms: float
    end_ms: float
    first_step: int = -1  # the engine's number
    last_step: int = -1


class TimelineMark(msgspec.Struct, omit_defaults=True):
    """The time at which a request reached a stage."""

    stage: str
    at_ms: float
    took_ms: float  # since the previous mark
    step: int = -1


class TimelineStep(msgspec.Struct, kw_only=True):
    """A step of the engine."""

    step: int
    begin_ms: float
    end_ms: float
    schedule_ms: float
    prepare_ms: float
    encode_ms: float | UnsetType = UNSET  # of the vision tower; on a CPU, a part of prepare_ms
    forward_ms: float
    rank_forward_ms: list[float] | UnsetType = UNSET  # by rank, if the engine has several workers
    sample_ms: float  # on a device that computes by itself, with the wait for it
    num_tokens: int
    num_prompt_tokens: int
    num_requests: int
    num_waiting: int
    waits_for: str
    num_preempted: int
    num_cached_tokens: int
    num_drafts: int
    num_accepted: int
    engine: int  # its rank
    message_bytes: int | UnsetType = UNSET  # that brought its outputs, while a request was watched


class TimelineNeighbour(msgspec.Struct, omit_defaults=True):
    """Another request, whose prompt was computed while this request waited."""

    num_prompt_tokens: int
    ms: float
    id: str = ""  # shown to the same API key only


class PrefixDifference(msgspec.Struct):
    """The first token at which a prompt differs from the most similar earlier prompt."""

    index: int
    token_id: int
    text: str
    other_token_id: int
    other_text: str
    other_id: str  # the earlier request's


class PrefixCacheReport(msgspec.Struct):
    """The number of a prompt's blocks found in the prefix cache, and the reason for misses."""

    block_size: int
    num_blocks: int  # full blocks of the prompt
    num_matched: int
    num_external: int = 0  # matched blocks from host memory or files
    num_uncovered: int = 0  # cached blocks after these, which no checkpoint of states covers
    # "complete", "different_token", "salt", "adapter", "engine", "emptied", "last_block",
    # "no_checkpoint", "evicted", "disabled", "prompt_is_read" or "unknown"
    reason: str = "unknown"
    text: str = ""
    difference: PrefixDifference | UnsetType = UNSET
    evicted_seconds_ago: float | UnsetType = UNSET


class RequestTimeline(RequestSummary, kw_only=True):
    """A request with its timeline: phases, spans, marks and steps."""

    object: str = "request.timeline"
    explanation: str
    phases: list[PhaseShare]  # longest first
    spans: list[TimelineSpan]
    marks: list[TimelineMark]
    num_steps: int
    steps: list[TimelineStep]  # the longest, in order
    neighbours: list[TimelineNeighbour]
    behind: list[str]  # requests of the same API key that ran while it queued
    prefix_cache: PrefixCacheReport | UnsetType = UNSET  # set once the request is scheduled
    # With the header X-Servd-Watch: of its message to the engine; the block table of each choice.
    message_bytes: int | UnsetType = UNSET
    block_ids: list[list[int]] | UnsetType = UNSET


class StepList(msgspec.Struct):
    """The latest steps of the engine, oldest first. Times are from the host's clock."""

    data: list[TimelineStep]
    now_ms: float
    tokens_per_second: list[int]  # generated in each of the last 120 whole seconds, oldest first
    prompt_tokens_per_second: list[int]  # computed in these, also of unfinished prompts
    object: str = "list"
