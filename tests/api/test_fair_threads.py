"""FairThreads: who gets a thread when there are fewer than work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from servd.api.engine.fair_threads import FairThreads
from servd.base.errors import Overloaded
from tests.api.harness import until
from tests.limits import WAIT_SECONDS


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    pool = FairThreads(3, "test")
    yield pool
    pool.close()


class Gate:
    """Work that runs until it is let go; `order` has the names in the order in which they began."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.open = threading.Event()

    def work(self, name: str):
        def run() -> str:
            self.order.append(name)
            assert self.open.wait(WAIT_SECONDS)
            return name

        return run


async def test_results_and_errors_reach_the_caller(threads):
    assert await threads.run("a", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 // 0)
    assert await threads.run("a", lambda: 8) == 8


async def test_one_client_leaves_a_thread_to_others(threads):
    gate = Gate()
    greedy = [asyncio.create_task(threads.run("a", gate.work(f"a{i}"))) for i in range(10)]
    await until(lambda: len(gate.order) == 2)
    await asyncio.sleep(0.05)
    assert gate.order == ["a0", "a1"]
    other = asyncio.create_task(threads.run("b", gate.work("b0")))
    await until(lambda: gate.order == ["a0", "a1", "b0"])
    gate.open.set()
    assert await asyncio.gather(*greedy, other) == [*(f"a{i}" for i in range(10)), "b0"]


async def test_clients_take_turns(threads):
    gate = Gate()
    tasks = [asyncio.create_task(threads.run("a", gate.work(f"a{i}"))) for i in range(6)]
    tasks += [asyncio.create_task(threads.run("b", gate.work("b0")))]
    await until(lambda: len(gate.order) == 3)
    tasks += [asyncio.create_task(threads.run("c", gate.work("c0")))]
    tasks += [asyncio.create_task(threads.run("b", gate.work("b1")))]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*tasks)
    # Neither has to wait for the four of `a` that were there before.
    assert max(gate.order.index("c0"), gate.order.index("b1")) < gate.order.index("a4")


async def test_waiting_work_is_limited_and_shared_between_clients(threads):
    gate = Gate()
    tasks: list[asyncio.Task[str]] = []

    def add(client: str) -> None:
        tasks.append(asyncio.create_task(threads.run(client, gate.work(client), limit=4)))

    for client in "bbb":  # one of them waits
        add(client)
    await until(lambda: len(gate.order) == 2)
    for client in "aaaa":  # the first gets the third thread
        add(client)
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="4 requests .* limit is 4 .*--max-waiting-requests"):
        await threads.run("a", bool, limit=4)
    add("b")
    await asyncio.sleep(0)
    for client in "ab":
        with pytest.raises(Overloaded):
            await threads.run(client, bool, limit=4)
    add("c")
    tasks.append(asyncio.create_task(threads.run("a", gate.work("a"))))  # has begun before
    gate.open.set()
    await asyncio.gather(*tasks)
    add("a")
    await tasks[-1]


async def test_cancelled_work_frees_its_place(threads):
    gate = Gate()
    running = [asyncio.create_task(threads.run("a", gate.work(f"a{i}"))) for i in range(2)]
    await until(lambda: len(gate.order) == 2)
    waiting = asyncio.create_task(threads.run("a", gate.work("never")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    running[0].cancel()  # its thread is busy all the same
    after = asyncio.create_task(threads.run("a", gate.work("after")))
    await asyncio.sleep(0.05)
    assert gate.order == ["a0", "a1"]
    gate.open.set()
    assert await after == "after"
    assert await running[1] == "a1"
    assert "never" not in gate.order
    assert all(
        await asyncio.wait_for(
            asyncio.gather(*(threads.run("a", lambda: True) for _ in range(9))), 60
        )
    )
