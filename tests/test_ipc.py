"""Channels: order, draining, an event loop on the descriptor, and who may enter the folder."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec
import pytest
import zmq

from servd.base.errors import ConfigError
from servd.base.private_dir import private_dir
from servd.ipc import channels as ipc
from servd.messages.engine import AbortRequests, Attach, EngineGone, ResetPrefixCache, ToEngine
from tests.limits import WAIT_SECONDS


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Address in a private folder that is removed with the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return ipc.address(private_dir(), "engine")


@pytest.fixture
def inbox(at):
    inbox = ipc.Inbox(at, ToEngine)
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(at):
    outbox = ipc.Outbox(at)
    yield outbox
    outbox.close()


def test_order_is_kept_and_types_come_back(inbox, outbox):
    sent = [Attach(0, "x")] + [AbortRequests([str(i)]) for i in range(1000)] + [ResetPrefixCache()]
    for message in sent:
        outbox.send(message)
    assert [inbox.recv(timeout=WAIT_SECONDS) for _ in sent] == sent


LAST_WORDS = """
import os, sys, threading
from servd.ipc import channels
from servd.messages.engine import AbortRequests
inbox = channels.Inbox(sys.argv[1] + "-of-the-process", AbortRequests)
threading.Thread(target=inbox.recv, daemon=True).start()
outbox = channels.Outbox(sys.argv[1])
forgotten = channels.Outbox(sys.argv[1] + "-of-nobody", linger=0)
forgotten.send(AbortRequests(["x"]))
if (child := os.fork()) == 0:  # which has a context of its own
    channels.Outbox(sys.argv[1]).send(AbortRequests(["of the child"]))
else:
    os.waitpid(child, 0)
    outbox.send(AbortRequests(["of the parent"]))
channels.close_outboxes()
os._exit(inbox.socket.closed)
"""


def test_the_last_messages_of_a_process_arrive_whatever_it_forgot_to_close(inbox, at):
    command = [sys.executable, "-c", LAST_WORDS, at]
    subprocess.run(command, check=True, timeout=WAIT_SECONDS)
    received = [inbox.recv(timeout=WAIT_SECONDS) for _ in range(2)]
    ids = {request_id for message in received for request_id in message.request_ids}
    assert ids == {"of the child", "of the parent"}


def test_drain_takes_all_that_is_there_and_does_not_wait(inbox, outbox):
    assert inbox.drain() == []
    for i in range(10):
        outbox.send(AbortRequests([str(i)]))
    outbox.send(ResetPrefixCache())
    messages = []
    deadline = time.monotonic() + WAIT_SECONDS
    while not messages or messages[-1] != ResetPrefixCache():
        assert time.monotonic() < deadline
        messages += inbox.drain()
    assert len(messages) == 11
    assert inbox.drain() == []


def test_an_outbox_may_come_before_its_inbox(at):
    outbox = ipc.Outbox(at)
    outbox.send(AbortRequests(["early"]))
    inbox = ipc.Inbox(at, ToEngine)
    assert inbox.recv(timeout=WAIT_SECONDS) == AbortRequests(["early"])
    outbox.close()
    inbox.close()


def test_last_words_are_delivered_after_close(at, inbox):
    outbox = ipc.Outbox(at)
    outbox.send(AbortRequests(["last"]))
    outbox.close()
    assert inbox.recv(timeout=WAIT_SECONDS) == AbortRequests(["last"])


async def test_an_event_loop_misses_nothing_on_the_edge_triggered_descriptor(at, inbox):
    num_messages = 500
    received = []
    done = asyncio.Event()

    def on_readable():
        received.extend(inbox.drain())
        if len(received) == num_messages:
            done.set()

    def send():
        outbox = ipc.Outbox(at)
        for i in range(num_messages):
            outbox.send(AbortRequests([str(i)]))
            if i % 50 == 0:
                time.sleep(0.005)  # several edges, not one burst
        outbox.close()

    loop = asyncio.get_running_loop()
    loop.add_reader(inbox.fileno(), on_readable)
    on_readable()
    sender = loop.run_in_executor(None, send)
    try:
        await asyncio.wait_for(done.wait(), timeout=WAIT_SECONDS)
    finally:
        loop.remove_reader(inbox.fileno())
        await sender
    assert [m.request_ids[0] for m in received] == [str(i) for i in range(num_messages)]


def test_drain_keeps_what_came_before_an_unreadable_message(inbox, outbox):
    for message in (AbortRequests(["before"]), EngineGone("no request"), AbortRequests(["after"])):
        outbox.send(message)
    time.sleep(0.05)  # most often enough for all three

    def drained():
        deadline = time.monotonic() + WAIT_SECONDS
        while not (messages := inbox.drain()):
            assert time.monotonic() < deadline
        return messages

    assert drained() == [AbortRequests(["before"])]
    with pytest.raises(ipc.UnreadableMessage):
        drained()
    assert drained() == [AbortRequests(["after"])]


def test_an_outbox_tells_that_its_inbox_is_gone(at):
    receiver = ipc.Inbox(at, ToEngine)
    sender = ipc.Outbox(at, must_exist=True)
    sender.send(AbortRequests(["a"]))
    assert receiver.recv(10) == AbortRequests(["a"])
    receiver.close()
    with pytest.raises(ConnectionError):
        for _ in range(10_000_000):  # until the socket has noticed
            sender.send(AbortRequests(["b"]))
    sender.close()


TOKEN = "a token of these tests, long enough"


def messages(listener, count: int) -> list[tuple[bytes, object]]:
    received: list[tuple[bytes, object]] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(received) < count:
        assert time.monotonic() < deadline
        ipc.wait([listener], 0.1)
        received += listener.drain()
    return received


@pytest.fixture
def listener():
    with zmq.Context() as context, context.socket(zmq.PULL) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    listener = ipc.Listener(f"tcp://127.0.0.1:{port}", ToEngine, ipc.CurveKeys(TOKEN))
    listener.at = f"tcp://127.0.0.1:{port}"
    yield listener
    listener.close()


def test_links_carry_messages_both_ways_in_order(listener):
    links = [ipc.Link(listener.at, ToEngine, ipc.CurveKeys(TOKEN)) for _ in range(2)]
    for i in range(100):
        for name, link in zip("ab", links, strict=True):
            link.send(AbortRequests([name, str(i)]))
    peers = {}
    for peer, message in messages(listener, 200):
        peers.setdefault(message.request_ids[0], peer)
        listener.send_to(peer, message)
    assert peers["a"] != peers["b"]
    for name, link in zip("ab", links, strict=True):
        received = []
        while len(received) < 100:
            ipc.wait([link], 1)
            received += link.drain()
        names = [message.request_ids for _, message in received]
        assert names == [[name, str(i)] for i in range(100)]
        link.close()


@pytest.mark.parametrize("knows", ["nothing", "the listener's key", "another token"])
def test_nothing_passes_a_listener_without_the_token(listener, knows):
    keys = ipc.CurveKeys(TOKEN)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    if knows == "the listener's key":
        stranger.curve_serverkey = keys.listener.public
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    elif knows == "another token":
        other_keys = ipc.CurveKeys(TOKEN + ".")
        stranger.curve_serverkey = other_keys.listener.public
        stranger.curve_publickey, stranger.curve_secretkey = other_keys.joiner
    stranger.connect(listener.at)
    stranger.send(msgspec.msgpack.encode(ResetPrefixCache()))
    friend = ipc.Link(listener.at, ToEngine, keys)
    friend.send(AbortRequests(["friend"]))
    assert [message for _, message in messages(listener, 1)] == [AbortRequests(["friend"])]
    assert not ipc.wait([listener], 0.5)
    context.destroy(linger=0)
    friend.close()


@pytest.mark.parametrize("flags", [0x02, 0x06])  # of a long message, of a long command
def test_who_has_shown_no_token_has_a_listener_take_no_memory(listener, flags):
    host, port = listener.at.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as stranger:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
        stranger.sendall(greeting)
        stranger.sendall(bytes([flags]) + (1 << 33).to_bytes(8, "big"))
        with pytest.raises(ConnectionError):
            for _ in range(64):  # it is not to be read
                stranger.sendall(bytes(1 << 20))


def test_who_says_nothing_is_not_kept(monkeypatch):
    monkeypatch.setattr(ipc, "HANDSHAKE_TIMEOUT", 200)
    listener = ipc.Listener("tcp://127.0.0.1:0", ToEngine, ipc.CurveKeys(TOKEN))
    port = int(listener.at.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as stranger:
        while stranger.recv(100):
            pass
    listener.close()


def test_strangers_are_not_more_than_there_is_room_for(monkeypatch):
    """Who has joined stays, and others can join when strangers were cut."""
    monkeypatch.setattr(ipc, "HANDSHAKE_TIMEOUT", 1000)
    monkeypatch.setattr(ipc, "MAX_CONNECTIONS", 8)
    listener = ipc.Listener("tcp://127.0.0.1:0", ToEngine, ipc.CurveKeys(TOKEN))
    friends = [ipc.Link(listener.at, ToEngine, ipc.CurveKeys(TOKEN))]
    friends[0].send(AbortRequests(["before"]))
    messages(listener, 1)
    port = int(listener.at.rpartition(":")[2])
    strangers = [
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) for _ in range(40)
    ]
    time.sleep(0.3)
    were_cut = 0
    for stranger in strangers:
        stranger.setblocking(False)
        with suppress(BlockingIOError):
            while data := stranger.recv(100):
                assert data
            were_cut += 1
    assert were_cut == 40 - 7
    friends.append(ipc.Link(listener.at, ToEngine, ipc.CurveKeys(TOKEN)))
    for friend in friends:
        friend.send(AbortRequests(["after"]))
    assert len(messages(listener, 2)) == 2
    for end in (*friends, *strangers, listener):
        end.close()


def test_a_stranger_that_has_left_may_have_had_the_number_of_anything(listener):
    """What has its descriptor now stays as it is, and so does the thread that lets others in."""
    end, other = socket.socketpair()
    reading, writing = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        for descriptor in (end.fileno(), reading):
            listener._hang_up(descriptor)
    assert len(os.listdir("/proc/self/fd")) < before + 100  # others come and go meanwhile
    end.sendall(b"still there")
    assert other.recv(100) == b"still there"
    for side in (end, other):
        side.close()
    os.close(reading)
    os.close(writing)


def test_a_long_message_comes_in_frames(listener):
    link = ipc.Link(listener.at, ToEngine, ipc.CurveKeys(TOKEN))
    for size in (ipc.MAX_FRAME - 100, ipc.MAX_FRAME, 5 * ipc.MAX_FRAME + 7):
        sent = AbortRequests(["x" * size])
        link.send(sent)
        [(peer, message)] = messages(listener, 1)
        assert message == sent
        listener.send_to(peer, message)
        while not (back := link.drain()):
            ipc.wait([link], 1)
        assert back == [(b"", sent)]
    link.close()


def test_a_listener_that_cannot_listen_says_where(listener):
    with pytest.raises(ConfigError, match=f"cannot listen on {listener.at}: Address already in"):
        ipc.Listener(listener.at, ToEngine, ipc.CurveKeys(TOKEN))


def test_nobody_can_read_what_passes_between_hosts(listener):
    """All bytes go through this test on their way."""
    host, port = listener.at.removeprefix("tcp://").split(":")
    traffic = bytearray()

    def carry(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test has ended
            while data := source.recv(65536):
                traffic.extend(data)
                to.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as between:
        link = ipc.Link(
            f"tcp://127.0.0.1:{between.getsockname()[1]}", ToEngine, ipc.CurveKeys(TOKEN)
        )
        link.send(AbortRequests(["a secret prompt"]))
        near, _ = between.accept()
        far = socket.create_connection((host, int(port)))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=carry, args=pair, daemon=True).start()
        assert messages(listener, 1)[0][1] == AbortRequests(["a secret prompt"])
        link.close()
        near.close()
        far.close()
    assert b"CURVE" in traffic and b"secret prompt" not in traffic and TOKEN.encode() not in traffic
