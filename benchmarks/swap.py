"""Host memory against computing again: requests that a KV cache has no room for, in turns.

    python -m benchmarks.swap [--shape smollm2] [--layers N] [--prompt N] [--rounds N]

Prints CPU seconds, tokens computed and whether outputs were equal. Every request has 600 tokens,
64 of them come at once, and the cache holds 16.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.gpu.engine import Bench
from benchmarks.gpu.shapes import GPT2_124M

NUM_REQUESTS = 64
NUM_TOKENS = 600
SHORTAGE = 4
BLOCK = 16
# What they are in a layer; vocabularies are small, and have the same part in both.
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2_124M,
    "smollm2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}


def measure(shape: dict[str, Any], prompt: int, host_gib: float | None) -> dict[str, Any]:
    """One run: seconds, tokens computed, preemptions, the outputs."""
    blocks = NUM_REQUESTS * -(-NUM_TOKENS // BLOCK) // SHORTAGE
    sizes = (
        shape.get("num_key_value_heads", 12),
        shape.get("num_hidden_layers", shape.get("n_layer")),
    )
    block_bytes = BLOCK * 2 * 64 * 4 * sizes[0] * sizes[1]
    bench = Bench(
        shape,
        "cpu",
        dtype="float32",
        max_num_seqs=NUM_REQUESTS,
        max_model_len=1024,
        kv_cache_memory=blocks * block_bytes,
        kv_offloading_size=host_gib,
    )
    for _ in range(NUM_REQUESTS):
        bench.add(prompt, NUM_TOKENS - prompt)
    outputs: dict[str, list[int]] = {}
    preemptions = 0
    began = time.process_time()
    wall = time.perf_counter()
    while bench.engine.has_work:
        for message in bench.engine.step().values():
            preemptions += message.stats.num_preemptions if message.stats else 0
            for output in message.all_outputs:
                outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
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
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    sizes = {"vocab_size": 1000, "dtype": "float32"}
    layers = {"n_layer" if args.shape == "gpt2" else "num_hidden_layers": args.layers}
    shape = SHAPES[args.shape] | sizes | layers
    for turn in range(args.rounds):
        results = [measure(shape, args.prompt, host) for host in (None, 2.0)]
        computed, swapped = results
        for name, result in zip(("computed", "swapped"), results, strict=True):
            figures = {k: round(v, 1) for k, v in result.items() if k != "outputs"}
            print(f"round {turn}, {name}: {figures}", flush=True)
        cpu, wall = (swapped[name] / computed[name] for name in ("cpu", "wall"))
        equal = computed["outputs"] == swapped["outputs"]
        print(f"round {turn}: CPU {cpu:.2f}, wall {wall:.2f}, equal {equal}", flush=True)


if __name__ == "__main__":
    main()
