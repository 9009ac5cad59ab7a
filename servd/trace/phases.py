"""Phases: divides the calls of all processes into the phases of a start and of a request."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from servd.trace.recorder import FunctionCall, Process

PHASES = tomllib.loads(Path(__file__).with_name("phases.toml").read_text(encoding="utf8"))


class Phase(msgspec.Struct):
    """A phase, with the calls of its first functions."""

    name: str
    text: str  # a sentence
    calls: list[tuple[str, FunctionCall]]  # process and call


def divide(processes: Sequence[Process]) -> list[Phase]:
    """Return the phases in the order of phases.toml."""
    phases: list[Phase] = []
    phase_of = {
        function: row["name"]
        for rows in PHASES.values()
        for row in rows
        for function in row["functions"]
    }
    for kind, rows in PHASES.items():
        is_request = kind == "request"
        for row in rows:
            calls = [
                (process.name, _cut(call, row["name"], phase_of, is_request))
                for process in processes
                for thread in process.threads
                for call in _find(thread, row["functions"], is_request)
            ]
            phases.append(Phase(row["name"], row["text"], calls))
    return phases


def _find(
    caller: FunctionCall, functions: Sequence[str], is_request: bool
) -> Iterator[FunctionCall]:
    """Yield the calls of these functions, without calls inside them."""
    for call in caller.calls:
        if call.is_request == is_request and _place(call) in functions:
            yield call
        else:
            yield from _find(call, functions, is_request)


def _cut(call: FunctionCall, name: str, phase_of: dict[str, str], is_request: bool) -> FunctionCall:
    """Return a call without those of the other part, and without the calls of other phases."""
    calls: list[FunctionCall] = []
    for inner in call.calls:
        if inner.is_request != is_request:
            continue
        other = phase_of.get(_place(inner), name)
        if other == name:
            calls.append(_cut(inner, name, phase_of, is_request))
        else:
            calls.append(msgspec.structs.replace(inner, phase=other, calls=[]))
    return msgspec.structs.replace(call, calls=calls)


def _place(call: FunctionCall) -> str:
    return f"{call.file}:{call.name}"
