"""Another tree of processes takes over a listening socket, and no client notices."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.limits import WAIT_SECONDS

# What systemd does: the socket is descriptor 3, and LISTEN_PID is the process that it is for.
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""
OPTIONS = ["--executor", "fake", "--api-server-count", "1"]


@contextmanager
def tree(listener: socket.socket, channel: socket.socket) -> Iterator[subprocess.Popen[bytes]]:
    """A server behind the socket; `channel` hears from it that it is ready."""
    command = [sys.executable, "-m", "servd", "serve", *OPTIONS]
    environment = {**os.environ, "NOTIFY_SOCKET": channel.getsockname()}
    process = subprocess.Popen(
        [sys.executable, "-c", ACTIVATE, str(listener.fileno()), *command],
        pass_fds=[listener.fileno()],
        env=environment,
    )
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0


class Clients:
    """Send one request after the other, over connections that they keep and over new ones."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/v1/completions"
        self.is_over = threading.Event()
        self.num_answers = 0
        self.failures: list[str] = []
        self.threads = [threading.Thread(target=self.ask, args=[keep]) for keep in (True, False)]
        for thread in self.threads:
            thread.start()

    def ask(self, keep: bool) -> None:
        body = {"prompt": "a b c", "max_tokens": 20, "ignore_eos": True, "stream": True}
        headers = {} if keep else {"connection": "close"}
        with httpx.Client(timeout=WAIT_SECONDS) as client:
            while not self.is_over.is_set():
                try:
                    answer = client.post(self.url, json=body, headers=headers)
                    assert answer.status_code == 200, answer.text
                    assert answer.text.endswith("data: [DONE]\n\n")
                    self.num_answers += 1
                except (httpx.HTTPError, AssertionError) as error:
                    self.failures.append(repr(error))

    def wait_for_more(self, count: int = 20) -> None:
        deadline, expected = time.monotonic() + WAIT_SECONDS, self.num_answers + count
        while self.num_answers < expected and not self.failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(WAIT_SECONDS)


@pytest.fixture
def channel(tmp_path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(WAIT_SECONDS)
        yield channel


def test_a_rolling_restart_loses_no_request(channel: socket.socket):
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        with tree(listener, channel) as old:
            assert channel.recv(100) == b"READY=1"
            clients = Clients(f"http://127.0.0.1:{listener.getsockname()[1]}")
            try:
                clients.wait_for_more()
                with tree(listener, channel) as new:
                    assert channel.recv(100) == b"READY=1"
                    clients.wait_for_more()
                    old.send_signal(signal.SIGTERM)
                    assert old.wait(WAIT_SECONDS) == 0
                    clients.wait_for_more()
                    clients.stop()
                    assert clients.failures == [] and new.poll() is None
            finally:
                clients.stop()
