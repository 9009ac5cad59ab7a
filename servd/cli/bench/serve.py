"""Throughput and latency of a running server, any that speaks /v1/completions."""

from __future__ import annotations

import argparse
import asyncio

from servd.cli import _client
from servd.cli.bench import _data, _load, _report


def add_options(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    _client.add_server_options(parser)
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
        "--warmup", type=int, default=1, metavar="N", help="requests sent before, not counted [1]"
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate the full output length",
    )
    _report.add_options(parser)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the distributions (.svg or .png; needs matplotlib)"
    )
    _data.add_options(parser, num_prompts=64, input_len=64, output_len=64)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if any request failed."""
    figure = _report.new_figure() if arguments.plot else None
    prompts = _data.make_prompts(arguments, more=arguments.warmup)
    records, seconds = asyncio.run(_measure(arguments, prompts))
    summary = _report.summarise(records, seconds)
    _report.show(summary, arguments.json)
    if summary["failed"]:
        print(f"\nfirst error: {summary['first_error']}")
    if arguments.plot:
        _report.plot(figure, arguments.plot, records)
    return 1 if summary["failed"] else 0


async def _measure(
    arguments: argparse.Namespace, prompts: list[_data.Prompt]
) -> tuple[list[_load.Record], float]:
    client = _client.Client(arguments.url, arguments.api_key)
    load = _load.Load(
        url=client.url,
        model=arguments.model or client.first_model(),
        concurrency=arguments.concurrency,
        request_rate=arguments.request_rate,
        api_key=arguments.api_key,
        ignore_eos=arguments.ignore_eos,
        seed=arguments.data_seed,
    )
    warmup, measured = prompts[: arguments.warmup], prompts[arguments.warmup :]
    if warmup:
        await _load.run(load, warmup, show_progress=False)
    return await _load.run(load, measured)
