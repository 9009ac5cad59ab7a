"""Relays without processes: an API server and an engine that are sockets of this test, between
them a link over loopback.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import servd
from servd import ipc, relay
from servd.config import Config
from servd.core.client import EngineCoreClient, engine_address, engine_dir
from servd.errors import ConfigError
from servd.head_relay import HeadRelay
from servd.hf import FAKE_SPEC
from servd.ipc import Inbox, Keys, Outbox
from servd.join import Beat, Join, Left, ToNode, terms_of
from servd.messages import (
    AbortRequests,
    Attach,
    EngineRestarting,
    EngineStatus,
    ResetPrefixCache,
    ToEngine,
)
from servd.node_relay import NodeRelay
from servd.process_tree import head_address, places

KEYS = Keys("a token of these tests, long enough")
IDENTITY = "an engine of the node"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@dataclasses.dataclass
class Hosts:
    """A head and nodes that join it; engine 1 of 2 may be elsewhere."""

    folder: Path
    config: Config
    head: HeadRelay | None = None
    nodes: list[NodeRelay] = dataclasses.field(default_factory=list)
    clients: list[EngineCoreClient] = dataclasses.field(default_factory=list)
    engines: list[Inbox[Any]] = dataclasses.field(default_factory=list)
    events: queue.SimpleQueue[Any] = dataclasses.field(default_factory=queue.SimpleQueue)

    def start_head(self) -> HeadRelay:
        terms, folder = terms_of(self.config, FAKE_SPEC), folder_of(self.folder / "head")
        at = head_address(self.config)
        self.head = HeadRelay(at, terms, [1], places([folder], 1), KEYS, self.events.put)
        self.head.start()
        return self.head

    def start_node(self, name: str = "node", keys: Keys = KEYS, **options: Any) -> NodeRelay:
        fields = {
            "version": servd.__version__, "ranks": [1],
            "terms": terms_of(self.config.replace(**options), FAKE_SPEC),
        }  # fmt: skip
        join = Join(host=name, session=0, **fields)
        one = NodeRelay(
            head_address(self.config), join, places([folder_of(self.folder / name)], 1), IDENTITY,
            keys,
            lambda numbers, _: self.events.put((name, numbers)),
            lambda why: self.events.put((name, why)),
            self.events.put,
        )  # fmt: skip
        self.nodes.append(one)
        one.start()
        return one

    def event(self) -> Any:
        """The next thing that a relay has called back."""
        return self.events.get(timeout=30)

    def client(self, number: int = 7) -> EngineCoreClient:
        """An API server."""
        assert self.head is not None
        (incarnation,) = self.head.add(number)
        folder = folder_of(self.folder / "head")
        self.clients.append(EngineCoreClient(folder, number, "an API server", incarnation))
        return self.clients[-1]

    def engine(self, name: str = "node", incarnation: int = 0) -> Inbox[Any]:
        """Where the engine of a node gets its messages."""
        at = engine_address(folder_of(self.folder / name), incarnation)
        self.engines.append(Inbox(at, ToEngine))
        return self.engines[-1]


def folder_of(path: Path) -> str:
    folder = Path(engine_dir(str(path), 1))
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


@pytest.fixture
def hosts(monkeypatch) -> Iterator[Hosts]:
    monkeypatch.setenv("SERVD_CLOCK_OFFSET_NS", "0")
    options = {"data_parallel_size": 2, "data_parallel_address": "127.0.0.1"}
    config = Config.load(options | {"data_parallel_rpc_port": free_port(), "max_num_seqs": 4})
    folder = ipc.private_dir()
    made = Hosts(folder, config)
    yield made
    for each in (*made.nodes, made.head, *made.clients, *made.engines):
        if each is not None:
            each.close()


def received(channel: Any, kind: type) -> Any:
    """The next message of a kind."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if isinstance(message := channel.recv(timeout=1), kind):
            return message
    raise AssertionError(f"no {kind}")


def test_an_api_server_and_an_engine_of_another_host_talk_as_if_they_were_on_one(hosts):
    hosts.start_head()
    client = hosts.client()  # before there is an engine: messages wait
    client.send(AbortRequests(["early"]))
    hosts.start_node()
    assert hosts.event() == ("node", [0])
    engine = hosts.engine()
    attach = received(engine, Attach)
    assert attach.client == 7 and attach.identity == IDENTITY
    assert attach.inbox.startswith(f"ipc://{hosts.folder}/node/")
    assert engine.recv(30) == AbortRequests(["early"])

    answers = Outbox(attach.inbox, is_bound=True)
    for i in range(100):
        answers.send(EngineStatus("loading", i / 100))
    assert [client.recv(30).progress for _ in range(100)] == [i / 100 for i in range(100)]

    client.close()
    hosts.head.drop(7)
    deadline = time.monotonic() + 30
    with pytest.raises(ConnectionError):  # the engine notices, and can abort what it had
        while time.monotonic() < deadline:
            answers.send(EngineStatus("for nobody"))
    answers.close()


def test_what_was_said_to_an_engine_that_died_does_not_reach_the_next(hosts):
    hosts.start_head()
    client = hosts.client()
    node = hosts.start_node()
    hosts.event()
    engine = hosts.engine()
    received(engine, Attach)
    node.restarted(1, EngineRestarting(1, "it died", ["a prompt"]))
    client.send(AbortRequests(["late"]))
    assert received(client, EngineRestarting) == EngineRestarting(1, "it died", ["a prompt"])
    successor = hosts.engine(incarnation=1)
    client.follow(1)
    client.send(ResetPrefixCache())
    assert isinstance(successor.recv(30), Attach)
    assert successor.recv(30) == ResetPrefixCache()


def test_a_silent_host_is_lost_within_a_second_and_may_join_again(hosts, monkeypatch):
    hosts.start_head()
    client = hosts.client()
    node = hosts.start_node()
    hosts.event()
    received(hosts.engine(), Attach)
    time.sleep(1.2)
    assert hosts.events.empty(), "neither is lost while beats come"

    monkeypatch.setattr(node, "_beat", lambda: None)
    since = time.monotonic()
    lost = received(client, EngineRestarting)
    assert lost.incarnation == 1 and "silent" in lost.reason and not lost.computing
    assert 2 * relay.TICK < time.monotonic() - since < 1.5  # 0.8 to 1.0 s where nothing waits
    name, why = hosts.event()  # its own beats are no longer answered
    assert (name, why.endswith("was silent")) == ("node", True)
    client.follow(1)

    monkeypatch.undo()
    node.rejoin()
    assert hosts.event() == ("node", [1])
    assert received(hosts.engine(incarnation=1), Attach).client == 7


def test_a_host_that_leaves_is_lost_at_once(hosts):
    hosts.start_head()
    client = hosts.client()
    node = hosts.start_node()
    hosts.event()
    node.reason = "its engine died too often"
    node.close()
    assert received(client, EngineRestarting).reason.endswith("left: its engine died too often")


def test_a_head_that_is_gone_is_noticed_and_another_one_is_joined(hosts):
    head = hosts.start_head()
    node = hosts.start_node()
    assert hosts.event() == ("node", [0])
    head.close()
    assert hosts.event()[1].endswith("was silent")
    node.rejoin()
    hosts.start_head()
    assert hosts.event() == ("node", [0])


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        (
            {"dtype": "float16"},
            {},
            r"--dtype: float16 on the host that joins, auto on the head: make them equal",
        ),
        ({"max_num_seqs": 8}, {}, r"--max-num-seqs: 8 on the host that joins, 4 on the head"),
        (
            {},
            {"version": "9.9"},
            rf"servd 9.9 on the host that joins, {servd.__version__} on the head",
        ),
        ({}, {"ranks": [0, 1]}, r"engines \[0\] are not of those that may join, \[1\]"),
        ({}, {"terms": {}}, r"the model's config.json: None on the host that joins"),
    ],
)
def test_a_host_that_does_not_fit_is_told_why(hosts, options, change, reason):
    hosts.start_head()
    node = hosts.start_node(**options)
    if change:
        node.close()
        hosts.nodes.clear()
        hosts.events = queue.SimpleQueue()
        join = msgspec.structs.replace(node.join_message, **change)
        other = NodeRelay(
            node.head, join, node.places, IDENTITY, KEYS, print, print, hosts.events.put
        )
        hosts.nodes.append(other)
        other.start()
    error = hosts.event()
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=reason):
        raise error


def test_what_another_version_says_is_refused_too(hosts):
    hosts.start_head()
    link = ipc.Link(hosts.start_node().head, ToNode, KEYS)
    link.send(EngineStatus("a message that nobody expects here"))
    deadline = time.monotonic() + 30
    while not (answers := link.drain()):
        assert time.monotonic() < deadline
    assert "cannot read" in answers[0].reason and answers[0].is_final
    link.close()


@pytest.mark.parametrize(("ranks", "reason"), [([1, 1], "twice"), ([1, 2], "not of those")])
def test_ranks_that_make_no_sense_are_refused(hosts, ranks, reason):
    head = hosts.start_head()
    link = ipc.Link(head_address(hosts.config), ToNode, KEYS)
    terms = terms_of(hosts.config, FAKE_SPEC)
    link.send(Join(servd.__version__, "a host", 1, ranks, terms))
    deadline = time.monotonic() + 30
    while not (answers := link.drain()):
        assert time.monotonic() < deadline
    assert reason in answers[0].reason and answers[0].is_final
    link.send(Left("it has no more to say"))
    link.close(1.0)
    hosts.start_node("friend")
    assert hosts.event() == ("friend", [0])
    assert head.is_alive()


def test_two_hosts_with_the_same_engines(hosts):
    """The second one asks again, until the first is lost: it may be the same one, restarted."""
    hosts.start_head()
    first = hosts.start_node("a")
    assert hosts.event() == ("a", [0])
    hosts.start_node("b")
    time.sleep(0.5)
    assert hosts.events.empty()
    first.close()
    assert hosts.event() == ("b", [1])


def test_times_of_another_host_are_on_the_clock_of_the_api_servers(hosts):
    head = hosts.start_head()
    hosts.start_node()
    hosts.event()
    assert os.environ["SERVD_CLOCK_OFFSET_NS"] == "0", "it is the same clock"
    hosts.nodes.pop().close()
    hear, ahead = head._hear, 10**13

    def hear_ahead(peer: bytes, message: Any) -> None:
        """As a host whose clock is ahead."""
        if isinstance(message, Beat):
            head.listener.send_to(peer, Beat(message.session, time.monotonic_ns() + ahead))
        else:
            hear(peer, message)

    head._hear = hear_ahead
    hosts.start_node("other")
    hosts.event()
    assert abs(int(os.environ["SERVD_CLOCK_OFFSET_NS"]) - ahead) < 10**9


def test_without_the_token_nobody_joins(hosts):
    hosts.start_head()
    hosts.start_node("stranger", Keys("another token, which is as long"))
    hosts.start_node("friend")
    assert hosts.event() == ("friend", [0])
    time.sleep(0.5)
    assert hosts.events.empty()
