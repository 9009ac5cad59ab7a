"""Throughput and latency of a running server, any that speaks OpenAI's completions or chats."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from servd.cli import _client
from servd.cli.bench import _data, _load, _report
from servd.errors import ServdError

# vLLM's flags for what is so anyhow, and what they may say.
CHATS = "openai-chat"
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
NEEDLESS: dict[str, dict[str, Any]] = {
    "--tokenizer": {},
    "--metric-percentiles": {},
    "--percentile-metrics": {},
    "--disable-tqdm": {"action": "store_true"},
    "--trust-remote-code": {"action": "store_true"},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    _client.add_server_options(parser)
    parser.add_argument("--host", metavar="NAME", help="with --port, in place of --url")
    parser.add_argument("--port", type=int, metavar="N", help="with --host, in place of --url")
    parser.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=int,
        metavar="N",
        help="most requests at once [no limit]",
    )
    parser.add_argument(
        "--request-rate", type=float, metavar="X", help="requests a second, Poisson [all at once]"
    )
    parser.add_argument(
        "--warmup",
        "--num-warmups",
        type=int,
        default=1,
        metavar="N",
        help="requests sent before, not counted [1]",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate the full output length",
    )
    parser.add_argument(
        "--backend",
        choices=("vllm", "openai", CHATS),
        default="openai",
        help=f"{CHATS}: send chats [completions]",
    )
    parser.add_argument("--endpoint", choices=ENDPOINTS, help=argparse.SUPPRESS)
    _report.add_options(parser)
    parser.add_argument(
        "--save-result", action="store_true", help="write the figures under vLLM's names, too"
    )
    parser.add_argument("--result-filename", metavar="FILE", help="where [MODEL-TIME.json]")
    parser.add_argument("--result-dir", default=".", metavar="DIR", help="in this folder [.]")
    for flag, rules in NEEDLESS.items():
        parser.add_argument(flag, help=argparse.SUPPRESS, **rules)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the distributions (.svg or .png; needs matplotlib)"
    )
    _data.add_options(parser, num_prompts=64, input_len=64, output_len=64)
    parser.add_argument(
        "--seed", dest="data_seed", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if any request failed."""
    figure = _report.new_figure() if arguments.plot else None
    if arguments.host is not None or arguments.port is not None:
        host = arguments.host or "127.0.0.1"
        arguments.url = f"http://{f'[{host}]' if ':' in host else host}:{arguments.port or 8000}"
    client = _client.Client(arguments.url, arguments.api_key)
    arguments.model = arguments.model or client.first_model()
    if arguments.save_result:
        _report.make_folder(arguments.result_dir)  # before what would be lost without it
    prompts = _data.make_prompts(
        arguments, arguments.warmup, lambda text: _num_tokens(client, arguments.model, text)
    )
    if _sends_chats(arguments):
        prompts = [_as_text(client, arguments.model, prompt) for prompt in prompts]
    records, seconds = asyncio.run(_measure(arguments, client.url, prompts))
    summary = _report.summarise(records, seconds)
    _report.show(summary, arguments.json)
    if arguments.save_result:
        when = time.strftime("%Y%m%d-%H%M%S")
        name = arguments.result_filename or f"{arguments.model.replace('/', '--')}-{when}.json"
        about = {
            "date": when, "model_id": arguments.model, "num_prompts": arguments.num_prompts,
            "request_rate": str(arguments.request_rate or "inf"),
            "max_concurrency": arguments.concurrency,
        }  # fmt: skip
        _report.write_json(Path(arguments.result_dir, name), about | _report.as_vllm(summary))
    if summary["failed"]:
        print(f"\nfirst error: {summary['first_error']}")
    if arguments.plot:
        _report.plot(figure, arguments.plot, records)
    return 1 if summary["failed"] else 0


def _num_tokens(client: _client.Client, model: str, text: str) -> int:
    """As the server counts, if it says."""
    answer = client.ask("POST", "/tokenize", {"model": model, "prompt": text})
    return answer.body["count"] if answer.status == 200 else _data.about_tokens(text)


def _sends_chats(arguments: argparse.Namespace) -> bool:
    return arguments.backend == CHATS or arguments.endpoint == ENDPOINTS[1]


def _as_text(client: _client.Client, model: str, prompt: _data.Prompt) -> _data.Prompt:
    """A prompt of token ids as the text that they are, for a chat.

    Raises:
        ServdError: the server does not say.
    """
    if isinstance(prompt.content, str):
        return prompt
    asked = {"model": model, "tokens": prompt.content}
    answer = client.ask("POST", "/detokenize", asked)
    if answer.status != 200:
        raise ServdError(
            f"--backend {CHATS} sends text, and /detokenize of this server, which makes text of "
            f"random tokens, answers {answer.status}: take texts of --dataset-path"
        )
    return _data.Prompt(answer.body["prompt"], prompt.output_len)


async def _measure(
    arguments: argparse.Namespace, url: str, prompts: list[_data.Prompt]
) -> tuple[list[_load.Record], float]:
    load = _load.Load(
        url=url,
        model=arguments.model,
        concurrency=arguments.concurrency,
        request_rate=arguments.request_rate,
        api_key=arguments.api_key,
        ignore_eos=arguments.ignore_eos,
        seed=arguments.data_seed,
        chats=_sends_chats(arguments),
    )
    warmup, measured = prompts[: arguments.warmup], prompts[arguments.warmup :]
    if warmup:
        await _load.run(load, warmup, show_progress=False)
    return await _load.run(load, measured)
