"""EngineCoreProc's threads, without a process: an API server that ends without a word."""

import gc
import shutil
import threading
import time
from functools import partial
from typing import Any

import msgspec
import pytest

from servd.base.errors import EngineError
from servd.base.private_dir import private_dir
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.config.machine import Machine
from servd.config.resolve import resolve
from servd.core import engine_core_proc
from servd.core.client import identity
from servd.core.engine_core_proc import ClientGone, EngineCoreProc, abort_all_of
from servd.core.executor import fake
from servd.ipc import channels as ipc
from servd.ipc.channels import Inbox, Outbox
from servd.ipc.heartbeat import LIMIT
from servd.ipc.start_messages import StartEngine
from servd.messages.engine import (
    AbortRequests,
    Attach,
    Audit,
    CollectiveRpc,
    CollectiveRpcResult,
    EngineAudit,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineGone,
    EngineReady,
    EngineStatus,
    FinishReason,
    FromEngine,
    ResetPrefixCache,
    ToEngine,
    WorkerFailed,
)
from servd.messages.params import MAX_CANDIDATES, PoolingParams, StructuredOutput
from tests.core.engines import generate, make_engine, make_request
from tests.core.test_encoder_cache import seeing_engine, seeing_request
from tests.fake_tokens import expected_tokens
from tests.limits import WAIT_SECONDS


def test_the_engine_learns_of_a_dead_client_and_others_continue():
    folder = private_dir()
    inboxes = {
        client: Inbox(ipc.address(folder, f"client-{client}"), FromEngine) for client in (1, 2)
    }
    proc = EngineCoreProc(StartEngine(Config(), FAKE_SPEC, str(folder), 0.0))
    thread = threading.Thread(target=proc.process_output_sockets)
    outputs = EngineCoreOutputs([EngineCoreOutput("a", [1])])
    thread.start()
    try:
        proc.output_queue.put((None, EngineStatus("loading")))
        for client, inbox in inboxes.items():
            proc.attach(Attach(client, inbox.at, identity(Config(), FAKE_SPEC)))
        assert all(inbox.recv(30) == EngineStatus("loading") for inbox in inboxes.values())
        inboxes[1].close()
        while proc.input_queue.empty():  # until the socket has noticed
            proc.output_queue.put((1, outputs))
            proc.output_queue.put((2, outputs))
            assert inboxes[2].recv(30) == outputs
        assert proc.input_queue.get() == ClientGone(1)
        proc.output_queue.put((1, outputs))  # for a request that was being compiled
        assert proc.input_queue.get(timeout=WAIT_SECONDS) == ClientGone(1)
    finally:
        proc.output_queue.put(None)
        thread.join(WAIT_SECONDS)
        inboxes[2].close()
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "other",
    [
        "",  # from a version that has no identity
        identity(Config.load({"tokenizer": "./other"}), FAKE_SPEC),
        identity(Config(), msgspec.structs.replace(FAKE_SPEC, vocab_size=1000)),
        identity(Config(), FAKE_SPEC).replace("servd 0", "servd 99"),
    ],
)
def test_a_client_of_another_model_or_version_is_refused(other: str):
    folder = private_dir()
    inbox: Inbox[FromEngine] = Inbox(ipc.address(folder, "client-1"), FromEngine)
    proc = EngineCoreProc(StartEngine(Config(), FAKE_SPEC, str(folder), 0.0))
    thread = threading.Thread(target=proc.process_output_sockets)
    thread.start()
    try:
        proc.output_queue.put((None, EngineStatus("loading")))
        proc.attach(Attach(1, inbox.at, other))
        answer = inbox.recv(30)
        assert isinstance(answer, EngineGone) and other in answer.reason
        proc.output_queue.put((None, EngineStatus("loading more")))
        assert inbox.recv(0.2) is None
    finally:
        proc.output_queue.put(None)
        thread.join(WAIT_SECONDS)
        inbox.close()
        shutil.rmtree(folder)


@pytest.fixture
def proc():
    folder = private_dir()
    yield EngineCoreProc(StartEngine(Config(), FAKE_SPEC, str(folder), 0.0))
    shutil.rmtree(folder)


def test_nobody_waits_for_a_client_that_dies_while_it_attaches(proc: Any, inbox: Any, outbox: Any):
    gone = ipc.address(proc.start.ipc_dir, "client-3")
    for at in (gone, "not an address"):
        outbox.send(Attach(3, at, identity(Config(), FAKE_SPEC)))
        began = time.monotonic()
        proc.receive_message(inbox)
        assert time.monotonic() - began < ipc.CONNECT_TIMEOUT / 2000
        assert proc.output_queue.empty()
        assert proc.input_queue.get(timeout=WAIT_SECONDS) == ClientGone(3)


@pytest.fixture
def inbox(proc: Any):
    inbox: Inbox[ToEngine] = Inbox(ipc.address(proc.start.ipc_dir, "engine"), ToEngine)
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(inbox: Any):
    outbox = Outbox(inbox.at)
    yield outbox
    outbox.close()


@pytest.mark.parametrize(
    ("message", "ended"),
    [
        (make_request("a", [1], logprobs=MAX_CANDIDATES + 1, client=2), ["a"]),
        (make_request("a", [1], n=3, top_p=7.0, client=2), ["a_0", "a_1", "a_2"]),
        (EngineCoreRequest("a", [1], PoolingParams(dimensions=-1), client=2), ["a"]),
        (make_request("a", [], client=2), ["a"]),
        (make_request("a", [1, -1], client=2), ["a"]),
        (make_request("a", [2**32], client=2), ["a"]),
    ],
)
def test_a_request_that_cannot_be_read_ends_with_an_error(proc, inbox, outbox, message, ended):
    outbox.send(message)
    proc.receive_message(inbox)
    client, answer = proc.output_queue.get(timeout=0)
    assert client == 2
    assert [(output.request_id, output.finish_reason) for output in answer.outputs] == [
        (name, FinishReason.ERROR) for name in ended
    ]
    assert "Expected `" in answer.outputs[0].error
    outbox.send(ResetPrefixCache())
    proc.receive_message(inbox)
    assert proc.input_queue.get(timeout=0) == ResetPrefixCache()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xa1\xff", b"\x91" * 5000, b"\x92\xa1a\x01"])
def test_a_message_that_is_no_request_is_logged_and_dropped(proc, inbox, outbox, caplog, data):
    outbox.socket.send(data)
    proc.receive_message(inbox)
    assert proc.input_queue.empty() and proc.output_queue.empty()
    assert "cannot be read" in caplog.text


def test_all_requests_of_a_client_are_dropped():
    engine = make_engine(max_num_seqs=1)
    for name, client in {"a": 1, "b": 2, "c": 1}.items():
        engine.handle(make_request(name, [1, 2], client=client))
    assert abort_all_of(1, engine) == AbortRequests(["a", "c"])
    engine.handle(abort_all_of(1, engine))
    assert [*engine.scheduler.requests] == ["b"]


def test_a_step_may_take_long_while_pictures_are_encoded(proc: Any):
    proc.engine = engine = seeing_engine(depth=2)
    limits: list[tuple[int, float]] = []

    def begin(record) -> None:
        proc.begin_step(record)
        limits.append((record.encoding_cost, proc.heartbeat.numbers[LIMIT]))

    engine.on_scheduled = begin
    generate(engine, make_request("text", [1, 2, 3]))
    generate(engine, seeing_request("picture", [1, ("a", 20), 7], max_tokens=6))
    [encoding] = [place for place, (cost, _) in enumerate(limits) if cost]
    assert limits[encoding][0] == 20
    assert limits[encoding - 1][1] < 60 and limits[-1][1] < 60
    # The second step is launched before the first is done.
    assert min(limit for _, limit in limits[encoding : encoding + 2]) > 300


def load_and_run(proc: EngineCoreProc) -> None:
    proc.load()
    proc.run_busy_loop()


@pytest.fixture
def running(proc: Any):
    """A process's busy loop in a thread, over the fake executor."""
    options = {"executor": "fake", "max_num_seqs": 4, "max_num_batched_tokens": 64}
    options |= {"max_model_len": 256, "sleep_idle_seconds": 600.0}
    proc.start.config = resolve(Config.load(options), FAKE_SPEC, Machine())
    thread = threading.Thread(target=load_and_run, args=[proc])
    thread.start()
    yield proc
    proc.input_queue.put(WorkerFailed("over"))
    thread.join(WAIT_SECONDS)


def next_of(proc: EngineCoreProc, kind: type) -> Any:
    """The next message of this kind that a client would get."""
    while True:
        item = proc.output_queue.get(timeout=WAIT_SECONDS)
        assert item is not None
        _, message = item
        if isinstance(message, kind):
            return message


def output_of(proc: EngineCoreProc) -> list[int]:
    """Tokens up to the end of the request that runs."""
    token_ids = []
    while True:
        for output in next_of(proc, EngineCoreOutputs).all_outputs:
            token_ids += output.new_token_ids
            if output.finish_reason is not None:
                assert output.error is None
                return token_ids


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_sleeps_when_nothing_is_left_and_a_request_wakes_it(running: Any):
    prompt = [*range(40)]
    ask = partial(make_request, "a", prompt, max_tokens=20, ignore_eos=True)
    assert not next_of(running, EngineReady).is_asleep
    running.input_queue.put(ask())
    running.input_queue.put(CollectiveRpc("sleep"))  # while it runs
    assert output_of(running) == expected_tokens(prompt, 20, FAKE_SPEC.vocab_size)
    assert next_of(running, EngineReady).is_asleep and running.engine.is_asleep
    running.input_queue.put(AbortRequests(["unknown"]))
    running.input_queue.put(Audit(0, 7))
    assert next_of(running, EngineAudit).problems == []
    assert running.engine.is_asleep
    assert gc.get_freeze_count()  # the end of a process looks at what is not: half a second
    running.input_queue.put(ask())
    assert not next_of(running, EngineReady).is_asleep
    # Nothing that the last executor had computed or held counts.
    assert output_of(running) == expected_tokens(prompt, 20, FAKE_SPEC.vocab_size)
    running.input_queue.put(CollectiveRpc("sleep"))
    assert next_of(running, EngineReady).is_asleep
    running.input_queue.put(CollectiveRpc("wake_up"))
    assert not next_of(running, EngineReady).is_asleep
    running.input_queue.put(ask())
    running.input_queue.put(CollectiveRpc("sleep", number=1))  # while it runs
    running.input_queue.put(CollectiveRpc("wake_up", number=2))  # withdraws it
    running.input_queue.put(CollectiveRpc("stop_profile", number=3))
    answers = [next_of(running, CollectiveRpcResult) for _ in range(3)]
    answers.sort(key=lambda answer: answer.number)
    assert [answer.results for answer in answers] == [[], [], [None]]
    assert not running.engine.is_asleep


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_is_gone_gets_no_answer_and_the_engine_sleeps(running: Any):
    assert not next_of(running, EngineReady).is_asleep
    running.input_queue.put(make_request("a", [1], max_tokens=200, ignore_eos=True))
    running.input_queue.put(CollectiveRpc("sleep", client=3, number=1))  # while it runs
    running.input_queue.put(ClientGone(3))
    running.input_queue.put(CollectiveRpc("sleep", number=2))
    assert len(output_of(running)) == 200
    assert next_of(running, EngineReady).is_asleep
    assert next_of(running, CollectiveRpcResult).number == 2


def update(proc: EngineCoreProc, number: int, **fields: Any) -> CollectiveRpcResult:
    proc.input_queue.put(CollectiveRpc("update_weights", ["b"], number=number, **fields))
    return next_of(proc, CollectiveRpcResult)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_refused_update_changes_nothing(running: Any, monkeypatch):
    assert not next_of(running, EngineReady).is_asleep
    engine = running.engine
    running.input_queue.put(make_request("a", [1], max_tokens=200, ignore_eos=True))
    assert "1 requests are unfinished" in update(running, 1).error
    assert len(output_of(running)) == 200
    monkeypatch.setattr(engine.scheduler, "forget_workers", None)
    ready = running.ready
    assert "no files" in update(running, 2).error
    monkeypatch.undo()
    running.input_queue.put(CollectiveRpc("sleep", number=3))
    assert next_of(running, EngineReady).is_asleep
    assert next_of(running, CollectiveRpcResult).number == 3
    assert "no files" in update(running, 4).error
    monkeypatch.setattr(engine, "check_update", lambda folder: engine.spec)
    assert not update(running, 5, only_checks=True).error
    assert engine.is_asleep and running.output_queue.empty()
    assert msgspec.structs.replace(running.ready, is_asleep=False) == ready


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_update_is_reported_and_its_failure_states_why(running: Any, monkeypatch):
    assert not next_of(running, EngineReady).is_asleep
    engine = running.engine
    spec = msgspec.structs.replace(engine.spec, folder="/models/b")
    monkeypatch.setattr(engine, "check_update", lambda folder: spec)
    running.input_queue.put(CollectiveRpc("update_weights", ["b"], number=1))
    reports = [next_of(running, EngineReady) for _ in range(2)]
    assert [report.is_asleep for report in reports] == [True, False]
    assert [(report.folder, report.num_updates) for report in reports] == [("/models/b", 1)] * 2
    assert next_of(running, CollectiveRpcResult).results == [None]

    def fail(method: str, args: list[str]) -> None:
        assert not running.heartbeat.is_asleep  # else the next engine would soon sleep
        raise RuntimeError("Traceback\n  line 1\nOSError: cut off")

    monkeypatch.setattr(engine.executor, "collective_rpc", fail)
    answer = update(running, 2)
    assert "/models/b: OSError: cut off; the engine restarts" in answer.error
    with pytest.raises(EngineError, match="cut off"):
        answer.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_grammar_from_before_the_sleep_rules_nobody_after_it(running: Any):
    """The slot is the next request's, which no worker was told to free."""
    prompt, output = [*range(40)], StructuredOutput("regex", "ab")
    ruled = make_request("a", prompt, max_tokens=20, structured_output=output)
    running.input_queue.put(ruled)
    assert bytes(output_of(running)[:2]) == b"ab"
    running.input_queue.put(CollectiveRpc("sleep"))
    while not next_of(running, EngineReady).is_asleep:
        pass
    running.input_queue.put(make_request("b", prompt, max_tokens=20, ignore_eos=True))
    assert output_of(running) == expected_tokens(prompt, 20, FAKE_SPEC.vocab_size)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_wakes_with_as_many_blocks_as_it_had(running, monkeypatch):
    num_blocks = next_of(running, EngineReady).worker.num_blocks
    for now_free in (num_blocks // 2, 2 * num_blocks):
        running.input_queue.put(CollectiveRpc("sleep"))
        assert next_of(running, EngineReady).is_asleep
        monkeypatch.setattr(fake, "MAX_CACHE_TOKENS", 16 * now_free)
        running.input_queue.put(CollectiveRpc("wake_up"))
        assert not next_of(running, EngineReady).is_asleep
        assert len(running.executor.cache) == 16 * num_blocks


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_comes_after_one_that_slept_sleeps_when_idle(proc, monkeypatch):
    monkeypatch.setattr(engine_core_proc, "IDLE", 0.05)
    proc.was_asleep = True
    proc.start.config = resolve(Config.load({"executor": "fake"}), FAKE_SPEC, Machine())
    thread = threading.Thread(target=load_and_run, args=[proc])
    thread.start()
    try:
        assert not next_of(proc, EngineReady).is_asleep
        assert next_of(proc, EngineReady).is_asleep and proc.heartbeat.is_asleep
        proc.input_queue.put(make_request("a", [1, 2, 3], max_tokens=5, ignore_eos=True))
        assert not next_of(proc, EngineReady).is_asleep and not proc.heartbeat.is_asleep
        assert len(output_of(proc)) == 5
        time.sleep(0.3)  # many times as long: only the first idle time counts
        assert not proc.engine.is_asleep
    finally:
        proc.input_queue.put(WorkerFailed("over"))
        thread.join(WAIT_SECONDS)
