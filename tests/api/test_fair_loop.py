"""FairLoop: who has much to do holds up nobody for long."""

import asyncio
import itertools
import time

import pytest

from servd.api.request.fair_loop import MAX_TURNS, PIECE_NS, FairLoop
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
    loop, done, seen = FairLoop(), 0, list[int]()

    async def run() -> None:
        nonlocal done
        await loop.turn("A")
        done += 1

    async def look() -> None:  # once per iteration of the event loop, as sockets are
        while done < len(tasks):
            seen.append(done)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(run()) for _ in range(10 * MAX_TURNS)]
    await asyncio.gather(look(), *tasks)
    steps = [after - before for before, after in zip(seen, seen[1:], strict=False)]
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
    loop, done, seen = FairLoop(), list[int](), list[int]()

    def work(item: int) -> None:
        done.append(item)
        begin = time.perf_counter()
        while time.perf_counter() - begin < PIECE_NS / 4e9:
            pass

    async def look() -> None:
        while len(done) < 40:
            seen.append(len(done))
            await asyncio.sleep(0)

    awaited = loop.each("A", range(20), work)
    loop.each("B", range(20, 40), work)
    await asyncio.wait_for(look(), WAIT_SECONDS)
    await awaited
    assert sorted(done) == [*range(40)]
    assert [item for item in done if item < 20] == [*range(20)]
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2 * 4


async def test_work_that_is_cancelled_or_fails_stops() -> None:
    loop, done = FairLoop(), list[int]()

    def work(item: int) -> None:
        done.append(10 // item)
        time.sleep(PIECE_NS / 1e9)

    waiting = loop.each("A", range(1, 100), work)
    waiting.cancel()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(loop.each("B", [2, 1, 0, 1], work), 30)
    await loop.turn("A")
    await asyncio.sleep(0)
    assert done == [10, 5, 10]
