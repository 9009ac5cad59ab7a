"""GPUModelRunner: a model on a CUDA device, with CUDA graphs and asynchronous copies."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch

from servd.base.errors import ConfigError
from servd.messages.engine import GrammarOutput, NewRequest, ScheduledRequest, SchedulerOutput
from servd.messages.params import SamplingParams
from servd.worker.batch.decode_inputs import PLACE, DecodeBuffers
from servd.worker.batch.input_batch import InputBatch, captured_attention, mixed_attention
from servd.worker.device.memory import CudaMeter, MemoryUse
from servd.worker.kv.block_store import STAGED_BYTES
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.weight import Loadable
from servd.worker.output_heads import StepPart
from servd.worker.runner.graph_runner import CudaRecorder, GraphRunner, GraphSize, Record
from servd.worker.runner.model_runner import ModelRunner

log = logging.getLogger("servd.worker")

# Weights times tokens of a step that takes a large device about 10 ms, longer than the host needs
# to launch its kernels one by one: beyond that, padding costs more than a graph saves.
MOST_PRODUCTS = 4 * 10**12


def count_active_weights(model: Loadable) -> int:
    """Return the number of this rank's matrix elements by which a token is multiplied."""
    matrices = [weight for _, weight in model.named_parameters() if isinstance(weight, Matrix)]
    return int(sum(x.num_weights * x.use / x.parallel.size for x in matrices))


class GPUModelRunner(ModelRunner):
    """Runs steps on a CUDA device. Only `AsyncOutput.result` waits for the device."""

    graphs: GraphRunner | None = None  # set by allocate_kv_cache, where they can be used
    memory_use: MemoryUse | None = None  # set by kv_cache_memory

    # ---- steps as graphs ----

    def allocate_kv_cache(self, num_blocks: int, num_checkpoints: int = 0) -> None:
        """Allocate the cache with one more block, to which padding is written."""
        super().allocate_kv_cache(num_blocks + 1, num_checkpoints)
        self.states.pad(num_blocks)
        self.graphs = self.make_graphs()
        if self.graphs is not None:
            self.states.inputs.sizes = self.graphs.decode_sizes

    def warm_up(self, progress: Callable[[float], None]) -> None:
        """Capture all graphs and run each sampling variant, so that no request waits for that."""
        started = time.monotonic()
        ways = self.sampler.examples
        num_graphs = 0 if self.graphs is None else len(self.graphs.sizes) * len(self.variants)
        steps = num_graphs + len(ways)
        for done, _ in enumerate(self._capture_all(), 1):
            progress(done / steps)
        if num_graphs:
            log.info("%d CUDA graphs in %.1f s", num_graphs, time.monotonic() - started)
        else:
            self._warm_up_columns()
        self._warm_up_eager()
        for done, params in enumerate(ways, num_graphs + 1):
            for has_grammar in (False, True):
                self._launch(1, 1, 0, params)
                self._sample_all(1, has_grammar)
            progress(done / steps)

    @torch.inference_mode()
    def _warm_up_columns(self) -> None:
        """Compile the first and last kernels of plain decode steps, on a row of padding."""
        inputs = self.states.inputs
        inputs.clear(1)
        step = inputs.buffers_of(1)
        self.states.begin_decode(step)
        hidden = torch.zeros(1, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        self.sample_greedy(hidden, step)

    def _warm_up_eager(self) -> None:
        """Compile the kernels of steps that are no graphs, over the longest context. Tiles depend
        on the number of tokens.
        """
        block_size = self.config.cache.block_size
        longest = min(self.max_model_len, (self.kv_caches[0].shape[1] - 1) * block_size)
        captured = 0 if self.graphs is None else max(self.graphs.mixed_sizes, default=0)
        num_tokens = min(self.max_num_tokens, longest)
        while num_tokens > captured:
            num_computed = (longest - num_tokens) // block_size * block_size
            for has_adapter in self.variants:
                if has_adapter and self.adapters is not None:
                    self.adapters.occupy(0)
                self._launch(1, num_tokens, 0, self.sampler.costliest, num_computed)
                self._sample_all(1)
            num_tokens //= 2

    @property
    def variants(self) -> list[bool]:
        return [False] if self.adapters is None else [False, True]

    def _capture_all(self) -> Iterator[GraphSize]:
        if self.graphs is None:
            return
        for variant in self.variants:
            if self.adapters is not None:
                self.adapters.rows.is_active = variant  # until the next step sets it
            for size in self.graphs.sizes:
                self._capture(self.graphs, size)
                yield size

    @cached_property
    def can_capture(self) -> bool:
        """Whether steps can be graphs. If not, a warning, logged once, explains why."""
        if self.config.model.enforce_eager:
            return False
        if not self.backend.supports_graphs:
            log.warning("no CUDA graphs: %s attention cannot be captured", self.backend_name)
        return self.backend.supports_graphs

    def make_graphs(self) -> GraphRunner | None:
        """Return a runner of CUDA graphs; None if graphs are off or unsupported by the backend."""
        if not self.can_capture:
            return None
        num_weights = count_active_weights(self.model)
        self.states.inputs.reserve(self.max_num_samples)
        graphs = GraphRunner(
            self._captured,
            self.max_num_samples,
            min(self.max_num_tokens, MOST_PRODUCTS // max(num_weights, 1)),
            self.states.inputs,
            torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=self.device),
            self.recorder(),
            2 if self.states.tree is None else 3,
            super().sample_greedy if self.parallel.is_last_stage else None,
        )
        graphs.variant = lambda: self.variant
        return graphs

    def run_graph(self, batch: InputBatch) -> torch.Tensor | None:
        """Return hidden states by a graph; None if the step is too large or must not be one."""
        if self.graphs is None or batch.is_eager:
            return None
        return self.graphs(batch.tokens, batch.attention_rows.ends, batch.buffers)

    def _captured(self, tokens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        states = self.states
        if ends is None:
            step = states.inputs.buffers_of(tokens.shape[1])
            states.begin_decode(step)
            attention = captured_attention(states, step)
            places = None if states.tree is None else step.step[PLACE]
            positions = states.positions(step.columns, places)
            positions = states.rotary_positions(step.slots, positions)
            return self.run_model(step.token_ids, positions, attention)
        slots, columns, *places = tokens
        input_ids = states.token_ids[slots, columns].long().clamp_(min=0)  # see InputBatch
        positions = states.positions(columns, *(places or [None]))
        positions = states.rotary_positions(slots, positions)
        return self.run_model(input_ids, positions, mixed_attention(states, tokens, ends))

    def sample_greedy(self, hidden: torch.Tensor, buffers: DecodeBuffers) -> torch.Tensor:
        graphs = self.graphs
        token_ids = None
        if graphs is not None and hidden.data_ptr() == graphs.hidden.data_ptr():
            token_ids = graphs.chosen_of(buffers)
        return super().sample_greedy(hidden, buffers) if token_ids is None else token_ids

    @torch.inference_mode()
    def _capture(self, graphs: GraphRunner, size: GraphSize) -> None:
        try:
            graphs.capture(size)
        except RuntimeError as error:
            raise ConfigError(
                f"the CUDA graph of a step ({size}) cannot be captured: {error}; "
                "--enforce-eager serves without graphs"
            ) from error

    def recorder(self) -> Record:
        """Return a recorder of CUDA graphs. Tests replace this method."""
        return CudaRecorder()

    # ---- memory ----

    def meter(self) -> CudaMeter:
        """Return a reader of the device's memory. Tests replace this method."""
        return CudaMeter(self.device)

    def kv_cache_memory(self) -> int:
        """Return the bytes for the KV cache: --gpu-memory-utilization, less weights, activations of
        the largest step, graphs and other processes. A profile run measures them.
        """
        self.memory_use = self._profile(self.meter())
        log.info("%s", self.memory_use)
        return self.memory_use.available - self.bytes_per_block  # the block of padding

    def more_memory(self, missing: int) -> list[str]:
        return self.memory_use.hints(missing) if self.memory_use else []

    def _profile(self, meter: CudaMeter) -> MemoryUse:
        """Run the largest steps and capture graphs, with the fewest KV-cache blocks needed."""
        longest = min(self.max_num_tokens, self.max_model_len)
        row_len = min(self.max_num_tokens // self.max_num_seqs, self.max_model_len)
        before = meter.allocated()
        super().allocate_kv_cache(-(-longest // self.config.cache.block_size))
        cache_bytes = meter.allocated() - before
        forward = 0
        sampling = 0
        steps = [(1, longest, 0), (self.max_num_seqs, row_len, 0)]
        if num_drafts := self.max_drafts:
            num_rows = min(self.max_num_seqs, self.max_num_samples // (1 + num_drafts))
            steps.append((num_rows, 1 + num_drafts, num_drafts))
        for num_rows, num_tokens, num_drafts in steps:
            meter.peak()
            self._launch(num_rows, num_tokens, num_drafts, self.sampler.costliest)
            forward = max(forward, meter.peak())
            self._sample_all(num_rows)
            sampling = max(sampling, meter.peak())
        kept = meter.allocated()
        if self.encoder is not None:  # in its stream, beside the forward pass of the step before
            self.encoder.encode_largest(self.config)
            forward += meter.peak() - kept
        graphs = self._graph_bytes(meter)
        self.kv_caches = []
        outside = meter.used() - meter.held()
        # What the allocator holds between tensors: its segments have up to 20 MB.
        fragments = meter.held() - meter.allocated()
        reserved = STAGED_BYTES if self.config.cache.has_connector else 0
        reserved += self.encoder_cache_bytes
        return MemoryUse(
            total=meter.total,
            outside=outside,
            persistent=kept - cache_bytes + fragments + reserved,
            per_request=(kept - cache_bytes - before + self.states.nbytes) // self.max_num_seqs,
            forward=forward - kept,
            sampling=sampling - kept,
            graphs=graphs,
            utilization=self.config.cache.gpu_memory_utilization,
            max_num_seqs=self.max_num_seqs,
        )

    def _launch(
        self,
        num_rows: int,
        num_tokens: int,
        num_drafts: int,
        params: SamplingParams,
        num_computed: int = 0,
    ) -> None:
        """Launch a step of prompts that are in the last block, because only sizes matter. The
        prefix cache has `num_computed` tokens more.
        """
        num_prompt_tokens = num_computed + num_tokens
        num_blocks = -(-num_prompt_tokens // self.config.cache.block_size)
        last_block = self.kv_caches[0].shape[1] - 1
        new_requests = [
            NewRequest(
                slot=slot,
                token_ids=[0] * num_prompt_tokens,
                num_prompt_tokens=num_prompt_tokens,
                num_computed_tokens=num_computed,
                block_ids=[last_block] * num_blocks * len(self.kv_windows),
                params=params,
            )
            for slot in range(num_rows)
        ]
        scheduled = [
            ScheduledRequest(
                slot=slot,
                num_scheduled_tokens=num_tokens,
                num_computed_tokens=num_computed,
                num_drafts=num_drafts,
                max_new_drafts=num_drafts,
            )
            for slot in range(num_rows)
        ]
        self.execute_model(SchedulerOutput(step=0, new_requests=new_requests, scheduled=scheduled))

    def _sample_all(self, num_rows: int, has_grammar: bool = True) -> None:
        """Sample the step, with a grammar in all rows or in no row, and free its rows."""
        words = bytes([255]) * (4 * -(-self.spec.vocab_size // 32))
        bitmask = GrammarOutput(list(range(num_rows)), [0] * num_rows, words * num_rows)
        self.sample_tokens(bitmask if has_grammar else None).result()
        self.execute_model(SchedulerOutput(step=0, scheduled=[], freed_slots=list(range(num_rows))))
        self.sample_tokens()

    def _graph_bytes(self, meter: CudaMeter) -> int:
        """Return an estimate of the memory of all graphs: the largest graph, the graph with the
        largest logits, and for each other graph as much as a second graph adds to the first.
        """
        if (graphs := self.make_graphs()) is None:
            return 0
        largest = GraphSize(graphs.decode_sizes[-1], is_decode=True)
        first = [*dict.fromkeys((*graphs.sizes[:2], largest))]
        used = [meter.used()]
        for size in first:
            self._capture(graphs, size)
            used.append(meter.used())
        per_graph = used[2] - used[1] if len(first) > 1 else 0
        per_variant = used[-1] - used[0] + per_graph * (len(graphs.sizes) - len(first))
        return len(self.variants) * per_variant + graphs.nbytes

    # ---- output ----

    def to_host(self, parts: Sequence[StepPart]) -> tuple[Sequence[StepPart], Callable[[], None]]:
        """Start copies to pinned memory in the step's stream; return them and a call that waits."""
        copied = [part.to_host() for part in parts]
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))

        def wait() -> None:
            torch.cuda.set_device(self.device)  # each thread has its own, at first device 0
            done.synchronize()

        return copied, wait

    def drop_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.graphs.clear()
            self.graphs.heads.clear()
            self.graphs = None
