"""Prompts for measurements: random, with a shared prefix, or from a JSONL file."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from servd.errors import ServdError

# Ids that are ordinary tokens in practically every vocabulary, also in that of the fake model:
# special ones stand at its beginning or end.
TOKEN_IDS = range(32, 250)


@dataclass(frozen=True)
class Prompt:
    """One request of a workload."""

    content: str | list[int]
    output_len: int  # tokens


def add_options(
    parser: argparse.ArgumentParser, num_prompts: int, input_len: int, output_len: int
) -> None:
    """Flags that describe a workload, with these defaults."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-prompts",
        "--batch-size",
        type=int,
        default=num_prompts,
        metavar="N",
        help="requests [%(default)s]",
    )
    group.add_argument(
        "--input-len",
        "--random-input-len",
        type=int,
        default=input_len,
        metavar="N",
        help="prompt tokens [%(default)s]",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        type=int,
        default=output_len,
        metavar="N",
        help="output tokens [%(default)s]",
    )
    group.add_argument(
        "--range-ratio", type=float, default=0.0, metavar="X",
        help="lengths vary evenly by this share, e.g. 0.5: from half to one and a half "
             "[%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with [%(default)s]",
    )
    group.add_argument(
        "--jsonl",
        metavar="FILE",
        help='prompts from a file: {"prompt": text or ids, "output_len": N}',
    )
    group.add_argument(
        "--data-seed",
        type=int,
        default=0,
        metavar="N",
        help="of prompts and arrivals [%(default)s]",
    )


def make_prompts(arguments: argparse.Namespace, more: int = 0) -> list[Prompt]:
    """The workload that the flags describe, preceded by `more` prompts to warm up with.

    Raises:
        ServdError: the JSONL file cannot be used.
    """
    if arguments.jsonl:
        num_prompts = arguments.num_prompts + more
        return _read_jsonl(Path(arguments.jsonl), num_prompts, arguments.output_len)
    rng = random.Random(arguments.data_seed)

    def length(mean: int) -> int:
        spread = int(mean * arguments.range_ratio)
        return max(1, mean + rng.randint(-spread, spread))

    def tokens(count: int) -> list[int]:
        return rng.choices(TOKEN_IDS, k=count)

    prefix = tokens(arguments.prefix_len)
    return [
        Prompt(prefix + tokens(length(arguments.input_len)), length(arguments.output_len))
        for _ in range(arguments.num_prompts + more)
    ]


def _read_jsonl(file: Path, num_prompts: int, output_len: int) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()][:num_prompts]
        prompts = [Prompt(row["prompt"], row.get("output_len", output_len)) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServdError(
            f"--jsonl {file}: {error!r}; each line must be an object with a prompt"
        ) from None
    if not prompts:
        raise ServdError(f"--jsonl {file}: has no prompt")
    return prompts
