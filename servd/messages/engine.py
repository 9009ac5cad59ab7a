"""All messages that cross a process border, as msgspec tagged unions. No tensors, no pickle.

The unions are ToEngine, FromEngine, ToWorker and FromWorker; start_messages.py has the messages on
the pipes of child processes. Structs are positional on the wire (`array_like`): append new fields,
with a default.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

import msgspec

from servd.base.bounds import TokenId
from servd.base.errors import EngineError, InvalidRequest
from servd.base.tracing import Mark, StepRecord
from servd.messages.adapter import Adapter
from servd.messages.multimodal import MultiModalFeature
from servd.messages.params import PoolingParams, SamplingParams
from servd.messages.stats import KVStoreStats, SchedulerStats


class Message(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The base class of all messages."""


class FinishReason(StrEnum):
    """The reason why a request ended. Every accepted request ends with exactly one reason."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context is full
    REPETITION = "repetition"  # the output repeats itself
    ABORT = "abort"  # the client left or asked for it
    ERROR = "error"


# ---- api -> core ----


class Attach(Message, tag=True):
    """An API server connects. The engine answers with EngineStatus or EngineReady, or with
    EngineGone if their identities differ.

    This is the only message that no version of servd may change.
    """

    client: int
    inbox: str  # address that the engine sends to
    identity: str = ""  # see `servd.core.client.identity`


class RequestOptions(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """The options of how servd serves a request, as opposed to the model's task (`params`)."""

    priority: int = 0  # lower runs first, under --scheduling-policy priority
    cache_salt: str | None = None  # requests share cached blocks only with the same salt
    # Keep only the last tokens of the prompt, at most this many; -1: as many as fit. The engine
    # gets None: its prompts are already cut.
    truncate_prompt_tokens: int | None = None
    owner: str = ""  # API key, user or address: owners share the engine fairly
    weight: float = 1.0  # its owner's share, relative to others'
    priority_class: int = 0  # 1: in the background, with the capacity that class 0 leaves
    adapter: Adapter | None = None  # None: the base model
    rank: int | None = None  # the engine that must run it, under --data-parallel-size
    is_watched: bool = False  # the outputs report the block ids
    retention: float = 0.0  # seconds that its prompt is pinned in the cache after its end
    kv_source: str = ""  # HOST:PORT of the engine that computed the prompt (disaggregated prefill)
    is_exported: bool = False  # another engine will fetch its blocks
    # Where truncate_prompt_tokens drops tokens. None: as the model was trained, or in the engine.
    truncation_side: Literal["left", "right"] | None = None
    reports_progress: bool = False  # StepRecords say how much of its prompt is computed
    # How many tokens of its prompt come before the last user message; 0: unknown. A model with
    # states keeps a checkpoint there.
    turn_start: int = 0

    @property
    def cache_keys(self) -> tuple[str | None, ...]:
        """The keys that two requests must share, besides tokens, to share cached blocks."""
        return self.cache_salt, self.adapter and self.adapter.digest


class EngineCoreRequest(Message, tag=True):
    """A validated prompt with all its choices. Prompt and max_tokens fit in max_model_len."""

    request_id: str
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    params: SamplingParams | PoolingParams
    client: int = 0  # which API server gets the outputs
    eos_token_ids: list[int] = []  # empty with ignore_eos
    options: RequestOptions = RequestOptions()
    block_hashes: list[bytes] = []  # of the prompt's full blocks; filled in by the engine
    marks: list[Mark] = []  # made in the engine before it is queued
    # For a request that is resent after a crash: the output so far of each unfinished choice, by
    # index.
    output_token_ids: dict[int, list[TokenId]] = {}
    mm_features: list[MultiModalFeature] = []  # the prompt's pictures, in order

    @property
    def choice_ids(self) -> list[str]:
        """The engine ids of the choices, as used in outputs."""
        n = self.params.n if isinstance(self.params, SamplingParams) else 1
        return [self.request_id] if n == 1 else [f"{self.request_id}_{i}" for i in range(n)]

    def choices(self) -> list[Self]:
        """Return a request for each unfinished choice, with its own seed. All lists are shared."""
        params = self.params
        outputs = self.output_token_ids
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
    """Drop these requests, in any state, without further output. Unknown ids are ignored."""

    request_ids: list[str]


class ResetPrefixCache(Message, tag=True):
    """Remove all cached blocks that no request uses."""


RpcMethod = Literal["update_weights", "start_profile", "stop_profile", "sleep", "wake_up"]


class CollectiveRpc(Message, tag=True):
    """Call a method of all workers. `sleep` frees weights and KV cache, `wake_up` loads the model
    again. Engines sleep once they are idle, and refuse `update_weights` unless they are.
    """

    method: RpcMethod
    args: list[str | int] = []
    client: int = 0
    number: int = 0  # of this client's calls; 0: without an answer
    only_checks: bool = False  # of `update_weights`: answer whether the engine would refuse it


class Audit(Message, tag=True):
    """Check the engine's invariants. The engine answers with EngineAudit."""

    client: int
    number: int  # of this client's audits


class Detach(Message, tag=True):
    """An API server has ended: drop its requests. Sent to engines on other hosts."""

    client: int


ToEngine = (
    Attach | Detach | EngineCoreRequest | AbortRequests | ResetPrefixCache | CollectiveRpc | Audit
)


# ---- core -> api ----


STALLED = "stalled"  # phase of an EngineStatus


class EngineStatus(Message, tag=True):
    """Start-up progress. From the engine's parent: STALLED, the engine hangs and will be killed."""

    phase: str  # e.g. "loading weights"
    progress: float = 0.0  # 0 to 1 within the phase
    generation: int = 0  # number of restarts; messages of earlier engines are ignored


class WorkerReady(Message, tag=True):
    """A worker has loaded the model: its device, and how many blocks fit."""

    device: str  # e.g. "cpu", "NVIDIA H200"
    dtype: str
    attention_backend: str
    num_blocks: int  # KV-cache blocks that fit
    weights_bytes: int
    kv_bytes_per_block: int
    # Hybrid models: the sliding window of each group of layers, in tokens; None: full attention.
    # Each group has its own blocks: a request has a block id of each group for its first
    # block_size tokens, then a block id of each group for the next, and so on.
    kv_windows: tuple[int | None, ...] = (None,)
    # With --enable-lora: (inputs, outputs) of each layer that adapters may change.
    adaptable: dict[str, tuple[int, int]] = {}
    warning: str = ""  # why the worker is slower than necessary, and a remedy
    # Models with states: the checkpoints that fit, and the bytes of one on this rank.
    num_checkpoints: int = 0
    state_bytes: int = 0


class EngineReady(Message, tag=True):
    """The engine can serve requests. Sent again when the engine falls asleep or wakes, and before
    and after `update_weights`.
    """

    worker: WorkerReady
    max_model_len: int
    block_size: int
    startup_seconds: dict[str, float] = {}  # by phase, since the user's command
    generation: int = 0
    is_asleep: bool = False  # the next request waits until the model is loaded again
    kv_stores: list[KVStoreStats] = []  # storages of the KV connector
    num_updates: int = 0  # of the weights, since the engine's start
    folder: str = ""  # of the weights, after an update


class EngineAudit(Message, tag=True):
    """The result of an Audit. It covers all messages that the client sent before the Audit."""

    number: int
    problems: list[str]
    request_ids: list[str]  # unfinished requests of this client
    num_requests: int  # of all clients
    generation: int = 0


class CollectiveRpcResult(Message, tag=True):
    """The result of a CollectiveRpc: of one worker, or of all workers of an engine by rank."""

    results: list[str | None]
    rank: int = 0  # of the worker
    number: int = 0  # as in CollectiveRpc
    error: str = ""  # why nothing was called
    generation: int = 0
    has_failed: bool = False  # with `error`: the engine ends

    def check(self) -> None:
        """Raise InvalidRequest or EngineError with `error`, if there is one."""
        if self.has_failed:
            raise EngineError(self.error)
        if self.error:
            raise InvalidRequest(self.error, param="args")


class TokenLogprobs(Message):
    """The log-probabilities at one position: the sampled token first, then the most likely."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the sampled token by probability, from 1


class PromptLogprobs(Message):
    """The log-probabilities of a part of a prompt. The first token of a prompt has none."""

    start: int  # index in the prompt of the first token of the part, from 1
    positions: list[TokenLogprobs]  # the prompt's token first, then the most likely tokens


class EngineCoreOutput(Message):
    """The output that one step added to one request."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    # The stop token id that ended the output; with `length`, why its grammar could not continue.
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None  # one per new token
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache, at first scheduling
    marks: list[Mark] = []  # since the last output
    error: str | None = None  # with finish_reason error
    # On the first output: an entry for each prompt token but the first.
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None  # float32, little-endian: the result of PoolingParams
    # The grammar is complete: the output's last token is text, not a stop token.
    ended_by_grammar: bool = False
    # On the first output: when the first block that was missing in the prefix cache was evicted;
    # 0: never, or long ago.
    evicted_at_ns: int = 0
    num_drafts: int = 0  # draft tokens of the workers that this step verified
    num_accepted: int = 0
    # On the first output: how many of num_cached_tokens the KV connector loaded.
    num_external_tokens: int = 0
    block_ids: list[int] = []  # block table; on the first and last output of a watched request
    # On the first output: cached prompt tokens that had to be computed, because they come after the
    # last checkpoint of the states.
    num_uncovered_tokens: int = 0


class EngineCoreOutputs(Message, tag=True):
    """The outputs of one step for one API server."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
    steps: list[StepRecord] = []  # collected since the last message to this API server
    generation: int = 0
    # By request id, to be read before `outputs`: the only token that a step added to a request.
    decoded: dict[str, int] = {}
    # By request id: marks of aborted requests that no output has carried. Their outputs are over.
    aborted: dict[str, list[Mark]] = {}

    @property
    def all_outputs(self) -> list[EngineCoreOutput]:
        """All outputs, including `decoded`. Each request's outputs are in order."""
        return [
            *(EngineCoreOutput(key, [token_id]) for key, token_id in self.decoded.items()),
            *self.outputs,
        ]


class EngineFailed(Message, tag=True):
    """The engine's last message. The parent process decides whether to restart the engine."""

    reason: str
    is_config_error: bool = False


class EngineRestarting(Message, tag=True):
    """The engine process died and is being restarted. Sent by the engine's parent. API servers
    attach to the next engine and resend their unfinished requests.
    """

    generation: int  # of the next engine
    reason: str
    computing: list[str] = []  # engine ids of the prompts that were being computed


class EngineGone(Message, tag="EngineDead"):  # the tag that clients of other versions read
    """From the parent: the engine died for good. From the engine: the client's identity differs."""

    reason: str


FromEngine = (
    EngineStatus
    | EngineReady
    | EngineCoreOutputs
    | EngineAudit
    | CollectiveRpcResult
    | EngineFailed
    | EngineRestarting
    | EngineGone
)


# ---- core -> worker ----


class LoadModel(Message, tag=True):
    """Load the weights, and report in WorkerReady how many KV blocks fit."""

    plans_memory: bool = True  # whether to compare the memory with a plan: at the first start


class AllocateKVCache(Message, tag=True):
    """Allocate the KV cache. The numbers are the smallest that a worker reported."""

    num_blocks: int
    num_checkpoints: int = 0


class NewRequest(Message):
    """A request that joins the batch, for the first time or after a preemption."""

    slot: int  # the request's row in every worker until the slot is freed
    token_ids: list[int]  # prompt and, after preemption, output
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache, a multiple of block_size
    block_ids: list[int]  # of the computed tokens
    params: SamplingParams | PoolingParams
    eos_token_ids: list[int] = []
    cache_salt: str | None = None  # requests share suffix drafts only with the same salt
    adapter: Adapter | None = None
    mm_features: list[MultiModalFeature] = []


class ScheduledRequest(Message):
    slot: int
    num_scheduled_tokens: int  # to compute, drafts included
    new_block_ids: list[int] = []  # appended to its block table
    samples: bool = True  # sample after the last token; False within a prompt
    # Upper bound: the workers know how many drafts in flight are accepted.
    num_computed_tokens: int = 0
    num_drafts: int = 0  # how many of num_scheduled_tokens, at their end, are drafts to verify
    max_new_drafts: int = 0  # draft tokens that the workers may propose for the next step
    scheduled_spec_decode_tokens: list[int] = []  # the engine's drafts; empty: the workers' drafts


class DecodeBatch(Message):
    """The rows that compute one token and sample the next, without drafts. Most rows of most steps
    are such rows, so they are stored as columns.
    """

    slots: list[int] = []
    num_computed_tokens: list[int] = []  # see ScheduledRequest
    new_blocks: dict[int, int] = {}  # slot -> new block, for the few rows that need a block

    def row(self, index: int) -> ScheduledRequest:
        """Return a row as a ScheduledRequest."""
        slot = self.slots[index]
        new_block_ids = [self.new_blocks[slot]] if slot in self.new_blocks else []
        return ScheduledRequest(slot, 1, new_block_ids, True, self.num_computed_tokens[index])


class BlockSwaps(Message):
    """Copies between KV cache blocks and slots of host memory, which have a part per rank; and
    between checkpoints and the states of running requests.

    Workers swap out first: slots that are filled may be read, and blocks that are saved may be
    filled again, in the same step. They load states after that, and save them in the forward pass.
    """

    memory: str  # file that workers map: slots of kv_bytes_per_block times the number of ranks
    blocks_to_swap_in: list[tuple[int, int]] = []  # (slot, block)
    blocks_to_swap_out: list[tuple[int, int]] = []  # (block, slot)
    # A checkpoint takes several slots of host memory, in order.
    states_to_swap_in: list[tuple[list[int], int]] = []  # (slots, checkpoint)
    states_to_swap_out: list[tuple[int, list[int]]] = []  # (checkpoint, slots)
    states_to_load: list[tuple[int, int]] = []  # (checkpoint, request's slot)
    # (request's slot, number of its tokens, checkpoint): the states after these tokens, of which
    # the step computes the last.
    states_to_save: list[tuple[int, int, int]] = []


class SchedulerOutput(Message, tag=True):
    """One step: the changes to the batch, and how many tokens each request computes.

    Workers make `swaps`, free `freed_slots` and add `new_requests`. They drop encoded pictures and
    encode others. Then they compute the rows: first `decodes`, then `scheduled`.
    """

    step: int
    scheduled: list[ScheduledRequest]
    new_requests: list[NewRequest] = []
    freed_slots: list[int] = []
    swaps: BlockSwaps | None = None
    decodes: DecodeBatch = msgspec.field(default_factory=DecodeBatch)
    # Pictures to encode: request's slot, and index in its `mm_features`.
    scheduled_encoder_inputs: list[tuple[int, int]] = []
    freed_encoder_outputs: list[bytes] = []  # identifiers

    @property
    def rows(self) -> list[ScheduledRequest]:
        """All rows in order, as objects. Slow."""
        return [*map(self.decodes.row, range(len(self.decodes.slots))), *self.scheduled]

    @property
    def slots(self) -> list[int]:
        return [*self.decodes.slots, *(row.slot for row in self.scheduled)]

    @property
    def num_rows(self) -> int:
        return len(self.decodes.slots) + len(self.scheduled)

    @property
    def total_num_scheduled_tokens(self) -> int:
        num_tokens = sum(row.num_scheduled_tokens for row in self.scheduled)
        return len(self.decodes.slots) + num_tokens


class GrammarOutput(Message):
    """The allowed tokens of rows with a grammar. A position without an entry allows all tokens, or
    comes after a draft that the grammar rejects.
    """

    indices: list[int]  # positions in SchedulerOutput.rows
    offsets: list[int]  # number of drafts of the row before the token to sample
    bitmask: bytes  # int32 [len(indices), ceil(vocab_size / 32)], bit set = allowed


class SampleTokens(Message, tag=True):
    grammar_output: GrammarOutput | None = None


class TakeTokens(Message, tag=True):
    """The sampled tokens of the oldest step, for pipeline stages that do not sample."""

    token_ids: list[list[int]]  # see ModelRunnerOutput.rows


class Shutdown(Message, tag=True):
    """Free the device and exit."""


ToWorker = (
    LoadModel
    | AllocateKVCache
    | SchedulerOutput
    | SampleTokens
    | TakeTokens
    | CollectiveRpc
    | Shutdown
)


# ---- worker -> core ----


class WorkerProgress(Message, tag=True):
    phase: str
    progress: float


class ModelRunnerOutput(Message, tag=True):
    """The sampled tokens of one step, in the order of SchedulerOutput.rows."""

    # Rows of SchedulerOutput.scheduled: empty if a row does not sample; with drafts, the accepted
    # drafts and one more token.
    sampled_token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # row -> an entry per sampled token
    prompt_logprobs: dict[int, PromptLogprobs] = {}  # row -> logprobs of its computed tokens
    pooled: dict[int, bytes] = {}  # row -> vector or vectors, float32
    errors: dict[int, str] = {}  # row -> why its request failed
    # row -> number, from 1, of its first sampled token where every token is forbidden
    dead_ends: dict[int, int] = {}
    draft_token_ids: dict[int, list[int]] = {}  # row -> drafts for the next step
    times_ns: tuple[int, ...] = ()  # see StepRecord.worker_ns
    encode_ns: int = 0  # see StepRecord
    rank: int = 0  # of the worker
    decoded: list[int] = []  # the token of each of SchedulerOutput.decodes

    def tokens_of(self, row: int) -> list[int]:
        other = row - len(self.decoded)
        return [self.decoded[row]] if other < 0 else self.sampled_token_ids[other]

    @property
    def rows(self) -> list[list[int]]:
        return [*([token_id] for token_id in self.decoded), *self.sampled_token_ids]


class WorkerFailed(Message, tag=True):
    reason: str  # the traceback, or for a ConfigError its message
    is_config_error: bool = False


FromWorker = WorkerProgress | WorkerReady | ModelRunnerOutput | CollectiveRpcResult | WorkerFailed
