"""Bridge: messages between an API server here and an engine elsewhere."""

from pathlib import Path

import msgspec
import pytest

from servd.ipc.channels import Inbox, Outbox, address
from servd.ipc.hub import HubInbox, HubOutbox
from servd.launch.bridge import Bridge
from servd.messages.engine import Detach, EngineGone, FromEngine, ResetPrefixCache, ToEngine
from tests.limits import WAIT_SECONDS


@pytest.fixture
def bridge():
    errors: list[Exception] = []
    bridge = Bridge("127.0.0.1", 3.0, errors.append)
    bridge.start()
    yield bridge
    bridge.close()
    assert errors == []


def test_an_engine_elsewhere_seems_to_be_here(bridge: Bridge, tmp_path: Path):
    engine_at = address(tmp_path, "engine-1")
    client_at = address(tmp_path, "client-7")
    uplink = bridge.open(engine_at, lambda: None)
    answers: Inbox[msgspec.Struct] = Inbox(client_at, FromEngine)
    requests = Outbox(engine_at)
    requests.send(ResetPrefixCache())
    inbox: HubInbox[msgspec.Struct] = HubInbox(uplink, ToEngine)
    assert inbox.recv(WAIT_SECONDS) == ResetPrefixCache()
    outbox = HubOutbox(uplink)
    outbox.send(client_at, EngineGone("hello"))
    assert answers.recv(WAIT_SECONDS) == EngineGone("hello")
    bridge.detach(7, client_at)
    assert inbox.recv(WAIT_SECONDS) == Detach(7)
    for socket in (inbox, outbox, requests, answers):
        socket.close()


def test_an_engine_that_has_ended_is_not_lost_as_well(bridge: Bridge, tmp_path: Path):
    lost: list[str] = []
    for name in ("engine-1", "engine-2"):
        bridge.open(address(tmp_path, name), lambda name=name: lost.append(name))
    bridge.forget(address(tmp_path, "engine-1"))
    for name in ("engine-1", "engine-2", "engine-2"):
        bridge.lose(address(tmp_path, name))
    assert lost == ["engine-2"]
