"""Host memory against computing again: requests that a KV cache has no room for, in turns.

    python -m benchmarks.swap [--layers N] [--prompt N] [--rounds N]

Prints CPU seconds, tokens computed and whether outputs were equal. Every request has 600 tokens,
64 of them come at once, and the cache holds 16.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.gpu.engine import Bench
from benchmarks.gpu.shapes import GPT2_124M

NUM_REQUESTS, NUM_TOKENS, SHORTAGE = 64, 600, 4
BLOCK = 16


def measure(shape: dict[str, Any], prompt: int, host_gib: float | None) -> dict[str, Any]:
    """One run: seconds, tokens computed, preemptions, the outputs."""
    blocks = NUM_REQUESTS * -(-NUM_TOKENS // BLOCK) // SHORTAGE
    block_bytes = BLOCK * shape["n_layer"] * 2 * shape["n_embd"] * 4
    bench = Bench(
        shape, "cpu", dtype="float32", max_num_seqs=NUM_REQUESTS, max_model_len=1024,
        kv_cache_memory=blocks * block_bytes, kv_offloading_size=host_gib,
    )  # fmt: skip
    for _ in range(NUM_REQUESTS):
        bench.add(prompt, NUM_TOKENS - prompt)
    outputs: dict[str, list[int]] = {}
    preemptions = 0
    began, wall = time.process_time(), time.perf_counter()
    while bench.engine.has_work:
        for message in bench.engine.step().values():
            preemptions += message.stats.num_preemptions if message.stats else 0
            for each in message.outputs:
                outputs.setdefault(each.request_id, []).extend(each.new_token_ids)
    return {
        "cpu": time.process_time() - began,
        "wall": time.perf_counter() - wall,
        "tokens": sum(step.num_tokens for step in bench.executor.steps),
        "steps": len(bench.executor.steps),
        "preemptions": preemptions,
        "outputs": outputs,
    }


def main() -> None:
    """Without and with host memory, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    shape = GPT2_124M | {"n_layer": args.layers, "vocab_size": 1000, "dtype": "float32"}
    for turn in range(args.rounds):
        found = [measure(shape, args.prompt, host) for host in (None, 2.0)]
        computed, swapped = found
        for name, each in zip(("computed", "swapped"), found, strict=True):
            shown = {k: round(v, 1) for k, v in each.items() if k != "outputs"}
            print(f"round {turn}, {name}: {shown}", flush=True)
        cpu, wall = (swapped[name] / computed[name] for name in ("cpu", "wall"))
        equal = computed["outputs"] == swapped["outputs"]
        print(f"round {turn}: CPU {cpu:.2f}, wall {wall:.2f}, equal {equal}", flush=True)


if __name__ == "__main__":
    main()
