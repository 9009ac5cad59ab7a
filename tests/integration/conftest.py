"""Real servers for the integration tests: `servd serve` in its own processes, on loopback."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.limits import WAIT_SECONDS

# By default httpx gives up after five seconds, in which a busy machine may not get to answer.
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, WAIT_SECONDS)


class Server:
    """A `servd serve` that a test started. Its log is in `lines`."""

    def __init__(
        self,
        *args: str,
        soft_file_limit: int | None = None,
        new_session: bool = False,
        prefix: Sequence[str] = (),
    ) -> None:
        def limit_files() -> None:
            if soft_file_limit is not None:
                max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft_file_limit, max_files))

        listen = () if "--uds" in args or "--headless" in args else ("--port", "0")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "servd", "serve", *args, *listen],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=limit_files,
            start_new_session=new_session,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self.read_log, daemon=True)
        self.reader.start()

    def read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def wait_for_line(self, pattern: str, timeout: float = WAIT_SECONDS) -> re.Match[str]:
        """The first log line that matches, waiting for it."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            if self.process.poll() is not None and not self.reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no line matches {pattern!r} in:\n" + "\n".join(self.lines))

    @property
    def url(self) -> str:
        return self.wait_for_line(r"listening on (https?://\S+)")[1]

    def wait_ready(self) -> None:
        self.wait_for_line(r" ready ")
        if "--uds" not in self.process.args and "--headless" not in self.process.args:
            # The API servers may still import, while the fake engine is ready.
            deadline = time.monotonic() + WAIT_SECONDS
            while httpx.get(f"{self.url}/health", timeout=WAIT_SECONDS).status_code != 200:
                assert time.monotonic() < deadline, self.lines
                time.sleep(0.02)

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_SECONDS
        )

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name} in:\n{text[:2000]}"
        return sum(map(float, values))

    def check_audit(self) -> None:
        """Nothing contradicts itself in the engine, and nothing is open there that is not here."""
        args, headers = list(self.process.args), {}
        if "--api-key" in args:
            headers["Authorization"] = f"Bearer {args[args.index('--api-key') + 1]}"
        answer = httpx.get(f"{self.url}/debug/audit", headers=headers)
        assert answer.status_code == 200 and answer.json()["problems"] == [], answer.text

    def wait_idle(self) -> None:
        """Wait until the engine reports that nothing runs. It does so with a step: ask for one."""
        body = {"prompt": "x", "max_tokens": 1}
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            httpx.post(f"{self.url}/v1/completions", json=body).raise_for_status()
            if not self.metric("vllm:num_requests_running"):
                break
            assert time.monotonic() < deadline, "requests still run"

    def children(self) -> dict[str, psutil.Process]:
        """Child processes by kind: engine, api (the last of several), standby (the next engine)."""
        kinds = {"engine_core_proc": "engine", "api.server": "api"}
        by_kind: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children():
            for name, kind in kinds.items():
                if name in " ".join(child.cmdline()):
                    by_kind["standby" if kind == "engine" and kind in by_kind else kind] = child
        return by_kind

    def stop(self, timeout: float = WAIT_SECONDS) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout)
        self.reader.join(WAIT_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers that are stopped at the end of the test."""
    servers: list[Server] = []

    def start_server(*args: str, wait: bool = True, **options: Any) -> Server:
        servers.append(Server(*args, **options))
        if wait:
            servers[-1].wait_ready()
        return servers[-1]

    yield start_server
    for server in servers:
        server.stop()


def shared(*args: str) -> Iterator[Server]:
    """The body of a fixture of a wider scope."""
    server = Server(*args)
    try:
        server.wait_ready()
        yield server
        server.check_audit()
    finally:
        server.stop()


# The engine of a server that many tests share has no successor: none is prepared, and a death is
# noticed.
LAST_ENGINE = ("--max-engine-restarts", "0")


@pytest.fixture(scope="session")
def fake_server() -> Iterator[Server]:
    """A server with the fake executor, shared by tests that leave it as it was."""
    yield from shared("--executor", "fake", *LAST_ENGINE)


@pytest.fixture(scope="session")
def llama_server(tiny_llama: Path) -> Iterator[Server]:
    """A server with a small real model."""
    name = ("--served-model-name", "tiny")
    yield from shared(str(tiny_llama), "--device", "cpu", *name, *LAST_ENGINE)


@pytest.fixture(scope="session")
def demo_server() -> Iterator[Server]:
    """A server with the demo model, which speaks, calls tools and writes JSON."""
    yield from shared("demo", "--device", "cpu", *LAST_ENGINE)


@pytest.fixture(scope="session")
def long_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama with a context of 8192 tokens: its streams last for many seconds."""
    folder = tmp_path_factory.mktemp("long-llama")
    shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder
