"""Measure throughput and latency of a running server that has OpenAI's completions or chats."""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from servd.base import log
from servd.base.errors import ServdError
from servd.bench import _data, _load, _pictures, _report
from servd.bench._data import BenchPrompt
from servd.terminal import api_client
from servd.terminal.api_client import Client
from servd.terminal.output import write_json

CHATS = "openai-chat"
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
# vLLM's flags for behaviour that servd always has.
NEEDLESS = (
    "--tokenizer",
    "--metric-percentiles",
    "--percentile-metrics",
    "--disable-tqdm",
    "--trust-remote-code",
    "--random-mm-limit-mm-per-prompt",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    api_client.add_server_options(parser)
    add = parser.add_argument
    add("--host", metavar="NAME", help="with --port, in place of --url")
    add("--port", type=int, metavar="N", help="with --host, in place of --url")
    add("--concurrency", "--max-concurrency", type=int, metavar="N", help="requests at once [all]")
    add("--request-rate", type=float, metavar="X", help="a second, Poisson [all at once]")
    add("--warmup", "--num-warmups", type=int, default=1, metavar="N", help="not counted [1]")
    switch = argparse.BooleanOptionalAction
    add("--ignore-eos", action=switch, default=True, help="generate the full output length")
    add("--backend", choices=("vllm", "openai", CHATS), default="openai", help="[completions]")
    add("--endpoint", choices=ENDPOINTS, help=argparse.SUPPRESS)
    _report.add_options(parser)
    add("--save-result", action="store_true", help="write the figures under vLLM's names, too")
    add("--result-filename", metavar="FILE", help="where [MODEL-TIME.json]")
    add("--result-dir", default=".", metavar="DIR", help="in this folder [.]")
    for flag in NEEDLESS:
        add(flag, nargs="?", help=argparse.SUPPRESS)
    names = ("random", _pictures.NAME, "sharegpt", "custom")
    _data.add_options(parser, num_prompts=64, input_len=64, output_len=64, names=names)
    _pictures.add_options(parser)
    add("--seed", dest="data_seed", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 1 if any request failed."""
    if arguments.host is not None or arguments.port is not None:
        host = arguments.host or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        arguments.url = f"http://{host}:{arguments.port or 8000}"
    client = Client(arguments.url, arguments.api_key)
    model = arguments.model = arguments.model or client.first_model()
    if arguments.save_result:
        try:
            Path(arguments.result_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:  # before what would be lost without it
            raise ServdError(f"--result-dir {arguments.result_dir}: {error.strerror}") from None

    def count(text: str) -> int:
        answer = client.ask("POST", "/tokenize", {"model": model, "prompt": text})
        return answer.body["count"] if answer.status == 200 else _data.guess_tokens(text)

    prompts = _data.make_prompts(arguments, arguments.warmup, count)
    load = _load.LoadGenerator(
        client.url,
        model,
        arguments.concurrency,
        arguments.request_rate,
        arguments.api_key,
        arguments.ignore_eos,
        arguments.data_seed,
        chats=arguments.backend == CHATS
        or arguments.endpoint == ENDPOINTS[1]
        or any(prompt.images for prompt in prompts),
    )
    if load.chats:
        prompts = [_as_text(client, model, prompt) for prompt in prompts]
    summary = asyncio.run(_measure(load, prompts, arguments.warmup))
    _report.show(summary, arguments.json)
    if arguments.save_result:
        when = time.strftime("%Y%m%d-%H%M%S")
        name = arguments.result_filename or f"{model.replace('/', '--')}-{when}.json"
        about = {
            "date": when,
            "model_id": model,
            "num_prompts": arguments.num_prompts,
            "request_rate": str(arguments.request_rate or "inf"),
            "max_concurrency": arguments.concurrency,
        }
        file = Path(arguments.result_dir, name)
        write_json("--result-filename", file, about | _report.as_vllm(summary))
    if summary["failed"]:
        print(f"\nfirst error: {log.escape(summary['first_error'])}")
    return 1 if summary["failed"] else 0


def _as_text(client: Client, model: str, prompt: BenchPrompt) -> BenchPrompt:
    """Return a prompt of token ids as its text, for a chat."""
    if isinstance(prompt.prompt, str):
        return prompt
    answer = client.ask("POST", "/detokenize", {"model": model, "tokens": prompt.prompt})
    if answer.status != 200:
        raise ServdError(
            f"--backend {CHATS} needs /detokenize to make random texts, and the server answers "
            f"{answer.status}: use --dataset-path"
        )
    return msgspec.structs.replace(prompt, prompt=answer.body["prompt"])


async def _measure(
    load: _load.LoadGenerator, prompts: Sequence[BenchPrompt], num_warmups: int
) -> dict[str, Any]:
    if num_warmups:
        await _load.run(load, prompts[:num_warmups], show_progress=False)
    return _report.summarise(*await _load.run(load, prompts[num_warmups:]))
