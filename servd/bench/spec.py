"""What drafting ahead of the model is worth: methods and depths beside none; the engine runs in
this process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from servd.api.offline_metrics import Counter
from servd.bench import _data, _engine
from servd.bench._data import Prompt
from servd.cli import _options
from servd.cli._output import format_row, write_json
from servd.errors import EngineError
from servd.llm import LLM
from servd.llm_engine import InProcess
from servd.speculative import read_keys, readers

LEAST_SECONDS = 1.0  # per run: shorter ones vary by more than drafts gain
HEAD = ("method", "depth", "batch", "tok/s", "drafts", "length", "ms/step", "ratio")


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


class Figures(msgspec.Struct):
    method: str
    depth: int
    batch: int
    tokens_per_s: float  # output tokens
    num_drafts: int  # tokens that were drafted and verified
    acceptance_length: float  # tokens that a step with drafts yields for a request
    ms_per_step: float
    seconds: float
    ratio: float = 1.0  # tokens_per_s over those of none


def run(arguments: argparse.Namespace) -> int:
    keys = read_keys(_options.load_options(arguments).get("speculative_config", {}))
    prompts = _data.make_prompts(arguments, more=1)
    print(format_row(*HEAD))
    rows, texts = measure(arguments, None, prompts, {})
    base = {row.batch: row.tokens_per_s for row in rows}
    for method, _, draft in (named.partition("=") for named in arguments.methods):
        for depth in arguments.depths:
            own = {key: keys[key] for key in keys if not readers(key, method)}
            own |= {"method": method, "num_speculative_tokens": depth}
            if draft:
                own["model"] = draft
            measured, same = measure(arguments, own, prompts, base)
            is_synthetic = own.get("rejection_sample_method") == "synthetic"
            if same != texts and not is_synthetic:
                raise EngineError(f"{method} with {depth} drafts changed an output: report this")
            rows += measured
    if any(row.seconds < LEAST_SECONDS for row in rows):
        print(f"a run of less than {LEAST_SECONDS:g} s says little: raise --output-len")
    if arguments.json:
        write_json("--json", arguments.json, {"rows": rows})
    return 0


def measure(
    arguments: argparse.Namespace,
    keys: dict[str, Any] | None,
    prompts: Sequence[Prompt],
    base: Mapping[int, float],
) -> tuple[list[Figures], list[list[list[int]]]]:
    """Measure and print one configuration at each batch size; `base` has tokens a second without
    drafts.

    Returns:
        the figures, and the outputs of each run, which are greedy.
    """
    llm = _engine.make_llm(arguments, speculative_config=keys)
    generate(llm, prompts[:1], 1)
    best: dict[int, Figures] = {}
    outputs: list[list[list[int]]] = []
    for batch in arguments.batches * arguments.rounds:
        num_before, drafts_before, accepted_before, steps_before = count(llm)
        started = time.perf_counter()
        outputs.append(generate(llm, prompts[1:], batch))
        seconds = time.perf_counter() - started
        num_after, drafts_after, accepted_after, steps_after = count(llm)
        num_accepted = accepted_after - accepted_before
        tokens_per_s = sum(map(len, outputs[-1])) / seconds
        row = Figures(
            method=keys["method"] if keys else "none",
            depth=keys["num_speculative_tokens"] if keys else 0,
            batch=batch,
            tokens_per_s=tokens_per_s,
            num_drafts=drafts_after - drafts_before,
            acceptance_length=1 + num_accepted / max(num_after - num_before, 1),
            ms_per_step=1000 * seconds / (steps_after - steps_before),
            seconds=seconds,
            ratio=tokens_per_s / base.get(batch, tokens_per_s),
        )
        best[batch] = max(row, best.get(batch, row), key=lambda row: row.tokens_per_s)
    llm.close()
    for row in best.values():
        length = row.acceptance_length if row.num_drafts else None
        cells = [row.depth, row.batch, row.tokens_per_s, row.num_drafts, length, row.ms_per_step]
        print(format_row(row.method, *cells, f"{row.ratio:.2f}x"))
    return list(best.values()), outputs


def count(llm: LLM) -> tuple[int, int, int, int]:
    """Return the steps with drafts, drafted tokens, accepted tokens, and all steps so far."""
    assert isinstance(llm.engine.port, InProcess)
    found = {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
    drafts = [
        found.get(f"vllm:spec_decode_num_{name}", 0)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    return drafts[0], drafts[1], drafts[2], llm.engine.port.engine.scheduler.report(0).step


def generate(llm: LLM, prompts: Sequence[Prompt], batch: int) -> list[list[int]]:
    texts: list[list[int]] = []
    for at in range(0, len(prompts), batch):
        outputs = _engine.generate(llm, prompts[at : at + batch])
        texts += [output.outputs[0].token_ids for output in outputs]
    return texts
