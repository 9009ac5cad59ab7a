"""EngineCoreProc's threads, without a process: an API server that ends without a word."""

from __future__ import annotations

import threading

from servd import ipc
from servd.config import Config
from servd.core.engine_core_proc import ClientGone, EngineCoreProc, Start, all_of
from servd.hf import FAKE_SPEC
from servd.ipc import Inbox
from servd.messages import (
    AbortRequests,
    Attach,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineStatus,
    FromEngine,
)
from tests.core.engines import make_engine, make_request


def test_a_client_that_is_gone_is_told_to_the_engine_and_others_go_on():
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
            proc.outputs.put(Attach(client, inbox.at))
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


def test_all_requests_of_a_client_are_dropped():
    engine = make_engine(max_num_seqs=1)
    for name, client in {"a": 1, "b": 2, "c": 1}.items():
        engine.handle(make_request(name, [1, 2], client=client))
    assert all_of(1, engine) == AbortRequests(["a", "c"])
    engine.handle(all_of(1, engine))
    assert [*engine.scheduler.requests] == ["b"]
