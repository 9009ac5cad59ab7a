"""`servd serve` without step records, timelines and metrics: what benchmarks.observability compares
servd with. Marks of requests, a handful for each, are still taken.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from starlette.types import Message, Send

from servd import cli, incarnations, ipc, process_tree
from servd.tracing import StepRecord

COUNTED = ("step", "finished", "request", "answer", "lag")


def replace(*what: tuple[Any, str, Any]) -> None:
    """Give attributes other values."""
    for owner, name, value in what:
        setattr(owner, name, value)


def nothing(*_: Any, **__: Any) -> None:
    """In place of what is left out."""


def engine() -> None:
    """Run the engine process."""
    from servd.core import engine_core_proc, scheduler, step

    class NoLog(step.StepLog):
        """Only tells the time between steps, by which drafts are planned."""

        def add(self, record: StepRecord) -> tuple[int, bool]:
            before, self._harvested_ns = self._harvested_ns, record.harvested_ns
            return record.harvested_ns - before, False

        def news(self, client: int) -> list[Any]:
            return []

    replace((scheduler, "StepLog", NoLog))
    engine_core_proc.main()


def api_server() -> None:
    """Run the API-server process."""
    from servd.api import middleware, server
    from servd.api.metrics import ChoiceTimes, Metrics
    from servd.api.timeline import Timeline, Tracer

    def count(metrics: Metrics, choice: ChoiceTimes, num_tokens: int, now_ns: int) -> None:
        choice.num_tokens += num_tokens

    def forget(tracer: Tracer, request_id: str, *_: object) -> Timeline:
        return tracer.running.pop(request_id, None) or Timeline(request_id)

    async def send_on(send: Send, message: Message, blocked: object) -> None:
        await send(message)

    replace(
        (middleware, "_send_timed", send_on),
        (Metrics, "observe_tokens", count),
        *((Metrics, f"observe_{what}", nothing) for what in COUNTED),
        (Tracer, "finish", forget),
        *((Tracer, name, nothing) for name in ("mark", "extend")),
        (middleware, "server_timing", lambda timelines: ""),
    )
    server.main()


if __name__ == "__main__":
    if ipc.PARENT_DIR in os.environ:  # which only engines get
        engine()
    elif len(sys.argv) > 1:
        incarnations.ENGINE_MODULE = process_tree.API_MODULE = "benchmarks.unrecorded"
        sys.exit(cli.main())
    else:
        api_server()
