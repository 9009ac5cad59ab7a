"""What drafting ahead of the model is worth: methods and depths beside none; the engine runs in
this process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from servd.cli import _options
from servd.cli.bench import _data, _engine, _report
from servd.errors import EngineError
from servd.llm import LLM
from servd.llm_engine import InProcess
from servd.messages import EngineCoreOutputs
from servd.params import SamplingParams
from servd.speculative import read_keys, readers
from servd.stats import DraftStats

LEAST_SECONDS = 1.0  # per run: shorter ones vary by more than drafts gain


def add_options(parser: argparse.ArgumentParser) -> None:
    _report.add_options(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw the speed-up (.svg, .png)")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["ngram"],
        metavar="METHOD[=DRAFT]",
        help="what to compare, e.g. ngram eagle3=FOLDER; further keys are those of "
        "--speculative-config [ngram]",
    )
    parser.add_argument(
        "--depths", nargs="+", type=int, default=[2, 4, 8], metavar="N",
        help="values of num_speculative_tokens [2 4 8]",
    )  # fmt: skip
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1, 8], metavar="N",
        help="requests at a time [1 8]",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N",
        help="times that each runs, of which the fastest counts [%(default)s]",
    )  # fmt: skip
    _engine.add_options(parser, batch=8, input_len=64, output_len=64)


@dataclass(frozen=True)
class Figures:
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
    figure = _report.new_figure() if arguments.plot else None
    keys = read_keys(_options.load_options(arguments).get("speculative_config", {}))
    prompts = _data.make_prompts(arguments, more=1)
    plain, texts = measure(arguments, None, prompts)
    base = {row.batch: row.tokens_per_s for row in plain}
    print(f"{'method':>12} {'depth':>5} {'batch':>5} {'tok/s':>9} {'drafts':>7} {'length':>7} "
          f"{'ms/step':>8} {'ratio':>6}")  # fmt: skip
    rows: list[Figures] = []
    show(plain, base, rows)
    for method, _, draft in (named.partition("=") for named in arguments.methods):
        for depth in arguments.depths:
            own = {"method": method, "num_speculative_tokens": depth}
            own |= {"model": draft} if draft else {}
            own = {key: keys[key] for key in keys if not readers(key, method)} | own
            measured, same = measure(arguments, own, prompts)
            is_synthetic = own.get("rejection_sample_method") == "synthetic"
            if same != texts and not is_synthetic:
                raise EngineError(f"{method} with {depth} drafts changed an output: report this")
            show(measured, base, rows)
    if any(row.seconds < LEAST_SECONDS for row in rows):
        print(f"too short: a run of less than {LEAST_SECONDS:g} s says little; give more prompts "
              "or a longer --output-len")  # fmt: skip
    if arguments.json:
        _report.write_json(arguments.json, {"rows": [asdict(row) for row in rows]})
    if figure is not None:
        plot(figure, arguments.plot, rows)
    return 0


def show(measured: Sequence[Figures], base: Mapping[int, float], rows: list[Figures]) -> None:
    for row in measured:
        row = replace(row, ratio=row.tokens_per_s / base[row.batch])
        rows.append(row)
        length = f"{row.acceptance_length:.2f}" if row.num_drafts else "-"
        print(f"{row.method:>12} {row.depth or '':>5} {row.batch:5} {row.tokens_per_s:9.1f} "
              f"{row.num_drafts or '-':>7} {length:>7} {row.ms_per_step:8.2f} {row.ratio:5.2f}x"
              f"{'  too short' if row.seconds < LEAST_SECONDS else ''}")  # fmt: skip


class Watch:
    """Adds up what an engine reports."""

    def __init__(self, llm: LLM) -> None:
        assert isinstance(llm.engine.port, InProcess)
        engine = llm.engine.port.engine
        self._step = engine.step
        self.last_step = 0
        self.drafts = DraftStats()
        engine.step = self.step

    def step(self) -> dict[int, EngineCoreOutputs]:
        outputs = self._step()
        for message in outputs.values():
            assert message.stats is not None
            self.last_step = message.stats.step
            self.drafts.add(message.stats.drafts)
        return outputs


def measure(
    arguments: argparse.Namespace, keys: dict[str, Any] | None, prompts: Sequence[_data.Prompt]
) -> tuple[list[Figures], list[list[list[int]]]]:
    """Figures of one configuration for each batch size, and its outputs, which are greedy."""
    llm = _engine.make_llm(arguments, speculative_config=keys)
    watch = Watch(llm)
    generate(llm, prompts[:1], 1)
    best: dict[int, Figures] = {}
    outputs: list[list[list[int]]] = []  # by run
    for batch in arguments.batches * arguments.rounds:
        watch.drafts, first_step = DraftStats(), watch.last_step
        started = time.perf_counter()
        texts = generate(llm, prompts[1:], batch)
        outputs.append(texts)
        seconds = time.perf_counter() - started
        drafts = watch.drafts
        row = Figures(
            method=keys["method"] if keys else "none",
            depth=keys["num_speculative_tokens"] if keys else 0,
            batch=batch,
            tokens_per_s=sum(map(len, texts)) / seconds,
            num_drafts=drafts.num_draft_tokens,
            acceptance_length=1 + drafts.num_accepted_tokens / max(drafts.num_drafts, 1),
            ms_per_step=1000 * seconds / (watch.last_step - first_step),
            seconds=seconds,
        )
        best[batch] = max(row, best.get(batch, row), key=lambda row: row.tokens_per_s)
    llm.close()
    return list(best.values()), outputs


def generate(llm: LLM, prompts: Sequence[_data.Prompt], batch: int) -> list[list[int]]:
    texts: list[list[int]] = []
    for at in range(0, len(prompts), batch):
        part = prompts[at : at + batch]
        params = [
            SamplingParams(temperature=0, max_tokens=prompt.output_len, ignore_eos=True)
            for prompt in part
        ]
        outputs = llm.generate([prompt.content for prompt in part], params, use_tqdm=False)
        texts += [output.outputs[0].token_ids for output in outputs]
    return texts


def plot(figure: Any, file: str, rows: Sequence[Figures]) -> None:
    """Speed-up and acceptance over the depth; `file` ends in a format (.svg, .png)."""
    series: dict[tuple[str, int], list[Figures]] = {}
    for row in rows:
        if row.depth:
            series.setdefault((row.method, row.batch), []).append(row)
    titles = {"ratio": "tok/s over those of none", "acceptance_length": "mean acceptance length"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for (method, batch), line in series.items():
            depths, values = [row.depth for row in line], [getattr(row, name) for row in line]
            axes.plot(depths, values, marker="o", label=f"{method}, batch {batch}")
        axes.set(title=title, xlabel="num_speculative_tokens")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file)
