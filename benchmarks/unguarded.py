"""`servd serve` without what keeps it alive and its clients apart: what benchmarks.observability
compares servd with. No process waits to be the next engine, nobody watches the engine or the event
loop, clients have no shares, no limits of admission, connections, headers and bodies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.unrecorded import Replaced, nothing, serve

OPTIONS = [
    "--scheduling-policy",
    "fcfs",
    "--max-engine-restarts",
    "0",
    "--engine-hang-timeout",
    "3600",
]


def of_engine() -> Replaced:
    """No beats, no record of what it may die of."""
    from servd.core.engine_core_proc import EngineCoreProc

    return [(EngineCoreProc, "beat", nothing), (EngineCoreProc, "begin_step", nothing)]


def of_api_server() -> Replaced:
    """Plain HTTP of uvicorn, and everybody is let in."""
    import uvicorn

    from servd.api import server
    from servd.api.engine.admission import Admission, Admitted
    from servd.api.engine.recovery import Recovery

    @contextmanager
    def enter(
        admission: Admission, key: Any, owner: str, num_prompts: int, *_: Any
    ) -> Iterator[Admitted]:
        yield Admitted(admission, owner, num_prompts)

    def settings(app: Any, connections: Any, **options: Any) -> uvicorn.Config:
        return uvicorn.Config(app, ws="none", lifespan="off", log_config=None, **options)

    return [
        (Admission, "enter", enter),
        (Admitted, "count_tokens", nothing),
        (Recovery, "try_next", nothing),
        (server, "settings", settings),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.argv += OPTIONS
    serve("benchmarks.unguarded", of_engine, of_api_server)
