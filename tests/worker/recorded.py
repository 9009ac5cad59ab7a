"""GPUModelRunner on a CPU: operations recorded with their addresses and run again, as a CUDA graph
does. Stricter than a GPU: within a capture it refuses what would read from or wait for a device.
"""

import copy
import json
import weakref
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from servd.worker.attention import AttentionBatch, torch_sdpa
from servd.worker.attention import native as _native  # noqa: F401 - keeps the library it imports
from servd.worker.compat import intercept_launches
from servd.worker.layers import experts
from servd.worker.ops import native
from servd.worker.quantization import int4
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from servd.worker.runner.gpu_model_runner import GPUModelRunner
from tests.parity.families import LLAMA


class NotCapturable(RuntimeError):
    """A capture met what reads a device's numbers, or makes a tensor of the host's."""


# By their names: methods of tensors, and functions of torch.
OF_THE_HOST = {
    "__bool__",
    "__float__",
    "__index__",
    "__int__",
    "allclose",
    "argwhere",
    "as_tensor",
    "asarray",
    "cpu",
    "equal",
    "from_numpy",
    "frombuffer",
    "item",
    "masked_select",
    "new_tensor",
    "nonzero",
    "numpy",
    "pin_memory",
    "tensor",
    "tolist",
    "unique",
    "unique_consecutive",
}
# Operations of aten, which what is no call of a function in torch comes to.
WAIT = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}


# By id: tensors that are in host memory where the others are on a device.
ON_HOST = weakref.WeakValueDictionary[int, torch.Tensor]()


class Strict(TorchFunctionMode):
    """Refuses calls that a CUDA graph cannot capture."""

    is_off = False  # while a kernel is interpreted, which is the device's part

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.is_off:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in OF_THE_HOST and not (args and ON_HOST.get(id(args[0])) is args[0]):
            raise NotCapturable(f"{name} within a capture")
        if name in ("__getitem__", "__setitem__") and _has_host_indices(args[1]):
            raise NotCapturable("an index from the host within a capture")
        return func(*args, **(kwargs or {}))


def _has_host_indices(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | np.ndarray) for part in parts)


class Recorder(TorchDispatchMode):
    """Records each operation of torch and each launch of a kernel. `strict`: the mode around it."""

    def __init__(self, strict: Strict) -> None:
        super().__init__()
        self.strict = strict
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.strict.is_off:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in WAIT or _waits(name, args, kwargs or {}):
            raise NotCapturable(f"{func} within a capture")
        out = func(*args, **(kwargs or {}))
        self.calls.append(partial(_run_again, func, args, kwargs or {}, out))
        return out

    def launch(self, kernel: Any, arguments: Any, run: Callable[[], object]) -> None:
        """Launch a kernel; see `intercept_launches`."""
        self.strict.is_off = True
        try:
            run()
        finally:
            self.strict.is_off = False
        self.calls.append(run)


def _run_again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        is_result = isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr()
        if is_result:  # neither a view nor in place
            old.copy_(new)


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the size of the result is known to the device alone."""
    if name in ("index", "index_put", "index_put_"):
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if name == "repeat_interleave" and isinstance(args[-1], torch.Tensor):
        return kwargs.get("output_size") is None
    return False


def record(run: Callable[[], None]) -> Callable[[], None]:
    """What it returns runs the operations of `run`, not its Python: what came from the host stays
    as it was.

    Raises:
        NotCapturable: a CUDA graph could not be made of it.
    """
    refuse = Mock(side_effect=NotCapturable("from_numpy within a capture"))
    with (
        patch.object(torch, "from_numpy", refuse),
        Strict() as strict,
        Recorder(strict) as recorder,
        intercept_launches(recorder.launch),
    ):
        run()

    def replay() -> None:
        for call in recorder.calls:
            call()

    return replay


class GraphBackend(torch_sdpa.TorchSdpaBackend):
    """Where the device alone knows lengths, tokens attend over all of their block table."""

    supports_graphs = True

    def build_metadata(self, batch: AttentionBatch) -> Any:
        is_captured = not batch.has_exact_query_lens or (batch.query_lens == 1).all()
        return batch if is_captured else super().build_metadata(batch)

    def attend(self, q, kv_cache, metadata, scale, sinks):
        if not isinstance(metadata, AttentionBatch):
            return super().attend(q, kv_cache, metadata, scale, sinks)
        tokens = torch.arange(len(q))
        starts = metadata.query_start_loc
        rows = torch.searchsorted(starts[1:].contiguous(), tokens, right=True, out_int32=True)
        is_padding = rows >= len(starts) - 1
        rows = rows.clamp(max=len(starts) - 2)
        seq_lens = metadata.seq_lens_device[rows]
        positions = seq_lens - starts[rows + 1] + tokens  # of each token in its row
        shape = (len(q), -1, self.spec.num_kv_heads, self.spec.head_dim)
        parts = kv_cache[:, metadata.block_tables[rows]].view(len(kv_cache), *shape).to(q.dtype)
        if metadata.tails is not None:
            numbers = torch.arange(-metadata.tails.shape[1], 0) + seq_lens[:, None]
            tails = kv_cache.flatten(1, 2)[:, metadata.tails[rows]].to(q.dtype)
            parts[:, tokens[:, None], numbers.clamp(min=0)] = tails
        at = torch.arange(parts.shape[2])
        hidden = at > positions[:, None]
        if self.spec.sliding_window is not None:
            hidden |= at <= positions[:, None] - self.spec.sliding_window
        parts = parts.masked_fill(hidden[..., None, None], 0)  # may be NaN, of others
        # [tokens, heads, keys, head_dim] each
        keys = parts[0].transpose(1, 2)
        values = parts[-1].transpose(1, 2)[..., -(self.spec.value_dim or self.spec.head_dim) :]
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        mask = mask[:, None, None]
        out = self._attention(q.unsqueeze(2), keys, values, mask, scale, sinks).squeeze(2)
        return out.masked_fill(is_padding[:, None, None], torch.nan)  # anything


class RecordedRunner(GPUModelRunner):
    """Takes the place of a CPUModelRunner."""

    def to_host(self, parts):
        """A copy: the next step is sampled to the same memory."""
        return CPUModelRunner.to_host(self, [copy.deepcopy(part) for part in parts])

    def load_model(self, progress: Callable[[float], None]) -> None:
        super().load_model(progress)
        self.backend = GraphBackend(self.backend.spec)
        for matrix in self.adapters.matrices if self.adapters else ():
            ON_HOST[id(matrix.factors.part_ends)] = matrix.factors.part_ends

    def recorder(self):
        return record


class ExpertsOnDevice(experts.OneByOne):
    """Stands for the kernels that a GPU has for experts."""

    def multiply(self, x, index, starts):
        rows = x if index is None else x[index]
        numbers = torch.arange(len(rows))
        outputs = []
        for matrix, start, end in zip(self.matrices, starts, starts[1:], strict=False):
            is_own = (numbers >= start) & (numbers < end)
            outputs.append(torch.where(is_own.unsqueeze(1), matrix.product(rows), 0))
        return torch.stack(outputs).sum(0)


def grouped_quant_method_on_device(matrices, biases=None):
    """As `grouped_quant_method` does on a GPU."""
    method = ExpertsOnDevice(matrices)
    return method if biases is None else experts.WithBiases(method, biases)


def use_recorded_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on a CPU get a RecordedRunner. What is no operation of torch is off."""
    monkeypatch.setattr(experts, "grouped_quant_method", grouped_quant_method_on_device)
    monkeypatch.setattr("servd.worker.worker.CPUModelRunner", RecordedRunner)
    if find_spec("servd.worker.ops.native"):
        monkeypatch.setattr(int4, "round_groups", with_kernels(int4.round_groups))
        monkeypatch.setattr("servd.worker.ops.native.library", lambda: None)


def with_kernels(load: Callable[..., Any]) -> Callable[..., Any]:
    """Rounding is the host's on a GPU, too, and has its kernels there."""
    library = native.library

    def call(*arguments: Any) -> Any:
        with patch("servd.worker.ops.native.library", library):
            return load(*arguments)

    return call


def write_config(folder: Path, **options: Any) -> Path:
    """A tiny Llama for load_format dummy."""
    config = LLAMA | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | options
    (folder / "config.json").write_text(json.dumps(config))
    return folder
