"""What it costs to watch requests, counted in calls of functions: with all records, and as
benchmarks.unrecorded leaves them out.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import prometheus_client
import pytest

import servd
from benchmarks import unrecorded
from servd.api import engine_client, fair_loop
from servd.messages import EngineCoreRequest
from servd.params import SamplingParams
from tests.api.harness import serve
from tests.core.engines import make_engine

COUNTED = tuple(str(Path(module.__file__).parent) for module in (servd, prometheus_client))
STREAMS, FEW, MANY = 8, 16, 80


class Calls:
    """A profile function that counts calls by servd and by the library of its metrics, of functions
    in Python and in C.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        is_call = event in ("call", "c_call")
        self.count += is_call and frame.f_code.co_filename.startswith(COUNTED)


@contextmanager
def counted() -> Iterator[Calls]:
    """The calls in the block."""
    calls = Calls()
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def calls_of_api_server(num_tokens: int) -> float:
    """For a stream with so many tokens, of several that run side by side, until all of it is
    published.
    """
    body = {"prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    async with serve() as served:
        served.async_llm.tracer._fastest_ns = 2**62  # no request is among the slowest

        async def ask() -> None:
            sent = (served.http.post("/v1/completions", json=body) for _ in range(STREAMS))
            assert {answer.status_code for answer in await asyncio.gather(*sent)} == {200}
            served.async_llm.metrics.write()

        await ask()
        with counted() as calls:
            await ask()
    return calls.count / STREAMS


async def test_calls_of_an_api_server(monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_READ_NS", 10**12)  # as many calls on a slow machine
    monkeypatch.setattr(fair_loop, "PIECE_NS", 10**12)
    few, many = [await calls_of_api_server(n) for n in (FEW, MANY)]
    for replaced in unrecorded.of_api_server():
        monkeypatch.setattr(*replaced)
    few -= await calls_of_api_server(FEW)
    many -= await calls_of_api_server(MANY)
    per_token = (many - few) / (MANY - FEW)
    assert per_token <= 1.5  # with what is counted for each step
    assert few - FEW * per_token <= 90


def calls_of_engine(num_tokens: int) -> int:
    """For a request with so many tokens: a step for each."""
    engine = make_engine(num_blocks=256)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    engine.handle(EngineCoreRequest("a", [1], params))
    with counted() as calls:
        while engine.has_work:
            engine.step()
    return calls.count


def test_calls_of_an_engine(monkeypatch: pytest.MonkeyPatch):
    with_all = calls_of_engine(MANY) - calls_of_engine(FEW)
    for replaced in unrecorded.of_engine():
        monkeypatch.setattr(*replaced)
    without = calls_of_engine(MANY) - calls_of_engine(FEW)
    assert with_all - without <= 3 * (MANY - FEW)


async def test_what_is_kept_of_a_request_is_few_objects_to_the_garbage_collector():
    """It looks at all of them now and then: a dozen each took as long as counting the tokens."""
    body = {"prompt": "a", "max_tokens": 8}
    async with serve() as served:

        async def objects_after(num_requests: int) -> int:
            for _ in range(num_requests):
                assert (await served.http.post("/v1/completions", json=body)).status_code == 200
            served.engine.sent.clear()
            gc.collect()
            return len(gc.get_objects())

        before = await objects_after(8)
        # Three for each; others in this process make a few meanwhile.
        assert await objects_after(64) - before < 64 * 3.5
