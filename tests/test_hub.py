"""Hub: messages to and from processes of other hosts, and who may send any."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import zmq

from servd.ipc.channels import CurveKeys, Link, Listener, UnreadableMessage, tcp_address
from servd.ipc.hub import Hub, HubInbox, HubOutbox, HubReceiver, HubSender
from servd.ipc.start_messages import Uplink
from servd.messages.engine import AbortRequests, EngineGone, FromEngine, ResetPrefixCache, ToEngine
from tests.limits import WAIT_SECONDS

TIMEOUT = 1.0  # seconds of silence after which a process is lost
# A process that receives, and can hold the interpreter's lock: PyDLL does not release it.
PROCESS = """
import ctypes, sys
from servd.ipc.hub import HubInbox, HubOutbox
from servd.ipc.start_messages import Uplink
from servd.messages.engine import AbortRequests, EngineGone, ToEngine
at, token, timeout = sys.argv[1:]
uplink = Uplink(at, token, "engine-1", float(timeout))
inbox = HubInbox(uplink, ToEngine)
outbox = HubOutbox(uplink)
while True:
    match inbox.recv():
        case AbortRequests(["hold", seconds]):
            ctypes.PyDLL(None).sleep(int(seconds))
            outbox.send("client", EngineGone("held"))
        case _:
            outbox.send("client", EngineGone("ready"))
"""


@pytest.fixture
def lost():
    return []


@pytest.fixture
def hub(lost):
    hub = Hub("127.0.0.1", 3.0, lost.append)
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
    stranger = Uplink(hub.listener.at, "0" * 64, "engine-1", 3.0)
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


class Cable:
    """Carries the bytes of connections to a port, in threads, until it is cut: then it reads
    nothing more, and nobody's connection closes.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_cut = False
        self.end = socket.create_server(("127.0.0.1", 0))
        self.ends = [self.end]
        self.at = f"tcp://127.0.0.1:{self.end.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self.end.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                self.ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                while self.is_cut:
                    time.sleep(0.01)
                to.sendall(data)

    def close(self) -> None:
        for end in self.ends:
            end.close()


def seconds_until(hub: Hub, condition: list) -> float:
    """Return the seconds until a list is not empty, of at most ten timeouts."""
    since = time.monotonic()
    while not condition and time.monotonic() < since + 10 * TIMEOUT:
        hub.drain()
        time.sleep(0.01)
    return time.monotonic() - since


@pytest.fixture
def strict_hub(lost):
    """A hub that loses a process after TIMEOUT."""
    hub = Hub("127.0.0.1", TIMEOUT, lost.append)
    yield hub
    hub.close()


@pytest.fixture
def process(strict_hub) -> Iterator[subprocess.Popen[bytes]]:
    uplink = strict_hub.uplink("engine-1")
    args = [sys.executable, "-c", PROCESS, uplink.at, uplink.token, str(TIMEOUT)]
    process = subprocess.Popen(args)
    strict_hub.send("engine-1", ResetPrefixCache())
    assert receive(HubReceiver(strict_hub, FromEngine), 1) == [EngineGone("ready")]
    yield process
    process.kill()
    process.wait()


def test_a_silent_process_is_lost_in_time(strict_hub, lost, process):
    os.kill(process.pid, signal.SIGSTOP)
    seconds = seconds_until(strict_hub, lost)
    print(f"lost after {seconds:.2f} s")
    assert lost[0] == "engine-1"
    assert TIMEOUT / 2 < seconds < TIMEOUT + 1


def test_a_process_that_is_busy_is_not_lost(strict_hub, lost, process):
    strict_hub.send("engine-1", AbortRequests(["hold", "5"]))
    assert receive(HubReceiver(strict_hub, FromEngine), 1) == [EngineGone("held")]
    assert lost == []


def test_both_ends_of_a_silent_connection_notice_and_what_comes_late_is_ignored(strict_hub, lost):
    cable = Cable(int(strict_hub.listener.at.rpartition(":")[2]))
    uplink = msgspec.structs.replace(strict_hub.uplink("engine-1"), at=cable.at)
    ends: list[bytes] = []
    inbox: HubInbox = HubInbox(uplink, ToEngine, ends.append)
    outbox = HubOutbox(uplink, ends.append)
    outbox.send("client", EngineGone("before"))
    assert receive(HubReceiver(strict_hub, FromEngine), 1) == [EngineGone("before")]
    strict_hub.send("engine-1", ResetPrefixCache())
    assert inbox.recv(WAIT_SECONDS) == ResetPrefixCache()
    assert lost == [] and ends == []

    cable.is_cut = True
    outbox.send("client", EngineGone("on its way"))
    assert seconds_until(strict_hub, lost) < TIMEOUT + 1
    assert seconds_until(strict_hub, ends) < 1
    strict_hub.forget("engine-1")
    outbox.send("client", EngineGone("late"))
    cable.is_cut = False
    # ZMQ connects the late process again.
    welcome = HubOutbox(strict_hub.uplink("engine-2"))
    welcome.send("client", EngineGone("from another"))
    receiver: HubReceiver = HubReceiver(strict_hub, FromEngine)
    arrived = [receiver.recv(0.1) for _ in range(15)]
    assert [message for message in arrived if message] == [EngineGone("from another")]
    for channel in (inbox, outbox, welcome, cable):
        channel.close()


def test_a_link_connects_again_to_each_new_listener():
    keys = CurveKeys("secret")
    broken: list[bytes] = []
    listener: Listener[AbortRequests] = Listener(tcp_address("127.0.0.1", 0), AbortRequests, keys)
    at = listener.at
    link: Link[AbortRequests] = Link(at, AbortRequests, keys, on_closed=broken.append)
    for number in range(3):
        deadline = time.monotonic() + WAIT_SECONDS
        link.send(AbortRequests([str(number)]))
        arrived: list[AbortRequests | None] = []
        while not arrived and time.monotonic() < deadline:
            arrived += [message for _, message in listener.drain()]
            time.sleep(0.01)
        assert arrived == [AbortRequests([str(number)])]
        listener.close()
        while len(broken) <= number and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(broken) == number + 1
        listener = Listener(at, AbortRequests, keys)
    link.close()
    listener.close()
