"""--response-db: stored responses over restarts, in several processes, within limits, on bad disks.

Two servers of a test are two processes: each has a connection and a lock of its own.
"""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servd.api.keys import ApiKeys
from servd.api.protocol.responses import ResponsesResponse
from servd.api.responses import queries
from servd.api.responses.database import Database, open_database
from servd.api.responses.queries import History
from servd.api.responses.response_store import ResponseStore, Turn
from servd.base.errors import ConfigError, InvalidRequest, NotFound
from servd.config import AccessConfig, ServerConfig
from tests.api.harness import Served, named_events, serve, until
from tests.api.test_errors import check

URL = "/v1/responses"


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "responses.db")


def store_of(served: Served) -> ResponseStore:
    return served.app.state.context.responses


@asynccontextmanager
async def process(db: str, **options: Any) -> AsyncIterator[Served]:
    """A server that shares its responses."""
    async with serve(response_db=db, **options) as served:
        task = asyncio.create_task(store_of(served).run())
        yield served
        task.cancel()
        await asyncio.wait([task])


async def ask(served: Served, text: str = "hi", **body: Any) -> dict[str, Any]:
    body = {"input": text, "max_output_tokens": 2, **body}
    answer = await served.http.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def read(served: Served, name: str) -> dict[str, Any]:
    answer = await served.http.get(f"{URL}/{name}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def inputs_of(served: Served, name: str) -> list[str]:
    answer = await served.http.get(f"{URL}/{name}/input_items?order=asc&limit=100")
    assert answer.status_code == 200, answer.text
    return [item["content"][0]["text"] for item in answer.json()["data"]]


async def test_responses_and_conversations_outlive_their_server(db: str):
    async with process(db) as served:
        conversation = (await served.http.post("/v1/conversations", json={})).json()
        first = await ask(served, "one", conversation=conversation["id"])
        second = await ask(served, "two", previous_response_id=first["id"])
        streamed = (await served.http.post(URL, json={"input": "x", "stream": True})).text
        last = named_events(streamed)[-1]["response"]
    async with process(db) as served:
        for response in (first, second, last):
            assert await read(served, response["id"]) == response
        answer = await served.http.get(f"/v1/conversations/{conversation['id']}")
        assert answer.json() == conversation
        texts = await inputs_of(served, second["id"])
        assert texts == ["one", first["output"][0]["content"][0]["text"], "two"]
        third = await ask(served, "three", conversation=conversation["id"])
        assert await inputs_of(served, third["id"]) == [*texts[:2], "three"]


async def test_a_background_response_in_another_process(db: str):
    async with process(db) as mine, process(db) as other:
        mine.engine.may_step.clear()
        name = (await ask(mine, background=True, max_output_tokens=60))["id"]
        assert (await read(other, name))["status"] == "queued"
        follower = asyncio.create_task(other.http.get(f"{URL}/{name}?stream=true"))
        mine.engine.step_seconds = 0.01
        mine.engine.may_step.set()
        events = named_events((await follower).text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"] == await read(mine, name) == await read(other, name)
        later = await other.http.get(f"{URL}/{name}?stream=true&starting_after=3")
        assert named_events(later.text) == events[4:]

        mine.engine.step_seconds = 0.0
        mine.engine.may_step.clear()
        for method, path in (("POST", "/cancel"), ("DELETE", "")):
            name = (await ask(mine, background=True, max_output_tokens=60))["id"]
            answer = await other.http.request(method, f"{URL}/{name}{path}")
            assert answer.status_code == 200 and not store_of(mine).running
            statuses = [(await s.http.get(f"{URL}/{name}")).status_code for s in (mine, other)]
            assert statuses == [200 if path else 404] * 2
            if path:
                assert answer.json()["status"] == "cancelled"
                assert await read(mine, name) == answer.json()


@pytest.mark.parametrize("reader", ["running", "new"])
async def test_a_response_of_a_dead_server_has_failed(db: str, reader: str):
    async with process(db) as other, process(db) as mine:
        mine.engine.may_step.clear()
        name = (await ask(mine, background=True))["id"]
        follower = asyncio.create_task(other.http.get(f"{URL}/{name}?stream=true"))
        store = store_of(mine)
        assert store.lock is not None
        store.lock.close()  # as the kernel does
        if reader == "running":
            failed = await read(other, name)
        else:
            async with process(db) as new:
                await store_of(new).clean_up()
                failed = await read(new, name)
        assert failed["status"] == "failed" and "died" in failed["error"]["message"]
        *queued, last = named_events((await follower).text)
        assert (last["type"], last["response"]) == ("response.failed", failed)
        assert len(queued) == 2 and last["sequence_number"] > 1000  # clients may have more of it
        more = await other.http.get(f"{URL}/{name}?stream=true&starting_after=50")
        assert named_events(more.text) == [last]
        body = {"input": "a", "previous_response_id": name}
        check(await other.http.post(URL, json=body), 400, "previous_response_id")


async def test_an_end_is_shown_once_it_is_stored(db: str, monkeypatch: pytest.MonkeyPatch):
    async with process(db) as served:
        store = store_of(served)
        save = store.save
        may_save = asyncio.Event()

        async def save_later(turn: Turn, last_event: bytes = b"") -> None:
            if not turn.is_running:
                await may_save.wait()
            await save(turn, last_event)

        monkeypatch.setattr(store, "save", save_later)
        name = (await ask(served, background=True))["id"]
        await until(lambda: not store.running[name].is_running)
        reads = [
            asyncio.create_task(served.http.get(f"{URL}/{name}{path}"))
            for path in ("", "?stream=true")
        ]
        reads.append(asyncio.create_task(served.http.post(URL, json={"input": "a"})))
        stored = await store.db.read(lambda db: db.execute("SELECT server FROM objects").fetchone())
        assert stored[0] is not None and not any(read.done() for read in reads)
        may_save.set()
        response, events, _ = [await read for read in reads]
        assert named_events(events.text)[-1]["response"] == response.json()
        assert response.json()["status"] == "incomplete"


async def test_a_full_disk(db: str):
    async with process(db) as served:
        kept = await ask(served)
        store = store_of(served)

        def limit(pages: int) -> Any:
            def pragma(connection: sqlite3.Connection) -> None:
                connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

            return store.db.read(pragma)

        await limit(1)  # the file has more, so it may not grow
        long = "x" * 3000
        answers = [await served.http.post("/v1/conversations", json={})]
        for _ in range(30):
            answers.append(await served.http.post(URL, json={"input": long}))
        full = [answer for answer in answers if answer.status_code != 200]
        assert len(full) > 5
        for answer in full:
            check(answer, 503, None, "store_unavailable")
        streamed = await served.http.post(URL, json={"input": long, "stream": True})
        last = named_events(streamed.text)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        check(
            await served.http.post(URL, json={"input": long, "background": True}),
            503,
            None,
            "store_unavailable",
        )
        assert not store.running
        # What does not need the database goes on.
        assert (await ask(served, store=False))["status"] == "incomplete"
        assert await read(served, kept["id"]) == kept
        served.engine.may_step.clear()
        await limit(2**30)
        name = (await ask(served, background=True))["id"]
        await limit(1)
        served.engine.may_step.set()
        await until(lambda: not store.running)
        await limit(2**30)
        assert (await read(served, name))["status"] in ("failed", "incomplete")
        assert (await ask(served, long))["status"] == "incomplete"


def test_files_that_are_no_database(tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("no database " * 1000)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
    connection.close()
    newer = tmp_path / "newer.db"
    open_database(str(newer)).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    damaged = tmp_path / "damaged.db"
    open_database(str(damaged)).close()
    damaged.write_bytes(damaged.read_bytes()[:4096] + b"\0" * 100)
    for path in (text, other, newer, damaged, tmp_path, tmp_path / "none" / "x.db"):
        before = path.is_file() and path.read_bytes()
        with pytest.raises(ConfigError, match="--response-db"):
            open_database(str(path), is_first=True)
        assert before == (path.is_file() and path.read_bytes())
    good = tmp_path / "good.db"
    open_database(str(good)).close()
    assert good.stat().st_mode & 0o777 == 0o600
    with open_database(str(good), is_first=True) as writing:
        writing.execute("BEGIN IMMEDIATE")
        open_database(str(good)).close()  # an API server that restarts does not wait for it
    writing.close()


async def test_a_file_that_is_damaged_later(db: str):
    async with process(db) as served:
        names = [(await ask(served, "x" * 3000))["id"] for _ in range(20)]
        await store_of(served).db.read(lambda connection: None)
    size = Path(db).stat().st_size
    with open(db, "r+b") as file:
        file.seek(4096 * 2)
        file.write(b"\xff" * (size - 4096 * 2))
    async with serve(response_db=db) as served:
        answers = [await served.http.get(f"{URL}/{name}") for name in names]
        assert {answer.status_code for answer in answers} <= {404, 503}
        assert any(answer.status_code == 503 for answer in answers)
        assert (await ask(served, store=False))["status"] == "incomplete"


def new_turn(name: str, history: History, text: str, owner: str = "a") -> Turn:
    from msgspec.structs import fields

    values = {field.name: None for field in fields(ResponsesResponse) if field.required}
    response = ResponsesResponse(**values | {"id": f"resp_{name}", "status": "completed"})
    response.background = False
    response.store = True
    item = {"id": f"msg_{name}", "role": "user", "content": text}
    return Turn(owner, response, history, [item])


@asynccontextmanager
async def open_store(**options: Any) -> AsyncIterator[ResponseStore]:
    store = ResponseStore(ServerConfig(**options), ApiKeys(AccessConfig()))
    yield store
    store.close()


async def contents(store: ResponseStore, name: str, owner: str = "a") -> list[str]:
    history = await store.history(owner, f"resp_{name}", None)
    return [item["content"] for item in history.items()]


async def delete_response(store: ResponseStore, owner: str, name: str) -> None:
    row = (await store.find(owner, f"resp_{name}")).row
    await store.db.write(partial(queries.remove, row=row))


async def counts(store: ResponseStore) -> tuple[int, int, int]:
    """Rows, rows that clients see, and bytes, as counted and as the totals say."""
    query = """SELECT count(*), count(*) - total(is_hidden), total(num_bytes) FROM objects"""
    rows = await store.db.read(lambda db: db.execute(query).fetchone())
    query = "SELECT total(num_objects), total(num_bytes) FROM owners"
    totals = await store.db.read(lambda db: db.execute(query).fetchone())
    assert rows[1:] == totals
    return tuple(map(int, rows))


async def test_later_turns_keep_the_items_of_removed_ones():
    async with open_store() as store:

        async def extend(name: str, previous: str | None) -> None:
            history = await store.history("a", previous and f"resp_{previous}", None)
            await store.save(new_turn(name, history, name))

        async def delete(name: str) -> None:
            await delete_response(store, "a", name)
            with pytest.raises(NotFound):
                await store.find("a", f"resp_{name}")

        for name, previous in (("1", None), ("2", "1"), ("3", "2"), ("3b", "2")):
            await extend(name, previous)
        late = new_turn("late", await store.history("a", "resp_3b", None), "late")
        await delete("2")
        await delete("1")
        assert await contents(store, "3") == ["1", "2", "3"]
        with pytest.raises(InvalidRequest):
            await store.history("a", "resp_2", None)
        await delete("3")
        assert (await counts(store))[:2] == (3, 1)
        await delete("3b")
        assert await counts(store) == (0, 0, 0)
        await store.save(late)  # it began before
        assert await contents(store, "late") == ["1", "2", "3b", "late"]


async def test_a_response_that_ends_while_it_is_shared(db: str):
    async with open_store(response_db=db) as store:
        conversation = await store.write("a", lambda key: key.create([], {}))
        turn = new_turn("1", await store.history("a", None, conversation.id), "x")
        turn.response.status = "queued"
        await store.save(turn)
        may_go_on = threading.Event()
        busy = asyncio.create_task(store.db.read(lambda db: may_go_on.wait()))
        turn.response.status = "in_progress"
        turn.log.append(b"event")
        sharing = asyncio.create_task(store.save(turn))
        await asyncio.sleep(0)
        turn.response.status = "completed"  # before the thread has stored the events
        ending = asyncio.create_task(store.save(turn, b"end"))
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.gather(busy, sharing, ending)
        stored = await store.find("a", "resp_1")
        assert (stored.server, stored.summary.status) == (None, "completed")
        events = await store.db.read(lambda db: queries.read_events(db, stored.row, 0, 9))
        assert events == [(0, b"event"), (1, b"end")]
        history = await store.history("a", None, conversation.id)
        assert [item["content"] for item in history.items()] == ["x"]


async def test_a_long_chain_costs_its_turns_once():
    async with open_store(max_stored_responses=3000) as store:
        history = History()
        for number in range(1000):
            await store.save(new_turn(str(number), history, f"turn {number}"))
            if number in (99, 999):
                _, _, num_bytes = await counts(store)
                assert num_bytes < 2_000 * (number + 1)
            history = await store.history("a", f"resp_{number}", None)
        expected = [f"turn {number}" for number in range(1000)]
        assert await contents(store, "999") == expected
        store.options = ServerConfig(max_stored_responses=1)  # only the newest stays
        await store.save(new_turn("other", History(), "x"))
        assert (await counts(store))[:2] == (1, 1)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 900), st.sampled_from("ab"), st.booleans()),
        max_size=40,
    )
)
async def test_the_store_stays_within_its_bounds_and_forgets_the_oldest(
    steps: list[tuple[int, int, str, bool]],
):
    async with open_store(max_stored_responses=4, response_max_bytes=5000) as store:
        kept: dict[str, list[str]] = {"a": [], "b": []}
        for number, (_, size, owner, deletes) in enumerate(steps):
            if deletes and kept[owner]:
                name = kept[owner].pop(0)
                await delete_response(store, owner, name)
            previous = f"resp_{kept[owner][-1]}" if size % 2 and kept[owner] else None
            history = await store.history(owner, previous, None)
            await store.save(new_turn(str(number), history, "x" * size, owner))
            kept[owner].append(str(number))
            for key, names in kept.items():
                alive = []
                for name in names:
                    with suppress(NotFound):
                        await store.find(key, f"resp_{name}")
                        alive.append(name)
                assert alive == names[len(names) - len(alive) :]  # the newest
                assert len(alive) <= 4
                kept[key] = alive
            _, num_seen, num_bytes = await counts(store)
            assert num_seen == sum(map(len, kept.values())) and num_bytes <= 10_000


async def test_what_is_too_old_is_removed_and_the_file_shrinks(db: str):
    async with open_store(response_db=db, response_max_age=1000.0) as store:
        for number in range(50):
            await store.save(new_turn(str(number), History(), "x" * 20_000))
        await store.clean_up()
        assert (await counts(store))[0] == 50
        query = "UPDATE objects SET changed = changed - 2000"
        await store.db.write(lambda db: db.execute(query).rowcount)
        await store.save(new_turn("new", History(), "x"))
        await store.clean_up()
        assert (await counts(store))[0] == 1
    assert Path(db).stat().st_size < 500_000


async def test_writes_that_wait_share_a_commit_and_fail_alone(db: str):
    async with open_store(response_db=db) as store:
        query = "INSERT INTO owners VALUES (?, 0, 0)"

        def fail(connection: sqlite3.Connection) -> None:
            connection.execute(query, ["failed"])
            raise InvalidRequest("no")

        results = await asyncio.gather(
            store.db.write(lambda db: db.execute(query, ["a"]).rowcount),
            store.db.write(fail),
            store.db.write(lambda db: db.execute(query, ["b"]).rowcount),
            return_exceptions=True,
        )
        assert [results[0], results[2]] == [1, 1] and isinstance(results[1], InvalidRequest)
        owners = await store.db.read(lambda db: db.execute("SELECT owner FROM owners").fetchall())
        assert owners == [("a",), ("b",)]


async def test_lock_files_go_with_their_servers(db: str):
    Path(f"{db}-server-killed").touch()
    async with process(db) as first, process(db):
        await store_of(first).clean_up()
        assert len([*Path(db).parent.glob("*-server-*")]) == 2
    assert [path.name for path in Path(db).parent.iterdir()] == [Path(db).name]


async def test_long_writes_in_memory_never_run_on_the_event_loop():
    """Short ones run there at once, but not with what waits for the thread."""
    db = Database(None)
    threads: list[threading.Thread] = []

    def long_work(_: sqlite3.Connection) -> None:
        threads.append(threading.current_thread())

    def short_work(_: sqlite3.Connection) -> int:
        return 1

    for _ in range(100):
        long_write = db.write(long_work, is_short=False)
        _, number = await asyncio.gather(long_write, db.write(short_work))
        assert number == 1
    assert len(threads) == 100 and threading.main_thread() not in threads
    db.close()
