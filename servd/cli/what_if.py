"""Replay recorded or made-up requests through servd's scheduler, KV cache and router, simulated."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf
from pathlib import Path
from typing import Any

import msgspec

from servd.api.recorder import OPTIONS, RequestLine, ServerLine
from servd.cli import _costs, _options, _traces
from servd.cli._costs import Costs
from servd.cli._fleet import BALANCING, CHOICES, ROUTING, Fleet
from servd.config import Config
from servd.errors import ConfigError
from servd.messages import WorkerReady

PERCENTILES = (50, 90, 99)
DEFAULTS = {"max_num_seqs": 64, "max_num_batched_tokens": 512}  # as on a CPU
LONGEST = 1 << 15  # tokens of a prompt with its answer, where nothing says otherwise
KV_BYTES = 1 << 16  # of a token
REQUESTS, RATE = 1000, 1.0  # of what is made up
MANY = 5000  # requests beyond which the progress is shown


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [TRACE] [OPTION ...]"
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help="a file of --record-trace, or of that shape")
    add("--speed", type=float, default=1.0, metavar="X", help="arrivals, so many times as fast")
    add("--concurrency", type=int, metavar="N", help="no more requests at once: the others wait")
    costs = ", ".join(Costs.__struct_fields__)
    add("--costs", metavar="FILE", help=f"of steps: a recording, or nanoseconds as JSON: {costs}")
    add("--json", metavar="FILE", help="write the figures and the costs to a file")
    group = parser.add_argument_group("without TRACE: conversations that are made up")
    add = group.add_argument
    add("--shape", choices=_traces.SHAPES, help="how long they are")
    add("--requests", type=int, metavar="N", help=f"in all [{REQUESTS}]")
    add("--rate", type=float, metavar="X", help=f"requests a second [{RATE:g}]")
    parser.argument_default = argparse.SUPPRESS
    group = parser.add_argument_group("the fleet; what is not given is as in the recording")
    add = group.add_argument
    add("--servers", type=int, default=1, metavar="N", help="behind one balancer [%(default)s]")
    among = f"among them [{BALANCING}]"
    add("--balancing", choices=CHOICES, default=BALANCING, help=among)
    among = f"among the engines of a server [{ROUTING}]"
    add("--routing", choices=[ROUTING, *CHOICES], default=ROUTING, help=among)
    add("--num-blocks", type=int, default=None, metavar="N", help="of each engine's KV cache")
    for name in OPTIONS:
        _options.add_option(group, name)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print what was measured, if it was, beside what would be."""
    recording = _traces.Recording([], [], None)
    verify(arguments)
    if arguments.trace is not None:
        recording = _traces.read(arguments.trace)
        if not recording.requests:
            raise ConfigError(f"{arguments.trace}: has no request")
    costs, server = find_costs(arguments, recording), recording.server
    columns: dict[str, Mapping[str, float]] = {}
    if server is not None and any(each.finished for each in recording.requests):
        columns["measured"] = measured(recording.requests)
        columns["simulated"] = simulate(server, recording.requests, costs)
    if server is None or is_changed(arguments):
        columns["what if"] = simulate(server, requests_of(arguments, recording), costs, arguments)
    print(table(columns))
    if arguments.json is not None:
        found = {**columns, "costs": msgspec.to_builtins(costs)}
        try:
            Path(arguments.json).write_bytes(
                msgspec.json.format(msgspec.json.encode(found)) + b"\n"
            )
        except OSError as error:
            raise ConfigError(f"--json {arguments.json}: {error.strerror}") from None
    return 0


def verify(arguments: argparse.Namespace) -> None:
    """Check what is asked for.

    Raises:
        ConfigError: a number is out of range, or what does not go together is given.
    """
    if arguments.trace is None and arguments.shape is None:
        raise ConfigError("name a TRACE, or the --shape of one to be made up")
    for name in ("shape", "requests", "rate"):
        if arguments.trace is not None and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for requests that are made up: leave it or TRACE out")
    for name in ("concurrency", "requests", "servers", "num_blocks"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("speed", "rate"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"--{name} {value:g}: must be above 0")


def find_costs(arguments: argparse.Namespace, recording: _traces.Recording) -> Costs:
    """Those given, or those of the recording.

    Raises:
        ConfigError: there are none.
    """
    text = arguments.costs
    if text is not None:
        try:
            if not text.lstrip().startswith("{"):
                text = Path(text).read_text(encoding="utf8")
            found: Any = msgspec.json.decode(text)
            return msgspec.convert(found.get("costs", found), Costs)
        except OSError as error:
            raise ConfigError(f"--costs {arguments.costs}: {error.strerror}") from None
        except msgspec.ValidationError as error:
            raise ConfigError(f"--costs {arguments.costs}: {error}") from None
        except msgspec.DecodeError:
            recording = _traces.read(arguments.costs)
    costs = _costs.fit(recording.steps, recording.requests)
    if costs is None:
        raise ConfigError(
            "what steps cost is not known: give a recording with at least "
            f"{_costs.LEAST_STEPS} steps (--record-trace of `servd serve`), or --costs"
        )
    return costs


def requests_of(
    arguments: argparse.Namespace, recording: _traces.Recording
) -> Iterable[RequestLine]:
    """Those to be replayed, at the speed that is asked for."""
    if arguments.shape is not None:
        longest = int(getattr(arguments, "max_model_len", LONGEST))
        rate = (arguments.rate or RATE) * arguments.speed
        shape, count = _traces.SHAPES[arguments.shape], arguments.requests or REQUESTS
        yield from _traces.made_up(shape, count, rate, longest)
    first = recording.requests[0].timestamp if recording.requests else 0.0
    for each in recording.requests:
        at = first + (each.timestamp - first) / arguments.speed
        yield msgspec.structs.replace(each, timestamp=at)


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in OPTIONS if hasattr(arguments, name)}


def is_changed(arguments: argparse.Namespace) -> bool:
    return bool(
        given_options(arguments)
        or arguments.num_blocks
        or arguments.concurrency
        or (arguments.servers, arguments.speed, arguments.routing) != (1, 1, ROUTING)
    )


def simulate(
    server: ServerLine | None,
    requests: Iterable[RequestLine],
    costs: Costs,
    arguments: argparse.Namespace | None = None,
) -> dict[str, float]:
    """Figures of a fleet: as recorded, but for what the arguments say.

    Raises:
        ConfigError: an option is wrong, or it is not known how large a KV cache is.
    """
    asked = arguments or argparse.Namespace(
        num_blocks=None, servers=1, routing=ROUTING, balancing=BALANCING, concurrency=None
    )
    options = {**(server.options if server is not None else DEFAULTS), **given_options(asked)}
    config = Config.load(options)
    config.cache.verify()
    batch, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    if batch is not None and seqs is not None and batch < seqs:
        raise ConfigError(f"--max-num-batched-tokens {batch} is below --max-num-seqs {seqs}")
    longest = int(options.get("max_model_len", LONGEST))
    num_blocks, kv_bytes = asked.num_blocks, KV_BYTES * config.cache.block_size
    if server is not None:  # as much memory, in blocks of another size
        before, now = server.options["block_size"], config.cache.block_size
        num_blocks = num_blocks or server.num_blocks * before // now
        kv_bytes = server.kv_bytes_per_block * now // before
    if not num_blocks:
        raise ConfigError("--num-blocks: say how large the KV cache of an engine is")
    windows = server.kv_windows if server is not None else (None,)
    if config.cache.has_connector and windows != (None,):  # then workers make no groups
        num_blocks, kv_bytes, windows = num_blocks // len(windows), kv_bytes * len(windows), (None,)
    worker = WorkerReady("none", "none", "none", num_blocks, 0, kv_bytes, kv_windows=windows)
    began = time.monotonic()
    fleet = Fleet(
        config, worker, longest, costs,
        asked.servers, asked.routing, asked.balancing, asked.concurrency,
    )  # fmt: skip

    def show(count: int) -> None:
        if count >= MANY and sys.stderr.isatty():
            print(f"\r{count} requests, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)

    fleet.run(requests, show)
    return figures(fleet) | {"simulation_s": time.monotonic() - began}


def figures(fleet: Fleet) -> dict[str, float]:
    tally, seconds = fleet.tally, (fleet.tally.ended_ns - fleet.tally.began_ns) / 1e9
    busy = [engine.busy_ns / 1e9 for engine in fleet.engines]
    mean = sum(busy) / len(busy)
    places = [place for engine in fleet.engines for place in engine.scheduler.report(0).tiers]
    hits = sum(place.num_hits for place in places if place.name == "host")
    shown = {
        **_common(seconds, tally.num_prompt, tally.num_output, len(tally.latency)),
        "refused": tally.num_refused,
        "engines": len(busy),
        "busy_%": 100 * mean / max(seconds, 1e-9),
        "busiest_over_mean": max(busy) / max(mean, 1e-9),
        "steps": tally.num_steps,
        "prefix_hits_%": 100 * tally.num_cached / max(tally.num_prompt, 1),
        "lost_by_routing_%": 100 * tally.num_lost / max(tally.num_compared, 1),
        "lost_by_balancing_%": 100 * tally.num_lost_outside / max(tally.num_compared, 1),
        "host_hits_%": 100 * hits * fleet.cache.block_size / max(tally.num_prompt, 1),
    }
    for name, values in (("ttft", tally.ttft), ("tpot", tally.tpot), ("request", tally.latency)):
        shown |= spread(name, values)
    return shown | {f"itl_ms_p{p}": value for p, value in _of_gaps(tally.gaps).items()}


def measured(requests: Sequence[RequestLine]) -> dict[str, float]:
    done = [each for each in requests if each.finished]
    begin = min(each.timestamp + each.sent for each in done)
    seconds = (max(each.timestamp + each.finished for each in done) - begin) / 1000
    prompt, output = sum(each.input_length for each in done), sum(e.output_length for e in done)
    shown = _common(seconds, prompt, output, len(done))
    shown["engines"] = len({each.engine for each in requests})
    shown["prefix_hits_%"] = 100 * sum(each.cached for each in done) / max(prompt, 1)
    late = [each.returned - each.finished for each in done]
    ttft = [1e6 * (each.first_token + x) for each, x in zip(done, late, strict=True)]
    long = [each for each in done if each.output_length > 1]
    tpot = [1e6 * (each.finished - each.first_token) / (each.output_length - 1) for each in long]
    shown |= spread("ttft", ttft) | spread("tpot", tpot)
    return shown | spread("request", [1e6 * each.returned for each in done])


def _common(seconds: float, num_prompt: int, num_output: int, count: int) -> dict[str, float]:
    seconds, some = max(seconds, 1e-9), max(count, 1)
    return {
        "requests": count,
        "seconds": seconds,
        "prompt_tokens_mean": num_prompt / some,
        "output_tokens_mean": num_output / some,
        "requests_per_s": count / seconds,
        "output_tokens_per_s": num_output / seconds,
    }


def spread(name: str, nanoseconds: Iterable[float]) -> dict[str, float]:
    values = sorted(nanoseconds)
    if not values:
        return {}
    at = {p: values[min(len(values) * p // 100, len(values) - 1)] / 1e6 for p in PERCENTILES}
    mean = sum(values) / len(values) / 1e6
    return {f"{name}_ms_mean": mean, **{f"{name}_ms_p{p}": value for p, value in at.items()}}


def _of_gaps(gaps: Counter[int]) -> dict[int, float]:
    """Percentiles in milliseconds, to a percent."""
    found: dict[int, float] = {}
    total, before = gaps.total(), 0
    for place, number in sorted(gaps.items()):
        before += number
        for p in PERCENTILES:
            if p not in found and before * 100 >= p * total:
                found[p] = exp(place / 100) / 1e6
    return found


def table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """One line a figure; the last column against the one before it."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    *_, before, last = [*columns, *columns][-2:]
    lines = [f"{'':26}" + "".join(f"{name:>14}" for name in columns)]
    for name in names:
        values = [column.get(name) for column in columns.values()]
        line = f"{name:26}" + "".join(f"{_number(value):>14}" for value in values)
        old, new = columns[before].get(name), columns[last].get(name)
        if before != last and old and new is not None:
            line += f"{100 * (new / old - 1):+9.1f} %"
        lines.append(line)
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 and value != int(value) else f"{value:.0f}"
