"""A feed-forward of experts beside a dense one with as many active parameters, in turns:
`python -m benchmarks.experts [hidden size num_experts top_k]`.
"""

from __future__ import annotations

import sys
import time

import torch
from msgspec.structs import replace

from servd.checkpoint.model_spec import FAKE_SPEC
from servd.worker.device.parallel import Parallel
from servd.worker.layers._matrix import MakeQuantMethod
from servd.worker.layers.experts import SparseMoE
from servd.worker.layers.packed import PackedMatrix
from servd.worker.models.llama import LlamaMLP
from servd.worker.ops import native
from servd.worker.quantization import int4, int8

ROWS = (1, 4, 16, 64, 512)
ROUNDS = 20
WEIGHTS = 1 << 28  # bytes of each kind in layers taken in turns, so that none stays in the caches
FORMS = {
    "bfloat16": lambda weight: PackedMatrix(weight.bfloat16()),
    "int8": int8.quantize,
    "int4": int4.quantize,
}


def filled(module: torch.nn.Module, form: str) -> torch.nn.Module:
    """With random weights."""
    for parameter in module.parameters():
        parameter.data.normal_(std=0.02)
        parameter.process_weights(MakeQuantMethod(FORMS[form]))  # type: ignore[operator]
    return module


def seconds(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """That one thread computes for a pass."""
    started = time.thread_time()
    layer(x)
    return time.thread_time() - started


@torch.inference_mode()
def main(hidden: int = 1024, size: int = 1792, num_experts: int = 8, top_k: int = 2) -> None:
    """Print a line for each form and number of rows."""
    native.set_num_threads(1)  # on a shared machine, times of several are those of the neighbours
    parallel = Parallel()
    spec = replace(FAKE_SPEC, hidden_size=hidden, config={"intermediate_size": size * top_k})
    copies = max(2, WEIGHTS // (6 * hidden * size * num_experts))
    for form in FORMS:
        pairs = [
            (
                filled(SparseMoE(hidden, size, num_experts, top_k, True, "silu", parallel), form),
                [filled(LlamaMLP(spec, parallel), form) for _ in range(num_experts // top_k)],
            )
            for _ in range(copies)
        ]
        for rows in ROWS:
            x = torch.randn(rows, hidden)
            times = ([], [])
            for number in range(ROUNDS):
                moe, dense = pairs[number % copies]
                times[0].append(seconds(moe, x))
                times[1].append(seconds(dense[number // copies % len(dense)], x))
            # The fastest quarter: other programs share the memory.
            fast = [sorted(durations)[ROUNDS // 4] * 1e3 for durations in times]
            print(
                f"{form:8} {rows:4} rows: experts {fast[0]:8.3f} ms, dense {fast[1]:8.3f} ms, "
                f"ratio {fast[0] / fast[1]:.2f}"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
