"""Blocks that go from engine to engine, over real sockets, on executors that check every token."""

import itertools
import json
import random
import socket
import threading
import time
from typing import Any

import pytest

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.config.kv_transfer import KVTransferConfig
from servd.config.machine import Machine
from servd.config.resolve import resolve
from servd.core.kv_cache.connector import io_workers, loads, remote
from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.kv_cache.connector.remote import Ask, Give
from servd.ipc.channels import CurveKeys, Link, Listener, wait
from servd.messages.engine import AbortRequests
from tests.core.engines import (
    AuditedExecutor,
    Log,
    check,
    check_idle,
    make_engine,
    make_request,
    solo,
)
from tests.limits import WAIT_SECONDS

PROMPT = list(range(40))  # ten blocks of four
TOKEN = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def _fakes_compute_faster_than_they_copy(monkeypatch):
    monkeypatch.setenv("SERVD_JOIN_TOKEN", TOKEN)
    monkeypatch.setattr(LoadCosts, "is_worth_loading", lambda self, place: True)
    monkeypatch.setattr(loads, "MIN_TIMEOUT_NS", 30_000_000_000)
    monkeypatch.setattr(remote, "IDLE", 0.05)
    monkeypatch.setattr(remote, "DOWN", 0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Fleet:
    """Engines, closed at the end."""

    def __init__(self) -> None:
        self.engines: list[Any] = []
        self.port = free_port()

    def engine(self, role: str, policy: str = "recompute", timeout: float = 20.0, **options):
        extra: dict[str, Any] = {"timeout": timeout}
        if role != "kv_producer":
            extra["peers"] = [self.peer]
        config = {
            "kv_role": role,
            "kv_port": self.port,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra,
        }
        self.engines.append(make_engine(kv_transfer_config=json.dumps(config), **options))
        return self.engines[-1]

    @property
    def peer(self) -> str:
        return f"127.0.0.1:{self.port}"

    def prefill(self, engine, name: str = "a", prompt=PROMPT, **options) -> None:
        """Compute a prompt for another engine, and take its blocks out of the device."""
        run(engine, make_request(name, prompt, 1, is_exported=True, **options))


def run(engine, *requests, seconds: float = WAIT_SECONDS) -> Log:
    """All requests to their end; engines wait for their peers in real time."""
    for request in requests:
        engine.handle(request)
    return run_on(engine, Log(), seconds)


def run_on(engine, log: Log, seconds: float = WAIT_SECONDS) -> Log:
    """All that it has to its end."""
    end = time.monotonic() + seconds
    while engine.has_work:
        assert time.monotonic() < end, "work is left"
        log.step(engine)
    check_idle(engine)
    return log


@pytest.fixture
def fleet():
    fleet = Fleet()
    yield fleet
    for engine in fleet.engines:
        engine.scheduler.kv_cache.close()


def decode(engine, fleet: Fleet, name: str = "a", prompt=PROMPT, **options) -> Any:
    """The answer's first output, which must be right."""
    request = make_request(name, prompt, kv_source=fleet.peer, **options)
    log = run(engine, request)
    assert log.token_ids(name) == solo(request)
    return log.outputs[name][0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_one_computes_the_prompt_and_another_goes_on(fleet, depth, policy):
    producer = fleet.engine("kv_producer", depth=depth)
    other = fleet.engine("kv_consumer", policy, depth=depth)
    for salt in (None, "salt"):
        fleet.prefill(producer, cache_salt=salt)
        output = decode(other, fleet, cache_salt=salt)
        assert output.num_external_tokens == output.num_cached_tokens == 36
    stats = other.scheduler.report(0).kv_stores[-1]
    assert (stats.name, stats.num_hits, stats.num_bad) == ("remote", 18, 0)
    assert producer.scheduler.report(0).kv_stores[-1].num_blocks == 20


def test_only_what_is_asked_for_is_kept_and_not_for_ever(fleet, monkeypatch):
    producer = fleet.engine("kv_both")
    store = producer.scheduler.kv_cache.connector.remote
    run(producer, make_request("a", PROMPT))
    assert store.num_blocks == 0
    fleet.prefill(producer)  # found in the cache
    fleet.prefill(producer)
    producer.scheduler.kv_cache.connector.flush()
    assert (store.num_blocks, store.num_bytes) == (10, 320)
    store.limit = 200
    fleet.prefill(producer, prompt=[7] * 8)
    producer.scheduler.kv_cache.connector.flush()
    assert (store.num_blocks, store.num_bytes) == (6, 192)
    now = time.monotonic()
    monkeypatch.setattr(remote.time, "monotonic", lambda: now + 121)
    store._trim()
    assert (store.num_blocks, store.num_bytes, store._expected) == (0, 0, {})


def test_a_crowd_goes_from_one_to_the_other(fleet):
    """Also with caches too small for it, where blocks find no room on their way."""
    rng = random.Random(5)
    producer = fleet.engine("kv_producer", num_blocks=24)
    other = fleet.engine("kv_consumer", num_blocks=24)
    prompts = [PROMPT[: rng.randrange(1, 40)] for _ in range(8)]
    prompts += [[rng.randrange(200) for _ in range(rng.randrange(1, 44))] for _ in range(16)]
    for i, prompt in enumerate(prompts):
        producer.handle(make_request(str(i), prompt, 1, is_exported=True))
    run(producer)
    requests = [make_request(str(i), p, 16, kv_source=fleet.peer) for i, p in enumerate(prompts)]
    log = run(other, *requests)
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
    assert log.total("external_prefix_cache_hits") > 100


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fate", ["nobody", "silent", "forgotten", "other model"])
def test_what_cannot_be_had_is_computed_or_fails(fleet, monkeypatch, policy, fate, caplog):
    monkeypatch.setattr(loads, "MIN_TIMEOUT_NS", 10**9)
    silent = None
    if fate == "silent":
        silent = Listener(f"tcp://{fleet.peer}", Ask, CurveKeys(TOKEN))
    elif fate != "nobody":
        producer = fleet.engine("kv_producer", seed=int(fate == "other model"), load_format="dummy")
        fleet.prefill(producer)
        if fate == "forgotten":
            producer.scheduler.kv_cache.connector.remote.clear()
    timeout = 0.3 if fate in ("nobody", "silent") else 20.0
    other = fleet.engine("kv_consumer", policy, timeout=timeout, load_format="dummy")
    if policy == "recompute":
        assert decode(other, fleet).num_external_tokens == 0
    else:
        log = run(other, make_request("a", PROMPT, kv_source=fleet.peer))
        [output] = log.outputs["a"]
        assert "9 of 9 KV blocks" in output.error and fleet.peer in output.error
        assert other.scheduler.report(0).num_failed + log.total("num_failed") == 1
    assert ("no answer" in caplog.text) == (fate in ("nobody", "silent"))
    assert ("another model" in caplog.text) == (fate == "other model")
    run(other, make_request("b", PROMPT))  # all is well
    if silent is not None:
        silent.close()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_who_needs_no_blocks_does_not_wait_for_a_silent_peer(fleet, monkeypatch, policy):
    monkeypatch.setattr(loads, "MIN_TIMEOUT_NS", 50_000_000)
    silent = Listener(f"tcp://{fleet.peer}", Ask, CurveKeys(TOKEN))
    other = fleet.engine("kv_consumer", policy, timeout=2.0, max_num_seqs=4)
    waiting = [make_request(f"a{i}", [i, *PROMPT], kv_source=fleet.peer) for i in range(4)]
    for request in [*waiting, make_request("b", PROMPT)]:
        other.handle(request)
    log, began = Log(), time.monotonic()
    while not log.outputs["b"]:
        log.step(other)
    assert time.monotonic() - began < 1.5
    run_on(other, log)
    assert log.token_ids("b") == solo(make_request("b", PROMPT))
    for i, request in enumerate(waiting):
        if policy == "fail":
            assert "could not be had" in log.outputs[f"a{i}"][0].error
        else:
            assert log.token_ids(f"a{i}") == solo(request)
    silent.close()


def test_those_who_are_passed_have_their_blocks(fleet):
    """One after the other, whoever begins meanwhile; also with few slots."""
    producer = fleet.engine("kv_producer")
    other = fleet.engine("kv_consumer", "fail", num_blocks=24)
    prompts = [[i] * (8 + i % 30) for i in range(24)]
    for i, prompt in enumerate(prompts):
        fleet.prefill(producer, str(i), prompt)
    requests = [
        make_request(str(i), prompt, 4, kv_source=fleet.peer if i % 3 else "")
        for i, prompt in enumerate(prompts)
    ]
    log = run(other, *requests)
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
    assert log.total("external_prefix_cache_hits") > 100


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_slots", [20, 11])
def test_a_crowd_that_must_have_its_blocks_waits_for_room_on_the_way(fleet, depth, num_slots):
    """Each needs nine of the host's slots, some of them the same blocks."""
    producer = fleet.engine("kv_producer", num_blocks=200)
    prompts = [[i % 7] * 20 + [i] * 20 for i in range(10)]
    for i, prompt in enumerate(prompts):
        fleet.prefill(producer, str(i), prompt)
    size = num_slots * 32 / 2**30
    other = fleet.engine("kv_consumer", "fail", depth=depth, kv_offloading_size=size)
    requests = [
        make_request(str(i), prompt, kv_source=fleet.peer, owner=str(i % 3))
        for i, prompt in enumerate(prompts)
    ]
    log = run(other, *requests)
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
        first = log.outputs[request.request_id][0]
        assert first.error is None and first.num_cached_tokens == 36


def test_what_has_no_place_on_the_way_fails_with_the_remedy(fleet):
    producer = fleet.engine("kv_producer")
    fleet.prefill(producer)
    other = fleet.engine("kv_consumer", "fail", kv_offloading_size=8 * 32 / 2**30)
    [output] = run(other, make_request("a", PROMPT, kv_source=fleet.peer)).outputs["a"]
    assert output.error == (
        "1 of 9 KV blocks have no place among the 8 of host memory, and kv_load_failure_policy is "
        "fail: raise --kv-offloading-size"
    )


def test_who_waits_behind_a_silent_peer_has_its_blocks_of_another(fleet, monkeypatch):
    monkeypatch.setattr(io_workers, "HANG_TIMEOUT", 0.2)
    fleet.prefill(fleet.engine("kv_producer"))
    silent = Listener(f"tcp://127.0.0.1:{(port := free_port())}", Ask, CurveKeys(TOKEN))
    other = fleet.engine("kv_consumer", "fail", timeout=1.0)
    first = make_request("first", [7] * 40, kv_source=f"127.0.0.1:{port}")
    log = run(other, first, second := make_request("second", PROMPT, kv_source=fleet.peer))
    assert "could not be had" in log.outputs["first"][0].error
    assert log.token_ids("second") == solo(second)
    silent.close()


class Hostile:
    """Stands between, and spoils answers."""

    def __init__(self, fleet: Fleet, spoil) -> None:
        self.at = fleet.port
        fleet.port = free_port()
        self.spoil, self.is_over, self.count = spoil, threading.Event(), 0
        self.links = (
            Listener(f"tcp://127.0.0.1:{fleet.port}", Ask, CurveKeys(TOKEN)),
            Link(f"tcp://127.0.0.1:{self.at}", Give, CurveKeys(TOKEN)),
        )
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        listener, link = self.links
        blocks: dict[bytes, bytes] = {}
        while not self.is_over.is_set():
            wait([listener, link], 0.02)
            for who, ask in listener.drain():
                blocks[ask.block_hash] = who
                link.send(ask)
            for _, give in link.drain():
                self.count += 1
                if (spoiled := self.spoil(give, self.count)) is not None:
                    listener.send_to(blocks[give.block_hash], spoiled)

    def close(self) -> None:
        self.is_over.set()
        self.thread.join()
        for link in self.links:
            link.close()


def flip(give: Give, rng: random.Random) -> Give:
    data = bytearray(give.block)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return Give(give.block_hash, bytes(data))


@pytest.mark.parametrize("seed", range(4))
def test_a_spoiled_block_is_never_a_wrong_token(fleet, seed):
    rng, kept = random.Random(seed), []

    def spoil(give: Give, count: int) -> Give | None:
        kept.append(give.block)
        ways = [
            lambda: give,
            lambda: flip(give, rng),
            lambda: Give(give.block_hash, give.block[: rng.randrange(len(give.block))]),
            lambda: Give(give.block_hash, give.block + b"x"),
            lambda: Give(give.block_hash, rng.choice(kept)),
            lambda: Give(give.block_hash),
            lambda: Give(bytes(32), give.block),
            lambda: None,
        ]
        return give if rng.random() < 0.6 else rng.choice(ways[: 6 if count % 9 else 8])()

    producer = fleet.engine("kv_producer")
    hostile = Hostile(fleet, spoil)
    other = fleet.engine("kv_consumer", timeout=0.2)
    try:
        num_external = 0
        for i in range(20):
            prompt = [rng.randrange(200) for _ in range(rng.randrange(8, 40))]
            one_port, fleet.port = fleet.port, hostile.at
            fleet.prefill(producer, str(i), prompt)
            fleet.port = one_port
            num_external += decode(other, fleet, str(i), prompt).num_external_tokens
            check(other)
        stats = other.scheduler.report(0).kv_stores[-1]
        assert num_external > 0 and stats.num_bad > 0
    finally:
        hostile.close()


def test_a_peer_that_dies_meanwhile_leaves_no_wrong_token(fleet):
    producer = fleet.engine("kv_producer")
    count = itertools.count()
    hostile = Hostile(fleet, lambda give, _: give if next(count) < 4 else None)
    other = fleet.engine("kv_consumer", timeout=0.5)
    try:
        one_port, fleet.port = fleet.port, hostile.at
        fleet.prefill(producer)
        fleet.port = one_port
        assert 0 <= decode(other, fleet).num_external_tokens <= 16
    finally:
        hostile.close()


def test_who_has_another_token_gets_nothing(fleet, monkeypatch):
    producer = fleet.engine("kv_producer")
    fleet.prefill(producer)
    monkeypatch.setenv("SERVD_JOIN_TOKEN", TOKEN[::-1])
    other = fleet.engine("kv_consumer", timeout=0.3)
    assert decode(other, fleet).num_external_tokens == 0


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(fleet):
    other = fleet.engine("kv_consumer")  # nobody answers
    other.handle(make_request("a", PROMPT, kv_source=fleet.peer))
    log = Log()
    for _ in range(3):
        log.step(other)
    other.handle(AbortRequests(["a"]))
    run(other)
    assert not log.outputs["a"]


def test_an_engine_that_slept_listens_again(fleet):
    producer = fleet.engine("kv_producer")
    producer.sleep()
    executor = AuditedExecutor(producer.config, FAKE_SPEC, lambda phase, fraction: None)
    producer.connect(executor, executor.start())
    other = fleet.engine("kv_consumer")
    fleet.prefill(producer)
    assert decode(other, fleet).num_external_tokens == 36


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "kv_role"),
        ({"kv_role": "kv_producer", "kv_connector": "NixlConnector"}, "kv_connector.*servd"),
        ({"kv_role": "kv_consumer"}, "peers"),
        ({"kv_role": "kv_both", "kv_connector_extra_config": {"peers": ["x"]}}, "HOST:PORT"),
        ({"kv_role": "kv_producer", "kv_port": 0}, "kv_port"),
        ({"kv_role": "kv_producer", "kv_ip": "0.0.0.0"}, "one interface"),
    ],
)
def test_a_wrong_configuration_is_refused_at_the_start(config, reason):
    with pytest.raises(ConfigError, match=f"--kv-transfer-config.*{reason}"):
        Config.load({"executor": "fake", "kv_transfer_config": json.dumps(config)})


def test_without_a_token_it_does_not_start(monkeypatch):
    monkeypatch.delenv("SERVD_JOIN_TOKEN")
    options = Config.load({"executor": "fake", "kv_transfer_config": '{"kv_role": "kv_producer"}'})
    with pytest.raises(ConfigError, match="token"):
        resolve(options, FAKE_SPEC, Machine())


def test_each_rank_has_a_port_of_its_own():
    assert KVTransferConfig(kv_role="kv_producer", kv_port=7000).of_rank(2).kv_port == 7002
