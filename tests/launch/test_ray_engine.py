"""RayEngine: how an engine on another host ends, with calls of Ray that block as on a cut host."""

import queue
import threading
import time
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from servd.config import Config
from servd.ipc.start_messages import Uplink
from servd.launch import ray_engine
from servd.launch.ray_engine import LOOK_TIMEOUT, LOST, Ended, RayEngine, StartElsewhere


class FakeRay:
    """Has the calls of Ray that a RayEngine makes, and one actor."""

    def __init__(self) -> None:
        self.is_cut = threading.Event()
        self.ended: futures.Future[bytes] = futures.Future()
        answers = {"host": "10.0.0.7", "now_ns": time.monotonic_ns(), "look": (True, False)}
        methods = {
            name: SimpleNamespace(remote=lambda answer=answer: self.answer(answer))
            for name, answer in answers.items()
        }
        methods["run"] = SimpleNamespace(remote=lambda message, offset: self.ended)
        self.actor = SimpleNamespace(**methods)

    def answer(self, result: object) -> futures.Future[object]:
        future: futures.Future[object] = futures.Future()
        if not self.is_cut.is_set():
            future.set_result(result)
        return future

    def remote(self, **options: object) -> Any:
        return lambda cls: SimpleNamespace(remote=lambda: self.actor)

    def wait(self, calls: list[futures.Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        done, pending = futures.wait(calls, timeout)
        return [*done], [*pending]

    def get(self, call: futures.Future[Any]) -> Any:
        return call.result()

    def kill(self, actor: object) -> None:
        if self.is_cut.is_set():
            threading.Event().wait()  # for ever


@pytest.fixture
def ray(monkeypatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setattr(ray_engine, "library", lambda: ray)
    return ray


def start(ray: FakeRay) -> tuple[RayEngine, queue.SimpleQueue[RayEngine]]:
    """Return an engine that is ready, and the queue that it joins at its end."""
    message = StartElsewhere(Config(), Uplink("", "", "", 3.0), "", 0, False)
    engine = RayEngine("engine-1", Config(), message)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.on_exit(ended.put)
    while not engine.is_ready:
        time.sleep(0.01)
    return engine, ended


def test_an_engine_on_a_cut_host_is_lost_though_calls_of_ray_block(ray: FakeRay):
    engine, ended = start(ray)
    ray.is_cut.set()
    time.sleep(LOOK_TIMEOUT)
    assert ended.empty()  # only the connection's end counts: Ray's answers may be late
    engine.is_silent = True
    assert ended.get(timeout=LOOK_TIMEOUT + 1) is engine
    assert engine.ended is not None and engine.exit_code == LOST and engine.ended.was_ready
    reason = "engine-1 on 10.0.0.7 is lost: no heartbeat for 3 s"
    assert engine.ended.reason.startswith(reason)


def test_the_report_of_an_engine_that_died_is_awaited_while_its_host_answers(ray: FakeRay):
    engine, ended = start(ray)
    engine.is_silent = True
    time.sleep(LOOK_TIMEOUT + 0.5)
    assert ended.empty()
    ray.ended.set_result(msgspec.msgpack.encode(Ended(-11, True, computing=["guilty"])))
    assert ended.get(timeout=5) is engine
    assert engine.exit_code == -11
    assert engine.computing() == ["guilty"]
