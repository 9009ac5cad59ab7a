"""Offline decode speed beside transformers, in one run: `python -m benchmarks.peers MODEL`."""

import argparse
import random
import statistics
import time
from typing import Any

from servd import LLM, SamplingParams
from servd.checkpoint.hub import local_folder


def servd_seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Wall time to generate `num_tokens` for every prompt."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(o.outputs[0].token_ids) == num_tokens for o in outputs)
    return time.perf_counter() - start


def transformers_seconds(model: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """The same with `generate`."""
    import torch

    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            torch.tensor(prompts),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    # In a process of its own, because it leaves torch one thread.
    llm = LLM(
        args.model,
        separate_process=True,
        device="cpu",
        dtype="float32",
        enable_prefix_caching=False,
    )
    peer = AutoModelForCausalLM.from_pretrained(
        local_folder(args.model) or args.model, dtype=torch.float32
    ).eval()
    rng = random.Random(0)
    print(f"{'batch':>5} {'servd ms/step':>14} {'transformers ms/step':>21} {'ratio':>6}")
    for batch in args.batch:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.repeats):  # in turn, so that a slow minute of the machine meets both
            prompts = [[rng.randrange(1000) for _ in range(args.input_len)] for _ in range(batch)]
            times[0].append(servd_seconds(llm, prompts, args.output_len))
            times[1].append(transformers_seconds(peer, prompts, args.output_len))
        ours, theirs = (1000 * statistics.median(t) / args.output_len for t in times)
        print(f"{batch:5} {ours:14.1f} {theirs:21.1f} {theirs / ours:6.2f}")


if __name__ == "__main__":
    main()
