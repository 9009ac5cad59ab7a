"""Loading a quantized checkpoint takes its final memory and at most two matrices more."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from servd.checkpoint.model_spec import read_spec
from servd.worker.runner.gpu_model_runner import GPUModelRunner
from servd.worker.worker import Worker
from tests.worker.driver import config_for
from tests.worker.gates import catalogue
from tests.worker.gates.simulated import use_simulated_device

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
CASES = [(family, form) for family in ("8B", "30B-A3B") for form in catalogue.FORMATS]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operations of torch allocate, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.storages = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {id(x.untyped_storage()) for x in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if id(storage) not in inputs and storage not in self.storages:
                self.storages.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage.nbytes())
        return out

    def free(self, num_bytes: int) -> None:
        self.live -= num_bytes


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class CopyToDevice(TorchFunctionMode):
    """Copies where a GPU would have to, from the mapped file."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_copy = func is torch.Tensor.to and isinstance(args[1], torch.device)
        return out.clone() if is_copy and out is args[0] else out


@pytest.mark.parametrize(("family", "form"), CASES, ids=str)
def test_loading_takes_little_more_than_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, form: str
):
    use_simulated_device(monkeypatch)
    monkeypatch.setitem(catalogue.FAMILIES, family, catalogue.FAMILIES[family] | SIZES)
    folder = catalogue.write_headers(tmp_path, family, form)
    worker = Worker(config_for(folder, dtype="float16"), read_spec(folder), 0, lambda *_: None)
    assert isinstance(worker.runner, GPUModelRunner)
    with CopyToDevice(), LiveBytes() as memory:
        worker.load_model()
    # Gate and up, or of a layer with experts, queries, keys and values; in 16 bits.
    num_rows = 2 * SIZES["intermediate_size"] if family == "8B" else 3 * SIZES["hidden_size"]
    largest = 2 * num_rows * SIZES["hidden_size"]
    assert memory.peak <= memory.live + 2 * largest, (memory.peak, memory.live, largest)
