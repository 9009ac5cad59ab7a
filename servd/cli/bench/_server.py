"""Start a server command, wait until it answers, stop it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from servd.errors import ServdError

POLL_INTERVAL = 0.05  # seconds
STOP_TIMEOUT = 20.0  # seconds


@contextlib.contextmanager
def running(command: str, url: str, timeout: float) -> Iterator[float]:
    """Run `command` until the block ends; yields the seconds until `url`/health answered 200.

    Raises:
        ServdError: the command ended, or did not answer within `timeout` seconds.
    """
    started = time.perf_counter()
    # A session of its own, so that whatever the command starts can be stopped with it.
    process = subprocess.Popen(
        shlex.split(command), start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        while not _is_healthy(url):
            if process.poll() is not None:
                code = process.returncode
                raise ServdError(f"{command!r} ended with code {code} before it was ready")
            if time.perf_counter() - started > timeout:
                raise ServdError(f"{command!r} was not ready within {timeout:.0f} s")
            time.sleep(POLL_INTERVAL)
        yield time.perf_counter() - started
    finally:
        _stop(process)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
