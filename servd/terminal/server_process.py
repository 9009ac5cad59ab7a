"""Starts a server command, waits until the server answers, and stops it."""

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from servd.base.errors import ServdError
from servd.base.private_dir import private_dir
from servd.terminal.api_client import Client

POLL_INTERVAL = 0.05  # seconds
STOP_TIMEOUT = 20.0  # seconds
Connect = Callable[[], Client]


@contextlib.contextmanager
def running(
    command: Sequence[str], client: Client, timeout: float, env: Mapping[str, str] = {}
) -> Iterator[float]:
    """Run a server, with `env` added to its environment, until the block ends; yield the seconds
    until it was ready. Raises ServdError if the command exits, or `client` finds no ready server
    within `timeout` seconds.
    """
    started = time.perf_counter()
    # Its own session, so that all processes of the command can be stopped with it.
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, env=os.environ | env
    )
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


@contextlib.contextmanager
def own_server(options: dict[str, Any], env: Mapping[str, str] = {}) -> Iterator[Connect]:
    """Run `servd serve` with these options of Config on a private socket until the block ends.
    Raises ServdError if the server exits before it is ready; its log explains why.
    """
    folder = private_dir()
    config = folder / "config.json"
    uds = folder / "http"
    config.write_text(json.dumps({**options, "uds": str(uds)}), encoding="utf8")
    for signum in (signal.SIGTERM, signal.SIGHUP):  # or the server would outlive this process
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    command = [sys.executable, "-m", "servd", "serve", "--config", str(config)]
    connect = partial(Client, "http://localhost", key_of(options), str(uds))
    try:
        with running(command, connect(), timeout=math.inf, env=env):
            yield connect
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def key_of(options: dict[str, Any]) -> str | None:
    return next(iter(options.get("api_key", [])), None)
