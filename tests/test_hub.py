"""Hub: messages to and from processes of other hosts, and who may send any."""

import threading
import time

import msgspec
import pytest
import zmq

from servd.ipc.channels import UnreadableMessage
from servd.ipc.hub import Hub, HubInbox, HubOutbox, HubReceiver, HubSender
from servd.ipc.start_messages import Uplink
from servd.messages.engine import AbortRequests, EngineGone, FromEngine, ResetPrefixCache, ToEngine
from tests.limits import WAIT_SECONDS


@pytest.fixture
def lost():
    return []


@pytest.fixture
def hub(lost):
    hub = Hub("127.0.0.1", lost.append)
    yield hub
    hub.close()


def receive(receiver: HubReceiver, count: int) -> list:
    """Return N messages, waiting for them."""
    received: list = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(received) < count:
        assert time.monotonic() < deadline
        if (message := receiver.recv(0.1)) is not None:
            received.append(message)
    return received


def test_messages_keep_their_order(hub):
    sent = [AbortRequests([str(i)]) for i in range(1000)] + [AbortRequests(["x" * 3_000_000])]
    sender = HubSender(hub, "engine-1")
    for message in sent[:10]:
        sender.send(message)
    receiver: HubReceiver = HubReceiver(hub, FromEngine)
    arrived: list = []

    def process() -> None:
        inbox: HubInbox = HubInbox(hub.uplink("engine-1"), ToEngine)
        outbox = HubOutbox(hub.uplink("engine-1"))
        outbox.send("client", EngineGone("hello"))
        arrived.extend(inbox.recv() for _ in sent)
        outbox.send("client", EngineGone("bye"))
        inbox.close()
        outbox.close()

    thread = threading.Thread(target=process)
    thread.start()
    assert receive(receiver, 1) == [EngineGone("hello")]
    for message in sent[10:]:
        sender.send(message)
    assert receive(receiver, 1) == [EngineGone("bye")]
    thread.join()
    assert arrived == sent


def test_a_process_that_is_forgotten_gets_nothing_more(hub):
    hub.send("engine-1", ResetPrefixCache())
    hub.forget("engine-1")
    hub.send("engine-1", AbortRequests(["later"]))
    inbox: HubInbox = HubInbox(hub.uplink("engine-1"), ToEngine)
    while (message := inbox.recv(0.05)) is None:
        hub.drain()
    assert message == AbortRequests(["later"])
    inbox.close()


def test_another_token_lets_nobody_in(hub):
    stranger = Uplink(hub.listener.at, "0" * 64, "engine-1")
    inbox: HubInbox = HubInbox(stranger, ToEngine)
    outbox = HubOutbox(stranger)
    outbox.send("client", EngineGone("from a stranger"))
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.connect(hub.listener.at)
    plain.send(msgspec.msgpack.encode(EngineGone("from a stranger")))
    hub.send("engine-1", ResetPrefixCache())
    welcome = HubOutbox(hub.uplink("engine-2"))
    welcome.send("client", EngineGone("from one of us"))
    received: list = []
    while not received:
        received = hub.drain()
    assert [msgspec.msgpack.decode(entry.message) for entry in received] == [
        ["EngineDead", "from one of us"]
    ]
    assert inbox.recv(0.5) is None and "engine-1" in hub.waiting
    plain.close(0)
    for channel in (inbox, outbox, welcome):
        channel.close()


def test_what_cannot_be_read_fails_alone(hub):
    inbox: HubInbox = HubInbox(hub.uplink("engine-1"), ToEngine)
    hub.send("engine-1", EngineGone("not to an engine"))
    hub.send("engine-1", ResetPrefixCache())
    while not hub.peers:
        hub.drain()
    with pytest.raises(UnreadableMessage):
        inbox.recv()
    assert inbox.recv() == ResetPrefixCache()
    inbox.close()


def test_a_process_whose_connection_breaks_is_lost(hub, lost):
    inbox: HubInbox = HubInbox(hub.uplink("engine-1"), ToEngine)
    while not hub.peers:
        hub.drain()
    inbox.close()
    deadline = time.monotonic() + WAIT_SECONDS
    while not lost:
        assert time.monotonic() < deadline
        hub.send("engine-1", ResetPrefixCache())
        time.sleep(0.01)
    assert lost == ["engine-1"]
