"""Engine processes, one after the other."""

import itertools
import os
import queue
import shutil
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from servd import launch
from servd.base.private_dir import private_dir
from servd.config import Config
from servd.core.client import EngineProcess
from servd.ipc.child import STANDBY_NICE, Child
from servd.launch import engine_supervisor as module
from servd.launch.engine_supervisor import EngineMessage, EngineSupervisor, devices_of
from servd.messages.engine import STALLED, EngineStatus
from tests.limits import WAIT_SECONDS


@pytest.fixture
def ipc_dir() -> Iterator[str]:
    path = str(private_dir())
    yield path
    shutil.rmtree(path)


def look_until_prepared(engines: EngineSupervisor) -> EngineProcess:
    deadline = time.monotonic() + WAIT_SECONDS
    assert engines.child
    while engines.standby is None:
        assert time.monotonic() < deadline and engines.child.exit_code is None
        engines.look()
        time.sleep(0.01)
    return engines.standby


def test_the_standby_engine_imports_torch_in_advance(ipc_dir, monkeypatch):
    monkeypatch.setattr(module, "STANDBY_DELAY", 0.0)
    ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
    config, spec, _ = launch.find_and_resolve(Config.load({"executor": "fake"}))
    engines = EngineSupervisor(config, spec, ipc_dir, ended.put)
    engines.start(time.monotonic())
    try:
        first, second = engines.child, look_until_prepared(engines)
        assert first and first.heartbeat.is_ready
        prepares = ["fake", "1", str(STANDBY_NICE)]
        assert second.process.args[-3:] == prepares and not second.heartbeat.numbers[0], (
            "it only waits"
        )
        first.process.kill()
        assert ended.get(timeout=WAIT_SECONDS) is first
        assert engines.replace() is None
        assert engines.child is second
        third = look_until_prepared(engines)  # as soon as the second one is ready
        third.process.kill()
        third.process.wait(WAIT_SECONDS)
        second.process.kill()
        assert ended.get(timeout=WAIT_SECONDS) is second, "nobody waited for the third"
        engines.replace()
        assert engines.child not in (second, third), "a standby that died is not used"
    finally:
        engines.stop(60)


def supervisor(ipc_dir: str, ended: queue.SimpleQueue[Child]) -> EngineSupervisor:
    config, spec, _ = launch.find_and_resolve(Config.load({"executor": "fake"}))
    engines = EngineSupervisor(config, spec, ipc_dir, ended.put)
    engines.start(time.monotonic())
    return engines


def look_until(engines: EngineSupervisor, is_so: Callable[[], bool], problem: str) -> int:
    """Look as the parent does; returns how often."""
    deadline = time.monotonic() + 60
    for count in itertools.count():
        if is_so():
            return count
        assert time.monotonic() < deadline, problem
        engines.look()
        time.sleep(0.05)
    raise AssertionError


def test_an_engine_that_a_signal_stops_is_replaced_at_once(ipc_dir, monkeypatch):
    monkeypatch.setattr(module, "STANDBY_DELAY", 0.0)
    ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
    engines = supervisor(ipc_dir, ended)
    messages: list[EngineMessage] = []
    engines.notify = lambda folder, message: messages.append(message)
    try:
        first = engines.child
        assert first
        look_until(engines, lambda: first.heartbeat.is_ready, "it is not ready")
        first.process.send_signal(signal.SIGSTOP)
        count = look_until(engines, lambda: bool(engines.reason), "it is not noticed")
        assert count * module.LOOK_INTERVAL <= 1.0
        assert messages == [EngineStatus(STALLED, 0.0, 0)]
        assert ended.get(timeout=60) is first
        assert engines.replace() is None and "SIGSTOP" in messages[-1].reason
    finally:
        engines.stop(60)


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("is_needed", [False, True])
def test_a_standby_that_could_not_become_the_engine_is_replaced(
    ipc_dir, monkeypatch, signum, is_needed
):
    monkeypatch.setattr(module, "STANDBY_DELAY", 0.0)
    ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
    engines = supervisor(ipc_dir, ended)
    try:
        first, bad = engines.child, look_until_prepared(engines)
        assert first
        bad.process.send_signal(signum)
        if signum == signal.SIGKILL:
            os.waitid(os.P_PID, bad.process.pid, os.WEXITED | os.WNOWAIT)
        else:
            os.waitid(os.P_PID, bad.process.pid, os.WSTOPPED | os.WNOWAIT)
        if is_needed:
            first.process.kill()
            assert ended.get(timeout=60) is first
            assert engines.replace() is None
            assert engines.child is not bad
            ready = engines.child
            look_until(engines, lambda: ready.heartbeat.is_ready, "no engine")
        else:
            look_until(engines, lambda: engines.standby not in (None, bad), "no other standby")
        assert not psutil.pid_exists(bad.process.pid), "no zombie is left"
    finally:
        engines.stop(60)


def test_no_standby_where_no_engine_is_started_again(ipc_dir, monkeypatch):
    monkeypatch.setattr(module, "STANDBY_DELAY", 0.0)
    options = {"executor": "fake", "max_engine_restarts": 0}
    config, spec, _ = launch.find_and_resolve(Config.load(options))
    engines = EngineSupervisor(config, spec, ipc_dir, print)
    engines.start(time.monotonic())
    try:
        while engines.watch.seconds_ready < 1:
            engines.look()
            time.sleep(0.01)
        assert engines.standby is None
    finally:
        engines.stop(60)


def test_each_engine_sees_devices_of_its_own(monkeypatch):
    parallel = Config.load(
        {"device": "cuda", "tensor_parallel_size": 2, "data_parallel_size": 2}
    ).parallel
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [devices_of(rank, parallel) for rank in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5,1,3,4")
    assert [devices_of(rank, parallel) for rank in range(2)] == ["7,GPU-5", "1,3"]
    assert devices_of(0, Config.load({"device": "cuda"}).parallel) == "", "all, as they are"
