"""Repeat an answer by its run manifest, and compare the tokens."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from servd.api.serving.run_manifest import RepeatablePrompt, RunManifest, make_manifest
from servd.base.errors import ConfigError
from servd.config import Config
from servd.messages.params import SamplingParams
from servd.offline.llm import LLM
from servd.terminal import engine_flags

TIE = 1e-3  # nats: less than this between two tokens is decided by rounding


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the manifest, and the options of `servd serve` that the server had."""
    parser.usage = "%(prog)s FILE [MODEL] [OPTION ...]"
    parser.add_argument("manifest", metavar="FILE", help="a run manifest, or an answer with one")
    engine_flags.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each choice; return 1 if a token differs."""
    manifest = read_manifest(arguments.manifest)
    options = engine_flags.load_options(arguments)
    config = Config.load(options)  # a wrong option is named before anything is loaded
    llm = LLM(config.model.model, **{k: v for k, v in options.items() if k != "model"})
    processor = llm.engine.processor
    now = make_manifest(processor.config, processor.spec, llm.engine.engine_core.worker, [])
    try:
        for line in manifest.find_differences(now):
            print(f"not the same: {line}")
        num_different = 0
        for i, prompt in enumerate(manifest.prompts):
            for choice, difference in enumerate(replay(llm, prompt)):
                if difference:
                    num_different += 1
                about = difference or f"{len(prompt.token_ids[choice])} tokens, all the same"
                print(f"prompt {i}, choice {choice}: {about}")
    finally:
        llm.close()
    return int(num_different > 0)


def read_manifest(path: str) -> RunManifest:
    """Return a manifest from a file with a manifest or an answer, which may end in a stream's
    comment. Raises ConfigError if the file has no manifest.
    """
    try:
        text = Path(path).read_text(encoding="utf8")
        for name in ("receipt", "run_manifest"):  # the first is that of servd 0.1
            if f"\n: {name} " in text:
                text = text.rpartition(f"\n: {name} ")[2].partition("\n")[0]
        manifest: Any = msgspec.json.decode(text)
        manifest = manifest.get("run_manifest", manifest.get("receipt", manifest))
        manifest = msgspec.convert(manifest, RunManifest)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: this is no run manifest: {error}") from None
    if any(len(prompt.token_ids) != prompt.params.n for prompt in manifest.prompts):
        raise ConfigError(
            f"{path}: this is no run manifest: a prompt has more or fewer choices than n"
        )
    return manifest


def replay(llm: LLM, prompt: RepeatablePrompt) -> Iterator[str]:
    """Run a prompt alone, and yield the difference of each choice, or "" without a difference."""
    [output] = llm.generate([prompt.prompt_token_ids], prompt.params, use_tqdm=False)
    for then, made in zip(prompt.token_ids, output.outputs, strict=True):
        now = made.token_ids
        shorter = min(len(then), len(now))
        at = next((i for i in range(shorter) if then[i] != now[i]), shorter)
        if then == now:
            yield ""
        elif at == shorter:
            yield f"ended after {len(then)} tokens then, after {len(now)} now"
        else:
            margin = find_margin(llm, [*prompt.prompt_token_ids, *now[:at]], now[at], then[at])
            texts = llm.engine.processor.tokenizer.token_string
            yield (
                f"token {at} was {texts(then[at])!r} ({then[at]}) and is {texts(now[at])!r} "
                f"({now[at]}); the model prefers the new one by {margin:.6f} nats: "
                + ("a tie, which rounding decides" if abs(margin) < TIE else "no tie")
            )


def find_margin(llm: LLM, token_ids: list[int], first: int, second: int) -> float:
    """Return the log-probability of token `first` as the next token, minus that of `second`."""
    params = SamplingParams(
        max_tokens=1, temperature=0, logprobs=0, logprob_token_ids=[first, second], ignore_eos=True
    )
    [output] = llm.generate([token_ids], params, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return logprobs[0][first].logprob - logprobs[0][second].logprob
