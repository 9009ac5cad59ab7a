"""Lets long work in a thread end early if nobody waits for its result any more."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_is_abandoned: ContextVar[threading.Event] = ContextVar("_is_abandoned")


def run_until(is_abandoned: threading.Event, work: Callable[[], Any]) -> Any:
    """Run `work`, in which `check_abandoned` raises CancelledError once the event is set."""
    _is_abandoned.set(is_abandoned)
    return work()


def check_abandoned() -> None:
    if (event := _is_abandoned.get(None)) is not None and event.is_set():
        raise asyncio.CancelledError
