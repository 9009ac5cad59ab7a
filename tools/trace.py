"""Run one prompt and draw its way through servd, call by call: `python -m tools.trace PROMPT`."""

from __future__ import annotations

import argparse
import html
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from servd.cli import CommandParser
from servd.config import Config
from servd.terminal import engine_flags
from servd.terminal.api_client import Client
from servd.terminal.output import write_file
from servd.terminal.server_process import key_of, own_server

NUM_CANDIDATES = 4
WARM_UP = "What is new takes longer."
PAGE = """<!doctype html><meta charset="utf-8"><title>trace</title>
<meta name="color-scheme" content="light dark"><h1>{}</h1><pre>{}</pre>
"""
ACCESS = ("api_key", "api_key_file")  # nobody else reaches a server of its own
_DATA = tomllib.loads(Path(__file__).with_name("trace.toml").read_text(encoding="utf8"))
WAYS: dict[str, dict[str, list[str]]] = _DATA["ways"]
TIMES: dict[str, list[str]] = _DATA["times"]
MOST_IDS = 12


def main(argv: list[str] | None = None) -> int:
    parser = CommandParser(prog="trace", usage="%(prog)s PROMPT [MODEL] [OPTION ...]")
    add_options(parser)
    return run(parser.parse_args(argv))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="a message to the model")
    parser.add_argument("--raw", action="store_true", help="text to continue, without a template")
    parser.add_argument(
        "--max-tokens", type=int, default=8, metavar="N", help="longest answer [%(default)s]"
    )
    parser.add_argument("--url", help="ask a running server, instead of one that is started for it")
    parser.add_argument("--html", metavar="FILE", help="write a page instead")
    engine_flags.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    options = engine_flags.load_options(arguments)
    Config.load(options)  # a wrong option is named before anything is started
    prompt = arguments.prompt
    raw = arguments.raw
    max_tokens = arguments.max_tokens
    if arguments.url:
        calls, tokens = ask(Client(arguments.url, key_of(options)), prompt, raw, max_tokens)
    else:
        private = {name: value for name, value in options.items() if name not in ACCESS}
        with own_server({"log_level": "error", **private}) as connect:
            ask(connect(), WARM_UP, raw, 2)
            calls, tokens = ask(connect(), prompt, raw, max_tokens)
    head = f"{'came after':>12}  {'token':<24}candidates"
    text = "\n".join([*draw(calls), "", head, *map(str, tokens)])
    if not arguments.html:
        print(text)
        return 0
    page = PAGE.format(html.escape(prompt), html.escape(text))
    write_file("--html", arguments.html, page.encode())
    print(f"written to {arguments.html}")
    return 0


class Token(NamedTuple):
    """A token of the answer, and the candidates for its position."""

    id: int
    candidates: list[tuple[str, float]]  # text and log-probability, of itself first
    seconds: float

    def __str__(self) -> str:
        (text, chance), *alternatives = [(text, f"{exp(p):.0%}") for text, p in self.candidates]
        token = f"{self.id} {text!r} {chance}"
        more = ", ".join(f"{t!r} {c}" for t, c in alternatives)
        return f"{1000 * self.seconds:9.3f} ms  {token:<24}{more}"


def ask(client: Client, text: str, raw: bool, max_tokens: int) -> tuple[list[Call], list[Token]]:
    """Return the calls that the server reports, with their times, and the tokens."""
    client.http.headers["x-servd-watch"] = "1"
    if raw:
        path = "/v1/completions"
        body = {"prompt": text, "logprobs": NUM_CANDIDATES}
    else:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": text}]}
        body |= {"logprobs": True, "top_logprobs": NUM_CANDIDATES}
    body |= {"model": client.first_model(), "max_tokens": max_tokens, "return_token_ids": True}
    tokens: list[Token] = []
    name = ""
    prompt = []
    began = time.perf_counter()
    for chunk in client.stream(path, body):
        name = chunk["id"]
        seconds = time.perf_counter() - began
        for choice in chunk["choices"]:
            prompt = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids") or prompt
            pairs = zip(choice.get("token_ids") or (), _candidates(choice), strict=True)
            tokens += [Token(token_id, candidates, seconds) for token_id, candidates in pairs]
    timeline = client.get(f"/v1/requests/{name}/timeline")
    info = client.ask("GET", "/server_info")
    runner = "ModelRunner"
    model = ""
    if info.status == 200 and (device := info.body["engine"]["device"]) != "none":
        runner = "CPUModelRunner" if device == "cpu" else "GPUModelRunner"
        model = info.body["architecture"]
    sampled = [token.id for token in tokens]
    return of_timeline(timeline, prompt, sampled, runner, model), tokens


def _candidates(choice: dict[str, Any]) -> list[list[tuple[str, float]]]:
    logprobs = choice.get("logprobs") or {}
    if "tokens" in logprobs:  # of a completion
        columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
        return [
            [(token, chance), *top.items()] for token, chance, top in zip(*columns, strict=True)
        ]
    return [
        [(token["token"], token["logprob"]) for token in (sampled, *sampled["top_logprobs"])]
        for sampled in logprobs.get("content") or ()
    ]


# ---- what lies between two marks of a timeline, as a call of the function that does it ----


class Call(msgspec.Struct):
    """A call of a function, or all calls of a process."""

    name: str
    seconds: float = 0.0  # 0 if unknown
    text: str = ""  # its description
    calls: list[Call] = []

    def add(self, way: list[str], seconds: float, text: str) -> None:
        call = self
        for name in way:
            if not call.calls or call.calls[-1].name != name:
                call.calls.append(Call(name))
            call = call.calls[-1]
            call.seconds += seconds
        call.text = text

    def folded(self) -> Iterator[Call]:
        """Yield the calls; from consecutive calls of one name, two calls and one for the rest."""
        for name, group in groupby(self.calls, lambda call: call.name):
            same = [*group]
            yield from same[:2]
            if more := same[2:]:
                seconds = sum(call.seconds for call in more)
                mean = f"{len(more)} more, {1000 * seconds / len(more):.3f} ms each"
                yield Call(name, seconds, mean)


def of_timeline(
    timeline: dict[str, Any], prompt: list[int], sampled: list[int], runner: str, model: str
) -> list[Call]:
    """Return the calls of a request with one choice, with their times. `runner` and `model` are
    class names; `model` is "" if unknown.
    """
    notes = {
        "tokenised": f"{len(prompt)} prompt tokens {shorten(prompt)}",
        "sent": f"EngineCoreRequest{_bytes(timeline)}",
        "detokenised": f"{len(sampled)} tokens {shorten(sampled)}",
    }
    processes = [Call(name) for name in WAYS]
    for process in processes:
        for mark in timeline["marks"]:
            if way := WAYS[process.name].get(mark["stage"]):
                process.add(way, mark["took_ms"] / 1000, notes.get(mark["stage"], ""))
    steps = [*_steps(timeline, sampled, runner, model)]
    processes[1].calls.append(Call("EngineCoreProc.run_busy_loop", calls=steps))
    phases = [Call(p["phase"], p["ms"] / 1000, p["meaning"]) for p in timeline["phases"] if p["ms"]]
    whole = Call(timeline["id"], timeline["wall_ms"] / 1000, timeline["explanation"], phases)
    return [*processes, whole]


def _steps(timeline: dict[str, Any], sampled: list[int], runner: str, model: str) -> Iterator[Call]:
    """Yield a request's steps from first to last, as far as the timeline has them. Tokens are shown
    only if no other request was in these steps.
    """
    stages = {mark["stage"]: mark["step"] for mark in timeline["marks"] if "step" in mark}
    first = min(stages.values(), default=0)
    last = max(stages.values(), default=-1)
    steps = [step for step in timeline["steps"] if first <= step["step"] <= last]
    is_alone = {step["num_requests"] for step in steps} == {1} and len(steps) == last - first + 1
    [blocks] = timeline.get("block_ids") or [[]]
    for step in steps:
        about = "step {step}: {num_tokens} tokens of {num_requests} requests".format_map(step)
        if step["step"] == first and blocks:
            about += f"; its blocks in the end: {shorten(blocks)}"
        tokens: list[int] = []
        if is_alone and step["step"] >= stages.get("first_token", last + 1):
            end = 1 + step["num_accepted"]
            tokens, sampled = sampled[:end], sampled[end:]
        notes = {"forward_ms": model}
        if tokens:
            notes["sample_ms"] = f"sampled {shorten(tokens)}"
        call = Call("EngineCore.step", (step["end_ms"] - step["begin_ms"]) / 1000, about)
        for field, way in TIMES.items():
            own_way = [name.replace("ModelRunner", runner) for name in way]
            call.add(own_way, step[field] / 1000, notes.get(field, ""))
        if message := _bytes(step):
            call.add(["Outbox.send"], 0.0, f"EngineCoreOutputs{message}")
        yield call


def _bytes(notes: dict[str, Any]) -> str:
    return f", {notes['message_bytes']} bytes" if "message_bytes" in notes else ""


def shorten(ids: list[int]) -> str:
    return str(ids[:MOST_IDS])[:-1] + (", ...]" if len(ids) > MOST_IDS else "]")


def draw(calls: Iterable[Call], prefix: str = "") -> Iterator[str]:
    calls = [*calls]
    for call in calls:
        branch, beside = ("└─ ", "   ") if call is calls[-1] else ("├─ ", "│  ")
        took = f"{1000 * call.seconds:.3f} ms" if call.seconds else ""
        yield f"{prefix + branch + call.name:<60}{took:>13}  {call.text}".rstrip()
        yield from draw(call.folded(), prefix + beside)


if __name__ == "__main__":
    sys.exit(main())
