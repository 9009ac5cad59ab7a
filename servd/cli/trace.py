"""Run one prompt and draw its way through servd, call by call, with its messages and tokens."""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

from servd import ipc, launch
from servd.api.async_llm import AsyncLLM
from servd.api.metrics import Metrics
from servd.api.output_processor import OutputProcessor
from servd.api.processor import Processor
from servd.api.prompt import Chat, Prompt
from servd.api.timeline import Tracer
from servd.api.tokenizer import Tokenizer
from servd.cli import _calls, _client, _options, _timeline
from servd.config import Config
from servd.core.client import EngineCoreClient, identity
from servd.core.engine_core_proc import EngineCoreProc, Start
from servd.errors import ConfigError, EngineError
from servd.messages import WorkerFailed
from servd.outputs import CompletionOutput
from servd.params import SamplingParams

NUM_CANDIDATES = 4
SETTLING = 0.1  # seconds, for the last words on the request before


def add_options(parser: argparse.ArgumentParser) -> None:
    """A prompt, and every option of `servd serve`."""
    parser.usage = "%(prog)s PROMPT [MODEL] [OPTION ...]"
    parser.add_argument("prompt", metavar="PROMPT", help="a message to the model")
    parser.add_argument("--raw", action="store_true", help="text to continue, without a template")
    parser.add_argument(
        "--max-tokens", type=int, default=8, metavar="N", help="longest answer [%(default)s]"
    )
    parser.add_argument(
        "--url", help="ask a running server instead, and draw its timeline as calls"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page instead")
    _options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print or write."""
    config = Config.load(_options.load_options(arguments))
    calls, tokens = (ask_server if arguments.url else ask_here)(arguments, config)
    lines = [f"{'came after':>12}  {'token':<24}candidates", *map(str, tokens)]
    if arguments.html:
        tree, text = "".join(map(_calls.to_html, calls)), html.escape("\n".join(lines))
        head = f'<!doctype html><meta charset="utf-8"><title>servd trace</title>{_calls.STYLE}'
        page = f"<h1>{html.escape(arguments.prompt)}</h1><h2>Calls</h2>{tree}<h2>Tokens</h2>"
        Path(arguments.html).write_text(f"{head}{page}<pre>{text}</pre>", encoding="utf8")
        print(f"written to {arguments.html}")
    else:
        print("\n".join([*_calls.draw(calls), "", *lines]))
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


# ---- a running server ----


def ask_server(
    arguments: argparse.Namespace, config: Config
) -> tuple[list[_calls.Call], list[Token]]:
    """What the server says of the time, as calls.

    Raises:
        ServdError: it does not answer, or refuses.
    """
    keys = config.access.api_key
    client = _client.Client(arguments.url, keys[0] if keys else None)
    client.headers["x-servd-watch"] = "1"
    path, asked = "/v1/chat/completions", {"messages": [_message(arguments.prompt)]}
    if arguments.raw:
        path, asked = "/v1/completions", {"prompt": arguments.prompt}
    body = {
        **asked,
        "model": client.first_model(),
        "max_tokens": arguments.max_tokens,
        "logprobs": NUM_CANDIDATES if arguments.raw else True,
        "return_token_ids": True,
    }
    if not arguments.raw:
        body["top_logprobs"] = NUM_CANDIDATES
    tokens: list[Token] = []
    name, prompt, began = "", [], time.perf_counter()
    for chunk in client.stream(path, body):
        name, seconds = chunk["id"], time.perf_counter() - began
        for choice in chunk["choices"]:
            prompt = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids") or prompt
            pairs = zip(choice.get("token_ids") or (), _candidates(choice), strict=True)
            tokens += [Token(token_id, candidates, seconds) for token_id, candidates in pairs]
    timeline = json.load(client.open("GET", f"/v1/requests/{name}/timeline"))
    client.connection.close()
    sampled = [token.id for token in tokens if token.id is not None]
    return _timeline.calls_of(timeline, prompt, sampled), tokens


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


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# ---- API server and engine as threads of this process, with their sockets between them ----


def ask_here(
    arguments: argparse.Namespace, config: Config
) -> tuple[list[_calls.Call], list[Token]]:
    """The calls of each thread.

    Raises:
        ConfigError: the engine does not start.
        InvalidRequest: the prompt cannot be served.
    """
    config, spec, _ = launch.find_and_resolve(config)
    assert config.model.max_model_len is not None
    ipc_dir, recorder = ipc.private_dir(), _calls.Recorder()
    engine = EngineCoreProc(Start(config, spec, str(ipc_dir), time.monotonic()))
    threading.setprofile(recorder)
    ended: Future[None] = Future()
    thread = threading.Thread(target=run_engine, args=[engine, ended], name="busy loop")
    thread.start()
    client = EngineCoreClient(str(ipc_dir), 0, identity(config, spec))
    tokenizer = Tokenizer.of_model(config, spec)
    processor = Processor(config, spec, tokenizer, config.model.max_model_len)
    outputs, metrics = OutputProcessor(tokenizer), Metrics(spec.model_type)
    llm = AsyncLLM(config, spec, [client], processor, outputs, Tracer(), metrics)
    content = arguments.prompt
    if not arguments.raw:
        content = Chat(messages=[_message(content)])
    try:
        calls, answer = asyncio.run(ask(llm, ended, recorder, content, arguments.max_tokens))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        engine.inputs.put(WorkerFailed("the trace has ended"))
        thread.join()
        client.close()
        shutil.rmtree(ipc_dir, ignore_errors=True)
    for call in calls:
        is_own = call.name == threading.current_thread().name
        call.name = "API server" if is_own else f"engine, {call.name}"
    return calls, [*tokens_of(answer, tokenizer)]


def run_engine(engine: EngineCoreProc, ended: Future[None]) -> None:
    """Run it until it fails, and keep the failure."""
    try:
        engine.run()
    except (EngineError, ConfigError) as error:
        ended.set_exception(error)


async def ask(
    llm: AsyncLLM,
    ended: Future[None],
    recorder: _calls.Recorder,
    content: str | Chat,
    max_tokens: int,
) -> tuple[list[_calls.Call], list[tuple[float, CompletionOutput]]]:
    """The calls, and what came in how many seconds; raises as `ask_here`."""
    llm.start()
    while not llm.is_ready:
        if ended.done():
            ended.result()
        await asyncio.sleep(0.01)
    try:
        warm = SamplingParams(max_tokens=2, ignore_eos=True)
        [delta async for delta in generate(llm, "warm-up", "What is new takes longer.", warm)]
        await asyncio.sleep(SETTLING)
        defaults = llm.processor.default_params
        params = SamplingParams(**defaults, max_tokens=max_tokens, logprobs=NUM_CANDIDATES)
        sys.setprofile(recorder)
        began = recorder.start()
        stream = generate(llm, "traced", content, params)
        answer = [(time.perf_counter() - began, delta) async for delta in stream]
        return recorder.finish(), answer
    finally:
        llm.close()


async def generate(
    llm: AsyncLLM, request_id: str, content: str | Chat, params: SamplingParams
) -> AsyncIterator[CompletionOutput]:
    """As a route does it."""
    with llm.admit():
        prompt = Prompt(content=content, request_id=request_id)
        async for delta in llm.generate(await llm.prepare([prompt], params)):
            yield delta


def tokens_of(
    answer: list[tuple[float, CompletionOutput]], tokenizer: Tokenizer
) -> Iterator[Token]:
    """Those of each delta."""
    for seconds, delta in answer:
        for logprobs in delta.logprobs or []:
            pairs = zip(logprobs.token_ids, logprobs.logprobs, strict=True)
            candidates = [(tokenizer.token_string(i), p) for i, p in pairs]
            yield Token(logprobs.token_ids[0], candidates, seconds)
