"""Prompts for measurements: random, with a shared prefix, or from a JSONL or ShareGPT file."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from servd.errors import ServdError

# Ids that are ordinary tokens in practically every vocabulary, also in that of the fake model:
# special ones stand at its beginning or end.
TOKEN_IDS = range(32, 250)
CHARS_PER_TOKEN = 4  # where nobody can count them
# Tokens of the conversations of ShareGPT that are used, as peers choose them.
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048


@dataclass(frozen=True)
class Prompt:
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
        "--range-ratio", "--random-range-ratio", type=float, default=0.0, metavar="X",
        help="lengths vary evenly by this share, e.g. 0.5: from half to one and a half "
             "[%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with [%(default)s]",
    )
    _add_file_options(parser)


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "custom"),
        default=None,
        help="random prompts, conversations of a ShareGPT file, or --jsonl "
        "[random, or custom with a file]",
    )
    group.add_argument(
        "--jsonl",
        "--dataset-path",
        metavar="FILE",
        help='prompts from a file: {"prompt": text or ids, "output_len": N}, or that of ShareGPT',
    )
    group.add_argument(
        "--sharegpt-output-len",
        type=int,
        metavar="N",
        help="output tokens of each conversation [as many as its answer has]",
    )
    group.add_argument(
        "--data-seed", type=int, default=0, metavar="N",
        help="of prompts and arrivals [%(default)s]",
    )  # fmt: skip


def about_tokens(text: str) -> int:
    return len(text) // CHARS_PER_TOKEN


def make_prompts(
    arguments: argparse.Namespace, more: int = 0, num_tokens: Callable[[str], int] = about_tokens
) -> list[Prompt]:
    """The workload that the flags describe, preceded by `more` prompts to warm up with.

    Args:
        arguments: of the command line.
        more: how many.
        num_tokens: counts those of a text.

    Raises:
        ServdError: the file is missing or cannot be used.
    """
    name = arguments.dataset_name or ("custom" if arguments.jsonl else "random")
    if name != "random" and not arguments.jsonl:
        raise ServdError(f"--dataset-name {name} needs --dataset-path FILE")
    rng, num_prompts = random.Random(arguments.data_seed), arguments.num_prompts + more
    if name == "sharegpt":
        return _read_sharegpt(
            Path(arguments.jsonl), num_prompts, rng, num_tokens, arguments.sharegpt_output_len
        )
    if name == "custom":
        return _read_jsonl(Path(arguments.jsonl), num_prompts, arguments.output_len)

    def length(mean: int) -> int:
        spread = int(mean * arguments.range_ratio)
        return max(1, mean + rng.randint(-spread, spread))

    def tokens(count: int) -> list[int]:
        return rng.choices(TOKEN_IDS, k=count)

    prefix = tokens(arguments.prefix_len)
    return [
        Prompt(prefix + tokens(length(arguments.input_len)), length(arguments.output_len))
        for _ in range(num_prompts)
    ]


def _read_sharegpt(
    file: Path,
    num_prompts: int,
    rng: random.Random,
    num_tokens: Callable[[str], int],
    output_len: int | None,
) -> list[Prompt]:
    """First turns of conversations, in a random order; as many tokens of output as the answers, or
    `output_len`.
    """
    try:
        found = [each["conversations"] for each in json.loads(file.read_text(encoding="utf8"))]
        pairs = [(turns[0]["value"], turns[1]["value"]) for turns in found if len(turns) > 1]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise TypeError("a value is no text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServdError(
            f"--dataset-path {file}: {error!r}; it must be a JSON list of objects with "
            '`conversations`: [{"value": text}, ...]'
        ) from None
    rng.shuffle(pairs)
    prompts: list[Prompt] = []
    for text, answer in pairs:
        if len(prompts) == num_prompts:
            break
        input_len, wanted = num_tokens(text), output_len or num_tokens(answer)
        is_long = input_len > LONGEST_PROMPT or input_len + wanted > LONGEST
        is_short = input_len < SHORTEST or (output_len is None and wanted < SHORTEST)
        if not is_short and not is_long:
            prompts.append(Prompt(text, wanted))
    if len(prompts) < num_prompts:
        raise ServdError(f"--dataset-path {file}: has {len(prompts)} prompts of {num_prompts}")
    return prompts


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
