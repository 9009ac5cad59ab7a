"""Run one prompt and draw its way through servd, call by call, with its messages and tokens."""

from __future__ import annotations

import argparse
import html
import json
import time
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

from servd.cli import _calls, _options
from servd.cli._client import Client
from servd.cli._server import key_of, own_server
from servd.config import Config
from servd.errors import ConfigError

NUM_CANDIDATES = 4
WARM_UP = "What is new takes longer."
PAGE = """<!doctype html><meta charset="utf-8"><title>servd trace</title>
<meta name="color-scheme" content="light dark"><h1>{}</h1><pre>{}</pre>
"""
ACCESS = ("api_key", "api_key_file")  # nobody else reaches a server of its own


def add_options(parser: argparse.ArgumentParser) -> None:
    """A prompt, and every option of `servd serve`."""
    parser.usage = "%(prog)s PROMPT [MODEL] [OPTION ...]"
    parser.add_argument("prompt", metavar="PROMPT", help="a message to the model")
    parser.add_argument("--raw", action="store_true", help="text to continue, without a template")
    parser.add_argument(
        "--max-tokens", type=int, default=8, metavar="N", help="longest answer [%(default)s]"
    )
    parser.add_argument("--url", help="ask a running server, instead of one that is started for it")
    parser.add_argument("--html", metavar="FILE", help="write a page instead")
    _options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print or write."""
    options = _options.load_options(arguments)
    Config.load(options)  # a wrong option is named before anything is started
    prompt, raw, max_tokens = arguments.prompt, arguments.raw, arguments.max_tokens
    if arguments.url:
        calls, tokens = ask(Client(arguments.url, key_of(options)), prompt, raw, max_tokens)
    else:
        private = {name: value for name, value in options.items() if name not in ACCESS}
        with own_server({"log_level": "error", **private}) as connect:
            ask(connect(), WARM_UP, raw, 2)
            calls, tokens = ask(connect(), prompt, raw, max_tokens)
    head = f"{'came after':>12}  {'token':<24}candidates"
    text = "\n".join([*_calls.draw(calls), "", head, *map(str, tokens)])
    if not arguments.html:
        print(text)
        return 0
    try:
        page = PAGE.format(html.escape(prompt), html.escape(text))
        Path(arguments.html).write_text(page, encoding="utf8")
    except OSError as error:
        raise ConfigError(f"--html {arguments.html}: {error.strerror}") from None
    print(f"written to {arguments.html}")
    return 0


class Token(NamedTuple):
    """A token of the answer, with what it could have been."""

    id: int | None
    candidates: list[tuple[str, float]]  # text and log-probability, of itself first
    seconds: float | None = None

    def __str__(self) -> str:
        (text, chance), *others = [(text, f"{exp(p):.0%}") for text, p in self.candidates]
        came = "" if self.seconds is None else f"{1000 * self.seconds:.3f} ms"
        token = f"{'' if self.id is None else self.id} {text!r} {chance}".lstrip()
        return f"{came:>12}  {token:<24}{', '.join(f'{t!r} {c}' for t, c in others)}"


def ask(
    client: Client, text: str, raw: bool, max_tokens: int
) -> tuple[list[_calls.Call], list[Token]]:
    """What the server says of the time, as calls.

    Raises:
        ServdError: it does not answer, or refuses.
    """
    client.headers["x-servd-watch"] = "1"
    if raw:
        path, body = "/v1/completions", {"prompt": text, "logprobs": NUM_CANDIDATES}
    else:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
        body |= {"logprobs": True, "top_logprobs": NUM_CANDIDATES}
    body |= {"model": client.first_model(), "max_tokens": max_tokens, "return_token_ids": True}
    tokens: list[Token] = []
    name, prompt, began = "", [], time.perf_counter()
    for chunk in client.stream(path, body):
        name, seconds = chunk["id"], time.perf_counter() - began
        for choice in chunk["choices"]:
            prompt = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids") or prompt
            pairs = zip(choice.get("token_ids") or (), _candidates(choice), strict=True)
            tokens += [Token(token_id, candidates, seconds) for token_id, candidates in pairs]
    timeline = json.load(client.open("GET", f"/v1/requests/{name}/timeline"))
    info = client.ask("GET", "/server_info")
    client.connection.close()
    runner, model = "ModelRunner", ""
    if info.status == 200 and (device := info.body["engine"]["device"]) != "none":
        runner = "CPUModelRunner" if device == "cpu" else "GPUModelRunner"
        model = info.body["architecture"]
    sampled = [token.id for token in tokens if token.id is not None]
    return _calls.of_timeline(timeline, prompt, sampled, runner, model), tokens


def _candidates(choice: dict[str, Any]) -> list[list[tuple[str, float]]]:
    """Of each token in a chunk, itself first."""
    logprobs = choice.get("logprobs") or {}
    if "tokens" in logprobs:  # of a completion
        found = zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
        return [[(token, own), *top.items()] for token, own, top in found]
    return [
        [(each["token"], each["logprob"]) for each in (found, *found["top_logprobs"])]
        for found in logprobs.get("content") or ()
    ]
