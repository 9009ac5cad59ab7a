"""Perplexity and KL divergence to float32, by the type of a model's weights:
`python -m benchmarks.quality MODEL`.

A text is read in rows of 512 tokens, and the second half of each row is scored, as by llama.cpp's
`llama-perplexity`. With `--llama-perplexity`, the table also has llama.cpp's figures for the same
files and tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from servd import LLM, SamplingParams
from servd.base.errors import ServdError
from servd.cli.quantize import ROW, read_rows
from servd.core.client import InprocClient
from servd.core.executor.uniproc import UniProcExecutor
from servd.worker.output_heads import prompt_logprobs
from servd.worker.quantization.int4 import GROUP_SIZE
from servd.worker.runner.model_runner import ModelRunner

NUM_SCORED = ROW // 2 - 1  # tokens at the end of each row
LONGEST = 2000  # characters of a package's description
COLUMNS = ("computed by", "weights", "activations", "MB", "perplexity", "e^KL")
# The first is the reference of all others.
OPTIONS = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"quantization": "int8", "cpu_activation_dtype": "float32"},
    {"quantization": "int8", "cpu_activation_dtype": "int8"},
    {"quantization": "int4", "cpu_activation_dtype": "float32"},
    {"quantization": "int4", "cpu_activation_dtype": "int8"},
)
OF_FILES = ({"cpu_activation_dtype": "float32"}, {"cpu_activation_dtype": "int8"})


def main() -> int:
    arguments = parse()
    if arguments.write_noisy is not None:
        write_noisy(Path(arguments.model), arguments.write_noisy)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        text = arguments.text
        if text is None:
            text = Path(folder, "descriptions of Python packages")
            text.write_text(describe_packages(), encoding="utf8")
        rows = read_rows(Path(arguments.model), str(text), arguments.rows * ROW)
        digest = hashlib.sha256(text.read_bytes()).hexdigest()[:12]
        print(f"{time.strftime('%d %B %Y').lstrip('0')}, {Path(arguments.model).name}")
        print(f"{len(rows) * NUM_SCORED} tokens of {text.name} (SHA-256 {digest})\n")
        show(*COLUMNS)
        show(*["---"] * len(COLUMNS))
        measure_servd(arguments, rows, Path(folder, "logprobs"))
        if arguments.llama_perplexity is not None:
            measure_llama_cpp(arguments, text, len(rows), Path(folder, "logprobs"))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder with weights of 16 or 32 bits")
    help = "UTF-8 [the beginnings of the descriptions of the installed Python packages]"
    add("--text", type=Path, metavar="FILE", help=help)
    add("--rows", type=int, default=16, metavar="N", help=f"of {ROW} tokens [%(default)s]")
    help = "what `servd quantize` made of the model"
    add("--checkpoints", nargs="+", default=[], metavar="FOLDER", help=help)
    help = "made from the model; for --llama-perplexity, float32 first"
    add("--gguf", nargs="+", default=[], metavar="FILE", help=help)
    add("--llama-perplexity", metavar="FILE", help="llama.cpp's command")
    help = "measure nothing; write the model with noise of a step of 4 bits, see `write_noisy`"
    add("--write-noisy", type=Path, metavar="FOLDER", help=help)
    return parser.parse_args()


def write_noisy(model: Path, folder: Path) -> None:
    """Write a model whose matrices have noise as large as the errors of 4 bits in groups of 32.

    Weights that were read from a file of 4 bits lie on its grid. Types with the same grid would
    lose nothing, which says nothing about weights that were trained.
    """
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and tensor.shape[1] % GROUP_SIZE == 0:
                groups = tensor.float().view(len(tensor), -1, GROUP_SIZE)
                low = groups.amin(dim=2, keepdim=True)
                step = (groups.amax(dim=2, keepdim=True) - low) / 15
                noisy = groups + step * (torch.rand_like(groups) - 0.5)
                tensors[name] = noisy.view_as(tensor).to(tensor.dtype)
        save_file(tensors, folder / file.name, metadata={"format": "pt"})


def describe_packages() -> str:
    """Return the beginnings of the descriptions of the installed packages, by name."""
    descriptions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        description = package.metadata.json.get("description")
        if isinstance(description, str) and len(description) >= LONGEST:
            descriptions[package.name.lower()] = description[:LONGEST]
    return "\n\n".join(descriptions[name] for name in sorted(descriptions))


def show(*columns: str) -> None:
    print(f"| {' | '.join(columns)} |", flush=True)


# ---- servd ----


def measure_servd(arguments: argparse.Namespace, rows: list[list[int]], path: Path) -> None:
    """Print a line for each way to store the weights. `path`: a file for log-probabilities."""
    reference = Reference(path, rows)
    for options in OPTIONS:
        weights = options.get("dtype") or options["quantization"]
        measure_way(reference, arguments.model, weights, options)
    for file in (*arguments.checkpoints, *arguments.gguf):
        for options in OF_FILES:
            measure_way(reference, file, Path(file).name, options)


def measure_way(reference: Reference, model: str, weights: str, options: dict[str, Any]) -> None:
    """Print a line; if servd refuses the options, say why instead."""
    activations = options.get("cpu_activation_dtype", weights)
    try:
        scores = reference.compare(model, {"dtype": "float32", **options})
    except ServdError as error:
        print(f"{weights}, activations {activations}: {error}", file=sys.stderr)
    else:
        show("servd", weights, activations, *scores)


class Reference:
    """Log-probabilities of the first model that is compared, in a file: they may be gigabytes."""

    def __init__(self, path: Path, rows: list[list[int]]) -> None:
        self.path = path
        self.rows = rows
        self.logprobs: Tensor | None = None  # [rows, NUM_SCORED, vocab] float32

    def compare(self, model: str, options: dict[str, Any]) -> tuple[str, ...]:
        """Return megabytes, perplexity and e^KL. Raises ServdError if servd refuses the model."""
        llm = LLM(
            model,
            use_tqdm=False,
            device="cpu",
            enable_prefix_caching=False,
            max_model_len=ROW + 1,
            max_num_seqs=32,
            kv_cache_memory="256MiB",
            **options,
        )
        client = llm.engine.engine_core
        assert isinstance(client, InprocClient)
        assert isinstance(client.engine.executor, UniProcExecutor)
        runner = client.engine.executor.worker.runner
        is_first = self.logprobs is None
        if self.logprobs is None:
            shape = (len(self.rows), NUM_SCORED, runner.spec.vocab_size)
            size = math.prod(shape)
            self.logprobs = torch.from_file(str(self.path), shared=True, size=size).view(shape)
        loss = 0.0
        divergence = 0.0
        computed = compute_logits(llm, runner, self.rows)
        for row, logits, expected in zip(self.rows, computed, self.logprobs, strict=True):
            logprobs = logits.log_softmax(dim=1)
            if is_first:
                expected.copy_(logprobs)
            targets = torch.tensor(row[-NUM_SCORED:])
            loss += F.nll_loss(logprobs, targets, reduction="sum").item()
            divergence += F.kl_div(logprobs, expected, reduction="sum", log_target=True).item()
        num_bytes = runner.weights_bytes
        llm.close()
        num_tokens = len(self.rows) * NUM_SCORED
        return format_scores(num_bytes, math.exp(loss / num_tokens), divergence / num_tokens)


def format_scores(num_bytes: int, perplexity: float, divergence: float) -> tuple[str, ...]:
    return f"{num_bytes / 1e6:.0f}", f"{perplexity:.3f}", f"{math.exp(divergence):.5f}"


def compute_logits(llm: LLM, runner: ModelRunner, rows: list[list[int]]) -> Iterator[Tensor]:
    """Yield the logits of each row's scored tokens, float32 [NUM_SCORED, vocab]. The rows are
    prompts whose log-probabilities are requested.
    """
    heads = runner.output_heads
    [head] = [head for head in heads if isinstance(head, prompt_logprobs.PromptLogprobsHead)]
    compute = head.compute_logits
    parts: list[Tensor] = []

    def record(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        parts.append(logits.float())
        return logits

    head.compute_logits = record
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for row in rows:
        parts.clear()
        llm.generate([row], params, use_tqdm=False)
        logits = torch.cat(parts)
        assert len(logits) == ROW - 1
        yield logits[-NUM_SCORED:]


# ---- llama.cpp ----


def measure_llama_cpp(arguments: argparse.Namespace, text: Path, num_rows: int, path: Path) -> None:
    """Print a line for each GGUF file; the first is the reference. `path`: as `measure_servd`."""
    for file in arguments.gguf:
        command = [arguments.llama_perplexity, "--model", file, "--file", str(text)]
        command += ["--ctx-size", str(ROW), "--chunks", str(num_rows)]
        command += ["--kl-divergence-base", str(path)]
        if file == arguments.gguf[0]:
            perplexity = find_figure(r"Final estimate: PPL = ", run(command))
            divergence = 0.0
        else:
            printed = run([*command, "--kl-divergence"])
            perplexity = find_figure(r"Mean PPL\(Q\)\s*:\s*", printed)
            divergence = find_figure(r"Mean\s+KLD:\s*", printed)
        num_bytes = Path(file).stat().st_size
        show("llama.cpp", Path(file).name, "", *format_scores(num_bytes, perplexity, divergence))


def run(command: list[str]) -> str:
    """Return what a command prints. Raises ServdError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    if done.returncode:
        raise ServdError(f"{command[0]} ended with code {done.returncode}: {printed[-500:]}")
    return printed


def find_figure(before: str, printed: str) -> float:
    """Return the number that follows the pattern `before`."""
    match = re.search(before + r"(-?[\d.]+)", printed)
    if match is None:
        raise ServdError(f"llama-perplexity prints no {before!r}: {printed[-500:]}")
    return float(match[1])


if __name__ == "__main__":
    sys.exit(main())
