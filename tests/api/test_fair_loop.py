"""FairLoop and FairThreads: who has much to do holds up nobody for long."""

import asyncio
import contextvars
import itertools
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from servd.api.engine.fair_threads import FairThreads
from servd.api.request.fair_loop import MAX_TURNS, SLICE_NS, FairLoop
from servd.api.text.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from servd.api.text.prompt import Chat
from servd.base.abandoned import check_abandoned, run_until
from servd.base.errors import Overloaded
from tests.api.harness import MODEL, serve, until
from tests.limits import WAIT_SECONDS


async def test_a_client_with_one_turn_passes_those_of_a_client_with_hundreds() -> None:
    loop, order = FairLoop(), list[str]()

    async def run(client: str) -> None:
        await loop.turn(client)
        order.append(client)

    crowd = [asyncio.create_task(run("A")) for _ in range(40 * MAX_TURNS)]
    await asyncio.sleep(0)  # all of them wait, but the first few
    await asyncio.gather(run("B"), *crowd)
    assert order.index("B") <= 3 * MAX_TURNS
    assert order.count("A") == len(crowd)


async def test_sockets_are_looked_at_between_a_few_turns() -> None:
    loop, done, counts = FairLoop(), 0, list[int]()

    async def run() -> None:
        nonlocal done
        await loop.turn("A")
        done += 1

    async def look() -> None:  # once per iteration of the event loop, as sockets are
        while done < len(tasks):
            counts.append(done)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(run()) for _ in range(10 * MAX_TURNS)]
    await asyncio.gather(look(), *tasks)
    steps = [after - before for before, after in zip(counts, counts[1:], strict=False)]
    assert max(steps) <= 2 * MAX_TURNS  # those that go on at once, and those that have waited


async def test_who_waits_and_is_cancelled_takes_no_turn() -> None:
    loop = FairLoop()
    turns = [loop.turn("A") for _ in range(4 * MAX_TURNS)]
    for turn in turns[MAX_TURNS:-1]:
        turn.cancel()
    await asyncio.wait_for(turns[-1], WAIT_SECONDS)
    future = asyncio.get_running_loop().create_future()
    assert loop.turn("A", future) is future
    await asyncio.wait_for(future, WAIT_SECONDS)


async def test_long_work_is_done_in_pieces_whether_or_not_somebody_waits() -> None:
    loop, done, counts = FairLoop(), list[int](), list[int]()

    def work(item: int) -> None:
        done.append(item)
        begin = time.perf_counter()
        while time.perf_counter() - begin < SLICE_NS / 4e9:
            pass

    async def look() -> None:
        while len(done) < 40:
            counts.append(len(done))
            await asyncio.sleep(0)

    awaited = loop.call_for_all("A", range(20), work)
    loop.call_for_all("B", range(20, 40), work)
    await asyncio.wait_for(look(), WAIT_SECONDS)
    await awaited
    assert sorted(done) == [*range(40)]
    assert [item for item in done if item < 20] == [*range(20)]
    assert max(after - before for before, after in itertools.pairwise(counts)) <= 2 * 4


async def test_work_that_is_cancelled_or_fails_stops() -> None:
    loop, done = FairLoop(), list[int]()

    def work(item: int) -> None:
        done.append(10 // item)
        time.sleep(SLICE_NS / 1e9)

    waiting = loop.call_for_all("A", range(1, 100), work)
    waiting.cancel()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(loop.call_for_all("B", [2, 1, 0, 1], work), 30)
    await loop.turn("A")
    await asyncio.sleep(0)
    assert done == [10, 5, 10]


# ---- threads ----


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
    with pytest.raises(Overloaded, match="4 requests .* most is 4 .*--max-waiting-requests"):
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
    more = asyncio.gather(*(threads.run("a", lambda: True) for _ in range(9)))
    assert all(await asyncio.wait_for(more, 60))


async def test_long_work_of_several_clients_leaves_a_thread_to_short_work(threads):
    gate = Gate()
    clients = ["a", "a", "b", "c", "d"]
    run = threads.run
    long = [asyncio.create_task(run(c, gate.work(c), is_long=True)) for c in clients]
    await until(lambda: len(gate.order) == 2)
    for client in "ae":
        assert await asyncio.wait_for(run(client, lambda: True), WAIT_SECONDS)
    assert len(gate.order) == 2
    gate.open.set()
    assert await asyncio.gather(*long) == clients


class EndlessWork:
    """Work that ends only because nobody waits for it."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()

    def __call__(self, *arguments: object) -> None:
        self.has_begun.set()
        try:
            while True:
                check_abandoned()
        finally:
            self.has_ended.set()


async def test_work_that_nobody_waits_for_ends():
    pool, work = FairThreads(2, "test"), EndlessWork()
    task = asyncio.create_task(pool.run("client", work))
    await until(work.has_begun.is_set)
    task.cancel()
    await until(work.has_ended.is_set)
    assert await pool.run("client", lambda: [check_abandoned()]) == [None]
    pool.close()


def test_a_prompt_is_rendered_only_while_somebody_waits():
    template = ChatTemplate(DEFAULT_TEMPLATE, escaped=["<eos>"])
    chat = Chat(messages=[{"role": "user", "content": "a"}] * 1000)
    is_abandoned = threading.Event()
    run = partial(
        contextvars.Context().run, run_until, is_abandoned, partial(template.render, chat)
    )
    assert len(run()) > 1000
    is_abandoned.set()
    with pytest.raises(asyncio.CancelledError):
        run()


COUNTED = {
    "/tokenize": {"prompt": "a" * 5000},
    "/v1/responses/input_tokens": {"input": "a" * 5000},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a" * 5000}]},
}


@pytest.mark.parametrize(("path", "body"), COUNTED.items())
async def test_tokens_are_counted_only_while_the_client_waits(path: str, body: dict, monkeypatch):
    tokenize = EndlessWork()
    async with serve(listen=True) as served:
        monkeypatch.setattr(served.async_llm.processor, "tokenize", tokenize)
        asking = asyncio.create_task(served.http.post(path, json={"model": MODEL, **body}))
        await until(tokenize.has_begun.is_set)
        asking.cancel()
        await until(tokenize.has_ended.is_set)
