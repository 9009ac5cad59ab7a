"""EngineCore: the step loop, and the handling of clients' messages."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from servd.base.errors import EngineError, InvalidRequest
from servd.base.memory import release_memory
from servd.base.tracing import Clock, StepRecord, now_ns
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.config.kv_layout import KVLayout
from servd.core.encoder_cache_manager import EncoderCacheManager
from servd.core.executor import Executor, PendingOutput, start_executor
from servd.core.kv_cache.connector import KVConnector
from servd.core.kv_cache.manager import KVCacheManager
from servd.core.kv_cache.state_cache import StateCache
from servd.core.replacement import find_replacement
from servd.core.request import OutputEnd
from servd.core.scheduler.micro_batches import MicroBatches
from servd.core.scheduler.scheduler import Scheduler
from servd.core.structured_output.manager import Compiled, GrammarManager
from servd.messages.engine import (
    AbortRequests,
    Attach,
    Audit,
    CollectiveRpc,
    EngineCoreOutputs,
    EngineCoreRequest,
    ResetPrefixCache,
    RpcMethod,
    ToEngine,
    WorkerReady,
)

logger = logging.getLogger("servd.engine")

NO_TOKEN_ALLOWED = (
    "no token is allowed here: `allowed_token_ids`, `bad_words`, `logit_bias` and `min_tokens` "
    "forbid all of them"
)


class EngineCore:
    """The step loop: the Scheduler decides steps, the Executor computes them on the workers.
    `executor` is started; `worker` is the result of `executor.start`.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        executor: Executor,
        worker: WorkerReady,
        clock: Clock = now_ns,
    ) -> None:
        self.clock = clock
        max_model_len = config.model.max_model_len or spec.max_position_embeddings
        speculative = config.model.speculative_config
        layout = KVLayout.from_config(config, worker.kv_windows)
        num_ranks = config.parallel.tensor_parallel_size
        states = StateCache.from_worker(worker, config.cache, num_ranks, clock)
        self.scheduler = Scheduler(
            config.scheduler,
            max_model_len,
            KVCacheManager(worker.num_blocks, config.cache, layout, clock, states),
            speculative.num_speculative_tokens if speculative else 0,
            config.lora.max_loras,
            clock,
            EncoderCacheManager.from_config(config, spec, max_model_len),
        )
        self.config = config
        self.spec = spec
        self.first_spec = spec  # of the command line; `spec` has the folder of the last update
        self.connect(executor, worker)
        self.grammars = GrammarManager(config, spec)
        self.depth = config.num_steps_in_flight
        self.micro_batches = MicroBatches(config.num_micro_batches)
        self.in_flight: deque[PendingOutput] = deque()
        # Called with each step before it is launched.
        self.on_scheduled: Callable[[StepRecord], None] = lambda record: None
        self.on_wait: Callable[[], None] = lambda: None  # called when no request can be computed

    def sleep(self) -> None:
        """Free weights and KV cache. No step may be in flight."""
        self.is_asleep = True
        self.executor.shutdown()
        self.scheduler.forget_workers()
        self.grammars.forget_rows()
        release_memory()

    def wake_up(self) -> None:
        """Load the model again, with as many blocks as before, whatever memory is free now."""
        num_blocks = self.worker.num_blocks
        config = self.config.replace(
            kv_cache_memory=num_blocks * self.worker.kv_bytes_per_block,
            max_state_memory=max(self.worker.num_checkpoints * self.worker.state_bytes, 1),
        )
        executor, worker = start_executor(
            config, self.spec, lambda phase, fraction: None, plans_memory=False
        )
        assert worker.num_blocks == num_blocks, worker
        assert worker.num_checkpoints == self.worker.num_checkpoints, worker
        self.connect(executor, worker)

    def collective_rpc(self, method: RpcMethod, args: Sequence[str | int]) -> list[str | None]:
        """Call a method of every worker between two steps; return the results by rank. Raises the
        errors of `check_update` and `update_weights`.
        """
        if method == "update_weights":
            return self.update_weights(self.check_update(str(args[0])))
        while self.in_flight:
            self._collect_outputs()
        return self.executor.collective_rpc(method, args)

    def check_update(self, folder: str) -> ModelSpec:
        """Return the spec with the checkpoint in `folder`. Raises InvalidRequest if a request is
        unfinished, or if the checkpoint cannot replace the weights.
        """
        if num_unfinished := len(self.scheduler.requests) + self.grammars.num_waiting:
            raise InvalidRequest(
                f"{num_unfinished} requests are unfinished: retry when all have finished"
            )
        return find_replacement(folder, self.first_spec, self.config.model)

    def update_weights(self, spec: ModelSpec) -> list[str | None]:
        """Load a checkpoint that `check_update` returned. Raises EngineError if the workers fail:
        they have no model any more.
        """
        while self.in_flight:
            self._collect_outputs()
        self.scheduler.forget_workers()
        self.grammars.forget_rows()
        try:
            results = self.executor.collective_rpc("update_weights", [spec.folder])
        except Exception as error:
            reason = str(error).strip().rpartition("\n")[2]  # of a traceback, the last line
            raise EngineError(f"cannot load the weights of {spec.folder}: {reason}") from error
        self.spec = spec
        self.config = self.config.replace(model=spec.folder)  # what `wake_up` loads
        self.connect(self.executor, self.worker)
        return results

    def connect(self, executor: Executor, worker: WorkerReady) -> None:
        """Use `executor` from now on: the first one, or a replacement after `sleep`."""
        self.executor = executor
        self.worker = worker
        self.is_asleep = False
        connector = KVConnector()
        if self.config.cache.has_connector:
            from servd.core.kv_cache.connector.offload import make_connector  # it needs zmq

            connector = make_connector(self.config, self.spec, worker)
        connector.measure_copies(executor)
        self.scheduler.kv_cache.connect(connector)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def handle(self, message: ToEngine | Compiled) -> None:
        match message:
            case EngineCoreRequest():
                for request in message.choices():
                    self._add_request(request)
            case Compiled(error=error):
                for request in self.grammars.take(message):
                    if error is None:
                        self._add_request(request, has_grammar=True)
                    else:
                        self.scheduler.outputs.reject(request, error)
            case AbortRequests(request_ids):
                for request in self.grammars.abort(request_ids):
                    self.scheduler.outputs.report_abort(request)
                self.scheduler.abort_requests(request_ids)
            case ResetPrefixCache():
                self.scheduler.kv_cache.reset()
            case Attach() | Audit() | CollectiveRpc():
                pass  # EngineCoreProc handles these

    def _add_request(self, request: EngineCoreRequest, has_grammar: bool = False) -> None:
        """Add a request. A malformed request fails alone; other requests continue."""
        try:
            if has_grammar or self.grammars.admit(request):
                self.scheduler.add_request(request)
            else:
                self.scheduler.outputs.report_to(request.client)
        except Exception as error:
            logger.exception("cannot add request %s", request.request_id)
            self.scheduler.outputs.reject(
                request, f"the engine cannot take it ({type(error).__name__})"
            )

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Schedule and launch a step, collect the oldest step in flight; return outputs by client.

        Up to `depth` steps are in flight. The scheduler counts tokens before they are sampled; only
        the workers know the real tokens. Depth 1 is therefore synchronous serving.
        """
        grammars = self.grammars
        idle = self.micro_batches.choose_idle(self.scheduler.running, grammars.choose_idle())
        scheduled = self.scheduler.schedule(idle, grammars.grammar_tokens())
        if scheduled is not None:
            record = self.scheduler.records[-1]
            self.on_scheduled(record)
            self.executor.execute_model(scheduled)
            record.executed_ns = self.clock()
            grammars.begin_step(scheduled)
            while grammars.awaits_tokens:
                self._collect_outputs()
            self.in_flight.append(self.executor.sample_tokens(grammars.get_grammar_bitmask()))
        depth = self.depth
        if self.scheduler.is_background:
            # One step less is in flight, so that a new request starts a step earlier; but no
            # pipeline stage may idle.
            depth = max(depth - 1, self.config.parallel.pipeline_parallel_size)
        if self.in_flight and (scheduled is None or len(self.in_flight) >= depth):
            self._collect_outputs()
        elif scheduled is None and self.scheduler.kv_cache.connector.wait():
            self.on_wait()
        return self.scheduler.take_outputs(grammars.num_waiting)

    def _collect_outputs(self) -> None:
        result = self.in_flight.popleft().result()
        ends = self.grammars.advance(result)
        for row, num_tokens in result.dead_ends.items():
            if row not in ends or ends[row].num_tokens > num_tokens:
                ends[row] = OutputEnd(num_tokens, NO_TOKEN_ALLOWED)
        self.scheduler.update_from_output(result, ends)
