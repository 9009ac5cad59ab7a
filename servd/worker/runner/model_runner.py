"""ModelRunner: runs steps of the model, on the rows of requests that it keeps."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from servd.base.errors import InvalidRequest
from servd.base.sizes import format_bytes
from servd.base.tracing import now_ns
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.quantization_config import quantization_of
from servd.config import Config
from servd.config.kv_layout import KVLayout
from servd.config.speculative import max_num_samples
from servd.messages.engine import (
    BlockSwaps,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)
from servd.messages.params import SamplingParams
from servd.worker import output_heads, spec_decode
from servd.worker.attention import AttentionBackend, AttentionBatch, make_backend
from servd.worker.batch.decode_inputs import DecodeBuffers
from servd.worker.batch.draft_chain import Chain, Drafter
from servd.worker.batch.input_batch import InputBatch, gather_rows
from servd.worker.batch.request_states import RequestStates
from servd.worker.device.device import upload
from servd.worker.device.parallel import Parallel
from servd.worker.kv import kv_cache, kv_groups
from servd.worker.kv.block_store import BlockStore
from servd.worker.layers import state
from servd.worker.layers.attention import ForwardContext, spec_of
from servd.worker.layers.image_embeddings import ImageEmbeddings
from servd.worker.loading import model_loader
from servd.worker.lora.adapters import AdapterSlots, check_modules
from servd.worker.ops import target
from servd.worker.output_heads import StepPart
from servd.worker.runner import encoder_runner
from servd.worker.runner.isolation import Failures, forward_apart
from servd.worker.sample.logit_edits import Bitmasks
from servd.worker.sample.sampled_tokens import SampledTokens
from servd.worker.sample.sampler import Sampler, SamplerOutput
from servd.worker.sample.verification import SpecDecodeMetadata
from servd.worker.spec_decode import Target

log = logging.getLogger("servd.worker")

MOST_WIDENED = 0.7  # of the device's memory, for weights that are dequantized without being asked


@dataclass(frozen=True)
class ExecuteModelState:
    """A step between `execute_model` and `sample_tokens`."""

    num_rows: tuple[int, int]  # in `SchedulerOutput.decodes`, and in `SchedulerOutput.scheduled`
    computed: tuple[InputBatch, Tensor] | None = None  # with hidden states [tokens, hidden]
    parts: Sequence[StepPart] = ()  # parts of the output that are computed already
    times_ns: Sequence[int] = ()  # see StepRecord.worker_ns


@dataclass(frozen=True)
class AsyncOutput:
    num_rows: tuple[int, int]  # see ExecuteModelState
    parts: Sequence[StepPart] = ()  # on the host after `wait`
    wait: Callable[[], None] = lambda: None
    times_ns: Sequence[int] = ()  # times until the launch

    def result(self) -> ModelRunnerOutput:
        self.wait()
        num_decodes, num_others = self.num_rows
        output = ModelRunnerOutput([[] for _ in range(num_others)], decoded=[-1] * num_decodes)
        for part in self.parts:
            part.write(output)
        output.times_ns = (*self.times_ns, now_ns()) if self.times_ns else ()
        return output


class ModelRunner(ABC):
    """Runs one model on `device`. `parallel`: the ranks that share the model."""

    def __init__(
        self, config: Config, spec: ModelSpec, device: torch.device, parallel: Parallel
    ) -> None:
        assert config.model.max_model_len is not None and config.scheduler.max_num_seqs is not None
        assert config.scheduler.max_num_batched_tokens is not None
        self.config = config
        self.spec = spec
        self.device = device
        self.parallel = parallel
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.max_model_len = config.model.max_model_len
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.max_num_tokens = config.scheduler.max_num_batched_tokens
        speculative = config.model.speculative_config
        self.max_drafts = speculative.num_speculative_tokens if speculative else 0
        chances = speculative.acceptance_chances if speculative else None
        self.acceptance_chances = None if chances is None else torch.tensor(chances, device=device)
        self.max_num_samples = max_num_samples(
            self.max_num_seqs, self.max_num_tokens, self.max_drafts
        )
        self.kv_caches: list[Tensor] = []
        self.block_store: BlockStore | None = None
        self.execute_model_state: ExecuteModelState | None = None
        self.failed: dict[int, str] = {}  # slot -> error of its request
        self.encoder: encoder_runner.EncoderRunner | None = None  # of a model that sees

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.dtype

    # ---- start-up ----

    def load_model(self, progress: Callable[[float], None]) -> None:
        """Build the model, load its weights, choose the attention backend, create the request
        states. Raises ConfigError if the model or the backend cannot run here.
        """
        options = self.config.model.model_impl, self.max_model_len, self.config.model.load_format
        self.model = model_loader.build_model(
            self.spec, self.compute_dtype, self.device, self.parallel, *options
        )
        reads_images = encoder_runner.reads_images(self.config, self.spec)
        if reads_images:
            encoder_runner.check_model(self.spec, self.model, self.parallel)
        self._load_weights(progress, reads_images)
        self.adapters = self._make_adapters()
        self.weights_bytes = model_loader.count_bytes(self.model)
        is_async = self.device.type == "cuda" and self.config.scheduler.async_scheduling
        attention = spec_of(
            self.model,
            block_size=self.config.cache.block_size,
            dtype=self.compute_dtype,
            kv_dtype=kv_cache.dtype_of(self.config),
            device=self.device,
            exact_seq_lens=not (self.max_drafts and is_async),
        )
        name = self.config.parallel.attention_backend
        self.backend: AttentionBackend[Any]
        self.backend_name, self.backend = make_backend(name, attention)
        limits = self.max_num_seqs, self.max_model_len, attention.block_size
        self.states = RequestStates(*limits, self.device, self.spec.vocab_size)
        self.states.make_room(state.arrange(self.model))
        if reads_images:
            parts = self.model, self.states, self.backend, self.parallel, self.failed
            options = self.config.multimodal.mm_processor_kwargs
            self.encoder = encoder_runner.EncoderRunner(self.spec, self.dtype, options, *parts)
            self.weights_bytes += self.encoder.nbytes
        mode = self.config.model.logprobs_mode
        self.sampler = Sampler(self.spec.vocab_size, self.max_num_seqs, self.device, mode)
        self.output_heads = output_heads.load(self.states, self.model.compute_logits, self.spec)
        parts = self.model, self.states, self.parallel, self.backend
        self.proposer = spec_decode.load(Target(self.config, self.spec, *parts, self.make_chain))
        has_draft = self.proposer is not None and self.proposer.bytes_per_block > 0
        self.kv_windows = kv_groups.arrange(self.model, self.config, self.backend, has_draft)
        self.states.block_tables.arrange(len(self.kv_windows))
        self.request_listeners = [
            part
            for part in (*self.output_heads, self.adapters, self.proposer, self.encoder)
            if part is not None
        ]

    def _load_weights(self, progress: Callable[[float], None], reads_images: bool) -> None:
        check_modules(self.config.lora, self.model)  # first, as loading takes long
        config = self.config.model
        options = config.cpu_activation_dtype, config.quantization_imatrix, self._widening()
        make = model_loader.quant_method_maker(
            self.dtype, config.quantization, self.spec.folder, *options
        )
        if config.load_format == "dummy":
            model_loader.init_dummy_weights(self.model, config.seed, make)
        else:
            folder = self.spec.folder
            form = config.load_format
            model_loader.load_weights(
                self.model, folder, progress, make, load_format=form, reads_images=reads_images
            )

    def _widening(self) -> str:
        """Return --widen-weights; "never" for auto if the model in 16 bits does not fit."""
        option = self.config.model.widen_weights
        if option != "auto" or quantization_of(self.spec.folder) is None:
            return option
        num_bytes = sum(weight.nbytes for _, weight in self.model.named_parameters())
        memory = target.card_of(self.device).memory or math.inf  # 0: unknown
        fits = num_bytes <= MOST_WIDENED * memory
        return "auto" if fits else "never"

    def _make_adapters(self) -> AdapterSlots | None:
        if not self.config.lora.enable_lora:
            return None
        limits = self.max_num_seqs, max(self.max_num_tokens, self.max_num_samples)
        name = self.config.lora.lora_dtype
        dtype = self.compute_dtype if name == "auto" else getattr(torch, name)
        return AdapterSlots(
            self.config.lora, self.model, dtype, self.device, *limits, self.parallel
        )

    def count_blocks(self, room: int | None = None) -> tuple[int, int]:
        """Return the KV-cache blocks that fit in --kv-cache-memory, else in `room`, else in free
        memory; and the checkpoints of states. Raises NotEnoughMemory if the blocks are too few for
        one request.
        """
        cache = self.config.cache
        memory = cache.kv_cache_memory
        states_memory = cache.max_state_memory
        if not (self.state_bytes and cache.enable_prefix_caching):
            states_memory = 0
        if memory is None:
            memory = self.kv_cache_memory() if room is None else room
            if states_memory is None:
                states_memory = memory // 2 if self.bytes_per_block else memory
            memory -= states_memory
        elif states_memory is None:
            states_memory = memory
        layout = KVLayout.from_config(self.config, self.kv_windows)
        sizes = self.bytes_per_block, memory, self.weights_bytes
        num_blocks = kv_cache.count_blocks(self.config, layout, *sizes, self.more_memory)
        if not states_memory:
            return num_blocks, 0
        num_checkpoints = min(states_memory // self.state_bytes, num_blocks)
        size = format_bytes(self.state_bytes)
        log.info("checkpoints of states: %d (%s each)", num_checkpoints, size)
        if not num_checkpoints:
            log.warning("no prompt is cached: --max-state-memory is below a checkpoint, %s", size)
        return num_blocks, num_checkpoints

    @property
    def encoder_cache_bytes(self) -> int:
        """The most bytes of encoded pictures."""
        return 0 if self.encoder is None else self.encoder.max_cache_bytes(self.config)

    @property
    def state_bytes(self) -> int:
        """The bytes of a request's states in all layers, on this rank."""
        return self.states.state_bytes

    @property
    def variant(self) -> bool:
        """Whether the next forward pass computes adapters. Each variant has its own graphs."""
        return self.adapters is not None and self.adapters.rows.is_active

    @property
    def bytes_per_block(self) -> int:
        num_bytes = kv_cache.bytes_per_block(self.backend, self.model)
        return num_bytes + (self.proposer.bytes_per_block if self.proposer else 0)

    def allocate_kv_cache(self, num_blocks: int, num_checkpoints: int = 0) -> None:
        self.states.allocate_checkpoints(num_checkpoints)
        self.kv_caches = kv_cache.allocate(self.backend, self.model, num_blocks)
        if self.proposer is not None:
            self.proposer.allocate_kv_cache(num_blocks)

    def warm_up(self, progress: Callable[[float], None]) -> None:  # noqa: B027
        """Capture and compile, so that first requests need not wait. `progress`: gets 0 to 1."""

    def release(self) -> None:
        """Free weights, caches and graphs. Steps cannot run any more. Else they would stay until a
        garbage collection, as they are in reference cycles with the runner, which takes 0.1 s.
        """
        self.drop_graphs()
        self.kv_caches = []
        self.block_store = None
        self.proposer = None
        self.adapters = None
        self.encoder = None
        self.output_heads = []
        self.request_listeners = []
        if hasattr(self, "model"):  # not if loading failed
            del self.model

    # ---- steps ----

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Update the request states and launch the forward pass."""
        if self.execute_model_state is not None:
            raise RuntimeError("execute_model was called twice without sample_tokens")
        begin = now_ns()
        if scheduled.swaps is not None and scheduled.swaps.memory:
            self._swap_blocks(scheduled.swaps)
        self._update_states(scheduled)
        num_rows = len(scheduled.decodes.slots), len(scheduled.scheduled)
        self.execute_model_state = ExecuteModelState(num_rows)
        if not any(num_rows):
            self._finish_swaps()
            return
        batch = self._prepare_inputs(scheduled)
        self.states.begin_states(scheduled.swaps, batch.rows)
        prepared = now_ns()
        try:
            hidden = self.forward(batch)
        except Exception as error:
            hidden = self._forward_apart(batch, error)
        self._finish_swaps()
        read = (head.read(hidden, batch) for head in self.output_heads)
        parts: list[StepPart] = [part for part in read if part is not None]
        if self.failed:
            parts.append(Failures.from_batch(batch, self.failed))
        if self.encoder is not None:
            parts += self.encoder.take_times()
        times_ns = (begin, prepared, now_ns())
        self.execute_model_state = ExecuteModelState(num_rows, (batch, hidden), parts, times_ns)

    def _prepare_inputs(self, scheduled: SchedulerOutput) -> InputBatch:
        """Return the inputs of a step, and update the block tables. The step's tokens, except
        drafts, count as computed from now on.
        """
        is_plain = not scheduled.scheduled and self.states.tree is None
        return InputBatch.from_rows(gather_rows(scheduled), self.states, is_plain)

    def forward(self, batch: InputBatch) -> Tensor:
        """Return hidden states [num_tokens, hidden] of a step."""
        if self.adapters is not None:
            self.adapters.begin_step(batch)
        if self.proposer is not None:
            self.proposer.begin_step(batch)
        if self.encoder is not None and self.encoder.requests:
            batch = self.encoder.add_images(batch)
        hidden = self.run_graph(batch)
        if hidden is None:
            inputs = batch.input_ids, batch.rotary_positions
            hidden = self.run_model(*inputs, batch.attention, batch.images)
        return hidden

    def _forward_apart(self, batch: InputBatch, error: Exception) -> Tensor:
        """Return hidden states after `error`; requests that fail alone are added to `failed`."""
        # Other ranks would wait; and layers before the error have updated their states.
        is_alone = self.parallel.size * self.parallel.num_stages == 1
        if not is_alone or self.states.state_memory is not None:
            raise error
        hidden, errors = forward_apart(batch, self.forward, error)
        if self.adapters is not None:
            self.adapters.begin_step(batch)
        self.failed |= {int(batch.host_slots[row]): text for row, text in errors.items()}
        return hidden

    def _swap_blocks(self, swaps: BlockSwaps) -> None:
        """Copy blocks between the cache and the engine's host memory, mapped by the first copy."""
        if self.block_store is None:
            caches = [*self.kv_caches, *(self.proposer.kv_caches if self.proposer else ())]
            memory = self.states.state_memory
            checkpoints = None if memory is None else memory.checkpoints
            self.block_store = BlockStore(swaps.memory, caches, self.parallel, checkpoints)
        self.block_store.swap_blocks(swaps)

    def _finish_swaps(self) -> None:
        if self.block_store is not None:
            self.block_store.finish()

    def make_chain(self, drafter: Drafter, max_num_rows: int, max_num_tokens: int) -> Chain:
        """Return a chain that drafts with another model, for the requests of this model."""
        return Chain(drafter, self.states)

    def run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBatch,
        images: ImageEmbeddings | None = None,
    ) -> Tensor:
        """Return hidden states [num_tokens, hidden] from int64 [num_tokens] ids and positions."""
        backend = self.backend
        if attention.bidirectional is not None and self.encoder is not None:
            backend = self.encoder.backend or backend
        memory = self.states.state_memory
        ctx = ForwardContext(backend, attention, self.kv_caches, memory, images)
        return self.model(input_ids, positions, ctx)

    @torch.inference_mode()
    def sample_tokens(self, bitmask: GrammarOutput | None = None) -> AsyncOutput:
        """Sample for the step launched last, store the tokens, and draft for the next step."""
        if self.execute_model_state is None:
            raise RuntimeError("sample_tokens was called before execute_model")
        state, self.execute_model_state = self.execute_model_state, None
        parts = [*state.parts]
        if state.computed is not None:
            batch, hidden = state.computed
            num_kept = None
            if len(batch.sample_rows):
                part = self._sample(batch, hidden, bitmask)
                parts.append(part)
                num_kept = part.sampled.num_kept
                if part.sampled.order is not None:
                    hidden = self._line_up(batch, hidden, part.sampled.order)
            if self.proposer and (drafts := self.proposer.draft(batch, hidden, num_kept)):
                parts.append(drafts)
        return AsyncOutput(state.num_rows, *self.to_host(parts), state.times_ns)

    def _sample(
        self, batch: InputBatch, hidden: Tensor, bitmask: GrammarOutput | None
    ) -> SampledTokens:
        drafts = SpecDecodeMetadata.from_batch(batch, self.acceptance_chances)
        buffers = batch.buffers
        is_synthetic = drafts is not None and drafts.is_synthetic
        if buffers is not None and bitmask is None and not is_synthetic:
            if self.sampler.is_plain(batch.host_slots):
                return self._sample_plain(batch, self.sample_greedy(hidden, buffers), drafts)
        sample_hidden = hidden if batch.samples_all else hidden[batch.sample_tokens]
        logits = self.model.compute_logits(sample_hidden)  # [m, vocab]
        metadata = self.sampler.make_metadata(
            batch.sample_slots, batch.sample_host_slots, batch.sample_positions
        )
        masks = self._unpack(bitmask, batch) if bitmask else None
        sampled = self.sampler(logits, metadata, masks, drafts)
        self.states.write(batch.sample_slots, batch.sample_columns, sampled.token_ids)
        if sampled.num_kept is not None:
            self.states.keep(batch.host_slots[batch.sample_rows], sampled.num_kept)
        return SampledTokens(batch.sample_rows, batch.num_drafts[batch.sample_rows], sampled)

    def _sample_plain(
        self, batch: InputBatch, token_ids: Tensor, drafts: SpecDecodeMetadata | None
    ) -> SampledTokens:
        num_kept = None if drafts is None else drafts.verify(token_ids)[0]
        if num_kept is not None:
            self.states.keep(batch.host_slots, num_kept)
        output = SamplerOutput(token_ids, None, num_kept)
        return SampledTokens(batch.sample_rows, batch.num_drafts, output)

    def sample_greedy(self, hidden: Tensor, buffers: DecodeBuffers) -> Tensor:
        logits = self.model.compute_logits(hidden)
        token_ids = self.states.token_ids
        return self.sampler.ops.choose(logits, buffers.slots, buffers.next_columns, token_ids)

    def _line_up(self, batch: InputBatch, hidden: Tensor, order: Tensor) -> Tensor:
        """Move keys, values and hidden states of a tree's accepted drafts into a chain."""
        tokens = batch.sample_tokens
        moved = batch.sample_tokens[order]
        if self.device.type == "cpu":  # comparing is free there, and most drafts need not move
            changed = tokens != moved
            tokens = tokens[changed]
            moved = moved[changed]
        for group in (batch.attention, *batch.attention.other_groups):
            sources = group.slot_mapping[moved]
            targets = group.slot_mapping[tokens]
            for cache in self.kv_caches:
                self.backend.move(cache, sources, targets)
        return hidden.index_copy(0, tokens, hidden[moved])

    def _update_states(self, scheduled: SchedulerOutput) -> None:
        for slot in scheduled.freed_slots:
            self._remove(slot)
            self.failed.pop(slot, None)
        for request in scheduled.new_requests:
            try:
                self._add(request)
            except Exception as error:
                self._fail(request, error)
        if self.encoder is not None:
            self.encoder.encode(scheduled)
        for slot, block in scheduled.decodes.new_blocks.items():
            self.states.block_tables.append(slot, [block])
        for row in scheduled.scheduled:
            if row.new_block_ids:
                self.states.block_tables.append(row.slot, row.new_block_ids)
        self.states.write_drafts(scheduled.scheduled)

    def _add(self, request: NewRequest) -> None:
        """Put a request in its slot. Raises InvalidRequest if a parameter or token id is out of
        bounds, although the API checks them.
        """
        params = request.params
        if isinstance(params, SamplingParams):
            params.validate(self.spec.vocab_size)
        self.states.add(request)
        for listener in self.request_listeners:
            listener.add(request)
        if isinstance(params, SamplingParams):
            prompt_len = request.num_prompt_tokens
            outputs = request.token_ids[prompt_len:]
            self.states.is_tree[request.slot] = self.sampler.add(
                request.slot, params, request.token_ids[:prompt_len], outputs, request.eos_token_ids
            )

    def _remove(self, slot: int) -> None:
        self.sampler.remove(slot)
        for listener in self.request_listeners:
            listener.remove(slot)

    def _fail(self, request: NewRequest, error: Exception) -> None:
        """Record the error of a request that cannot be added. Its tokens are computed anyway,
        because other requests may share its blocks by the prefix cache.
        """
        slot = request.slot
        vocab_size = self.spec.vocab_size
        if isinstance(error, InvalidRequest):
            self.failed[slot] = str(error)
        else:
            log.error("cannot add a request to slot %d", slot, exc_info=error)
            self.failed[slot] = f"the worker failed on this request ({type(error).__name__})"
        self._remove(slot)
        token_ids = [i if 0 <= i < vocab_size else 0 for i in request.token_ids]
        self.states.add(msgspec.structs.replace(request, token_ids=token_ids))

    def _unpack(self, bitmask: GrammarOutput, batch: InputBatch) -> Bitmasks:
        words = np.frombuffer(bitmask.bitmask, dtype=np.int32).reshape(len(bitmask.indices), -1)
        counts = batch.num_drafts[batch.sample_rows] + 1
        rows = np.full(counts.sum(), -1, dtype=np.int32)
        starts = (counts.cumsum() - counts).tolist()
        firsts = dict(zip(batch.sample_rows.tolist(), starts, strict=True))
        places = zip(bitmask.indices, bitmask.offsets, strict=True)
        for number, (index, offset) in enumerate(places):
            if index in firsts:  # rows that do not end their prompt sample no token
                rows[firsts[index] + offset] = number
        return Bitmasks(upload(words.copy(), self.device), upload(rows, self.device))

    # ---- what the device decides ----

    def run_graph(self, batch: InputBatch) -> Tensor | None:
        """Return the hidden states of a step that runs as a graph; None: run it without."""
        return None

    @abstractmethod
    def kv_cache_memory(self) -> int:
        """Return the bytes that the KV cache may take. Called after load_model."""

    def more_memory(self, missing: int) -> list[str]:
        """Return options that would free `missing` bytes, e.g. "lower --max-num-seqs to 4"."""
        return []

    def drop_graphs(self) -> None:  # noqa: B027
        """Free captured or recorded steps. No such step may run afterwards."""

    @abstractmethod
    def to_host(self, parts: Sequence[StepPart]) -> tuple[Sequence[StepPart], Callable[[], None]]:
        """Start copying outputs to the host. Return the copies, and a call that waits for them."""
