"""Prompts for measurements: random, with a shared prefix or pictures, or from a JSONL or ShareGPT
file.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from servd.base.errors import ServdError
from servd.bench import _pictures

# Ids that are ordinary tokens in practically every vocabulary, also in the fake model's:
# special tokens are at the beginning or end.
TOKEN_IDS = range(32, 250)
CHARS_PER_TOKEN = 4  # estimate, if the tokens cannot be counted
# Limits of tokens in ShareGPT's conversations, as in vLLM's benchmark.
SHORTEST = 4
LONGEST_PROMPT = 1024
LONGEST = 2048


class BenchPrompt(msgspec.Struct, frozen=True):
    prompt: str | list[int]
    output_len: int = 0  # tokens; 0: as --output-len
    images: list[str] = []  # data: addresses of pictures, for chats


class Turn(msgspec.Struct):
    value: str


class ShareGPTConversation(msgspec.Struct):
    conversations: list[Turn]


def add_options(
    parser: argparse.ArgumentParser,
    num_prompts: int,
    input_len: int,
    output_len: int,
    names: Sequence[str] = ("random", "sharegpt", "custom"),
) -> None:
    """Add flags that describe a workload, with these defaults."""
    add = parser.add_argument_group("workload").add_argument
    for flags, default, purpose in (
        (("--num-prompts", "--batch-size"), num_prompts, "requests"),
        (("--input-len", "--random-input-len"), input_len, "prompt tokens"),
        (("--output-len", "--random-output-len"), output_len, "output tokens"),
        (("--prefix-len", "--random-prefix-len"), 0, "tokens that all prompts begin with"),
        (("--data-seed",), 0, "of prompts and arrivals"),
        (("--range-ratio", "--random-range-ratio"), 0.0, "lengths vary evenly by this share"),
    ):
        help = f"{purpose} [%(default)s]"
        add(*flags, type=type(default), default=default, metavar="N", help=help)
    help = "[random, or custom with a file]"
    add("--dataset-name", choices=names, default=None, help=help)
    help = 'a file of ShareGPT, or lines of {"prompt": text or ids, "output_len": N}'
    add("--dataset-path", "--jsonl", default=None, metavar="FILE", help=help)
    help = "output tokens of each conversation [as many as its answer has]"
    add("--sharegpt-output-len", type=int, default=None, metavar="N", help=help)


def guess_tokens(text: str) -> int:
    return len(text) // CHARS_PER_TOKEN


def make_prompts(
    arguments: argparse.Namespace, more: int = 0, count: Callable[[str], int] = guess_tokens
) -> list[BenchPrompt]:
    """Return the prompts that the flags describe, preceded by `more` prompts for warming up.
    `count` counts the tokens of a text. Raises ServdError if the file cannot be used.
    """
    rng = random.Random(arguments.data_seed)
    num_prompts = arguments.num_prompts + more
    name = arguments.dataset_name or ("custom" if arguments.dataset_path else "random")
    if not name.startswith("random"):
        return _read_file(name, arguments, num_prompts, rng, count)

    def length(mean: int) -> int:
        spread = int(mean * arguments.range_ratio)
        return max(1, mean + rng.randint(-spread, spread))

    prefix = rng.choices(TOKEN_IDS, k=arguments.prefix_len)
    prompts: list[BenchPrompt] = []
    images: list[str] = []
    for _ in range(num_prompts):
        suffix = rng.choices(TOKEN_IDS, k=length(arguments.input_len))
        if name == _pictures.NAME and not (images and arguments.random_mm_same):
            images = _pictures.make_images(arguments, rng)
        prompts.append(BenchPrompt(prefix + suffix, length(arguments.output_len), images))
    return prompts


def _read_file(
    name: str,
    arguments: argparse.Namespace,
    num_prompts: int,
    rng: random.Random,
    count: Callable[[str], int],
) -> list[BenchPrompt]:
    file = arguments.dataset_path
    if not file:
        raise ServdError(f"--dataset-name {name} needs --dataset-path FILE")
    try:
        data = Path(file).read_bytes()
        if name == "sharegpt":
            source = _read_sharegpt(data, rng, arguments.sharegpt_output_len, count)
        else:
            lines = msgspec.json.Decoder(BenchPrompt).decode_lines(data)
            source = (BenchPrompt(p.prompt, p.output_len or arguments.output_len) for p in lines)
        prompts = list(islice(source, num_prompts))
    except (OSError, ValueError) as error:
        raise ServdError(f"--dataset-path {file}: {error}") from None
    if not prompts or (name == "sharegpt" and len(prompts) < num_prompts):
        raise ServdError(f"--dataset-path {file}: has {len(prompts)} prompts of {num_prompts}")
    return prompts


def _read_sharegpt(
    data: bytes, rng: random.Random, output_len: int | None, count: Callable[[str], int]
) -> Iterator[BenchPrompt]:
    """Yield first turns of conversations in random order, with `output_len` output tokens, or as
    many as the answers have.
    """
    conversations = msgspec.json.decode(data, type=list[ShareGPTConversation])
    turns = [conversation.conversations for conversation in conversations]
    pairs = [pair[:2] for pair in turns if len(pair) > 1]
    rng.shuffle(pairs)
    for turn, answer in pairs:
        input_len = count(turn.value)
        max_tokens = output_len or count(answer.value)
        is_long = input_len > LONGEST_PROMPT or input_len + max_tokens > LONGEST
        is_short = input_len < SHORTEST or (output_len is None and max_tokens < SHORTEST)
        if not is_short and not is_long:
            yield BenchPrompt(turn.value, max_tokens)
