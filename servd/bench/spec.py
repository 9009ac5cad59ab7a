"""Measure the gain of speculative decoding, by method and number of drafts, over no drafts. The
engine runs in this process.
"""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from servd.base.errors import EngineError
from servd.bench import _data, _engine
from servd.bench._data import BenchPrompt
from servd.config.speculative import read_keys, readers
from servd.core.client import InprocClient
from servd.offline import metrics as offline_metrics
from servd.offline.llm import LLM
from servd.terminal import engine_flags
from servd.terminal.output import format_row, write_json

LEAST_SECONDS = 1.0  # per run: shorter runs vary by more than drafts gain
COUNTED = "vllm:spec_decode_num_"
COLUMNS = {  # of the table, and of the figures
    "depth": "depth",
    "batch": "batch",
    "tok/s": "tokens_per_s",
    "drafts": "num_drafts",
    "length": "acceptance_length",
    "ms/step": "ms_per_step",
    "ratio": "ratio",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = "what to compare, e.g. ngram eagle3=FOLDER [ngram]; further keys: --speculative-config"
    add("--methods", nargs="+", default=["ngram"], metavar="METHOD[=DRAFT]", help=help)
    help = "values of num_speculative_tokens [2 4 8]"
    add("--depths", nargs="+", type=int, default=[2, 4, 8], metavar="N", help=help)
    help = "requests at a time [1 8]"
    add("--batches", nargs="+", type=int, default=[1, 8], metavar="N", help=help)
    help = "times that each runs, of which the fastest counts [%(default)s]"
    add("--rounds", type=int, default=2, metavar="N", help=help)
    _engine.add_options(parser, batch=8, input_len=64, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    keys = read_keys(engine_flags.load_options(arguments).get("speculative_config", {}))
    prompts = _data.make_prompts(arguments, more=1)
    print(format_row("method", *COLUMNS))
    rows, texts = measure(arguments, None, prompts, {})
    base = {row["batch"]: row["tokens_per_s"] for row in rows}
    for method, _, draft in (spec.partition("=") for spec in arguments.methods):
        for depth in arguments.depths:
            draft_keys = {key: keys[key] for key in keys if not readers(key, method)}
            draft_keys |= {"method": method, "num_speculative_tokens": depth}
            if draft:
                draft_keys["model"] = draft
            measured, same = measure(arguments, draft_keys, prompts, base)
            is_synthetic = draft_keys.get("rejection_sample_method") == "synthetic"
            if same != texts and not is_synthetic:
                raise EngineError(f"{method} with {depth} drafts changed an output: report this")
            rows += measured
    if any(row["seconds"] < LEAST_SECONDS for row in rows):
        print(f"a run of less than {LEAST_SECONDS:g} s is not reliable: raise --output-len")
    if arguments.json:
        write_json("--json", arguments.json, {"rows": rows})
    return 0


def measure(
    arguments: argparse.Namespace,
    keys: dict[str, Any] | None,
    prompts: Sequence[BenchPrompt],
    base: dict[int, float],
) -> tuple[list[dict[str, Any]], list[list[list[int]]]]:
    """Measure and print one configuration at each batch size. `base` has tokens per second without
    drafts. Return the figures, and the greedy outputs of each run.
    """
    llm = _engine.make_llm(arguments, speculative_config=keys)
    generate(llm, prompts[:1], 1)
    best: dict[int, dict[str, Any]] = {}
    outputs: list[list[list[int]]] = []
    for batch in arguments.batches * arguments.rounds:
        before = count_drafts(llm)
        started = time.perf_counter()
        outputs.append(generate(llm, prompts[1:], batch))
        seconds = time.perf_counter() - started
        counts = count_drafts(llm) - before
        num_accepted = counts["accepted_tokens"]
        tokens_per_s = sum(map(len, outputs[-1])) / seconds
        if batch in best and best[batch]["tokens_per_s"] >= tokens_per_s:
            continue
        best[batch] = {
            "method": keys["method"] if keys else "none",
            "depth": keys["num_speculative_tokens"] if keys else 0,
            "batch": batch,
            "tokens_per_s": tokens_per_s,
            "num_drafts": counts["draft_tokens"],
            # Tokens that a step with drafts yields for a request.
            "acceptance_length": 1 + num_accepted / max(counts["drafts"], 1),
            "ms_per_step": 1000 * seconds / counts["steps"],
            "seconds": seconds,
            "ratio": tokens_per_s / base.get(batch, tokens_per_s),
        }
    llm.close()
    for row in best.values():
        print(format_row(row["method"], *(row[name] for name in COLUMNS.values())))
    return list(best.values()), outputs


def count_drafts(llm: LLM) -> Counter[str]:
    """Return the counts so far: drafts, draft tokens, accepted tokens and all steps."""
    assert isinstance(llm.engine.engine_core, InprocClient)
    counts = Counter({"steps": llm.engine.engine_core.engine.scheduler.report(0).step})
    for metric in llm.get_metrics():
        if isinstance(metric, offline_metrics.Counter) and metric.name.startswith(COUNTED):
            counts[metric.name.removeprefix(COUNTED)] = metric.value
    return counts


def generate(llm: LLM, prompts: Sequence[BenchPrompt], batch: int) -> list[list[int]]:
    texts: list[list[int]] = []
    for at in range(0, len(prompts), batch):
        outputs = _engine.generate(llm, prompts[at : at + batch])
        texts += [output.outputs[0].token_ids for output in outputs]
    return texts
