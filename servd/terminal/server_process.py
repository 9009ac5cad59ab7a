"""Starts a server command, waits until the server answers, and stops it."""

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from servd.base.errors import ServdError
from servd.base.private_dir import private_dir
from servd.base.python_command import python_command
from servd.checkpoint import hub
from servd.checkpoint.short_names import full_name
from servd.config import Config
from servd.terminal.api_client import Client
from servd.terminal.waiting import describe_start, exit_on_signals, spinner

POLL_INTERVAL = 0.05  # seconds
STOP_TIMEOUT = 20.0  # seconds
END_TIMEOUT = 0.5  # seconds that a server that has failed may live on: clients notice it first
MAX_LINES = 10  # of a log in an error
Connect = Callable[[], Client]


@contextlib.contextmanager
def running(
    command: Sequence[str], client: Client, timeout: float, env: Mapping[str, str] = {}
) -> Iterator[float]:
    """Run a server, with `env` added to its environment, until the block ends; yield the seconds
    until it was ready. Raises ServdError if the command exits, or `client` finds no ready server
    within `timeout` seconds. The server's stderr is a file, which is kept if the server fails.
    """
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile(prefix="servd-log-", delete=False) as log:
        try:
            # Its own session, so that all processes of the command can be stopped with it.
            process = subprocess.Popen(
                command,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=os.environ | env,
            )
        except OSError:
            os.unlink(log.name)
            raise
    is_ready = False
    has_failed = False
    try:
        with spinner("starting a server") as status:
            while process.poll() is None and not client.is_healthy():
                if time.perf_counter() - started > timeout:
                    raise ServdError(f"{shlex.join(command)} was not ready within {timeout:.0f} s")
                status.update(describe_start(log.name))
                time.sleep(POLL_INTERVAL)
        if process.poll() is None:
            is_ready = True
            yield time.perf_counter() - started
        if process.poll() is not None:
            raise ServdError(f"{shlex.join(command)} ended with code {process.returncode}")
    except ServdError as error:
        if is_ready and not ends(process, END_TIMEOUT):  # an error of the block
            raise
        has_failed = True
        text = Path(log.name).read_text(encoding="utf8", errors="replace")
        lines = [line for line in text.splitlines() if " INFO " not in line][-MAX_LINES:]
        raise ServdError("\n".join([f"{error}; its log is {log.name}", *lines])) from None
    finally:
        process.terminate()
        if not ends(process, STOP_TIMEOUT):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not has_failed:
            os.unlink(log.name)


def ends(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Return whether a process has ended, or does so within `timeout` seconds."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextlib.contextmanager
def own_server(
    options: dict[str, Any], env: Mapping[str, str] = {}, on_tcp: bool = False
) -> Iterator[Connect]:
    """Run `servd serve` with these options of Config until the block ends, on a private socket, or
    on a free port of the loopback address. Raises ServdError like `running`, and if the weights
    cannot be downloaded.
    """
    model = Config.load(options).model
    if model.model is not None and model.load_format != "dummy":  # here the hub shows its progress
        hub.download_weights(model.model, model.revision, model.download_dir, model.load_format)
    folder = private_dir()
    config = folder / "config.json"
    listens: dict[str, Any] = {"uds": str(folder / "http")}
    url = ""
    if on_tcp:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        listens = {"uds": None, "host": "127.0.0.1", "port": port}
        url = f"http://127.0.0.1:{port}"
    config.write_text(json.dumps(options | listens), encoding="utf8")
    exit_on_signals()  # or the server would outlive this process
    command = python_command("servd", "serve", "--config", str(config))
    connect = partial(Client, url, key_of(options), listens["uds"])
    try:
        with running(command, connect(), timeout=math.inf, env=env):
            yield connect
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def key_of(options: dict[str, Any]) -> str | None:
    return next(iter(options.get("api_key", [])), None)


def find_model(client: Client, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return what /v1/models says of the model that `options` of Config name, or of the server's
    first one if they name none. Return None without such a server.
    """
    client.http.timeout = 5  # seconds
    name = options.get("model")
    names = (name, full_name(name or ""))
    with contextlib.suppress(ServdError, LookupError, ValueError, TypeError):  # another kind
        for model in client.get("/v1/models")["data"]:
            if name is None or model["id"] in names:
                client.http.timeout = None
                return model
    return None
