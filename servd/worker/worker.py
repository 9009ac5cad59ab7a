"""Worker: one device with its share of the model, controlled by an executor."""

import gc
import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import torch
from torch.autograd.profiler import profile

from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.messages.engine import GrammarOutput, ModelRunnerOutput, SchedulerOutput, WorkerReady
from servd.worker.device.device import (
    configure_triton,
    count_gpus,
    name_of,
    require_c_compiler,
    set_num_threads,
)
from servd.worker.device.parallel import Parallel
from servd.worker.ops import native
from servd.worker.runner import dry_run
from servd.worker.runner.batch_invariant import make_batch_invariant
from servd.worker.runner.compile import compile_layers
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from servd.worker.runner.gpu_model_runner import GPUModelRunner
from servd.worker.runner.model_runner import AsyncOutput, ModelRunner
from servd.worker.runner.pipeline_stage import Stage
from servd.worker.runner.reference_check import ReferenceCheck

log = logging.getLogger("servd.worker")

MAX_PROFILED_STEPS = 1000


class Worker:
    """A device with its share of the model. Start with `load_model`, then `allocate_kv_cache`; run
    each step by `execute_model`, then `sample_tokens`.

    Args:
        rank: number of this worker among `ParallelConfig.num_workers`.
        progress: called with a start-up phase and its progress, 0 to 1.
        distributed_init: init_method of torch.distributed, e.g. "tcp://127.0.0.1:29500".
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        rank: int,
        progress: Callable[[str, float], None],
        distributed_init: str | None = None,
    ) -> None:
        self.progress = progress
        self.profiler: profile | None = None
        self.profiling = ExitStack()  # holds the profiler
        options = config.parallel
        runner_class: type[ModelRunner]
        if config.parallel.device == "cuda":
            require_c_compiler()
            configure_triton()
            # Ranks count over all hosts, devices on each host.
            self.device = torch.device("cuda", rank % count_gpus())
            torch.cuda.set_device(self.device)
            runner_class = GPUModelRunner
        else:
            self.device = torch.device("cpu")
            self.num_threads = set_num_threads(options.num_workers * options.num_engines_here)
            runner_class = CPUModelRunner
        size = options.tensor_parallel_size
        num_stages = options.pipeline_parallel_size
        self.parallel = Parallel.connect(
            rank, size, self.device, distributed_init, num_stages, options.enable_expert_parallel
        )
        self.runner = runner_class(config, spec, self.device, self.parallel)

    def load_model(self, plans_memory: bool = True) -> WorkerReady:
        """Load weights; return how many KV blocks fit. With `plans_memory`, first plan the memory
        that this needs, and compare the plan with the result. Raises ConfigError if this cannot
        run.
        """
        start = time.monotonic()
        self.reference_check = ReferenceCheck(self.runner)
        planned = None
        if plans_memory and self.parallel.rank == 0:
            planned = dry_run.predict(self.runner)
        if planned is not None:
            dry_run.check_fits(self.runner, planned)
        self.progress("loading weights", 0.0)
        self.runner.load_model(lambda fraction: self.progress("loading weights", fraction))
        if self.runner.config.model.compile:
            compile_layers(self.runner.model)
        if self.runner.config.model.batch_invariant:
            make_batch_invariant(self.runner)
        self.steps = self.runner if self.parallel.num_stages == 1 else Stage(self.runner)
        self.progress("loading weights", 1.0)
        seconds = time.monotonic() - start
        log.info("weights loaded in %.2f s, attention %s", seconds, self.runner.backend_name)
        for part in (self.runner.proposer, self.runner.adapters):
            if part is not None:
                log.info("%s", part)
        warning = native.explain_absence() if self.device.type == "cpu" else ""
        if warning and self.parallel.rank == 0:
            log.warning("%s", warning)
        self.progress("measuring memory", 0.0)
        num_blocks, num_checkpoints = self.runner.count_blocks()
        if planned is not None:
            dry_run.compare(self.runner, planned)
        return WorkerReady(
            device=name_of(self.device),
            dtype=str(self.runner.dtype).removeprefix("torch."),
            attention_backend=self.runner.backend_name,
            num_blocks=num_blocks,
            weights_bytes=self.runner.weights_bytes,
            kv_bytes_per_block=self.runner.bytes_per_block,
            kv_windows=self.runner.kv_windows,
            adaptable=self.runner.adapters.layers if self.runner.adapters else {},
            warning=warning,
            num_checkpoints=num_checkpoints,
            state_bytes=self.runner.state_bytes,
        )

    def allocate_kv_cache(self, num_blocks: int, num_checkpoints: int = 0) -> None:
        """Allocate the cache, with as many blocks and checkpoints of states as other workers have;
        prepare to run steps.
        """
        self.num_blocks = num_blocks
        self.num_checkpoints = num_checkpoints
        self.runner.allocate_kv_cache(num_blocks, num_checkpoints)
        self.reference_check.run(self.run_step)
        self.runner.warm_up(lambda fraction: self.progress("warming up", fraction))

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Launch a step's forward pass. Raises RuntimeError if the last step was not sampled."""
        if self.profiler is not None:
            self._count_profiled_step()
        self.steps.execute_model(scheduled)

    def sample_tokens(self, bitmask: GrammarOutput | None = None) -> AsyncOutput:
        """Launch sampling for the step that `execute_model` launched last. `result()` of the return
        value waits for its tokens. Raises RuntimeError if there is no such step.
        """
        return self.steps.sample_tokens(bitmask)

    def run_step(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step and return its output."""
        self.execute_model(scheduled)
        return self.sample_tokens().result()

    def take_tokens(self, sampled: list[list[int]]) -> None:
        """Pass the sampled tokens of the oldest step in flight to a stage that has no head."""
        assert isinstance(self.steps, Stage)
        self.steps.take_tokens(sampled)

    def update_weights(self, folder: str) -> None:
        """Load another checkpoint of the same architecture, in place of this one. The KV cache is
        empty afterwards, and as large as before.
        """
        config = self.runner.config.replace(
            kv_cache_memory=self.num_blocks * self.runner.bytes_per_block,
            max_state_memory=max(self.num_checkpoints * self.runner.state_bytes, 1),
        )
        self.release()
        self.progress = lambda phase, fraction: None  # it is no start
        spec = msgspec.structs.replace(self.runner.spec, folder=folder)
        self.runner = type(self.runner)(config, spec, self.device, self.parallel)
        self.load_model(plans_memory=False)
        self.allocate_kv_cache(self.num_blocks, self.num_checkpoints)

    def start_profile(self) -> None:
        """Record the operations of torch, until `stop_profile` or for MAX_PROFILED_STEPS."""
        if self.profiler is None:
            self.num_profiled_steps = 0
            # torch.profiler would first import the compiler, for seconds.
            self.profiler = self.profiling.enter_context(
                profile(use_device="cuda" if self.device.type == "cuda" else None, use_kineto=True)
            )

    def _count_profiled_step(self) -> None:
        if self.num_profiled_steps == MAX_PROFILED_STEPS:
            self.profiling.close()
            log.info("the profile has %d steps and ends: call stop_profile", MAX_PROFILED_STEPS)
        self.num_profiled_steps += 1

    def stop_profile(self) -> str | None:
        """Write what was recorded as a Chrome trace; return its path. None: nothing was."""
        if self.profiler is None:
            return None
        self.profiling.close()
        folder = tempfile.mkdtemp(prefix="servd-profile-")
        path = f"{folder}/rank-{self.parallel.rank}.json"
        self.profiler.export_chrome_trace(path)
        self.profiler = None
        return path

    def shutdown(self) -> None:
        """Leave the process group, and free memory, for a process that continues."""
        self.release()  # first: NCCL waits for ever for graphs that hold its kernels
        self.parallel.close()

    def release(self) -> None:
        """Free the model and its KV cache; give torch all threads again."""
        self.runner.release()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        else:
            torch.set_num_threads(self.num_threads)
