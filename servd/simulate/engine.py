"""SimulatedEngine: the real Scheduler and KV cache in virtual time. Costs set the step times."""

from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.config.kv_layout import KVLayout
from servd.core.kv_cache.connector.offload import make_connector
from servd.core.kv_cache.manager import KVCacheManager
from servd.core.scheduler.scheduler import Scheduler
from servd.core.step import StepLog
from servd.messages.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerReady,
)
from servd.simulate.costs import Costs


class VirtualClock:
    """A clock whose nanoseconds the simulation advances."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000  # 0 means "not yet" in many places

    def __call__(self) -> int:
        return self.ns


class SimulatedEngine:
    """A Scheduler with its current step. `worker` states the size of the cache."""

    def __init__(
        self,
        rank: int,
        config: Config,
        worker: WorkerReady,
        max_model_len: int,
        costs: Costs,
        clock: VirtualClock,
    ) -> None:
        layout = KVLayout.from_config(config, worker.kv_windows)
        kv_cache = KVCacheManager(worker.num_blocks, config.cache, layout, clock)
        self.scheduler = Scheduler(config.scheduler, max_model_len, kv_cache, clock=clock)
        self.scheduler.step_log = StepLog(max_records=1)  # nobody reads a cluster's gigabyte
        self.rank = rank
        self.costs = costs
        self.clock = clock
        self.copy_ns = costs.copied_byte * worker.kv_bytes_per_block
        if config.cache.has_connector:
            connector = make_connector(config, FAKE_SPEC, worker)
            connector.costs.loading["host"].add(self.copy_ns, 1)
            kv_cache.connect(connector)
        self.arrived: list[EngineCoreRequest] = []
        self.launched: SchedulerOutput | None = None  # the step that runs
        self.began_ns = 0  # when it began
        self.busy_ns = 0
        self.num_open = 0  # requests

    def end_step(self) -> tuple[list[EngineCoreOutput], int]:
        """Collect the outputs of the step that ends now. Return the outputs that report more than
        one more token, and the number of the other outputs.
        """
        step = self.launched
        assert step is not None
        self.launched = None
        self.busy_ns += self.clock.ns - self.began_ns
        sampled = [[0] if row.samples else [] for row in step.scheduled]
        decoded = [0] * len(step.decodes.slots)
        self.scheduler.update_from_output(ModelRunnerOutput(sampled, decoded=decoded), {})
        for message in self.scheduler.outputs.take().values():  # of one client at most
            return message.outputs, len(message.decoded)
        return [], 0

    def begin_step(self, was_idle: bool) -> int | None:
        """Add arrived requests and begin a step. Return when the step ends; None without work."""
        for message in self.arrived:
            self.scheduler.add_request(message)
        self.arrived.clear()
        if not self.scheduler.requests:
            return None
        step = self.scheduler.schedule()
        assert step is not None, "what waits fits, and there are no files to be read"
        self.launched = step
        self.began_ns = self.clock.ns
        return self.began_ns + self._step_ns(step, was_idle)

    def _step_ns(self, step: SchedulerOutput, was_idle: bool) -> int:
        num_tokens = len(step.decodes.slots)
        context = sum(step.decodes.num_computed_tokens) + num_tokens
        pairs = 0
        for row in step.scheduled:
            num_tokens += row.num_scheduled_tokens
            if row.num_scheduled_tokens == 1:
                context += row.num_computed_tokens + 1
            else:
                pairs += row.num_scheduled_tokens * (
                    row.num_computed_tokens + row.num_scheduled_tokens / 2
                )
        num_copies = 0
        if step.swaps is not None:
            num_copies = len(step.swaps.blocks_to_swap_in) + len(step.swaps.blocks_to_swap_out)
        took = self.costs.of_step(num_tokens, step.num_rows, context, pairs, was_idle)
        return round(took + self.copy_ns * num_copies)
