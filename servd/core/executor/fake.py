"""FakeExecutor: deterministic tokens from a cache like a real KV cache, without a model."""

import logging
import math
import struct
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

from servd.base.tracing import now_ns
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core import executor
from servd.core.executor._fake_script import FakeScript
from servd.messages.engine import (
    BlockSwaps,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    PromptLogprobs,
    RpcMethod,
    SchedulerOutput,
    TokenLogprobs,
    WorkerReady,
)
from servd.messages.params import PoolingParams, SamplingParams

logger = logging.getLogger("servd.engine")

BYTE_VOCAB = 257  # see FAKE_SPEC
NEARLY_ALL = 250  # allowed tokens; inside a JSON string it is about 150 of the bytes
LETTERS = b"abcdefghijklmnopqrstuvwxyz      "  # 32: five bits choose one
CLOSERS = frozenset([*b'"]}', 256])  # 256: end of sequence
MAX_CACHE_TOKENS = 2**20  # 8 MB, unless --kv-cache-memory is set
MASK = 2**64 - 1


def next_state(state: int, token_id: int) -> int:
    """Return the state after one more token: a 64-bit hash of all tokens so far."""
    return ((state ^ token_id) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK


def sample(state: int, vocab_size: int) -> int:
    """Return the token that follows a state: a letter or space if tokens are bytes, otherwise any
    token but the last (end of sequence).
    """
    return LETTERS[state >> 59] if vocab_size == BYTE_VOCAB else (state >> 32) % (vocab_size - 1)


def sample_allowed(state: int, mask: bytes, token_id: int) -> int:
    """Return the token that follows a state under a grammar. Texts end soon, because a closing
    token is often chosen.

    `token_id` is the token without a grammar. It is kept if it is allowed and the mask forbids
    hardly any tokens.
    """
    allowed = [
        8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
    ]
    if len(allowed) >= NEARLY_ALL and token_id in allowed:
        return token_id
    closing = [token_id for token_id in allowed if token_id in CLOSERS]
    plain = [token_id for token_id in allowed if token_id < 128]
    candidates = closing if closing and state >> 62 == 0 else plain or allowed
    return candidates[(state >> 32) % len(candidates)]


def first_state(digest: str) -> int:
    """Return the state before the first token, which depends on the adapter's bytes."""
    return int(digest[:16], 16)


def vector(state: int, params: PoolingParams, size: int) -> bytes:
    """Return an embedding that depends on every token. Each number is a hashed byte."""
    hashes = b"".join(next_state(state, i).to_bytes(8, "little") for i in range(-(-size // 8)))
    numbers = [byte - 127.5 for byte in hashes[: params.dimensions or size]]
    norm = math.sqrt(sum(x * x for x in numbers)) if params.normalize is not False else 1.0
    return struct.pack(f"<{len(numbers)}f", *[x / norm for x in numbers])


@dataclass(slots=True)
class FakeRow:
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams | PoolingParams
    # States after the last computed token, and after each draft computed after it.
    states: list[int] = field(default_factory=lambda: [0])
    drafts: list[int] = field(default_factory=list)  # the drafts after `token_ids`
    first_state: int = 0
    answer: list[int] = field(default_factory=list)  # of --fake-script
    breaks_form: bool = False  # the answer has a token that the request's grammar forbids


class AtOnce(Executor):
    """Runs each call at once, like a device for which the host waits."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args, **options))
        return done


class FakeExecutor(executor.Executor):
    """Computes a token by hashing the previous token's entry in the KV cache.

    Therefore, as with a real model, a block that is owned twice, freed too early or wrongly shared
    changes the text. With asynchronous scheduling, steps run in a separate thread, as on a device.
    """

    needs_weights = False

    def __init__(self, config: Config, spec: ModelSpec, progress: executor.Progress) -> None:
        super().__init__(config, spec, progress)
        self.block_size = config.cache.block_size
        self.cache = array("Q")  # one state per token
        self.bytes_per_block = self.spec.kv_bytes_per_token(dtype_bytes=4) * self.block_size
        self.memories: dict[str, mmap] = {}  # by id, for BlockSwaps
        self.times_ns: list[int] = []  # the step computed last, see StepRecord.worker_ns
        self.rows: dict[int, FakeRow] = {}
        self.script = FakeScript(config, spec) if config.parallel.fake_script else None
        self.launched: Future[Any] | None = None  # the forward pass, until its tokens are sampled
        # Each call runs after all earlier ones.
        is_async = config.scheduler.async_scheduling
        self.stream: Executor = ThreadPoolExecutor(1, "device") if is_async else AtOnce()

    def start(self) -> WorkerReady:
        """Create the cache and return its size: room for all requests at full length, up to a
        limit, or `kv_cache_memory`.
        """
        memory = self.config.cache.kv_cache_memory
        if memory is None:
            max_model_len = self.config.model.max_model_len or self.spec.max_position_embeddings
            num_tokens = max_model_len * (self.config.scheduler.max_num_seqs or 1)
            num_tokens = min(num_tokens, max(MAX_CACHE_TOKENS, max_model_len))
            num_blocks = -(-num_tokens // self.block_size)
        else:
            num_blocks = max(1, memory // self.bytes_per_block)
        self.cache = array("Q", bytes(8 * num_blocks * self.block_size))
        self.progress("loading weights", 1.0)
        return WorkerReady(
            device="none",
            dtype="none",
            attention_backend="none",
            num_blocks=num_blocks,
            weights_bytes=0,
            kv_bytes_per_block=self.bytes_per_block,
        )

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        if self.launched is not None:
            raise RuntimeError("execute_model was called twice without sample_tokens")
        self.launched = self.stream.submit(self._forward, scheduled)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> executor.PendingOutput:
        if self.launched is None:
            raise RuntimeError("sample_tokens was called without execute_model")
        launched, self.launched = self.launched, None
        return self.stream.submit(lambda: self._sample(launched.result(), grammar_output))

    def collective_rpc(self, method: RpcMethod, args: Sequence[str | int]) -> list[str | None]:
        return [None]

    def shutdown(self) -> None:
        self.stream.shutdown()

    def _forward(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        begin = now_ns()
        if scheduled.swaps is not None:
            self._swap_blocks(scheduled.swaps)
        for slot in scheduled.freed_slots:
            row = self.rows.pop(slot)
            if self.script and len(row.token_ids) - row.num_prompt_tokens < len(row.answer):
                self.script.interrupt(row.token_ids[: row.num_prompt_tokens], row.answer)
        for request in scheduled.new_requests:
            self.rows[request.slot] = self._row(request)
        for item in scheduled.rows:
            row = self.rows[item.slot]
            row.block_ids += item.new_block_ids
            self._compute(row, item.num_scheduled_tokens - item.num_drafts)
            row.drafts = (item.scheduled_spec_decode_tokens or row.drafts)[: item.num_drafts]
            self._compute_drafts(row)
        self.times_ns = [begin, begin, now_ns()]
        return scheduled

    def _sample(
        self, scheduled: SchedulerOutput, bitmask: GrammarOutput | None
    ) -> ModelRunnerOutput:
        output = ModelRunnerOutput([])
        sampled = []
        masks = _unpack(bitmask) if bitmask else {}
        for i, item in enumerate(scheduled.rows):
            row = self.rows[item.slot]
            if part := self._prompt_logprobs(row, item.num_scheduled_tokens):
                output.prompt_logprobs[i] = part
            if not item.samples:
                sampled.append([])
                continue
            token_ids = self._verify(row, i, masks)
            row.token_ids += token_ids
            row.num_computed_tokens += len(token_ids) - 1
            sampled.append(token_ids)
            if item.max_new_drafts:
                state = next_state(row.states[len(token_ids) - 1], token_ids[-1])
                row.drafts = self._draft(state, item.max_new_drafts)
                output.draft_token_ids[i] = row.drafts
            if isinstance(row.params, PoolingParams):
                output.pooled[i] = self._pooled(row, row.params)
            elif (k := row.params.logprobs) is not None:
                requested_ids = row.params.logprob_token_ids
                output.logprobs[i] = [
                    self._logprobs(token_id, k, requested_ids) for token_id in token_ids
                ]
        num_decodes = len(scheduled.decodes.slots)
        output.decoded = [token_id for [token_id] in sampled[:num_decodes]]
        output.sampled_token_ids = sampled[num_decodes:]
        output.times_ns = (*self.times_ns, now_ns())
        return output

    def _swap_blocks(self, swaps: BlockSwaps) -> None:
        """Copy blocks between the cache and host memory, like the worker of rank 0."""
        if swaps.memory not in self.memories:
            with open(swaps.memory, "r+b") as file:
                self.memories[swaps.memory] = mmap(file.fileno(), 0)
        memory = self.memories[swaps.memory]
        cache = memoryview(self.cache).cast("B")
        size = 8 * self.block_size
        stride = self.bytes_per_block * self.config.parallel.tensor_parallel_size
        for block, slot in swaps.blocks_to_swap_out:
            memory[slot * stride : slot * stride + size] = cache[block * size : (block + 1) * size]
        for slot, block in swaps.blocks_to_swap_in:
            cache[block * size : (block + 1) * size] = memory[slot * stride : slot * stride + size]

    def _row(self, request: NewRequest) -> FakeRow:
        params = request.params
        answers = isinstance(params, SamplingParams) and params.max_tokens != 0
        return FakeRow(
            request.token_ids.copy(),
            request.num_computed_tokens,
            request.block_ids.copy(),
            request.num_prompt_tokens,
            request.params,
            first_state=first_state(request.adapter.digest) if request.adapter else 0,
            answer=self.script.begin(request) if self.script and answers else [],
        )

    def _compute(self, row: FakeRow, num_tokens: int) -> None:
        first = row.num_computed_tokens
        # Read what is before from the cache, not from the row: the cache is what the scheduler can
        # get wrong.
        state = self.cache[self._position(row, first - 1)] if first else row.first_state
        for i in range(first, first + num_tokens):
            state = next_state(state, row.token_ids[i])
            self.cache[self._position(row, i)] = state
        row.states = [state]
        row.num_computed_tokens = first + num_tokens

    def _compute_drafts(self, row: FakeRow) -> None:
        for at, token_id in enumerate(row.drafts, row.num_computed_tokens):
            row.states.append(next_state(row.states[-1], token_id))
            self.cache[self._position(row, at)] = row.states[-1]

    def _verify(self, row: FakeRow, index: int, masks: dict[tuple[int, int], bytes]) -> list[int]:
        """Return the drafts that equal the sampled tokens, and one more token."""
        token_ids: list[int] = []
        num_known = len(row.token_ids) - row.num_prompt_tokens
        for offset, state in enumerate(row.states):
            token_id = sample(state, self.spec.vocab_size)
            position = num_known + offset
            if row.answer and row.answer[-1] not in self.spec.eos_token_ids:  # it is cut
                position = min(position, len(row.answer) - 1)
            is_scripted = position < len(row.answer)
            if is_scripted:
                token_id = row.answer[position]
            mask = masks.get((index, offset))
            if mask and not (is_scripted and mask[token_id // 8] >> token_id % 8 & 1):
                if is_scripted and not row.breaks_form:
                    row.breaks_form = True
                    logger.warning(
                        "--fake-script: token %d of an answer breaks the form that the request "
                        "demands, so random text follows",
                        position + 1,
                    )
                token_id = sample_allowed(state, mask, token_id)
            token_ids.append(token_id)
            if offset == len(row.drafts) or row.drafts[offset] != token_id:
                break
        return token_ids

    def _draft(self, state: int, max_drafts: int) -> list[int]:
        """Return the tokens that follow without a grammar; sometimes a wrong token or no tokens."""
        drafts: list[int] = []
        while len(drafts) < max_drafts and state % 11:
            token_id = sample(state, self.spec.vocab_size)
            drafts.append(token_id if state % 7 else token_id ^ 1)
            state = next_state(state, token_id)
        return drafts

    def _position(self, row: FakeRow, token: int) -> int:
        return row.block_ids[token // self.block_size] * self.block_size + token % self.block_size

    def _pooled(self, row: FakeRow, params: PoolingParams) -> bytes:
        first = 0 if params.pooling == "all" else row.num_prompt_tokens - 1
        states = [self.cache[self._position(row, at)] for at in range(first, row.num_prompt_tokens)]
        return b"".join([vector(state, params, self.spec.hidden_size) for state in states])

    def _prompt_logprobs(self, row: FakeRow, num_tokens: int) -> PromptLogprobs | None:
        k = row.params.prompt_logprobs if isinstance(row.params, SamplingParams) else None
        start = row.num_computed_tokens - num_tokens + 1
        token_ids = row.token_ids[start : min(row.num_computed_tokens + 1, row.num_prompt_tokens)]
        if k is None or not token_ids:
            return None
        return PromptLogprobs(start, [self._logprobs(token_id, k) for token_id in token_ids])

    def _logprobs(
        self, token_id: int, num_logprobs: int, requested_ids: Sequence[int] = ()
    ) -> TokenLogprobs:
        """Return logprobs: probability 1/2 for the sampled token, 1/4 for its neighbour, etc."""
        likely = [(token_id + i) % self.spec.vocab_size for i in range(num_logprobs)]
        token_ids = [token_id, *likely, *requested_ids]
        distances = [(other - token_id) % self.spec.vocab_size for other in token_ids]
        return TokenLogprobs(
            token_ids, [-(distance + 1) * math.log(2) for distance in distances], rank=1
        )


def _unpack(bitmask: GrammarOutput) -> dict[tuple[int, int], bytes]:
    """Return the masks by (index in the step, number of drafts before the token)."""
    size = len(bitmask.bitmask) // len(bitmask.indices)
    rows = [bitmask.bitmask[at : at + size] for at in range(0, len(bitmask.bitmask), size)]
    return dict(zip(zip(bitmask.indices, bitmask.offsets, strict=True), rows, strict=True))
