"""`servd serve` without step records, timelines and metrics: what benchmarks.observability compares
servd with. Marks of requests, a handful for each, are still taken.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from servd import cli
from servd.base.private_dir import PARENT_DIR
from servd.base.tracing import StepRecord
from servd.core import client
from servd.launch import api_servers

Replaced = list[tuple[Any, str, Any]]  # owner, name, what is there instead

COUNTED = ("step", "finished", "request", "answer", "lag")


def nothing(*_: Any, **__: Any) -> None:
    """In place of what is left out."""


def of_engine() -> Replaced:
    """No records of steps."""
    from servd.core import step
    from servd.core.scheduler import scheduler

    class NoLog(step.StepLog):
        """Only tells the time between steps, by which drafts are planned."""

        def add(self, record: StepRecord) -> tuple[int, bool]:
            before, self._collected_ns = self._collected_ns, record.collected_ns
            return record.collected_ns - before, False

        def take_new(self, client: int) -> list[Any]:
            return []

    return [(scheduler, "StepLog", NoLog)]


def of_api_server() -> Replaced:
    """No timelines and metrics."""
    from servd.api.http import middleware
    from servd.api.observability.metrics import Metrics
    from servd.api.observability.tracer import Tracer
    from servd.api.request.choice import Choice
    from servd.api.request.timeline import Timeline

    def count(metrics: Metrics, choice: Choice, num_tokens: int, now_ns: int) -> None:
        choice.num_tokens += num_tokens

    def forget(tracer: Tracer, timeline: Timeline, *_: object) -> None:
        tracer.running.pop(timeline.request_id, None)

    return [
        (Metrics, "observe_tokens", count),
        *((Metrics, f"observe_{what}", nothing) for what in COUNTED),
        (Tracer, "finish", forget),
        (middleware, "server_timing", lambda prompts: ""),
    ]


def main() -> None:
    """Be the process of `servd serve` that this one was started as."""
    if PARENT_DIR in os.environ:  # which only engines get
        from servd.core.engine_core_proc import EngineCoreProc

        replace(of_engine())
        EngineCoreProc.run_engine_core()
    elif len(sys.argv) > 1:
        client.ENGINE_MODULE = api_servers.API_MODULE = "benchmarks.unrecorded"
        sys.exit(cli.main())
    else:
        from servd.api import server

        replace(of_api_server())
        server.main()


def replace(replaced: Replaced) -> None:
    for owner, name, value in replaced:
        setattr(owner, name, value)


if __name__ == "__main__":
    main()
