"""What goes wrong at a bad time, or on purpose: with real processes."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.ipc.channels import Outbox
from servd.ipc.start_messages import StartEngine
from servd.launch.sockets import check_private
from servd.messages.engine import EngineReady
from tests.integration.test_processes import socket_folder
from tests.limits import WAIT_SECONDS


def run_serve(*args: str) -> subprocess.CompletedProcess[str]:
    """A `servd serve` that is expected to end by itself."""
    command = [sys.executable, "-m", "servd", "serve", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)


def run_fake(*args: str) -> subprocess.CompletedProcess[str]:
    return run_serve("--executor", "fake", *args)


def test_uds_never_removes_what_is_not_a_socket(tmp_path: Path):
    file = tmp_path / "weights"
    file.write_text("precious")
    result = run_fake("--uds", str(file))
    assert result.returncode == 2
    assert f"--uds {file}: this is not a socket" in result.stderr
    assert file.read_text() == "precious"


def test_uds_is_removed_after_a_configuration_error(tmp_path: Path):
    path = tmp_path / "servd.sock"
    assert run_fake("--uds", str(path), "--max-num-batched-tokens", "2").returncode == 2
    assert not path.exists()


def test_stopped_headless_engine_ends_attached_api_servers(start, tmp_path: Path):
    folder = tmp_path / "ipc"
    engine = start("--executor", "fake", "--headless", "--ipc-dir", str(folder))
    attached = start("--executor", "fake", "--attach", str(folder))
    assert engine.stop() == 0
    assert attached.process.wait(WAIT_SECONDS) != 0
    assert not list(folder.iterdir())
    assert "no engine listens there" in run_fake("--port", "0", "--attach", str(folder)).stderr


def test_ipc_dir_that_is_too_long_is_refused(tmp_path: Path):
    result = run_fake("--headless", "--ipc-dir", str(tmp_path / ("x" * 100)))
    assert result.returncode == 2
    assert "too long" in result.stderr


def test_attach_refuses_an_engine_of_another_model_and_an_open_folder(start, tmp_path, tiny_llama):
    folder = tmp_path / "ipc"
    engine = start("--executor", "fake", "--headless", "--ipc-dir", str(folder))
    other = run_serve(str(tiny_llama), "--port", "0", "--attach", str(folder))
    assert other.returncode == 2 and "Traceback" not in other.stderr
    assert re.search(r"the engine is servd \S+ with model fake .*, not servd .*", other.stderr)
    folder.chmod(0o750)
    opened = run_fake("--port", "0", "--attach", str(folder))
    assert opened.returncode == 2 and "other users may enter this folder" in opened.stderr
    folder.chmod(0o700)
    attached = start("--executor", "fake", "--attach", str(folder))
    httpx.get(f"{attached.url}/v1/models").raise_for_status()
    assert engine.process.poll() is None


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch):
    tmp_path.chmod(0o700)
    check_private(str(tmp_path), "--attach")
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(ConfigError, match="another user"):
        check_private(str(tmp_path), "--attach")


def test_nohup_survives_the_end_of_the_terminal():
    def ignore_hangup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with subprocess.Popen(
        [sys.executable, "-m", "servd", "serve", "--executor", "fake", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore_hangup,
    ) as process:
        try:
            assert process.stderr is not None
            assert any(" ready at " in line for line in process.stderr)
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
        finally:
            process.terminate()
            process.stderr.read()


def test_second_signal_ends_streams_with_an_error(start):
    server = start("--executor", "fake")

    def signal_again() -> None:
        server.wait_for_line("draining")
        server.process.send_signal(signal.SIGTERM)

    tail = b""
    body = {"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True, "n": 16}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS
    ) as response:
        for i, data in enumerate(response.iter_raw()):
            tail = (tail + data)[-1000:]
            if i == 0:
                server.process.send_signal(signal.SIGTERM)
                threading.Thread(target=signal_again).start()
    assert b'"error"' in tail and tail.endswith(b"data: [DONE]\n\n")
    assert server.process.wait(WAIT_SECONDS) == 0
    server.stop()
    problems = [line for line in server.lines if re.search(r"WARNING|ERROR|Traceback", line)]
    assert not [line for line in problems if "event loop was blocked" not in line]  # a slow machine


def test_tokenizer_may_be_named_by_its_id_on_the_hub(start, tiny_llama, tmp_path, monkeypatch):
    commit = "0" * 40
    repository = tmp_path / "models--some--tokenizer"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tiny_llama / name).exists():
            shutil.copy(tiny_llama / name, snapshot / name)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    names = ("--tokenizer", "some/tokenizer", "--download-dir", str(tmp_path))
    server = start(str(tiny_llama), "--device", "cpu", *names)
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": "hello"}).json()["count"] > 0


def test_message_that_the_engine_cannot_read_is_dropped(start):
    server = start("--executor", "fake")
    outbox = Outbox(f"ipc://{socket_folder(server)}/engine")
    outbox.send(EngineReady(worker=None, max_model_len=1, block_size=1))  # type: ignore[arg-type]
    try:
        body = {"prompt": "a", "max_tokens": 3}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_SECONDS)
        assert answer.status_code == 200 and server.process.poll() is None
        server.wait_for_line("a message of an API server cannot be read")
    finally:
        outbox.close()


def test_killed_engine_leaves_no_socket_of_its_workers(start, tiny_llama: Path, monkeypatch):
    with tempfile.TemporaryDirectory(
        prefix="x", dir="/tmp"
    ) as folder:  # a short path, as sockets need
        monkeypatch.setitem(os.environ, "XDG_RUNTIME_DIR", folder)
        limit = ["--max-engine-restarts", "0"]
        server = start(str(tiny_llama), "--device", "cpu", "--executor", "multiproc", *limit)
        assert list(Path(folder).rglob("worker-0"))
        server.children()["engine"].kill()
        assert server.process.wait(WAIT_SECONDS) == 1
        assert not os.listdir(folder)


SLOW_TO_STOP = """
import time
from servd.core.engine_core_proc import EngineCoreProc
from servd.core.executor.fake import FakeExecutor

def shutdown(self):
    print("stopping", flush=True)
    time.sleep(1)
    print("stopped", flush=True)

FakeExecutor.shutdown = shutdown
EngineCoreProc.run_engine_core()
"""


def test_second_sigterm_does_not_cut_short_the_stopping_of_workers(tmp_path: Path):
    config = Config.load(
        {"executor": "fake", "max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8}
    )
    start = StartEngine(config, FAKE_SPEC, str(tmp_path), time.monotonic())
    message = msgspec.msgpack.encode(start)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_STOP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as engine:
        assert engine.stdin and engine.stdout and engine.stderr
        engine.stdin.write(len(message).to_bytes(4, "big") + message)
        engine.stdin.flush()
        assert any(b" ready after " in line for line in engine.stderr)
        engine.send_signal(signal.SIGTERM)
        assert engine.stdout.readline() == b"stopping\n"
        engine.send_signal(signal.SIGTERM)
        assert engine.stdout.readline() == b"stopped\n"
        assert engine.wait(WAIT_SECONDS) == 0


def test_silent_connections_lock_nobody_out(start):
    """300 of them, where the shell allows 256 open files and the server 100 connections."""
    server = start("--executor", "fake", "--max-connections", "100", soft_file_limit=256)
    assert psutil.Process(server.children()["api"].pid).rlimit(psutil.RLIMIT_NOFILE)[0] > 256
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(address, timeout=WAIT_SECONDS))
        for _ in range(3):
            assert httpx.get(f"{server.url}/v1/models", timeout=WAIT_SECONDS).status_code == 200
