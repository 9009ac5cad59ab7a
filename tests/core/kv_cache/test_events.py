"""KV events, read with a decoder that knows nothing of servd, against the pool's own truth."""

import json
import random
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from servd import LLM
from servd.base.errors import ConfigError
from servd.config import Config
from servd.config.kv_events import KVEventsConfig
from servd.core.engine_core import EngineCore
from servd.core.kv_cache.events import AllBlocksCleared
from servd.ipc.channels import END_OF_REPLAY, Publisher
from servd.messages.adapter import Adapter
from servd.messages.engine import ResetPrefixCache
from tests.core.engines import Log, make_engine, make_request

SIZE = 4
ENDPOINTS = ("endpoint", "replay_endpoint")
WRONG = [
    {name: endpoint}
    for name in ENDPOINTS
    for endpoint in (
        "tcp://*",
        "tcp://*:x",
        "tcp://*:0",
        "tcp://:65536",
        "tcp://h:65536",
        "ipc://",
        "*:5557",
        "http://h:80",
        "tcp://h:1 ",
        "",
    )
]


class Router:
    """What a router makes of the batches."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(endpoint)
        self.blocks: dict[bytes, tuple[Any, list[int]]] = {}  # hash -> parent, tokens
        self.numbers: list[int] = []
        self.events: list[dict[str, Any]] = []

    def take(self, number: bytes, data: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big"))
        at, events, rank = msgspec.msgpack.decode(data)
        assert abs(at - time.time()) < 60 and rank == 0
        for event in events:
            self.events.append(event)
            match event:
                case {"type": "BlockStored", "block_hashes": hashes, "token_ids": token_ids}:
                    assert event["block_size"] == SIZE and event["medium"] == "GPU"
                    assert len(token_ids) == SIZE * len(hashes)
                    parent = event["parent_block_hash"]
                    for i, block_hash in enumerate(hashes):
                        assert block_hash not in self.blocks, "told twice"
                        tokens = token_ids[SIZE * i : SIZE * (i + 1)]
                        self.blocks[block_hash], parent = (parent, tokens), block_hash
                case {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}:
                    for block_hash in hashes:
                        del self.blocks[block_hash]
                case {"type": "AllBlocksCleared"}:
                    self.blocks.clear()
                case _:
                    raise AssertionError(event)

    def receive(self) -> None:
        while self.socket.poll(200):
            _, number, data = self.socket.recv_multipart()
            self.take(number, data)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[EngineCore, Router]]]:
    made: list[tuple[EngineCore, Router]] = []

    def make_publisher(depth: int = 1, **options: Any) -> tuple[EngineCore, Router]:
        made.append(start(tmp_path, depth, **options))
        return made[-1]

    yield make_publisher
    for engine, router in made:
        router.socket.close()
        assert engine.scheduler.kv_cache.events is not None
        engine.scheduler.kv_cache.events.close()


def start(tmp_path: Path, depth: int, **options: Any) -> tuple[EngineCore, Router]:
    endpoint = f"ipc://{tmp_path}/events"
    config = {
        "enable_kv_cache_events": True,
        "endpoint": endpoint,
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv",
        "buffer_steps": 500,
    }
    engine = make_engine(depth=depth, kv_events_config=json.dumps(config), **options)
    router = Router(endpoint, "kv")
    events = engine.scheduler.kv_cache.events
    for _ in range(1000):  # a subscription takes effect when it arrives, of which nobody hears
        events._events.append(AllBlocksCleared())
        events.publish()
        if router.socket.poll(20):
            break
    return engine, router


@pytest.mark.parametrize(
    ("depth", "options"), [(1, {}), (2, {}), (1, {"kv_offloading_size": 1 / 1024})]
)
def test_a_router_knows_what_the_pool_has(make, depth, options):
    engine, router = make(depth, num_blocks=24, **options)
    rng, log = random.Random(3), Log()
    beginnings = [[rng.randrange(200) for _ in range(16)] for _ in range(3)]
    for i in range(40):
        prompt = rng.choice(beginnings) + [rng.randrange(200) for _ in range(rng.randrange(1, 20))]
        salt = rng.choice([None, "salt"])
        engine.handle(make_request(str(i), prompt, rng.randrange(1, 9), cache_salt=salt))
        for _ in range(rng.randrange(6)):
            log.step(engine)
    log.run(engine)
    router.receive()
    pool = engine.scheduler.kv_cache.pool
    assert {*router.blocks} == {block_hash for block_hash in pool.hashes if block_hash is not None}
    assert sum(event["type"] == "BlockRemoved" for event in router.events) > 3
    salted = sha256(sha256(b"salt").digest() + bytes(32)).digest()
    for block_hash, (parent, tokens) in router.blocks.items():  # a reader can make them itself
        data = array("I", tokens).tobytes()
        roots = [parent] if parent is not None else [bytes(32), salted]
        assert block_hash in [sha256(root + data).digest() for root in roots]
    for event in router.events:
        if event["type"] == "BlockStored":
            assert event.get("extra_keys") in (None, [[salted.hex()]] * len(event["block_hashes"]))
    engine.handle(ResetPrefixCache())
    router.receive()
    assert not router.blocks and router.events[-1] == {"type": "AllBlocksCleared"}
    first = router.numbers[0]
    assert router.numbers == [*range(first, first + len(router.numbers))]


def test_missed_batches_can_be_had_again(make, tmp_path):
    engine, router = make()
    log = Log()
    for i in range(4):
        engine.handle(make_request(str(i), [i] * 9, 2, adapter=Adapter("x", "0" * 64, "/x")))
        log.run(engine)
    router.receive()
    late = Router(f"ipc://{tmp_path}/events")
    for start in (0, 2):
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(f"ipc://{tmp_path}/replay")
        dealer.send_multipart([b"harms nobody"])
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        late.numbers, late.blocks = [], {}
        while (frames := dealer.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
            late.take(*frames[1:])
        assert late.numbers[0] == start
        if start == 0:
            assert late.blocks == router.blocks and late.blocks
            assert late.events[0] == {"type": "AllBlocksCleared"}
        dealer.close()
    late.socket.close()
    assert {event.get("lora_name") for event in router.events} == {"x", None}


def test_a_replay_waits_for_its_reader(tmp_path):
    replay = f"ipc://{tmp_path}/replay"
    publisher = Publisher(f"ipc://{tmp_path}/events", "", 3, replay, 2000)
    for _ in range(2000):
        publisher.send(bytes(2000))
    with zmq.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.set_hwm(3)
        dealer.connect(replay)
        dealer.send_multipart([b"", bytes(8)])
        got: list[bytes] = []
        while got[-1:] != [END_OF_REPLAY] and dealer.poll(3000):
            got.append(dealer.recv_multipart()[1])
    assert got == [*(i.to_bytes(8, "big") for i in range(2000)), END_OF_REPLAY]
    publisher.close()


def test_a_script_may_have_one_engine_after_another():
    options = json.dumps(
        {"enable_kv_cache_events": True} | dict(zip(ENDPOINTS, free(), strict=True))
    )
    for _ in range(2):
        LLM(executor="fake", use_tqdm=False, kv_events_config=options).close()


def free() -> list[str]:
    """Endpoints on TCP, which cannot be taken twice."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return [f"tcp://*:{probe.getsockname()[1]}" for probe in (first, second)]


def test_each_rank_has_ports_of_its_own():
    config = read('{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:6000"}')
    assert config.is_on and config.of_rank(0) == config
    other = config.of_rank(2)
    assert (other.endpoint, other.replay_endpoint) == ("tcp://*:5559", "tcp://*:6002")
    assert other.data_parallel_rank == 2 and not KVEventsConfig().is_on
    for wrong in ("", "{", '{"endpoints": 1}', '{"publisher": "kafka"}', *map(json.dumps, WRONG)):
        with pytest.raises(ConfigError, match="--kv-events-config"):
            read(wrong)
    with pytest.raises(ConfigError, match="a port from 1 to 65535"):
        read('{"endpoint": "tcp://*:65535"}').of_rank(1)


def read(text: str) -> KVEventsConfig:
    config = Config.load({"kv_events_config": text}).cache.kv_events_config
    assert config is not None
    return config


def test_events_of_a_prefix_cache_that_is_off_are_refused():
    events = '{"enable_kv_cache_events": true}'
    options = {"kv_events_config": events, "enable_prefix_caching": False}
    with pytest.raises(ConfigError, match="--kv-events-config needs the prefix cache"):
        Config.load(options).cache.validate()
    Config.load(options | {"kv_events_config": "{}"}).cache.validate()


@pytest.mark.parametrize("listener", ["engine", "router"])
def test_star_endpoints_listen_and_others_connect(tmp_path, caplog, listener):
    caplog.set_level("INFO")
    router = zmq.Context.instance().socket(zmq.SUB)
    router.subscribe(b"")
    if listener == "router":
        port = router.bind_to_random_port("tcp://127.0.0.1")
        endpoint, manner = f"tcp://127.0.0.1:{port}", "connecting to"
    else:
        endpoint, manner = f"ipc://{tmp_path}/events", "listening on"
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})
    engine = make_engine(kv_events_config=events)
    if listener == "engine":
        router.connect(endpoint)
    assert f"KV events: {manner} {endpoint}" in caplog.text
    events = engine.scheduler.kv_cache.events
    assert events is not None
    for _ in range(100):  # until the subscription has come
        events._events.append(AllBlocksCleared())
        events.publish()
        if router.poll(50):
            break
    assert router.poll(0)
    router.close()
    events.close()


def test_an_endpoint_that_cannot_be_had_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--kv-events-config: ipc:///no"):
        make_engine(
            kv_events_config='{"enable_kv_cache_events": true, "endpoint": "ipc:///no/where"}'
        )
