"""Simulate requests with servd's own scheduler, cache and router."""

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from servd.base.errors import ConfigError
from servd.simulate import cluster, costs, report, traces
from servd.simulate.cluster import OWN_ROUTER, POLICIES, ClusterOptions
from servd.simulate.costs import Costs
from servd.simulate.traces import Recording, RequestLine, ServerLine
from servd.terminal import engine_flags
from servd.terminal.engine_flags import positive
from servd.terminal.output import format_row, write_json

NUM_REQUESTS = 1000  # of what is made up
RATE = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [TRACE] [OPTION ...]"
    add = parser.add_argument
    count = positive(int)
    number = positive(float)
    add("trace", nargs="?", metavar="TRACE", help="a file of --record-trace, or of that shape")
    add(
        "--speed", type=number, default=1.0, metavar="X", help="let requests arrive X times as fast"
    )
    add("--concurrency", type=count, metavar="N", help="no more requests at once: the others wait")
    names = ", ".join(Costs.__struct_fields__)
    add(
        "--costs",
        metavar="MACHINE|FILE",
        help=f"of steps: {', '.join(costs.MACHINES)}, a recording, or nanoseconds as JSON: {names}",
    )
    add("--json", metavar="FILE", help="write the figures and the costs to a file")
    add = parser.add_argument_group("without TRACE: conversations that are made up").add_argument
    add("--shape", choices=traces.SHAPES, help="how long they are")
    add("--requests", type=count, metavar="N", help=f"in all [{NUM_REQUESTS}]")
    add("--rate", type=number, metavar="X", help=f"requests a second [{RATE:g}]")
    group = parser.add_argument_group("the cluster; what is not given is as in the recording")
    add = group.add_argument
    add("--servers", type=count, default=1, metavar="N", help="behind one balancer [%(default)s]")
    among = "among them [%(default)s]"
    add("--balancing", choices=POLICIES, default=POLICIES[0], help=among)
    among = "among the engines of a server [%(default)s]"
    add("--routing", choices=[OWN_ROUTER, *POLICIES], default=OWN_ROUTER, help=among)
    add("--num-blocks", type=count, metavar="N", help="of each engine's KV cache")
    group.argument_default = argparse.SUPPRESS
    for name in traces.OPTIONS:
        engine_flags.add_option(group, name)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print the simulated figures next to the measured figures, if any."""
    if arguments.trace is None and arguments.shape is None:
        raise ConfigError("give a TRACE, or --shape for generated requests")
    for name in ("shape", "requests", "rate"):
        if arguments.trace is not None and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for generated requests: leave out this option or TRACE")
    recording = Recording([], [])
    if arguments.trace is not None:
        recording = traces.read(arguments.trace)
        if not recording.requests:
            raise ConfigError(f"{arguments.trace}: has no request")
    machine = costs.MACHINES.get(arguments.costs or "")
    if arguments.costs is None and arguments.trace is None:
        name, machine = next(iter(costs.MACHINES.items()))
        print(f"costs of {machine.about}: --costs {name}; give your own by a recording")
    step_costs = machine.costs if machine is not None else find_costs(arguments.costs, recording)
    server = recording.server
    values = vars(arguments)
    if machine is not None and server is None and values["num_blocks"] is None:
        values["num_blocks"] = machine.num_blocks
    options = msgspec.convert(values, ClusterOptions)
    options.config = {name: values[name] for name in traces.OPTIONS if name in values}
    columns: dict[str, dict[str, float]] = {}
    if server is not None and any(request.finished for request in recording.requests):
        columns["measured"] = report.summarise(recording.requests)
        columns["simulated"] = simulate(server, recording.requests, step_costs, ClusterOptions())
    if server is None or options != ClusterOptions() or arguments.speed != 1:
        requests = choose_requests(arguments, recording)
        name = "changed" if server is not None else "simulated"
        columns[name] = simulate(server or cluster.UNKNOWN_SERVER, requests, step_costs, options)
    name, figures = [*columns.items()][-1]
    print(f"{name}: {report.verdict(figures)}\n")
    print_table(columns)
    if arguments.json is not None:
        write_json("--json", arguments.json, {**columns, "costs": step_costs})
    return 0


def find_costs(path: str | None, recording: Recording) -> Costs:
    """Return the costs of --costs, or of the recording. Raises ConfigError if there are none."""
    if path is not None:
        try:
            text = path if path.lstrip().startswith("{") else Path(path).read_text("utf8")
            decoded: Any = msgspec.json.decode(text)
            return msgspec.convert(decoded.get("costs", decoded), Costs)
        except OSError as error:
            raise ConfigError(f"--costs {path}: {error.strerror}") from None
        except msgspec.ValidationError as error:
            raise ConfigError(f"--costs {path}: {error}") from None
        except msgspec.DecodeError:  # several lines
            recording = traces.read(path)
    step_costs = costs.fit(recording.steps, recording.requests)
    if step_costs is None:
        raise ConfigError(
            f"the cost of a step is unknown: give a recording with at least {costs.LEAST_STEPS} "
            "steps (--record-trace of `servd serve`), or --costs"
        )
    return step_costs


def choose_requests(arguments: argparse.Namespace, recording: Recording) -> Iterator[RequestLine]:
    """Yield the requests to replay, at the requested speed."""
    if arguments.shape is not None:
        longest = int(getattr(arguments, "max_model_len", cluster.MAX_MODEL_LEN))
        rate = (arguments.rate or RATE) * arguments.speed
        count = arguments.requests or NUM_REQUESTS
        yield from traces.make_requests(traces.SHAPES[arguments.shape], count, rate, longest)
    for request in recording.requests:
        first = recording.requests[0].timestamp
        at = first + (request.timestamp - first) / arguments.speed
        yield msgspec.structs.replace(request, timestamp=at)


def simulate(
    server: ServerLine, requests: Iterable[RequestLine], step_costs: Costs, options: ClusterOptions
) -> dict[str, float]:
    began = time.monotonic()
    sim = cluster.ClusterSim(server, step_costs, options)
    sim.run(tqdm(requests, "requests", leave=False, disable=None))
    return {**report.summarise_simulation(sim), "simulation_s": time.monotonic() - began}


def print_table(columns: dict[str, dict[str, float]]) -> None:
    """Print a line for each figure, with the change from the second-last column to the last."""
    print(format_row("", *columns))
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        values = [column.get(name) for column in columns.values()]
        cells: list[object] = [*values]
        if len(values) > 1 and values[-2] and values[-1] is not None:
            cells.append(f"{100 * (values[-1] / values[-2] - 1):+.1f} %")
        print(format_row(name, *cells))
