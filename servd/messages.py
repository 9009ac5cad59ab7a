"""Every message that crosses a process border, as msgspec tagged unions. No tensors, no pickle.

The unions are ToEngine, FromEngine, ToWorker and FromWorker; what goes through the pipes of a child
process is in child_messages.py. Structs are positional on the wire (`array_like`): new fields are
appended, with a default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from servd.bounds import TokenId
from servd.lora import Adapter
from servd.params import PoolingParams, SamplingParams
from servd.stats import SchedulerStats, TierStats
from servd.tracing import Mark, StepRecord


class Message(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Base of all messages."""


class FinishReason(StrEnum):
    """Why a request ended. Every accepted request ends with exactly one of these."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context is full
    REPETITION = "repetition"  # the output repeats itself
    ABORT = "abort"  # the client left or asked for it
    ERROR = "error"


# ---- api -> core ----


class Attach(Message, tag=True):
    """An API server introduces itself; the engine answers with EngineStatus or EngineReady, or with
    EngineDead if it is of another identity.

    Versions of servd may change every message but this one.
    """

    client: int
    inbox: str  # address that the engine sends to
    identity: str = ""  # see `servd.core.client.identity`


class RequestOptions(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """How a request is served, whatever it asks of the model: from the route to the engine."""

    priority: int = 0  # lower runs first, under --scheduling-policy priority
    cache_salt: str | None = None  # requests share cached blocks only with the same salt
    # Keep only the last tokens of the prompt, at most this many; -1: as many as fit. The engine
    # gets None: its prompts are already cut.
    truncate_prompt_tokens: int | None = None
    owner: str = ""  # whose request it is: owners share the engine
    weight: float = 1.0  # its owner's share, compared with others'
    lane: int = 0  # 1: in the background, with what lane 0 leaves
    adapter: Adapter | None = None  # None: the model as it is
    rank: int | None = None  # the engine that it asks for, under --data-parallel-size
    is_watched: bool = False  # its outputs tell which blocks it has
    retention: float = 0.0  # seconds that its prompt stays in the cache after its end
    kv_source: str = ""  # HOST:PORT of the engine that has computed the prompt
    is_exported: bool = False  # another engine will ask for its blocks

    @property
    def cache_keys(self) -> tuple[str | None, ...]:
        """What must be equal, beside the tokens, for requests to share cached blocks."""
        return self.cache_salt, self.adapter and self.adapter.digest


class EngineCoreRequest(Message, tag=True):
    """One validated prompt with all its choices: nothing in it can fail in the engine."""

    request_id: str
    # With max_tokens within max_model_len.
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    params: SamplingParams | PoolingParams
    client: int = 0  # which API server gets the outputs
    eos_token_ids: list[int] = []  # end generation; empty under ignore_eos
    options: RequestOptions = RequestOptions()
    block_hashes: list[bytes] = []  # one for each full block of the prompt; the engine fills it in
    marks: list[Mark] = []  # taken in the engine before it is queued
    # Set when a request is replayed after an engine died: the output so far of each unfinished
    # choice, by index.
    output_token_ids: dict[int, list[TokenId]] = {}

    @property
    def choice_ids(self) -> list[str]:
        """Ids of the choices, as outputs carry them."""
        n = self.params.n if isinstance(self.params, SamplingParams) else 1
        return [self.request_id] if n == 1 else [f"{self.request_id}_{i}" for i in range(n)]

    def choices(self) -> list[EngineCoreRequest]:
        """A request for each choice that has not ended, with a seed of its own. They share all
        lists.
        """
        params, outputs = self.params, self.output_token_ids
        if not isinstance(params, SamplingParams) or params.n == 1:
            return [self]
        return [
            msgspec.structs.replace(
                self,
                request_id=choice_id,
                params=params.of_choice(index),
                output_token_ids={0: outputs[index]} if outputs else {},
            )
            for index, choice_id in enumerate(self.choice_ids)
            if not outputs or index in outputs
        ]


class AbortRequests(Message, tag=True):
    """Drop these requests, wherever they are, without further output; unknown ids are ignored."""

    request_ids: list[str]


class ResetPrefixCache(Message, tag=True):
    """Forget all cached blocks that no request uses."""


class Sleep(Message, tag=True):
    """Free weights and KV cache as soon as there is nothing to do; the next request wakes it."""


class WakeUp(Message, tag=True):
    """Load the model again, before a request needs it."""


class Audit(Message, tag=True):
    """Look for contradictions in the engine's state; it answers with EngineAudit."""

    client: int
    number: int  # counts this client's questions


ToEngine = Attach | EngineCoreRequest | AbortRequests | ResetPrefixCache | Sleep | WakeUp | Audit


# ---- core -> api ----


class EngineStatus(Message, tag=True):
    """How far start-up has come."""

    phase: str  # e.g. "loading weights"
    progress: float = 0.0  # 0 to 1 within the phase
    incarnation: int = 0  # the engine's; messages of an earlier one no longer count


class WorkerReady(Message, tag=True):
    """What a worker found while loading; "auto" settings and the log depend on it."""

    device: str  # e.g. "cpu", "NVIDIA H200"
    dtype: str
    attention_backend: str
    num_blocks: int  # KV-cache blocks that fit
    weights_bytes: int
    kv_bytes_per_block: int
    # Of each group of layers, whose blocks of the KV cache are its own: how many tokens they keep
    # from the newest on; None: all. A request's block ids are those of the first tokens, one of
    # each group, then those of the next tokens.
    kv_windows: tuple[int | None, ...] = (None,)
    # With --enable-lora: (inputs, outputs) of each layer that an adapter may have a part for.
    adaptable: dict[str, tuple[int, int]] = {}


class EngineReady(Message, tag=True):
    """The engine serves requests from now on; said again when it falls asleep and wakes."""

    worker: WorkerReady
    max_model_len: int
    block_size: int
    startup_seconds: dict[str, float] = {}  # by phase, from the user's command on
    incarnation: int = 0
    is_asleep: bool = False  # the next request waits until the model is loaded again
    tiers: list[TierStats] = []  # below the device's KV cache, as they begin


class EngineAudit(Message, tag=True):
    """What an audit found, after everything that the client had sent before it."""

    number: int
    problems: list[str]
    request_ids: list[str]  # the client's, unfinished
    num_requests: int  # all clients' together
    incarnation: int = 0


class TokenLogprobs(Message):
    """Log-probabilities at one position: the sampled token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # place of the sampled token in the vocabulary, from 1


class PromptLogprobs(Message):
    """Log-probabilities of a part of a prompt; the first token of a prompt has none."""

    start: int  # index in the prompt of the first token of the part, from 1
    positions: list[TokenLogprobs]  # the token of the prompt first, then the most likely ones


class EngineCoreOutput(Message):
    """What one step added to one request."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    # The stop_token_ids entry that ended it; with finish_reason length, why its grammar cut it off.
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache, at first scheduling
    marks: list[Mark] = []  # since the last output
    error: str | None = None  # with finish_reason error
    # On the first output; one per prompt token but the first.
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None  # float32, little-endian: what PoolingParams ask for
    # It stops because nothing may follow: its last token is text, not a stop token.
    ended_by_grammar: bool = False
    # On the first output: when the first block of the prompt that the prefix cache had not was
    # evicted from it; 0 if it was not, or that was long ago.
    evicted_at_ns: int = 0
    num_drafts: int = 0  # that the workers had found for this step
    num_accepted: int = 0  # drafts that were kept
    # On the first output: those of num_cached_tokens that came from tiers below the device.
    num_external_tokens: int = 0
    block_ids: list[int] = []  # its block table, on the first and the last output if it is watched


class EngineCoreOutputs(Message, tag=True):
    """All outputs of one step for one API server."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
    steps: list[StepRecord] = []  # harvested since the last message to this API server
    incarnation: int = 0
    # By request, before its `outputs`: those of which there is no more to say than another token.
    decoded: dict[str, int] = {}

    @property
    def all_outputs(self) -> list[EngineCoreOutput]:
        """One by one, each request's in their order."""
        return [*(EngineCoreOutput(key, [one]) for key, one in self.decoded.items()), *self.outputs]


class EngineFailed(Message, tag=True):
    """The engine's last message. Its parent decides whether another one is started."""

    reason: str
    is_config_error: bool = False


class EngineRestarting(Message, tag=True):
    """From the engine's parent: its process is gone and another one is on its way, to which API
    servers attach and send again what has not ended.
    """

    incarnation: int  # the next engine's
    reason: str
    computing: list[str] = []  # engine ids whose prompts it computed when it died


class EngineDead(Message, tag=True):
    """There is no engine any more: from its parent. From an engine itself: it is of another
    identity.
    """

    reason: str


FromEngine = (
    EngineStatus | EngineReady | EngineCoreOutputs | EngineAudit | EngineFailed | EngineRestarting
    | EngineDead
)  # fmt: skip


# ---- core -> worker ----


class LoadModel(Message, tag=True):
    """Load weights and report how many KV blocks fit (WorkerReady)."""


class AllocateKVCache(Message, tag=True):
    """Make the cache: the smallest `num_blocks` over all workers."""

    num_blocks: int


class NewRequest(Message):
    """A request that enters (or, after preemption, enters again) the batch, in full."""

    slot: int  # the row that it owns in every worker until it is freed
    token_ids: list[int]  # prompt and, after preemption, outputs
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache, a multiple of block_size
    block_ids: list[int]  # where the computed tokens are
    params: SamplingParams | PoolingParams
    eos_token_ids: list[int] = []
    cache_salt: str | None = None  # drafts are shared only among requests with the same one
    adapter: Adapter | None = None


class ScheduledRequest(Message):
    """One request's part in a step."""

    slot: int
    num_tokens: int  # to compute in this step, after those computed before
    new_block_ids: list[int] = []  # appended to its block table
    samples: bool = True  # the last of these tokens gets a successor
    # Tokens computed before, if all drafts in flight are kept: the workers know how many are.
    num_computed_tokens: int = 0
    num_drafts: int = 0  # the last of num_tokens; each gets a successor if it is kept
    max_new_drafts: int = 0  # how many the workers may draft for the next step
    draft_token_ids: list[int] = []  # the engine's drafts; empty: those of the workers


class Decodes(Message):
    """The rows that compute one token and sample the next, without drafts: most of most steps, so
    in columns.
    """

    slots: list[int] = []
    num_computed_tokens: list[int] = []  # see ScheduledRequest
    new_blocks: dict[int, int] = {}  # by slot, of few of them: the block that it gets

    def row(self, index: int) -> ScheduledRequest:
        """One of them."""
        slot = self.slots[index]
        new_block_ids = [self.new_blocks[slot]] if slot in self.new_blocks else []
        return ScheduledRequest(slot, 1, new_block_ids, True, self.num_computed_tokens[index])


class BlockCopy(Message):
    """A block of the KV cache, and a slot of the engine's memory with a part for each rank."""

    block: int
    slot: int
    to_device: bool  # from the slot to the block


class BlockCopies(Message):
    """Copies that each worker makes one after the other: later ones build on earlier ones."""

    memory: str  # the file that workers map: slots, each of kv_bytes_per_block of every rank
    copies: list[BlockCopy]


class SchedulerOutput(Message, tag=True):
    """One step: what changed, and how many tokens each request computes. Workers apply it in this
    order: make `copies`, free `freed_slots`, add `new_requests`, then compute the rows: those of
    `decodes`, and then those of `scheduled`.
    """

    step: int
    scheduled: list[ScheduledRequest]
    new_requests: list[NewRequest] = []
    freed_slots: list[int] = []
    copies: BlockCopies | None = None
    decodes: Decodes = msgspec.field(default_factory=Decodes)

    @property
    def rows(self) -> list[ScheduledRequest]:
        """All rows in their order, one by one, for those who are in no hurry."""
        return [*map(self.decodes.row, range(len(self.decodes.slots))), *self.scheduled]

    @property
    def slots(self) -> list[int]:
        """Those of all rows."""
        return [*self.decodes.slots, *(row.slot for row in self.scheduled)]

    @property
    def num_rows(self) -> int:
        """How many requests compute something."""
        return len(self.decodes.slots) + len(self.scheduled)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all requests."""
        return len(self.decodes.slots) + sum(s.num_tokens for s in self.scheduled)


class GrammarBitmask(Message):
    """Allowed tokens of the rows that follow a grammar. A token without an entry is free, or cannot
    be reached: the grammar does not allow the drafts before it.
    """

    indices: list[int]  # positions in SchedulerOutput.rows
    offsets: list[int]  # drafts of the row before the token to sample
    bitmask: bytes  # int32 [len(indices), ceil(vocab_size / 32)], bit set = allowed


class SampleTokens(Message, tag=True):
    """Second half of a step."""

    bitmask: GrammarBitmask | None = None


class TakeTokens(Message, tag=True):
    """What the oldest step sampled that this worker, which does not sample, was not told of yet."""

    token_ids: list[list[int]]  # see ModelRunnerOutput.rows


class Shutdown(Message, tag=True):
    """Free the device and end."""


ToWorker = LoadModel | AllocateKVCache | SchedulerOutput | SampleTokens | TakeTokens | Shutdown


# ---- worker -> core ----


class WorkerProgress(Message, tag=True):
    """Start-up progress of the worker."""

    phase: str
    progress: float


class ModelRunnerOutput(Message, tag=True):
    """Sampled tokens of one step, in the order of SchedulerOutput.rows."""

    # Of SchedulerOutput.scheduled: empty for a request that does not sample in this step; with
    # drafts, those that are kept and one more.
    sampled_token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # index in `rows` -> one per sampled token
    # Index in `rows` -> those of the tokens computed.
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    pooled: dict[int, bytes] = {}  # index in `rows` -> vector or vectors, float32
    errors: dict[int, str] = {}  # index in `rows` -> why its request could not enter
    # Index in `rows` -> what was drafted for the next step.
    draft_token_ids: dict[int, list[int]] = {}
    times_ns: tuple[int, ...] = ()  # see StepRecord.worker_ns
    rank: int = 0  # the worker's; of those above 0 the times count
    decoded: list[int] = []  # the token of each of SchedulerOutput.decodes

    def tokens_of(self, row: int) -> list[int]:
        """What a row sampled."""
        other = row - len(self.decoded)
        return [self.decoded[row]] if other < 0 else self.sampled_token_ids[other]

    @property
    def rows(self) -> list[list[int]]:
        """What each row sampled."""
        return [*([token_id] for token_id in self.decoded), *self.sampled_token_ids]


class WorkerFailed(Message, tag=True):
    """The worker cannot go on."""

    reason: str  # the traceback, or for a ConfigError its message
    is_config_error: bool = False


FromWorker = WorkerProgress | WorkerReady | ModelRunnerOutput | WorkerFailed
