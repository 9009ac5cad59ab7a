"""Show what memory a model needs on this machine, and what fits."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping

import msgspec

from servd import launch
from servd.base import plugins
from servd.base.cards import CARDS, Card
from servd.base.errors import ConfigError
from servd.base.sizes import STEP_TOKENS, MemoryPlan, StepTime, advise_more_memory, format_bytes
from servd.checkpoint import hub
from servd.checkpoint.facts import read_facts
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.config.kv_layout import KVLayout
from servd.config.machine import Machine
from servd.ipc.child import import_ahead
from servd.terminal import engine_flags

WORKER = "servd.worker"
MAX_GPUS = 8  # of a machine with cards of --device
ROUNDED = ("fp8", "int8", "int4")  # values of --quantization for 16-bit checkpoints
LENGTHS = (256, 1024, 4096, 16384, 65536)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `servd serve`, for which the plan is made."""
    parser.usage = "%(prog)s [MODEL] [OPTION ...]"
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        default=[],
        help="tokens of a request (prompt and answer), to show how many such requests fit",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="CHECKPOINT",
        default=[],
        help="other checkpoints of the model, or values of --quantization: which fits, and is fast",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    engine_flags.add_options(parser, [*CARDS])


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 if no request fits."""
    options = engine_flags.load_options(arguments)
    card = CARDS.get(str(options.get("device")))
    if card is not None:
        options["device"] = "cuda"
    report = make_report(Config.load(options), card)
    if arguments.compare:
        if arguments.json:
            raise ConfigError("--json: has no effect with --compare: leave one of them out")
        reports = {report.config.model.model or "": report}
        failures: dict[str, str] = {}
        for name in arguments.compare:
            key = "quantization" if name in ROUNDED else "model"
            try:
                reports[name] = make_report(Config.load(options | {key: name}), card)
            except ConfigError as error:
                failures[name] = str(error)
        print(comparison(reports, failures))
        return 0 if any(report.plan.num_blocks for report in reports.values()) else 1
    lengths = arguments.lengths or sorted(
        {*(n for n in LENGTHS if n < report.max_model_len), report.max_model_len}
    )
    if min(lengths) < 1:
        raise ConfigError("--lengths: must be at least 1")
    if max(lengths) > report.max_model_len:
        raise ConfigError(
            f"--lengths {max(lengths)}: a request has at most {report.max_model_len} tokens here, "
            "by --max-model-len, the model or the KV cache"
        )
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report.facts(lengths))).decode())
    else:
        print(report.text(lengths))
    return 0 if report.plan.num_blocks else 1


def make_report(config: Config, card: Card | None = None) -> PlanReport:
    """Return the plan of these options, here or on `card`. Raises like `find_and_resolve`."""
    machine = None
    if card is not None:
        machine = Machine(num_gpus=MAX_GPUS, torch_has_cuda=True, has_triton=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = config.model
        headers = model.model
        if headers is not None:
            headers = hub.find_gguf_headers(headers, model.revision, model.download_dir, scratch)
        config, spec, _ = launch.find_and_resolve(config.replace(model=headers), machine)
        if not spec.folder:
            raise ConfigError("--executor fake has no weights: leave it out")
        config, spec = with_headers(config, spec, scratch)
        import_ahead(f"{WORKER}.runner.dry_run")  # imports torch, a tenth faster
        plan = plugins.load(f"{WORKER}.runner", "dry_run", "plan")(config, spec, card)
        if headers != model.model:  # else it stays what a draft names as its target
            config = config.replace(model=model.model)
        return PlanReport(config, spec, plan)


def with_headers(config: Config, spec: ModelSpec, scratch: str) -> tuple[Config, ModelSpec]:
    """Return config and spec with folders that have the weights, or only headers, in `scratch`."""
    model = config.model
    if model.load_format != "dummy":
        assert model.model is not None
        folder = hub.find_headers(model.model, model.revision, model.download_dir, scratch)
        spec = msgspec.structs.replace(spec, folder=str(folder))
    if (draft := model.speculative_config) is not None and draft.model is not None:
        folder = hub.find_headers(draft.model, draft.revision, model.download_dir, scratch)
        draft = msgspec.structs.replace(draft, model=str(folder))
        config = config.replace(speculative_config=draft)
    return config, spec


def comparison(reports: Mapping[str, PlanReport], failures: Mapping[str, str]) -> str:
    """Return a table of checkpoints of a model, and the fastest that fits. `failures`: errors of
    checkpoints that cannot run.
    """
    width = max(map(len, (*reports, *failures)))
    lines = [f"{'checkpoint':<{width}}    weights  KV tokens   ms of a step, by requests"]
    times: dict[str, float] = {}
    for name, report in reports.items():
        plan = report.plan
        steps = "  ".join(f"{step.num_rows}: {step.total:.2f}" for step in report.steps)
        tokens = report.num_tokens if plan.num_blocks else "none"
        size = format_bytes(plan.sizes.weights)
        lines.append(f"{name:<{width}} {size:>10} {tokens:>10}   {steps or 'unknown'}")
        if plan.num_blocks and report.steps:
            times[name] = report.steps[0].total
    lines += [f"{name:<{width}} {error}" for name, error in failures.items()]
    if times:
        lines += ["", f"the fastest that fits: {min(times, key=times.__getitem__)}"]
    return "\n".join(lines)


class PlanReport:
    """The memory plans of all ranks, for users."""

    def __init__(self, config: Config, spec: ModelSpec, plan: MemoryPlan) -> None:
        max_model_len = config.model.max_model_len
        max_num_seqs = config.scheduler.max_num_seqs
        assert max_model_len is not None and max_num_seqs is not None
        self.config = config
        self.spec = spec
        self.plan = plan
        self.quantization = config.model.quantization or read_facts(spec.folder).precision
        self.block_size = config.cache.block_size
        self.layout = KVLayout.from_config(config, plan.kv_windows)
        self.num_tokens = self.layout.num_tokens(plan.num_blocks, max_model_len)
        per_request = self.layout.blocks(max_model_len) * plan.sizes.kv_per_block
        self.kv_bytes_per_token = per_request // -(-max_model_len // self.block_size)
        self.kv_bytes_per_token //= self.block_size
        self.max_num_seqs = max_num_seqs
        longest = self.layout.max_tokens(plan.num_blocks, max_model_len)
        self.max_model_len = min(max_model_len, longest) or max_model_len
        self.for_checkpoints = plan.num_checkpoints * plan.sizes.per_checkpoint
        self.for_caches = plan.free - plan.sizes.persistent - plan.sizes.step  # at most

    def fit(self, length: int) -> int:
        return self.plan.num_blocks // self.layout.blocks(length)

    @property
    def steps(self) -> list[StepTime]:
        """Return the times of decode steps whose requests fit at once."""
        num_requests = self.fit(min(STEP_TOKENS, self.max_model_len))
        return [step for step in self.plan.steps if step.num_rows <= num_requests]

    def advice(self) -> list[str]:
        sizes = self.plan.sizes
        length = self.max_model_len
        seqs = self.max_num_seqs
        if self.for_caches < 0:
            rows = sizes.per_requests + sizes.step
            if self.plan.free > sizes.persistent - sizes.per_requests and seqs > 1:
                return [f"lower --max-num-seqs: {seqs} requests take {format_bytes(rows)}"]
            return [advise_more_memory(-self.for_caches, bool(self.quantization))]
        if self.plan.shortage:
            return [self.plan.shortage]
        room = self.for_caches - self.for_checkpoints
        sequence_bytes = self.layout.blocks(length) * sizes.kv_per_block
        if self.fit(length) < seqs:
            shorter = self.layout.max_tokens(self.plan.num_blocks // seqs, length)
            lower = [f"lower --max-num-seqs to {self.fit(length)}"]
            lower += [f"--max-model-len to {shorter}"] if shorter else []
            hints = [f"for all to run at their longest, {' or '.join(lower)}"]
            if sequence_bytes * seqs <= room:
                hints[0] += f", or raise {self.cache_options(sequence_bytes * seqs, 'to ')}"
            return hints
        # What one more request, or one more block of each, takes beside the cache.
        budget = self.config.scheduler.max_num_batched_tokens or 1
        row = (sizes.per_requests + sizes.sampling) // seqs + sizes.forward // budget
        hints = []
        if (more := (room + sizes.per_requests) // (sequence_bytes + row)) > seqs:
            cache = self.cache_options(more * sequence_bytes)
            hints.append(f"--max-num-seqs could be {more}, with {cache}")
        block = sizes.kv_per_block + sizes.requests // (seqs * self.layout.blocks(length))
        max_positions = self.spec.max_position_embeddings
        max_tokens = self.layout.max_tokens(room // (seqs * block), max_positions)
        longer = min(max_tokens, max_positions)
        if longer > length:
            cache = self.cache_options(self.layout.blocks(longer) * seqs * sizes.kv_per_block)
            hints.append(f"--max-model-len could be {longer}, with {cache}")
        return hints

    def cache_options(self, kv_bytes: int, to: str = "") -> str:
        """Return the options of a KV cache of this size beside as many checkpoints as now."""
        sizes = {"--kv-cache-memory": kv_bytes, "--max-state-memory": self.for_checkpoints}
        options = [f"{name} {to}{format_bytes(size)}" for name, size in sizes.items() if size]
        return " and ".join(options)

    def facts(self, lengths: list[int]) -> dict[str, object]:
        """Return the whole plan as data. Sizes are in bytes."""
        return {
            "model": self.config.model.model,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "block_size": self.block_size,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            **msgspec.to_builtins(self.plan),
            "requests": {length: self.fit(length) for length in lengths},
            "advice": self.advice(),
        }

    def text(self, lengths: list[int]) -> str:
        plan = self.plan
        sizes = self.plan.sizes
        size = self.config.parallel.num_workers
        budget = self.config.scheduler.max_num_batched_tokens
        lora = self.config.lora
        adapters = f"--max-loras {lora.max_loras}, --max-lora-rank {lora.max_lora_rank}"
        tokens = f"{self.num_tokens} tokens of {format_bytes(self.kv_bytes_per_token)}"
        state_size = format_bytes(sizes.per_checkpoint)
        checkpoints = f"{plan.num_checkpoints} of {state_size}, --max-state-memory"
        rows = [
            ("weights", sizes.weights, self.quantization or plan.dtype),
            ("vision tower", sizes.tower, "--language-model-only goes without"),
            ("encoded pictures", sizes.encoder_cache, "at most, --encoder-cache-memory"),
            ("weights of the draft", sizes.draft_weights, ""),
            ("adapters", sizes.adapters, adapters),
            ("requests", sizes.requests, f"--max-num-seqs {self.max_num_seqs}"),
            ("states of requests", sizes.states, f"{state_size} of each, --max-num-seqs"),
            ("largest step", sizes.step, f"about, --max-num-batched-tokens {budget}"),
            ("KV cache", plan.num_blocks * sizes.kv_per_block, tokens),
            ("checkpoints of states", self.for_checkpoints, checkpoints),
        ]
        where = f"{plan.device} ({size} ranks, each)" if size > 1 else plan.device
        if (engines := self.config.parallel.num_engines_here) > 1:
            where += f", for each of {engines} engines"
        verb = "fits" if plan.num_blocks else "does not fit"
        lines = [f"{self.config.model.model} {verb} on {where}, {format_bytes(plan.free)} free", ""]
        lines += [f"  {name:<22}{format_bytes(n):>9}   {note}" for name, n, note in rows if n]
        lines += ["", "  tokens of a request    that fit at once"]
        lines += [f"  {length:>19}    {self.fit(length):>16}" for length in lengths]
        lines += self.step_lines()
        return "\n".join([*lines, "", *self.advice()]).rstrip()

    def step_lines(self) -> list[str]:
        """Return a table of where the time of decode steps goes; nothing if it is unknown."""
        steps = self.steps
        if not steps:
            return []
        columns = "".join(f"{step.num_rows:>9}" for step in steps)
        length = min(STEP_TOKENS, self.max_model_len)
        lines = ["", f"  ms of a decode step at {columns} requests of {length} tokens, about"]
        for name in steps[0].parts:
            times = "".join(f"{step.parts[name]:>9.2f}" for step in steps)
            lines.append(f"  {name.replace('_', ' '):<22} {times}")
        lines.append(f"  {'in all':<22} " + "".join(f"{step.total:>9.2f}" for step in steps))
        bounds = [max(step.parts, key=step.parts.__getitem__) for step in steps]
        names = "".join(f"{name.replace('_', ' '):>9}" for name in bounds)
        return [*lines, f"  {'bound by':<22} {names}"]
