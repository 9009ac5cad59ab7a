"""Pictures in the engine: what is encoded when, and which requests share blocks and outputs."""

import os
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.core.encoder_cache_manager import EncoderCacheManager
from servd.messages.engine import AbortRequests
from servd.messages.multimodal import MultiModalFeature
from tests.core.engines import (
    AuditedExecutor,
    Log,
    generate,
    make_engine,
    make_request,
    run_arrivals,
    solo,
)

IMAGE = 99  # the image token
NULL = os.stat(os.devnull).st_ino


class SeeingExecutor(AuditedExecutor):
    """Checks that what rows read is encoded, and that the outputs never exceed the capacity."""

    capacity = 64
    is_bidirectional = False

    def start(self):
        self.features: dict[int, list[MultiModalFeature]] = {}
        self.outputs: dict[bytes, int] = {}
        self.num_encoded = 0
        return super().start()

    def execute_model(self, scheduled) -> None:
        for new in scheduled.new_requests:
            self.features[new.slot] = new.mm_features
        for identifier in scheduled.freed_encoder_outputs:
            del self.outputs[identifier]
        for slot, index in scheduled.scheduled_encoder_inputs:
            feature = self.features[slot][index]
            assert feature.identifier not in self.outputs
            self.outputs[feature.identifier] = feature.num_embeds
            self.num_encoded += 1
        assert sum(self.outputs.values()) <= self.capacity
        for row in scheduled.rows:
            start = row.num_computed_tokens
            end = start + row.num_scheduled_tokens
            for feature in self.features[row.slot]:
                if feature.offset < end and feature.end > start:
                    assert feature.identifier in self.outputs
                    assert feature.end <= end or not self.is_bidirectional
        super().execute_model(scheduled)


def seeing_request(request_id: str, parts: list, max_tokens: int = 3, **options):
    """A request whose parts are tokens, or a picture's name and its number of image tokens."""
    token_ids: list[int] = []
    features: list[MultiModalFeature] = []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        name, size = part
        identifier = sha256(f"{options.get('cache_salt')}{name}".encode()).digest()
        feature = MultiModalFeature(identifier, len(token_ids), size, size)
        features.append(msgspec.structs.replace(feature, memory=os.devnull, inode=NULL))
        token_ids += [IMAGE] * size
    request = make_request(request_id, token_ids, max_tokens, **options)
    return msgspec.structs.replace(request, mm_features=features)


def seeing_engine(capacity: int = 64, is_bidirectional: bool = False, **options):
    kind = type("Seeing", (SeeingExecutor,), {})
    kind.capacity = capacity
    kind.is_bidirectional = is_bidirectional
    engine = make_engine(executor_class=kind, **options)
    engine.scheduler.encoder_cache = EncoderCacheManager(capacity, is_bidirectional)
    return engine


def test_a_picture_is_encoded_once_for_all_that_have_it():
    engine = seeing_engine()
    requests = [seeing_request(str(i), [i + 1, ("a", 20), 7]) for i in range(50)]
    log = generate(engine, *requests)
    assert engine.executor.num_encoded == 1
    assert [log.token_ids(str(i)) for i in range(50)] == [solo(request) for request in requests]
    encodes = [record.encodes for record in engine.scheduler.step_log.take_new(client=9)]
    assert [sizes for sizes in encodes if sizes] == [{"0": 20}]


def test_a_cached_prefix_covers_a_picture():
    engine = seeing_engine(block_size=4)
    generate(engine, seeing_request("first", [1, ("a", 20), 7, 8, 9]))
    engine.scheduler.encoder_cache.clear()
    engine.executor.outputs.clear()
    log = generate(engine, seeing_request("second", [1, ("a", 20), 7, 8, 9]))
    assert log.outputs["second"][0].num_cached_tokens == 20  # but for the last block: 4 of 24
    assert engine.executor.num_encoded == 2  # the last image token is in that block


@pytest.mark.parametrize(
    ("name", "salt", "num_cached"), [("a", None, 20), ("b", None, 0), ("a", "other", 0)]
)
def test_two_pictures_share_no_block_nor_do_two_salts(name, salt, num_cached):
    engine = seeing_engine(block_size=4)
    generate(engine, seeing_request("first", [("a", 20), 7, 8, 9]))
    log = generate(engine, seeing_request("second", [(name, 20), 7, 8, 9], cache_salt=salt))
    assert log.outputs["second"][0].num_cached_tokens == num_cached


def test_blocks_before_and_after_a_picture_depend_on_it_only_after():
    engine = seeing_engine(block_size=4)
    text = [1, 2, 3, 4]
    generate(engine, seeing_request("first", [*text, ("a", 4), *text, 5]))
    log = generate(engine, seeing_request("second", [*text, ("b", 4), *text, 5]))
    assert log.outputs["second"][0].num_cached_tokens == 4


def test_what_a_failed_request_had_is_encoded_again():
    engine = seeing_engine()
    engine.handle(seeing_request("a", [("a", 20), 7]))
    engine.step()
    cache = engine.scheduler.encoder_cache
    [request] = engine.scheduler.requests.values()
    cache.forget(request)
    assert cache.num_embeds == 0
    assert cache.take_freed() == [request.mm_features[0].identifier]


def test_workers_drop_what_was_freed_while_there_was_nothing_to_compute():
    engine = seeing_engine()
    engine.handle(seeing_request("a", [("a", 20), 7], max_tokens=1))
    [request] = engine.scheduler.requests.values()
    while engine.has_work:
        engine.step()
    engine.scheduler.encoder_cache.forget(request)
    assert engine.scheduler.schedule() is None
    generate(engine, make_request("b", [1, 2, 3]))
    assert engine.executor.outputs == {}


def test_a_picture_stays_open_for_steps_in_flight():
    engine = seeing_engine(depth=2)
    [feature] = seeing_request("a", [("a", 20), 7]).mm_features
    memory = os.memfd_create("picture")
    feature = msgspec.structs.replace(
        feature, memory=f"/proc/self/fd/{memory}", inode=os.fstat(memory).st_ino
    )
    requests = [
        msgspec.structs.replace(seeing_request(name, [("a", 20), 7]), mm_features=[feature])
        for name in ("leaves", "stays")
    ]
    replaced = msgspec.structs.replace(feature, inode=feature.inode - 1)
    late = msgspec.structs.replace(requests[0], request_id="late", mm_features=[replaced])
    engine.handle(requests[0])
    engine.step()
    engine.handle(requests[1])
    [[opened]] = engine.executor.features.values()
    os.close(memory)
    other = os.memfd_create("another picture")  # it gets the number
    assert other == memory
    engine.handle(AbortRequests(["leaves"]))
    assert Path(opened.memory).stat().st_ino == feature.inode
    log = generate(engine, late)
    os.close(other)
    assert "cannot open" in log.outputs["late"][0].error
    assert log.token_ids("stays") == solo(requests[1])
    assert not Path(opened.memory).exists()


def test_a_request_whose_cached_prefix_ends_before_a_picture_waits_for_room():
    """The step holds "a" for another request, which leaves no room for "b"."""
    engine = seeing_engine(capacity=16, block_size=4, max_num_batched_tokens=8, num_blocks=20)
    requests = [
        seeing_request(str(i), [1, 1, ("a", 12), 1, 1, picture], 1)
        for i, picture in enumerate([("a", 12), ("b", 5)])
    ]
    log = generate(engine, seeing_request("before", [1], 1), *requests)
    assert [log.token_ids(str(i)) for i in range(2)] == [solo(request) for request in requests]


@pytest.mark.parametrize(("num_texts", "num_shares"), [(0, 0), (1, 1), (3, 3), (7, 5)])
def test_more_requests_decode_for_longer_after_a_slow_picture(num_texts, num_shares):
    now = 0

    class Slow(SeeingExecutor):
        def execute_model(self, scheduled) -> None:
            nonlocal now
            encodes = bool(scheduled.scheduled_encoder_inputs)
            kinds.append(encodes)
            now += 1_000_000_000 if encodes else 100_000_000
            super().execute_model(scheduled)

    kinds: list[bool] = []
    engine = make_engine(num_blocks=256, executor_class=Slow, clock=lambda: now)
    engine.scheduler.encoder_cache = EncoderCacheManager(64)
    log = Log()
    for number in range(num_texts):
        engine.handle(make_request(f"text-{number}", [1], 100))
        log.step(engine)
    for name in ("a", "b"):
        engine.handle(seeing_request(name, [(name, 20), 7], 1))
    log.run(engine)
    first = kinds.index(True)
    assert sum(kinds) == 2
    assert kinds.index(True, first + 1) - first == 1 + 10 * num_shares


class Arrival(NamedTuple):
    step: int
    parts: list
    max_tokens: int
    abort_after: int | None


PICTURES = st.integers(0, 40).map(lambda number: (str(number), number % 16 + 1))
PARTS = st.lists(st.one_of(st.integers(1, 90), PICTURES), min_size=1, max_size=8)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 6),
        PARTS,
        st.integers(1, 6),
        st.one_of(st.none(), st.integers(0, 5)),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=ARRIVALS,
    depth=st.sampled_from([1, 2]),
    num_blocks=st.integers(20, 60),
    capacity=st.sampled_from([16, 20, 40]),
    budget=st.sampled_from([8, 20, 40, 64]),
    is_bidirectional=st.booleans(),
    is_chunked=st.booleans(),
)
def test_every_schedule_encodes_what_it_reads_and_ends(
    arrivals, depth, num_blocks, capacity, budget, is_bidirectional, is_chunked
):
    min_budget = 40 if is_bidirectional else 8
    if not is_chunked:
        min_budget = 64
    engine = seeing_engine(
        capacity=capacity if is_chunked else 64,
        is_bidirectional=is_bidirectional,
        num_blocks=num_blocks,
        depth=depth,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=max(budget, min_budget),
        enable_chunked_prefill=is_chunked,
    )
    requests = {
        str(i): seeing_request(str(i), arrival.parts, arrival.max_tokens)
        for i, arrival in enumerate(arrivals)
    }
    log = run_arrivals(engine, arrivals, requests)
    for request_id, request in requests.items():
        token_ids = log.token_ids(request_id)
        assert token_ids == solo(request)[: len(token_ids)]
