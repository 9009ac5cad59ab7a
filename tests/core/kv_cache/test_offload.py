"""Blocks that leave the device and come back, on an executor that checks every token."""

import os
import random
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from servd.core.kv_cache.connector import costs, io_workers, loads
from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.kv_cache.connector.disk import HEADER, Disk
from servd.core.kv_cache.connector.identity import _digest
from servd.core.kv_cache.connector.offload import OffloadConnector
from servd.messages.adapter import Adapter
from servd.messages.engine import AbortRequests, ResetPrefixCache
from tests.core.engines import (
    AuditedExecutor,
    Log,
    check,
    generate,
    make_engine,
    make_request,
    solo,
)
from tests.limits import WAIT_SECONDS

MIB = 1 / 1024  # GiB
PROMPT = list(range(40))  # ten blocks of four


@pytest.fixture(autouse=True)
def _fakes_compute_faster_than_they_copy(monkeypatch):
    monkeypatch.setattr(LoadCosts, "is_worth_loading", lambda self, place: True)
    monkeypatch.setattr(loads, "MIN_TIMEOUT_NS", 30_000_000_000)


def cached_tokens(log: Log, name: str) -> int:
    return log.outputs[name][0].num_cached_tokens


def connector_of(engine) -> OffloadConnector:
    connector = engine.scheduler.kv_cache.connector
    assert isinstance(connector, OffloadConnector)
    return connector


def settle(engine) -> None:
    """Let what is left be copied and written."""
    while engine.has_work:
        engine.step()
    connector_of(engine).flush()
    check(engine)


def restart(engine, **options):
    """Another engine, after the end of this one."""
    settle(engine)
    again = make_engine(**options)
    connector_of(again).flush()
    return again


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slots", [3, 400])
@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_a_crowd_gets_its_tokens_with_a_cache_too_small_for_it(depth, slots, drafts):
    options = {"num_blocks": 20, "depth": depth, "speculative_config": drafts}
    engine = make_engine(**options, kv_offloading_size=slots * 32 / 2**30)
    rng = random.Random(1)
    prompts = [PROMPT[: rng.randrange(4, 40)] for _ in range(6)]
    prompts += [[rng.randrange(200) for _ in range(rng.randrange(1, 44))] for _ in range(12)]
    requests = [
        make_request(f"{turn}-{i}", prompt, max_tokens=16)
        for turn in range(3)
        for i, prompt in enumerate(prompts)
    ]
    log = generate(engine, *requests)
    for request in requests:
        assert log.token_ids(request.request_id) == solo(request)
    assert log.total("num_preemptions") > 0
    assert slots == 3 or log.total("external_prefix_cache_hits") > 0
    assert connector_of(engine).host.num_hits > 0
    swaps = [step.swaps for step in engine.executor.steps if step.step >= 0 and step.swaps]
    num_in = sum(len(swap.blocks_to_swap_in) for swap in swaps)
    num_out = sum(len(swap.blocks_to_swap_out) for swap in swaps)
    assert log.total("num_bytes_loaded") == 32 * num_in > 0
    assert log.total("num_bytes_stored") == 32 * num_out > 0
    assert (log.total("num_stores_skipped") > 0) == (slots == 3)


def test_a_request_that_had_to_yield_computes_only_its_last_block_again():
    """Two requests outgrow the cache together; the younger one yields its eleven blocks."""
    counts = {}
    for size in (None, MIB):
        engine = make_engine(num_blocks=16, max_model_len=64, kv_offloading_size=size)
        requests = [make_request(name, [i] * 20, max_tokens=30) for i, name in enumerate("ab")]
        log = generate(engine, *requests)
        for request in requests:
            assert log.token_ids(request.request_id) == solo(request)
        assert log.total("num_preemptions") > 0
        counts[size] = sum(step.total_num_scheduled_tokens for step in engine.executor.steps)
        reports = [message.stats.num_swapped for message in log.by_client[0]]
        assert (max(reports) > 0) == bool(size) and reports[-1] == 0
        marks = [m.stage for name in "ab" for output in log.outputs[name] for m in output.marks]
        assert marks.count("swapped") == (marks.count("preempted") if size else 0)
    assert counts[MIB] < counts[None]
    assert counts[MIB] < 2 * 50 + 4 * 4  # each preemption costs at most the last block


def test_host_memory_is_forgotten_by_a_reset():
    engine = make_engine(num_blocks=16, kv_offloading_size=MIB)
    for name, prompt in (("a", PROMPT), ("other", [9] * 50)):
        generate(engine, make_request(name, prompt))
    assert cached_tokens(generate(engine, make_request("b", PROMPT)), "b") == 36
    engine.handle(ResetPrefixCache())
    assert cached_tokens(generate(engine, make_request("c", PROMPT)), "c") == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_found_after_a_restart(tmp_path, depth):
    options = {"depth": depth, "kv_cache_dir": str(tmp_path)}
    first = make_engine(**options)
    connector_of(first).flush()
    request = make_request("a", PROMPT)
    log = generate(first, request)
    assert cached_tokens(log, "a") == 0
    second = restart(first, **options)
    again, other = make_request("b", PROMPT), make_request("c", [*PROMPT[:20], 7, 7])
    log = generate(second, again, other)
    assert [cached_tokens(log, name) for name in "bc"] == [36, 20]
    assert log.token_ids("b") == solo(again) and log.token_ids("c") == solo(other)
    assert log.total("external_prefix_cache_hits") >= 36
    assert log.outputs["b"][0].num_external_tokens == 36
    assert log.total("prefix_cache_hits") + log.total("external_prefix_cache_hits") == 56


def test_a_long_prompt_is_written_through_few_slots(tmp_path):
    engine = make_engine(kv_cache_dir=str(tmp_path), kv_offloading_size=4 * 32 / 2**30)
    connector_of(engine).flush()
    generate(engine, make_request("a", PROMPT, max_tokens=2))
    settle(engine)
    assert len(blocks_in(tmp_path)) == 10


class WithAdapters(AuditedExecutor):
    """Its states begin with the adapter's, which the audit does not know."""

    def _audit(self, row, free: set[int]) -> None:
        pass


@pytest.mark.parametrize(
    "of",
    [
        lambda name: {"cache_salt": name},
        lambda name: {"adapter": Adapter(name, (name * 64)[:64], f"/{name}")},
    ],
    ids=["salt", "adapter"],
)
def test_salts_and_adapters_isolate_on_the_disk_too(tmp_path, of):
    options = {"executor_class": WithAdapters, "kv_cache_dir": str(tmp_path)}
    first = make_engine(**options)
    connector_of(first).flush()
    before = generate(first, make_request("a", PROMPT, **of("a")))
    second = restart(first, **options)
    log = generate(second, make_request("b", PROMPT, **of("b")), make_request("none", PROMPT))
    assert [cached_tokens(log, name) for name in ("b", "none")] == [0, 0]
    log = generate(second, make_request("again", PROMPT, **of("a")))
    assert cached_tokens(log, "again") == 36
    assert log.token_ids("again") == before.token_ids("a")


def test_files_of_another_model_or_layout_are_not_found(tmp_path):
    first = make_engine(kv_cache_dir=str(tmp_path))
    connector_of(first).flush()
    generate(first, make_request("a", PROMPT))
    for other in ({"seed": 1}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}):
        options = {"load_format": "dummy"} | other
        second = restart(first, kv_cache_dir=str(tmp_path), **options)
        assert cached_tokens(generate(second, make_request("b", PROMPT)), "b") == 0
    third = restart(first, kv_cache_dir=str(tmp_path))
    assert cached_tokens(generate(third, make_request("b", PROMPT)), "b") == 36


def blocks_in(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(rng: random.Random, path, files: list) -> bytes:
    """Do something to a file that a disk, a crash or a person may do."""
    data = bytearray(path.read_bytes())
    match rng.choice(["cut", "flip", "longer", "foreign", "stale", "empty", "header", "zeros"]):
        case "cut":
            data = data[: rng.randrange(len(data))]
        case "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "longer":
            data += b"\0" * rng.randrange(1, 99)
        case "foreign":
            data = bytearray(rng.randbytes(len(data)))
        case "stale":  # whole, but of another block
            data = bytearray(rng.choice([file for file in files if file != path]).read_bytes())
        case "empty":
            data.clear()
        case "header":
            data = data[: HEADER.size]
        case "zeros":
            data[HEADER.size :] = bytes(len(data) - HEADER.size)
    path.write_bytes(data)
    return bytes(data)


def test_no_damaged_file_ever_changes_a_token(tmp_path):
    """200 files, of which each is damaged in its own way; every prompt is asked for again."""
    options = {"kv_cache_dir": str(tmp_path), "num_blocks": 400}
    rng = random.Random(7)
    engine = make_engine(**options)
    connector_of(engine).flush()
    prompts = [[rng.randrange(200) for _ in range(41)] for _ in range(20)]
    for i, prompt in enumerate(prompts):
        generate(engine, make_request(f"a{i}", prompt, max_tokens=2))
    engine = restart(engine, **options)
    files = blocks_in(tmp_path)
    assert len(files) == 200
    damaged = {path: damage(rng, path, files) for path in files}
    requests = [make_request(f"b{i}", prompt, max_tokens=2) for i, prompt in enumerate(prompts)]
    for request in requests:
        log = generate(engine, request)
        assert log.token_ids(request.request_id) == solo(request)
        assert cached_tokens(log, request.request_id) == 0
    settle(engine)
    assert not any(path.exists() and path.read_bytes() == damaged[path] for path in files)
    engine = restart(engine, **options)  # what was damaged is written again
    log = generate(engine, make_request("c", prompts[0], max_tokens=2))
    assert cached_tokens(log, "c") >= 4


def test_a_folder_that_cannot_be_used_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    engine = make_engine(kv_cache_dir=str(tmp_path / "file"))
    request = make_request("a", PROMPT)
    assert generate(engine, request).token_ids("a") == solo(request)
    settle(engine)
    assert "cannot be used" in caplog.text


def test_a_full_disk_is_a_warning(tmp_path, caplog, monkeypatch):
    engine = make_engine(kv_cache_dir=str(tmp_path))
    connector_of(engine).flush()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    request = make_request("a", PROMPT)
    assert generate(engine, request).token_ids("a") == solo(request)
    settle(engine)
    assert "No space left" in caplog.text
    assert blocks_in(tmp_path) == []


def test_the_folder_stays_within_its_size_and_keeps_what_was_used_last(tmp_path):
    size = HEADER.size + 32
    disk = Disk(tmp_path, 50 * size, lambda: bytes(32))
    disk.open()
    data = memoryview(bytearray(32))
    hashes = [bytes([i]) * 32 for i in range(120)]
    for at, block_hash in enumerate(hashes):
        disk.write(block_hash, data)
        age = time.time() - 1000 + at
        os.utime(disk._path(block_hash), (age, age))
        assert disk.read(hashes[0], data)  # used all the time
        assert sum(path.stat().st_size for path in blocks_in(tmp_path)) <= 50 * size
    assert disk.read(hashes[-1], data) and not disk.may_have(hashes[1])


def test_engines_share_a_folder_while_they_run(tmp_path):
    engines = [make_engine(kv_cache_dir=str(tmp_path)) for _ in range(2)]
    for engine in engines:
        connector_of(engine).flush()
    generate(engines[0], make_request("a", PROMPT))
    settle(engines[0])
    log = generate(engines[1], make_request("b", PROMPT))
    assert cached_tokens(log, "b") == 36


def test_a_request_whose_blocks_are_being_read_can_be_aborted(tmp_path, monkeypatch):
    first = make_engine(kv_cache_dir=str(tmp_path))
    connector_of(first).flush()
    generate(first, make_request("a", PROMPT))
    engine = restart(first, kv_cache_dir=str(tmp_path))
    may_read, read = threading.Event(), Disk.read
    monkeypatch.setattr(
        Disk, "read", lambda *arguments: may_read.wait(WAIT_SECONDS) and read(*arguments)
    )
    for name in "bc":
        engine.handle(make_request(name, PROMPT))
    log = Log()
    for _ in range(3):
        log.step(engine)
    assert not engine.scheduler.running

    def fetching() -> tuple[int, int]:
        report = engine.scheduler.report(0)
        return report.num_reading, report.num_read

    assert fetching() == (1, 0)  # the second has not been looked at
    engine.handle(AbortRequests(["b"]))
    assert fetching() == (0, 0)
    check(engine)
    log.step(engine)
    assert fetching() == (1, 0)
    may_read.set()
    connector_of(engine).flush()
    assert fetching() == (0, 1)
    log.run(engine)
    assert fetching() == (0, 0)
    assert cached_tokens(log, "c") == 36
    assert log.token_ids("c") == solo(make_request("c", PROMPT))


def test_a_slow_disk_is_not_waited_for_longer_than_computing_takes(tmp_path, monkeypatch):
    first = make_engine(kv_cache_dir=str(tmp_path))
    connector_of(first).flush()
    generate(first, make_request("a", PROMPT))
    engine = restart(first, kv_cache_dir=str(tmp_path))
    may_read = threading.Event()
    monkeypatch.setattr(loads, "MIN_TIMEOUT_NS", 1_000_000)
    monkeypatch.setattr(costs, "UNKNOWN_COST", 1_000)
    monkeypatch.setattr(Disk, "read", lambda *_: may_read.wait(WAIT_SECONDS) and False)
    log = generate(engine, make_request("b", PROMPT))
    assert cached_tokens(log, "b") == 0
    may_read.set()
    settle(engine)


class VoidExecutor(AuditedExecutor):
    """The first `num_void` outputs are NaN, and so are keys and values of their step."""

    num_void = 0

    def _audit(self, row, free: set[int]) -> None:
        if self.cache[self._position(row, 0)]:  # or it is void
            super()._audit(row, free)

    def _sample(self, scheduled, bitmask):
        output = super()._sample(scheduled, bitmask)
        for i, item in enumerate(scheduled.rows):
            if item.samples and self.num_void:
                self.num_void -= 1
                output.errors = output.errors | {i: "NaN"}
                row = self.rows[item.slot]
                end = row.num_computed_tokens
                for at in range(end - item.num_scheduled_tokens, end):
                    self.cache[self._position(row, at)] = 0
        return output


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [12, 30])
def test_what_a_failed_request_computed_reaches_no_file(tmp_path, depth, length):
    """The next request, of the same prompt, gets the same blocks at once."""
    options = {"kv_cache_dir": str(tmp_path), "max_num_seqs": 1, "depth": depth}
    engine = make_engine(executor_class=VoidExecutor, **options)
    connector_of(engine).flush()
    engine.executor.num_void = 1
    request = make_request("again", PROMPT[:length])
    log = Log()
    engine.handle(make_request("void", PROMPT[:length]))
    engine.handle(request)
    while not log.finished("void"):
        log.step(engine)
    connector_of(engine).flush()  # its files are deleted
    log.run(engine)
    assert log.outputs["void"][-1].error == "NaN"
    assert log.token_ids("again") == solo(request)
    engine = restart(engine, **options)
    log = generate(engine, request)
    assert cached_tokens(log, "again") == (length - 1) // 4 * 4
    assert log.token_ids("again") == solo(request)


def test_files_that_a_failed_request_was_built_on_are_not_used_again(tmp_path):
    """They may have come from one that was aborted before it could fail."""
    options = {"kv_cache_dir": str(tmp_path)}
    first = make_engine(**options)
    connector_of(first).flush()
    generate(first, make_request("a", PROMPT))
    settle(first)
    engine = make_engine(executor_class=VoidExecutor, **options)
    connector_of(engine).flush()
    engine.executor.num_void = 1
    log = generate(engine, make_request("void", PROMPT))
    assert log.outputs["void"][-1].error == "NaN"
    assert log.total("external_prefix_cache_hits") == 36
    settle(engine)
    log = generate(engine, make_request("again", PROMPT))
    assert cached_tokens(log, "again") == 0


def test_what_came_back_after_a_preemption_was_not_found_at_first():
    """Metrics count what was computed and what was found, and neither can be negative."""
    options = {"max_num_batched_tokens": 4, "max_num_seqs": 2, "kv_offloading_size": MIB}
    engine = make_engine(num_blocks=16, **options)
    log = generate(
        engine,
        make_request("a", [1] * 20, max_tokens=30),
        make_request("b", [2] * 36, max_tokens=4),  # yields while its prompt is computed
    )
    assert log.total("num_preemptions") > 0 and connector_of(engine).host.num_hits > 0
    first = log.outputs["b"][0]
    assert "preempted" in [mark.stage for mark in first.marks]
    assert first.num_external_tokens <= first.num_cached_tokens


def test_nothing_is_deleted_but_blocks(tmp_path):
    """Somebody may name a folder that has other things in it."""
    foreign_files = [
        tmp_path / "letter.txt",
        tmp_path / "ab" / ("0" * 64),
        tmp_path / ("0" * 32) / "x",
    ]
    for path in foreign_files:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10_000))
        os.utime(path, (0, 0))
    disk = Disk(tmp_path, 500, lambda: bytes(32))
    disk.open()
    for i in range(20):
        disk.write(bytes([i]) * 32, memoryview(bytearray(32)))
    assert all(path.exists() for path in foreign_files)
    assert disk.num_bytes <= 500 and disk.may_have(bytes([19]) * 32)


def test_a_block_whose_file_was_deleted_is_written_again(tmp_path):
    size = HEADER.size + 32
    disk = Disk(tmp_path, 10 * size, lambda: bytes(32))
    disk.open()
    hashes = [bytes([i]) * 32 for i in range(11)]
    for block_hash in hashes:
        disk.write(block_hash, memoryview(bytearray(32)))
    assert [block_hash in disk.known_hashes for block_hash in hashes] == [
        disk.may_have(block_hash) for block_hash in hashes
    ]
    assert not all(map(disk.may_have, hashes))


def test_a_folder_that_others_may_write_to_is_a_warning(tmp_path, caplog):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    disk = Disk(shared, 500, lambda: bytes(32))
    disk.open()
    disk.write(bytes(32), memoryview(bytearray(32)))
    assert disk.may_have(bytes(32)) and "go-w" in caplog.text
    assert [path.stat().st_mode & 0o077 for path in shared.rglob("*")] == [0, 0, 0]


def test_what_is_no_file_is_waited_for_by_nobody(tmp_path):
    """In place of blocks, and of what is known of weights."""
    options = {"kv_cache_dir": str(tmp_path)}
    engine = make_engine(**options)
    connector_of(engine).flush()
    request = make_request("a", PROMPT)
    generate(engine, request)
    settle(engine)
    disk = connector_of(engine).disk
    assert disk is not None
    paths = [
        Path(disk._path(block_hash)) for block_hash in engine.scheduler.kv_cache.pool._block_of_hash
    ]
    makers = [os.mkfifo, os.mkdir, partial(os.symlink, "/dev/zero")] * 3
    makers.append(partial(os.symlink, "/no"))
    for path, make in zip(
        [existing for existing in paths if existing.exists()], makers, strict=False
    ):
        path.unlink()
        make(path)
    engine = make_engine(**options)
    connector_of(engine).flush()
    log = generate(engine, make_request("b", PROMPT))
    assert log.token_ids("b") == solo(request) and cached_tokens(log, "b") == 0
    settle(engine)
    assert not [path for path in tmp_path.rglob("*") if path.is_fifo()]
    file, notes = tmp_path / "weights.bin", tmp_path / "notes"
    file.write_bytes(b"numbers")
    digest = _digest(file, notes)
    [note] = notes.iterdir()
    note.unlink()
    os.mkfifo(note)
    assert _digest(file, notes) == digest


def test_what_links_lead_to_is_not_deleted(tmp_path):
    """Somebody else may be able to write to the folder."""
    root, other = tmp_path / "root", tmp_path / "other"
    letters = [other / "0" / ("a" * 64), other / "ab" / ("a" * 64), other / "letter"]
    for path in letters:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(bytes(10_000))
        os.utime(path, (0, 0))
    (root / ("0" * 32)).mkdir(parents=True)
    (root / ("0" * 32) / "ab").symlink_to(other / "0")
    (root / ("1" * 32)).symlink_to(other)
    disk = Disk(root, 500, lambda: bytes([9]) * 32)
    disk.open()
    for i in range(20):
        disk.write(bytes([i]) * 32, memoryview(bytearray(32)))
    assert all(path.exists() for path in letters) and disk.num_bytes <= 500


def test_a_folder_of_another_user_is_not_used(tmp_path, caplog, monkeypatch):
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    disk = Disk(tmp_path, 500, lambda: bytes(32))
    disk.open()
    disk.write(bytes(32), memoryview(bytearray(32)))
    assert not disk.may_have(bytes(32)) and "another user owns it" in caplog.text


def test_a_disk_that_hangs_keeps_no_engine_busy(tmp_path, monkeypatch, caplog):
    """Nor is the engine, which waits, taken for one that hangs."""
    engine = make_engine(kv_cache_dir=str(tmp_path), kv_offloading_size=4 * 32 / 2**30)
    connector_of(engine).flush()
    monkeypatch.setattr(io_workers, "HANG_TIMEOUT", 0.05)
    may_write, write = threading.Event(), Disk.write
    monkeypatch.setattr(
        Disk, "write", lambda *arguments: may_write.wait(WAIT_SECONDS) and write(*arguments)
    )
    waits: list[int] = []
    engine.on_wait = lambda: waits.append(1)
    request = make_request("a", PROMPT)
    try:
        assert generate(engine, request).token_ids("a") == solo(request)
        deadline = time.monotonic() + 10
        while engine.has_work and time.monotonic() < deadline:
            engine.step()
        assert not engine.has_work and waits and "does not respond" in caplog.text
        check(engine)
    finally:
        may_write.set()
    settle(engine)
    generate(engine, make_request("b", [7] * 40))  # it is used again
    settle(engine)
    assert len(blocks_in(tmp_path)) > 3
