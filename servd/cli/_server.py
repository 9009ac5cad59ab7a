"""Start a server command, wait until it answers, stop it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from servd.cli._client import Client
from servd.errors import ServdError

POLL_INTERVAL = 0.05  # seconds
STOP_TIMEOUT = 20.0  # seconds


@contextlib.contextmanager
def running(command: Sequence[str], client: Client, timeout: float) -> Iterator[float]:
    """Run a server until the block ends; yields the seconds until it was ready.

    Args:
        command: starts the server.
        client: of that server.
        timeout: seconds in which it has to be ready.

    Raises:
        ServdError: the command ended, or the server was not ready in time.
    """
    started = time.perf_counter()
    # A session of its own, so that whatever the command starts can be stopped with it.
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        while not client.is_healthy():
            if process.poll() is not None:
                code = process.returncode
                raise ServdError(
                    f"the server did not start: {shlex.join(command)} ended with code {code}"
                )
            if time.perf_counter() - started > timeout:
                raise ServdError(f"{shlex.join(command)} was not ready within {timeout:.0f} s")
            time.sleep(POLL_INTERVAL)
        yield time.perf_counter() - started
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
