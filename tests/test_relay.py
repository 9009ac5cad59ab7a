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
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import servd
from servd import ipc, relay
from servd.config import Config
from servd.core.client import EngineCoreClient, engine_address, engine_dir
from servd.errors import ConfigError
from servd.hf import FAKE_SPEC
from servd.ipc import Inbox, Keys, Outbox
from servd.join import Beat, Join, Left, ToMember, Welcome, terms_of
from servd.launch.process_tree import addresses_of, head_address
from servd.messages import (
    AbortRequests,
    Attach,
    EngineRestarting,
    EngineStatus,
    ResetPrefixCache,
    ToEngine,
)
from servd.private_dir import private_dir
from servd.relay import Head, Member
from tests.limits import WAIT_SECONDS

KEYS = Keys("a token of these tests, long enough")
IDENTITY = "an engine of the node"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Node(Member):
    """The host of an engine that is this test."""

    def __init__(self, name: str, events: queue.SimpleQueue[Any], *args: Any) -> None:
        super().__init__(*args, events.put, IDENTITY)
        self.name, self.events = name, events
        self.is_here = False
        self.last: Left | None = None  # the engine dies with this

    def begin(self, welcome: Welcome) -> None:
        self.events.put((self.name, welcome.incarnation))
        self.is_here = True

    def left(self) -> Left | None:
        last, self.last = self.last, None
        return last

    def end(self) -> None:
        if self.is_here and not self.closing.is_set():
            self.events.put((self.name, "has ended"))
        self.is_here = False


@dataclasses.dataclass
class Hosts:
    """A head and nodes that join it; engine 1 of 2 may be elsewhere."""

    folder: Path
    config: Config
    number: int = 0  # of the engine
    head: Head | None = None
    nodes: list[Node] = dataclasses.field(default_factory=list)
    clients: list[EngineCoreClient] = dataclasses.field(default_factory=list)
    engines: list[Inbox[Any]] = dataclasses.field(default_factory=list)
    events: queue.SimpleQueue[Any] = dataclasses.field(default_factory=queue.SimpleQueue)

    def start_head(self) -> Head:
        where = addresses_of({1: folder_of(self.folder / "head")})
        terms = partial(terms_of, self.config, FAKE_SPEC)
        at = head_address(self.config)
        self.head = Head(at, [1], where, terms, KEYS, self.lost, self.events.put)
        self.head.start()
        return self.head

    def lost(self, rank: int, restarting: EngineRestarting) -> None:
        """As the parent of the API servers."""
        self.number = restarting.incarnation
        for client in self.clients:
            outbox = Outbox(client.inbox.at)
            outbox.send(restarting)
            outbox.close()

    def start_node(
        self, name: str = "node", keys: Keys = KEYS, change: Any = None, **options: Any
    ) -> Node:
        terms = terms_of(self.config.replace(**options), FAKE_SPEC)
        join = Join(servd.__version__, name, 0, 1, terms)
        join = msgspec.structs.replace(join, **change or {})
        where = addresses_of({join.rank: folder_of(self.folder / name)})
        self.nodes.append(Node(name, self.events, head_address(self.config), join, where, keys))
        self.nodes[-1].start()
        return self.nodes[-1]

    def event(self) -> Any:
        """The next thing that a relay has called back."""
        return self.events.get(timeout=WAIT_SECONDS)

    def client(self, number: int = 7) -> EngineCoreClient:
        """An API server."""
        folder = folder_of(self.folder / "head")
        self.clients.append(EngineCoreClient(folder, number, "an API server", self.number))
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
    folder = private_dir()
    made = Hosts(folder, config)
    yield made
    for each in (*made.nodes, made.head, *made.clients, *made.engines):
        if each is not None:
            each.close()


def received(channel: Any, kind: type) -> Any:
    """The next message of a kind."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if isinstance(message := channel.recv(timeout=1), kind):
            return message
    raise AssertionError(f"no {kind}")


def test_an_api_server_and_an_engine_of_another_host_talk_as_if_they_were_on_one(hosts):
    hosts.start_head()
    client = hosts.client()  # before there is an engine: messages wait
    client.send(AbortRequests(["early"]))
    hosts.start_node()
    assert hosts.event() == ("node", 0)
    engine = hosts.engine()
    attach = received(engine, Attach)
    assert attach.client == 7 and attach.identity == IDENTITY
    assert attach.inbox.startswith(f"ipc://{hosts.folder}/node/")
    assert engine.recv(30) == AbortRequests(["early"])

    answers = Outbox(attach.inbox, must_exist=True)
    for i in range(100):
        answers.send(EngineStatus("loading", i / 100))
    assert [client.recv(30).progress for _ in range(100)] == [i / 100 for i in range(100)]

    client.close()
    hosts.head.drop(7)
    deadline = time.monotonic() + WAIT_SECONDS
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
    client.send(AbortRequests(["a word"]))
    received(engine, AbortRequests)
    node.last = Left("it died", ["a prompt"])
    died = received(client, EngineRestarting)
    client.send(AbortRequests(["late"]))
    assert died == EngineRestarting(1, "host node has left: it died", ["a prompt"])
    assert [hosts.event(), hosts.event()] == [("node", "has ended"), ("node", 1)]
    successor = hosts.engine(incarnation=1)
    client.follow(1)
    client.send(ResetPrefixCache())
    assert isinstance(successor.recv(30), Attach)
    assert successor.recv(30) == ResetPrefixCache()


def test_a_silent_host_is_lost_and_may_join_again(hosts, monkeypatch):
    hosts.start_head()
    client = hosts.client()
    node = hosts.start_node()
    hosts.event()
    received(hosts.engine(), Attach)
    time.sleep(2.4)
    assert hosts.events.empty(), "neither is lost while beats come"

    monkeypatch.setattr(node.beats, "send", lambda beat: None)
    lost = received(client, EngineRestarting)
    assert lost.incarnation == 1 and "silent" in lost.reason and not lost.computing
    assert hosts.event() == ("node", "has ended"), "its own beats are no longer answered"
    client.follow(1)
    assert hosts.event() == ("node", 1)
    assert received(hosts.engine(incarnation=1), Attach).client == 7


def test_a_host_that_waited_long_for_its_head_is_not_taken_for_silent(hosts, monkeypatch):
    monkeypatch.setattr(relay, "TICK", 0.05)
    node = hosts.start_node()
    time.sleep(0.6)
    look, looks = node._look, []
    node._look = lambda: (
        looks.append(node.process is not None) or (look() if not looks[-1] else None)
    )
    hosts.start_head()
    assert hosts.event() == ("node", 0)
    assert node.silent <= relay.MOST_SILENT


def test_a_host_that_gave_up_while_its_head_was_busy_takes_no_place(hosts, monkeypatch):
    """Its question is still answered: of workers, a lost one would end the engine."""
    monkeypatch.setattr(relay, "PATIENCE", 1)
    monkeypatch.setattr(relay, "PAUSE", 0.1)
    head = hosts.start_head()
    terms, waits = head.terms, [1.5]  # as where weights are on a slow disk
    head.terms = lambda: (time.sleep(waits.pop() if waits else 0), terms())[1]
    hosts.start_node()
    assert hosts.event() == ("node", 0)
    assert hosts.number == 0 and not waits


def test_a_host_that_leaves_is_lost_at_once(hosts):
    hosts.start_head()
    client = hosts.client()
    node = hosts.start_node()
    hosts.event()
    node.close()
    assert received(client, EngineRestarting).reason.endswith("left: it was stopped")


def test_a_head_that_is_gone_is_noticed_and_another_one_is_joined(hosts):
    head = hosts.start_head()
    hosts.start_node()
    assert hosts.event() == ("node", 0)
    head.close()
    assert hosts.event() == ("node", "has ended")
    hosts.start_head()
    assert hosts.event() == ("node", 0)


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
        ({}, {"rank": 2}, r"number 2 is not of those that may join, \[1\]"),
        ({}, {"terms": {}}, r"the model's config.json: None on the host that joins"),
    ],
)
def test_a_host_that_does_not_fit_is_told_why(hosts, options, change, reason):
    hosts.start_head()
    hosts.start_node(change=change, **options)
    error = hosts.event()
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=reason):
        raise error


def test_what_another_version_says_is_refused_too(hosts):
    hosts.start_head()
    link = ipc.Link(hosts.start_node().head, ToMember, KEYS)
    link.send(EngineStatus("a message that nobody expects here"))
    deadline = time.monotonic() + WAIT_SECONDS
    while not (answers := link.drain()):
        assert time.monotonic() < deadline
    [(_, answer)] = answers
    assert "cannot read" in answer.reason and answer.is_final
    link.close()


def test_a_rank_that_makes_no_sense_is_refused(hosts):
    head = hosts.start_head()
    link = ipc.Link(head_address(hosts.config), ToMember, KEYS)
    terms = terms_of(hosts.config, FAKE_SPEC)
    link.send(Join(servd.__version__, "a host", 1, 2, terms))
    deadline = time.monotonic() + WAIT_SECONDS
    while not (answers := link.drain()):
        assert time.monotonic() < deadline
    [(_, answer)] = answers
    assert "not of those" in answer.reason and answer.is_final
    link.send(Left("it has no more to say"))
    link.close(1.0)
    hosts.start_node("friend")
    assert hosts.event() == ("friend", 0)
    assert head.is_alive()


def test_an_engine_whose_connection_breaks_is_lost_though_its_host_still_beats(hosts):
    """What was on its way is gone: nobody may wait for it."""
    hosts.start_head()
    client = hosts.client()
    node = hosts.start_node()
    assert hosts.event() == ("node", 0)
    attach = received(hosts.engine(), Attach)
    head = node.head
    node.link.socket.disconnect(head)
    node.link.socket.connect(head)
    answers = Outbox(attach.inbox, must_exist=True)
    answers.send(EngineStatus("for nobody"))
    assert [hosts.event(), hosts.event()] == [("node", "has ended"), ("node", 1)]
    assert received(client, EngineRestarting).incarnation == 1
    answers.close()


def test_a_host_is_told_whose_weights_it_has_others_than(tmp_path):
    """Those of the same shape: samples of the files are compared, where both hosts have them."""
    config, specs = Config(), []
    for name in ("head", "same", "other"):
        (folder := tmp_path / name).mkdir()
        data = bytearray(1 << 20)
        data[700_000 : 700_000 + 100_000] = bytes([name == "other"]) * 100_000
        (folder / "model.safetensors").write_bytes(data)
        specs.append(msgspec.structs.replace(FAKE_SPEC, folder=str(folder)))
    head, same, other = (terms_of(config, spec) for spec in specs)
    unknown = terms_of(config, FAKE_SPEC)

    def why(terms: dict[str, str]) -> str | None:
        return Join(servd.__version__, "a host", 1, 1, terms).refusal(head)

    assert why(same) is None and why(unknown) is None
    assert (why(other) or "").startswith("the model's weights: ")
    (tmp_path / "head" / "model.safetensors").unlink()
    (tmp_path / "head" / "model.safetensors").mkdir()  # it cannot be read any more
    assert terms_of(config, specs[0]) == unknown


def test_two_hosts_with_the_same_engines(hosts):
    """The second one asks again, until the first is lost: it may be the same one, restarted."""
    hosts.start_head()
    first = hosts.start_node("a")
    assert hosts.event() == ("a", 0)
    hosts.start_node("b")
    time.sleep(0.5)
    assert hosts.events.empty()
    first.close()
    assert hosts.event() == ("b", 1)


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
            beat = Beat(message.session, message.asked_ns, time.monotonic_ns() + ahead)
            head.listener.send_to(peer, beat)
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
    assert hosts.event() == ("friend", 0)
    time.sleep(0.5)
    assert hosts.events.empty()
