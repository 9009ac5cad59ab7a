"""What a decode step launches on a CUDA device, the bytes that each launch moves, and its time.

The step runs without memory (see `dry_run`). Each operation of torch that is no view, and each
launch of a Triton kernel, reads or writes each of its tensors once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from servd.base.cards import Card
from servd.base.sizes import StepTime
from servd.worker.attention import AttentionBatch
from servd.worker.batch.decode_inputs import NUM_NUMBERS
from servd.worker.compat import DispatchMode, intercept_launches
from servd.worker.kv import kv_cache
from servd.worker.layers._matrix import Matrix
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.weight import Loadable
from servd.worker.lora.layers import AdaptedMatrix
from servd.worker.runner.gpu_model_runner import GPUModelRunner

LAUNCH_SECONDS = 2.2e-6  # of a kernel in a CUDA graph, on an H100
# Operations of torch that launch nothing.
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm_v2", "_grouped_mm")
GATHERS = ("embedding", "index", "index_select")  # which read as many rows as they return
ATTENTION = ("attention_kernel",)
# Results of splits: room for the most of any step. Those of a step are a few MB.
PARTIALS = ("partial_ptr", "lse_ptr")


class Launch(NamedTuple):
    """A launch of a kernel. Sizes are in bytes."""

    name: str
    weights: int
    kv_cache: int
    activations: int
    operations: int  # of matrix products: a multiplication and an addition are two

    @property
    def num_bytes(self) -> int:
        return self.weights + self.kv_cache + self.activations


class LaunchCounter(DispatchMode):
    """Appends the launches of a step to `launches`. `num_tokens`: of each request."""

    def __init__(self, model: Loadable, caches: Sequence[Tensor], num_tokens: int) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.num_tokens = num_tokens
        self.weights = {id(x.untyped_storage()) for x in weights_of(model)}
        self.caches = {id(x.untyped_storage()) for x in caches}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = _without_memory(args)
        options = {key: _without_memory(value) for key, value in (kwargs or {}).items()}
        if "device" in options:
            options["device"] = "meta"
        out = func(*args, **options)
        name = func.overloadpacket.__name__
        if func.is_view or name in ALLOCATIONS:
            return out
        inputs = [*_tensors_in([args, *options.values()])]
        outputs = [*_tensors_in([out])]
        operations = 0
        if name in PRODUCTS:
            first = inputs[-2] if name in ("addmm", "baddbmm") else inputs[0]
            operations = 2 * out.numel() * first.shape[-1]
        if name in GATHERS:
            inputs = [*inputs[1:], *outputs]
        sizes = [(x, x.nbytes) for x in (*inputs, *outputs)]
        self._append(name, sizes, operations)
        return out

    def launch(self, kernel: Any, arguments: dict[str, Any], run: Callable[[], object]) -> None:
        """Count a launch of a Triton kernel; see `intercept_launches`."""
        name = kernel.__name__
        visible = 1.0  # share of the cache that the queries see
        if name in ATTENTION and arguments["WINDOW"] is not None:
            visible = min(arguments["WINDOW"] / self.num_tokens, 1.0)
        sizes: list[tuple[Tensor, int]] = []
        operations = 0
        num_experts = arguments.get("num_experts") if "out_features" in arguments else None
        for key, value in arguments.items():
            if not isinstance(value, Tensor) or key in PARTIALS:
                continue
            num_bytes = value.nbytes
            if id(value.untyped_storage()) in self.caches:
                num_bytes = int(visible * num_bytes) if name in ATTENTION else 0
            if id(value.untyped_storage()) in self.weights and num_experts:
                rows = arguments["out_ptr"].numel() // arguments["out_features"]
                num_bytes = int(num_bytes * share_of_experts(num_experts, rows))
            sizes.append((value, num_bytes))
        if "out_features" in arguments:
            operations = 2 * arguments["out_ptr"].numel() * arguments["size"]
        self._append(name, sizes, operations)

    def _append(self, name: str, sizes: Sequence[tuple[Tensor, int]], operations: int) -> None:
        totals = {"weights": 0, "kv_cache": 0, "activations": 0}
        for tensor, num_bytes in sizes:
            storage = id(tensor.untyped_storage())
            kind = "kv_cache" if storage in self.caches else "activations"
            totals["weights" if storage in self.weights else kind] += num_bytes
        self.launches.append(Launch(name, **totals, operations=operations))


def _without_memory(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_memory(item) for item in value]
    return value.to("meta") if isinstance(value, Tensor) else value


def share_of_experts(num_experts: int, num_rows: int) -> float:
    """Return the expected share of experts with a row, if each row is of any expert."""
    return 1.0 - (1.0 - 1.0 / num_experts) ** num_rows


def weights_of(model: Loadable) -> list[Tensor]:
    """Return the tensors of the model's weights as they are multiplied."""
    weights = [weight for _, weight in model.named_parameters()]
    methods = [weight.quant_method for weight in weights if isinstance(weight, Matrix)]
    # An adapted matrix refers to its weight, which refers to it.
    bases = [method.base if isinstance(method, AdaptedMatrix) else method for method in methods]
    return [*weights, *_tensors_in(bases)]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors_in([*vars(value).values()])


def step_launches(
    runner: GPUModelRunner, num_rows: int, num_tokens: int, num_queries: int = 1
) -> list[Launch]:
    """Return the launches of a step of a runner without memory, in its mode `Weightless`: the last
    `num_queries` tokens of `num_rows` requests with `num_tokens` tokens each.
    """
    num_blocks = -(-num_tokens // runner.config.cache.block_size)
    caches = kv_cache.allocate(runner.backend, runner.model, num_rows * num_blocks)
    lengths = np.full(num_rows, num_tokens)
    numbers = torch.empty(NUM_NUMBERS, num_rows * num_queries, dtype=torch.int64)
    rows = numbers[:, :num_rows]
    batch = AttentionBatch(
        query_lens=np.full(num_rows, num_queries),
        seq_lens=lengths,
        query_start_loc=torch.empty(num_rows + 1, dtype=torch.int32),
        seq_lens_device=torch.empty(num_rows, dtype=torch.int32),
        block_tables=torch.empty(num_rows, num_blocks, dtype=torch.int32),
        slot_mapping=numbers[0],
        slots=rows[1],
    )
    batch = replace(batch, other_groups=[batch] * (len(runner.kv_windows) - 1))
    counter = LaunchCounter(runner.model, caches, num_tokens)
    with intercept_launches(counter.launch), counter:
        ctx = ForwardContext(runner.backend, batch, caches, runner.states.state_memory)
        hidden = runner.model(numbers[0], numbers[1], ctx)
        logits = runner.model.compute_logits(hidden[:num_rows])
        runner.sampler.ops.choose(logits, rows[0], rows[1], runner.states.token_ids)
    return counter.launches


def time_on(card: Card, launches: Sequence[Launch], num_rows: int) -> StepTime:
    """Return the time of a decode step of `num_rows` requests. A launch takes as long as its bytes,
    or as its products if these are longer.
    """
    kinds = ("weights", "kv_cache", "activations")
    seconds: dict[str, float] = dict.fromkeys((*kinds, "products"), 0.0)
    for launch in launches:
        rate = card.products * (2 if launch.name == "_scaled_mm_v2" else 1)
        products = launch.operations / rate
        if products > launch.num_bytes / card.bandwidth:
            seconds["products"] += products
            continue
        for name in kinds:
            seconds[name] += getattr(launch, name) / card.bandwidth
    seconds["launches"] = len(launches) * LAUNCH_SECONDS
    return StepTime(num_rows=num_rows, **{name: 1e3 * value for name, value in seconds.items()})
