"""EngineCoreProc's threads, without a process: an API server that ends without a word."""

from __future__ import annotations

import threading

import msgspec
import pytest

from servd import ipc
from servd.config import Config
from servd.core.client import identity
from servd.core.engine_core_proc import ClientGone, EngineCoreProc, Start, all_of
from servd.hf import FAKE_SPEC
from servd.ipc import Inbox
from servd.messages import (
    AbortRequests,
    Attach,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDead,
    EngineStatus,
    FromEngine,
)
from tests.core.engines import make_engine, make_request


def test_the_engine_learns_of_a_dead_client_and_others_continue():
    folder = ipc.private_dir()
    inboxes = {
        client: Inbox(ipc.address(folder, f"client-{client}"), FromEngine) for client in (1, 2)
    }
    proc = EngineCoreProc(Start(Config(), FAKE_SPEC, str(folder), 0.0))
    thread = threading.Thread(target=proc.send_outputs)
    outputs = EngineCoreOutputs([EngineCoreOutput("a", [1])])
    thread.start()
    try:
        proc.outputs.put((None, EngineStatus("loading")))
        for client, inbox in inboxes.items():
            proc.outputs.put(Attach(client, inbox.at, identity(Config(), FAKE_SPEC)))
        assert all(inbox.recv(30) == EngineStatus("loading") for inbox in inboxes.values())
        inboxes[1].close()
        while proc.inputs.empty():  # until the socket has noticed
            proc.outputs.put((1, outputs))
            proc.outputs.put((2, outputs))
            assert inboxes[2].recv(30) == outputs
        assert proc.inputs.get() == ClientGone(1)
        proc.outputs.put((1, outputs))  # of a request that was being compiled
        assert proc.inputs.get(timeout=30) == ClientGone(1)
    finally:
        proc.outputs.put(None)
        thread.join(30)
        inboxes[2].close()
        folder.rmdir()


@pytest.mark.parametrize(
    "other",
    [
        "",  # of a version that has no identity
        identity(Config.load({"tokenizer": "./other"}), FAKE_SPEC),
        identity(Config(), msgspec.structs.replace(FAKE_SPEC, vocab_size=1000)),
        identity(Config(), FAKE_SPEC).replace("servd 0", "servd 99"),
    ],
)
def test_a_client_of_another_model_or_version_is_refused(other: str):
    folder = ipc.private_dir()
    inbox: Inbox[FromEngine] = Inbox(ipc.address(folder, "client-1"), FromEngine)
    proc = EngineCoreProc(Start(Config(), FAKE_SPEC, str(folder), 0.0))
    thread = threading.Thread(target=proc.send_outputs)
    thread.start()
    try:
        proc.outputs.put((None, EngineStatus("loading")))
        proc.outputs.put(Attach(1, inbox.at, other))
        answer = inbox.recv(30)
        assert isinstance(answer, EngineDead) and other in answer.reason
        proc.outputs.put((None, EngineStatus("loading more")))
        assert inbox.recv(0.2) is None
    finally:
        proc.outputs.put(None)
        thread.join(30)
        inbox.close()
        folder.rmdir()


def test_all_requests_of_a_client_are_dropped():
    engine = make_engine(max_num_seqs=1)
    for name, client in {"a": 1, "b": 2, "c": 1}.items():
        engine.handle(make_request(name, [1, 2], client=client))
    assert all_of(1, engine) == AbortRequests(["a", "c"])
    engine.handle(all_of(1, engine))
    assert [*engine.scheduler.requests] == ["b"]
