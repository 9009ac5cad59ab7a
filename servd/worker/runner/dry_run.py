"""Dry run: computes the memory that a model will need from config.json and file headers alone.

The runner's own `load_model` runs on meta tensors, so everything that it converts counts.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from servd.base.cards import Card
from servd.base.errors import ConfigError, NotEnoughMemory
from servd.base.sizes import (
    STEP_TOKENS,
    MemoryPlan,
    MemorySizes,
    StepTime,
    advise_more_memory,
    format_bytes,
)
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.quantization_config import quantization_of
from servd.config import Config
from servd.worker.device.device import available_memory, name_of
from servd.worker.device.memory import CudaMeter, MemoryUse
from servd.worker.device.parallel import Parallel
from servd.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from servd.worker.loading import model_loader
from servd.worker.ops import native, target
from servd.worker.runner import step_cost
from servd.worker.runner.cpu_model_runner import CPUModelRunner, kv_cache_share
from servd.worker.runner.gpu_model_runner import GPUModelRunner
from servd.worker.runner.model_runner import ModelRunner

log = logging.getLogger("servd.worker")

DRIVER_BYTES = 600 << 20  # of a card that this machine need not have
STEP_ROWS = (1, 64, 256)  # requests of the decode steps in a plan


class Weightless(TorchFunctionMode):
    """A mode in which new tensors have no storage but report `device` as their device."""

    # On meta tensors, torch's versions import a thousand modules. The results are the same.
    same: ClassVar[dict[Any, Callable[..., Tensor]]] = {
        torch.empty_like: lambda x: torch.empty(x.shape, dtype=x.dtype),
        torch.zeros_like: lambda x: torch.empty(x.shape, dtype=x.dtype),
        torch.cat: lambda parts: torch.empty(
            sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype
        ),
        Tensor.abs: lambda x: x,
        Tensor.normal_: lambda x: x,
    }

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is native.call:
            return None
        if func == Tensor.device.__get__:
            return self.device
        if func in (torch.empty, torch.zeros):
            kwargs = kwargs | {"device": "meta"}
        elif kwargs.get("device") is not None:  # small, and their values are needed
            kwargs = kwargs | {"device": "cpu"}
        elif func in self.same and not kwargs and len(args) == 1 and _first(args[0]).is_meta:
            with self:  # a mode is disabled within its own function
                return self.same[func](*args)
        return func(*args, **kwargs)


def _first(value: Tensor | Sequence[Tensor]) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def plan(config: Config, spec: ModelSpec, card: Card | None = None) -> MemoryPlan:
    """Return the plan, given the free memory, or for `card`. Raises ConfigError if the model cannot
    be loaded.
    """
    with target.assume(card):
        return _plan(config, spec)


def _plan(config: Config, spec: ModelSpec) -> MemoryPlan:
    on_cuda = config.parallel.device == "cuda"
    device = torch.device(config.parallel.device)
    runner = load(GPUModelRunner if on_cuda else CPUModelRunner, config, spec, device)
    sizes = _sizes(runner)
    num_ranks = config.parallel.num_workers * max(config.parallel.num_engines_here, 1)
    if isinstance(runner, GPUModelRunner):
        card = target.ASSUMED.get()
        if card is None:
            meter = CudaMeter(runner.device)
            total = meter.total
            outside = meter.used() - meter.held()
        else:
            total = card.memory
            outside = DRIVER_BYTES
        use = MemoryUse(
            total=total,
            outside=outside,
            persistent=sizes.persistent,
            per_request=sizes.per_requests // runner.max_num_seqs,
            forward=sizes.forward,
            sampling=sizes.sampling,
            graphs=0,
            utilization=config.cache.gpu_memory_utilization,
            max_num_seqs=runner.max_num_seqs,
        )
        runner.memory_use = use
        free = int(use.total * use.utilization) - use.outside
        room = use.available
    else:
        free = available_memory() // num_ranks
        room = kv_cache_share((free - sizes.persistent) * num_ranks, num_ranks)
    num_blocks = num_checkpoints = 0
    shortage = ""
    requested = config.cache.kv_cache_memory
    unused = free - sizes.persistent
    try:
        counts = runner.count_blocks(room)
        for_states = counts[1] * sizes.per_checkpoint
        if requested is not None and requested + for_states > unused >= 0:
            beside = f" and {format_bytes(for_states)} of --max-state-memory" if for_states else ""
            raise NotEnoughMemory(
                f"--kv-cache-memory {format_bytes(requested)}{beside}: {format_bytes(unused)} are "
                "free beside weights and requests: lower it, or leave it out"
            )
        num_blocks, num_checkpoints = counts
    except NotEnoughMemory as error:
        shortage = str(error)
    dtype = runner.dtype
    if not on_cuda and native.library() is not None:
        # Packed matrices keep the checkpoint's type if it is narrower.
        dtype = min(dtype, getattr(torch, spec.dtype), key=lambda kind: kind.itemsize)
    return MemoryPlan(
        device=target.card_of(runner.device).name or name_of(runner.device),
        dtype=str(dtype).removeprefix("torch."),
        sizes=sizes,
        free=free,
        num_blocks=num_blocks,
        num_checkpoints=num_checkpoints,
        kv_windows=runner.kv_windows,
        shortage=shortage,
        steps=_steps(runner) if isinstance(runner, GPUModelRunner) else [],
    )


def _steps(runner: GPUModelRunner) -> list[StepTime]:
    """Return the times of decode steps on the runner's card; none if they are unknown."""
    card = target.card_of(runner.device)
    is_shared = runner.config.parallel.num_workers > 1
    has_graphs = runner.backend.supports_graphs and not runner.config.model.enforce_eager
    if not card.bandwidth or is_shared or not has_graphs:
        return []
    num_tokens = min(STEP_TOKENS, runner.max_model_len)
    with Weightless(runner.device):
        return [
            step_cost.time_on(card, step_cost.step_launches(runner, num_rows, num_tokens), num_rows)
            for num_rows in STEP_ROWS
            if num_rows <= runner.max_num_seqs
        ]


def predict(runner: ModelRunner) -> MemorySizes | None:
    """Return the sizes of a runner before it loads its model; None if they are unknown."""
    try:
        return _sizes(
            load(type(runner), runner.config, runner.spec, runner.device, runner.parallel)
        )
    except ConfigError:  # loading reports it
        return None
    except Exception as error:  # a plan must never stop a server
        log.warning("no plan to compare memory with: %r", error)
        return None


def check_fits(runner: ModelRunner, sizes: MemorySizes) -> None:
    """Compare the memory that a runner needs with the free memory, before loading takes minutes.
    Raises NotEnoughMemory if the model, or the configured KV cache, does not fit.
    """
    cache = runner.config.cache
    if runner.device.type == "cuda":
        meter = CudaMeter(runner.device)
        free = int(meter.total * cache.gpu_memory_utilization) - meter.used() + meter.held()
    else:
        free = available_memory()
    where = f"{format_bytes(max(free, 0))} of memory are free on {name_of(runner.device)}"
    if sizes.persistent > free:
        method = runner.config.model.quantization or quantization_of(runner.spec.folder)
        lacking = advise_more_memory(sizes.persistent - free, bool(method))
        needed = format_bytes(sizes.persistent)
        raise NotEnoughMemory(f"the model takes {needed}, and {where}: it needs {lacking}")
    if (requested := cache.kv_cache_memory) is not None and requested > free:
        raise NotEnoughMemory(
            f"--kv-cache-memory {format_bytes(requested)}: {where}: lower it, or leave it out"
        )


def compare(runner: ModelRunner, planned: MemorySizes) -> None:
    pairs = {
        "weights": (planned.weights + planned.tower + planned.adapters, runner.weights_bytes),
        "KV cache per block": (planned.kv_per_block, runner.bytes_per_block),
    }
    if isinstance(runner, GPUModelRunner) and (use := runner.memory_use):
        pairs["weights and requests"] = (planned.persistent, use.persistent)
        pairs["largest step"] = (planned.step, max(use.forward, use.sampling))
    parts = []
    for name, (before, now) in pairs.items():
        parts.append(f"{name} {format_bytes(before)}")
        if now != before:
            parts.append(f"took {format_bytes(now)}")
    log.info("planned: %s", ", ".join(parts))


def load(
    runner_class: type[ModelRunner],
    config: Config,
    spec: ModelSpec,
    device: torch.device,
    parallel: Parallel | None = None,
) -> ModelRunner:
    """Return a rank's runner, by default the first rank's, loaded without weights. Raises
    ConfigError if the model cannot be loaded here.
    """
    with Weightless(device):
        options = config.parallel
        size = options.tensor_parallel_size
        num_stages = options.pipeline_parallel_size
        first = Parallel(0, size, 0, num_stages, has_whole_experts=options.enable_expert_parallel)
        runner = runner_class(config, spec, device, parallel or first)
        runner.load_model(lambda _: None)
    return runner


def _sizes(runner: ModelRunner) -> MemorySizes:
    proposer = runner.proposer
    states = runner.states
    spec = runner.spec
    owners = [vars(owner) for owner in (states, states.block_tables, proposer) if owner]
    kept = [value for owner in owners for value in owner.values()]
    drafts: list[Any] = [value for value in kept if isinstance(value, nn.Module)]
    modules = [*runner.model.named_modules()]
    outputs = [sum(m.local_features) for _, m in modules if isinstance(m, ColumnParallelLinear)]
    rows = [m.weight.part_shapes[0] for _, m in modules if isinstance(m, RowParallelLinear)]
    inputs = [runner.parallel.share(shape[1]) for shape in rows]
    # The stream, its norm, and two intermediates; a layer's products, and results from these.
    width = 4 * spec.hidden_size + max(outputs, default=0) + max(inputs, default=0)
    adapters = runner.adapters.nbytes if runner.adapters else 0
    tower = runner.encoder.nbytes if runner.encoder else 0
    return MemorySizes(
        weights=runner.weights_bytes - adapters - tower,
        tower=tower,
        encoder_cache=runner.encoder_cache_bytes,
        draft_weights=sum(map(model_loader.count_bytes, drafts)),
        adapters=adapters,
        requests=sum(x.nbytes for x in kept if isinstance(x, Tensor)),
        states=states.state_bytes * len(states.token_ids),
        forward=runner.max_num_tokens * width * runner.compute_dtype.itemsize,
        # Logits, the shifted logits, and the weights of the draw.
        sampling=3 * runner.max_num_samples * spec.vocab_size * 4,
        kv_per_block=runner.bytes_per_block,
        per_checkpoint=runner.state_bytes,
    )
