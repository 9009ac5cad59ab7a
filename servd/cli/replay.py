"""Repeat an answer by its receipt (`X-Servd-Receipt: 1`), and name the first token that differs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from servd.cli import _options
from servd.config import Config
from servd.errors import ConfigError
from servd.llm import LLM
from servd.params import SamplingParams
from servd.receipt import Receipt, RepeatablePrompt

TIE = 1e-3  # nats: less than this between two tokens is decided by rounding


def add_options(parser: argparse.ArgumentParser) -> None:
    """The receipt, and the options of `servd serve` that the server had."""
    parser.usage = "%(prog)s FILE [MODEL] [OPTION ...]"
    parser.add_argument("receipt", metavar="FILE", help="a receipt, or an answer that has one")
    _options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each choice; 1 if a token differs."""
    receipt = read_receipt(arguments.receipt)
    options = _options.load_options(arguments)
    config = Config.load(options)  # a wrong option is named before anything is loaded
    llm = LLM(config.model.model, **{k: v for k, v in options.items() if k != "model"})
    engine = llm.engine
    now = Receipt.of(engine.processor.config, engine.processor.spec, engine.port.worker, [])
    try:
        for line in receipt.differences(now):
            print(f"not the same: {line}")
        same = [replay(llm, prompt, i) for i, prompt in enumerate(receipt.prompts)]
    finally:
        llm.close()
    return 0 if all(same) else 1


def read_receipt(path: str) -> Receipt:
    """A receipt of its own, or in an answer, also the last comment of a stream.

    Raises:
        ConfigError: there is none in the file.
    """
    try:
        text = Path(path).read_text(encoding="utf8")
        if "\n: receipt " in text:
            text = text.rpartition("\n: receipt ")[2].partition("\n")[0]
        found: Any = msgspec.json.decode(text)
        receipt = msgspec.convert(found.get("receipt", found), Receipt)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: this is no receipt: {error}") from None
    if any(len(prompt.token_ids) != prompt.params.n for prompt in receipt.prompts):
        raise ConfigError(f"{path}: this is no receipt: a prompt has more or fewer choices than n")
    return receipt


def replay(llm: LLM, prompt: RepeatablePrompt, number: int) -> bool:
    """Run a prompt alone and compare its choices."""
    [output] = llm.generate([prompt.prompt_token_ids], prompt.params, use_tqdm=False)
    same = True
    for choice, (then, made) in enumerate(zip(prompt.token_ids, output.outputs, strict=True)):
        now = made.token_ids
        where = f"prompt {number}, choice {choice}"
        if then == now:
            print(f"{where}: {len(now)} tokens, all the same")
            continue
        same = False
        pairs = zip(then, now, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(then), len(now)))
        if at == min(len(then), len(now)):
            print(f"{where}: ended after {len(then)} tokens then, after {len(now)} now")
            continue
        margin = margin_of(llm, [*prompt.prompt_token_ids, *now[:at]], now[at], then[at])
        names = [repr(llm.engine.processor.tokenizer.token_string(i)) for i in (then[at], now[at])]
        cause = "a tie, which rounding decides" if abs(margin) < TIE else "no tie"
        print(
            f"{where}: token {at} was {names[0]} ({then[at]}) and is {names[1]} ({now[at]}); "
            f"the model prefers the new one by {margin:.6f} nats: {cause}"
        )
    return same


def margin_of(llm: LLM, token_ids: list[int], one: int, other: int) -> float:
    """Log-probability of a token as the next one, less that of another."""
    params = SamplingParams(
        max_tokens=1, temperature=0, logprobs=0, logprob_token_ids=[one, other], ignore_eos=True
    )
    [output] = llm.generate([token_ids], params, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    of = dict(zip(logprobs[0].token_ids, logprobs[0].logprobs, strict=True))
    return of[one] - of[other]
