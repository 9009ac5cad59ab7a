"""POST /collective_rpc. What workers do: tests/parity/test_collective_rpc.py."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servd.messages.engine import CollectiveRpc, CollectiveRpcResult
from tests.api.harness import serve, until

URL = "/collective_rpc"


async def test_methods_are_called_on_all_workers():
    async with serve() as served:
        for method, args, results in (
            ("sleep", [1], []),
            ("wake_up", [], []),
            ("start_profile", [], [None]),
        ):
            reply = await served.http.post(URL, json={"method": method, "args": args})
            assert reply.status_code == 200, reply.text
            assert reply.json() == {"results": results}
        assert [message.method for message in served.engine.sent] == [
            "sleep",
            "wake_up",
            "start_profile",
        ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"method": "__init__"}, "only: sleep, start_profile, stop_profile, update_weights, wake_"),
        ({"method": "shutdown", "args": []}, "there is no method 'shutdown'"),
        ({"method": "sleep", "args": [3]}, "the level 1 or 2"),
        ({"method": "wake_up", "args": ["weights"]}, "wake_up has no arguments"),
        ({"method": "update_weights"}, "one argument, a folder"),
        ({"method": "update_weights", "args": [5]}, "one argument, a folder"),
        ({"method": "update_weights", "args": ["/nowhere"]}, "are no files"),
        ({"method": "update_weights", "args": ["a", "b"]}, "args"),
        ({"method": "update_weights", "args": ["x" * 5000]}, "args"),
        ({"method": "sleep", "kwargs": {"level": 1}}, "kwargs"),
        ({"args": []}, "method"),
    ],
)
async def test_other_calls_are_refused(body: dict[str, Any], reason: str):
    async with serve() as served:
        reply = await served.http.post(URL, json=body)
        assert reply.status_code == 400 and reason in reply.text, reply.text
        assert reply.json()["error"]["param"].split("[")[0] in ("method", "args", "kwargs")


async def test_a_call_ends_with_its_timeout_or_with_the_engine(monkeypatch):
    async with serve() as served:
        sent: list[Any] = []
        monkeypatch.setattr(served.engine, "send", sent.append)
        reply = await served.http.post(URL, json={"method": "sleep", "timeout": 0.01})
        assert reply.status_code == 504
        call = asyncio.create_task(served.http.post(URL, json={"method": "start_profile"}))
        await until(lambda: len(sent) == 2)
        assert isinstance(sent[1], CollectiveRpc) and sent[1].number > sent[0].number
        served.engine.die()
        assert (await call).status_code == 503
        refused = await served.http.post(URL, json={"method": "wake_up"})
        assert refused.status_code == 503


class Engine:
    """An engine whose workers do as `answers` say, by whether it is only asked to check."""

    def __init__(self, served: Any, check: str, update: str, has_failed: bool = False) -> None:
        self.tell = served.tell
        self.check = check
        self.update = update
        self.has_failed = has_failed
        served.send = self.send

    def send(self, call: Any) -> None:
        error = self.check if call.only_checks else self.update
        answer = CollectiveRpcResult(["done"], number=call.number, error=error)
        answer.has_failed = self.has_failed and not call.only_checks
        self.tell(answer)


@pytest.mark.parametrize(
    ("second", "status", "reason"),
    [
        (("", ""), 200, "done"),
        (("no such tensor", "never"), 400, "engine 1: no such tensor"),
        (("", "1 requests are unfinished"), 500, "unfinished; the engines now have"),
        (("", "cut off", True), 500, "engine 1: cut off; the engines now have different weights"),
    ],
)
async def test_the_engines_that_refuse_an_update_are_stated(second: Any, status: int, reason: str):
    async with serve(data_parallel_size=2) as served:
        first = Engine(served.engines[0], "", "")
        Engine(served.engines[1], *second)
        if status == 400:
            first.update = "not before all have agreed"
        reply = await served.http.post(URL, json={"method": "update_weights", "args": ["b"]})
        assert reply.status_code == status and reason in reply.text, reply.text


async def test_a_single_engine_that_fails_states_why():
    async with serve() as served:
        Engine(served.engine, "", "cannot load the weights: cut off", has_failed=True)
        reply = await served.http.post(URL, json={"method": "update_weights", "args": ["b"]})
        assert reply.status_code == 500 and "cut off" in reply.text, reply.text


async def test_answers_state_the_weights_that_computed_them(tmp_path: Path):
    body = {"prompt": "a", "max_tokens": 1}
    hashes: list[str] = []
    fingerprints: list[str] = []
    async with serve() as served:
        for number, data in enumerate((b"", b"first", b"second")):
            (tmp_path / "model.safetensors").write_bytes(data)
            ready = msgspec.structs.replace(
                served.engine.ready, folder=str(tmp_path), num_updates=number
            )
            served.engine.tell(ready)
            await until(lambda ready=ready: served.async_llm.status == ready)
            reply = await served.http.post(
                "/v1/completions", json=body, headers={"X-Servd-Run-Manifest": "1"}
            )
            hashes.append(reply.json()["run_manifest"]["weights"])
            fingerprints.append(reply.json()["system_fingerprint"])
    assert hashes[0] == "" and len({*hashes}) == 3
    assert fingerprints == [fingerprints[0] + end for end in ("", "-1", "-2")]
