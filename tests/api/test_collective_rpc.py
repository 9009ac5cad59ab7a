"""POST /collective_rpc. What workers do: tests/parity/test_collective_rpc.py."""

import asyncio
from typing import Any

import pytest

from servd.messages.engine import CollectiveRpc
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
        ({"method": "update_weights", "args": ["/nowhere"]}, "config.json"),
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
