"""/v1/files and /v1/batches through OpenAI's SDK: answers, failures, restarts, owners, bounds."""

import asyncio
import errno
import fcntl
import io
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.datastructures import UploadFile
from starlette.requests import Request

from servd.api.batches import runner as batch_runner
from servd.api.batches import store as batch_store
from servd.api.batches.store import BatchStore
from servd.api.protocol import batch_file as batch_files
from servd.api.protocol.batches import Batch
from servd.config.keys import hash_key
from tests.api.harness import Served, output_text, serve, until
from tests.api.hostile import VALID
from tests.limits import WAIT_SECONDS

COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(batch_runner, "POLL", 0.01)


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[Served]:
    """A server that keeps batches and runs them."""
    async with serve(batch_dir=str(folder), **options) as served:
        task = asyncio.create_task(served.app.state.context.batches.run())
        try:
            yield served
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def served(tmp_path) -> AsyncIterator[Served]:
    async with running(tmp_path) as served:
        yield served


def client_of(served: Served, key: str = "none") -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(served.app)
    http = httpx.AsyncClient(transport=transport, timeout=WAIT_SECONDS)
    options = {"base_url": "http://servd/v1", "api_key": key, "max_retries": 0}
    return openai.AsyncOpenAI(http_client=http, **options)


@pytest.fixture
def client(served) -> openai.AsyncOpenAI:
    return client_of(served)


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def lines(num: int, max_tokens: int = 4) -> list[str]:
    return [line(f"r{i}", prompt=f"text {i}", max_tokens=max_tokens) for i in range(num)]


async def create(client: openai.AsyncOpenAI, *texts: str, endpoint: Any = COMPLETIONS) -> Any:
    content = ("\n".join(texts) + "\n").encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    settings: Any = {"endpoint": endpoint, "completion_window": "24h", "metadata": {"a": "b"}}
    return await client.batches.create(input_file_id=file.id, **settings)


async def finished(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(WAIT_SECONDS):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    results = [json.loads(line) for line in text.splitlines()]
    assert len({result["custom_id"] for result in results}) == len(results)
    return {result["custom_id"]: result for result in results}


async def test_a_batch_is_answered_as_its_route_would(client, served):
    texts = [*lines(20), line("hot", prompt="a", temperature=1000)]
    batch = await create(client, *texts)
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    assert batch.request_counts.total == 0
    batch = await finished(client, batch)
    assert batch.status == "completed" and batch.in_progress_at and batch.completed_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    good = await answers(client, batch.output_file_id)
    for i in range(20):
        response = good[f"r{i}"]["response"]
        assert response["status_code"] == 200 and response["request_id"]
        assert response["body"]["choices"][0]["text"] == output_text(f"text {i}", 4)
    bad = await answers(client, batch.error_file_id)
    assert bad.keys() == {"hot"} and bad["hot"]["response"]["status_code"] == 400
    assert bad["hot"]["response"]["body"]["error"]["param"] == "temperature"
    sent = [message.options for message in served.engine.sent if hasattr(message, "options")]
    assert len(sent) == 20 and all(options.priority_class == 1 for options in sent)
    assert not list(Path(served.app.state.context.batches.store.open).iterdir())


ROUTES = "/v1/chat/completions /v1/responses /v1/embeddings /v1/score /v1/rerank"


@pytest.mark.parametrize("url", ROUTES.split())
async def test_every_route_of_batches_runs_in_the_background(client, served, url):
    body = VALID[url]
    batch = await finished(client, await create(client, line("a", url, **body), endpoint=url))
    assert batch.status == "completed", batch.errors
    result = (await answers(client, batch.output_file_id))["a"]
    direct = (await served.http.post(url, json=body)).json()
    assert result["response"]["body"].keys() == direct.keys()
    options = [m.options for m in served.engine.sent if hasattr(m, "options")]
    half = len(options) // 2
    assert [option.priority_class for option in options] == [1] * half + [0] * half


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("{", "invalid_line", "not valid JSON"),
        ("[]", "invalid_line", "Expected `object`"),
        ("\udcff", "invalid_line", "not valid JSON"),
        ('{"url": 1}', "invalid_line", "custom_id"),
        ('{"custom_id": "a", "body":' + "[" * 100_000, "invalid_line", "not valid JSON"),
        (line("a", "/v1/models"), "invalid_line", "url one of"),
        (line("a", prompt="a", stream=True), "invalid_line", "does not support `stream`"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 3}', "invalid_line", "JSON object"),
        (line("r0", prompt="a"), "duplicate_custom_id", "lines 1 and 3"),
        (line("a", "/v1/embeddings", input="a"), "mismatched_url", "/v1/completions"),
    ],
)
async def test_a_bad_line_fails_the_batch_by_its_number(client, text, code, message):
    text = text.encode("utf8", "surrogateescape").decode("latin-1")
    batch = await finished(client, await create(client, *lines(2), text))
    assert batch.status == "failed" and batch.output_file_id is None
    [error] = batch.errors.data
    assert (error.code, error.line) == (code, 3) and message in error.message


@pytest.mark.parametrize("length", [batch_files.MAX_LINE + 1, 2 * batch_files.MAX_LINE + 9])
def test_a_long_line_counts_once(tmp_path, length):
    source = tmp_path / "batch.jsonl"
    text = line("a", prompt="a")
    source.write_text(f"{text}\n{'x' * length}\n{line('b', prompt='b')}", encoding="utf8")
    problems = list(batch_files.inspect(source, None))
    assert [problem and problem.line for problem in problems] == [None, 2, None]
    assert str(batch_files.MAX_LINE) in problems[1].message


async def test_an_empty_file_and_too_many_lines_fail(client, monkeypatch):
    batch = await finished(client, await create(client, "", ""))
    assert batch.errors.data[0].code == "empty_file"
    monkeypatch.setattr(batch_runner, "MAX_LINES", 3)
    batch = await finished(client, await create(client, *lines(4)))
    assert batch.errors.data[0].code == "too_many_lines"


async def test_text_of_an_answer_ends_no_line(tmp_path):
    async with running(tmp_path, script="a\u2028b\u0085c") as served:
        client = client_of(served)
        batch = await finished(client, await create(client, *lines(1, max_tokens=20)))
        [answer] = (await answers(client, batch.output_file_id)).values()
    assert answer["response"]["body"]["choices"][0]["text"] == "a\u2028b\u0085c"


async def test_a_cancelled_batch_keeps_what_was_answered(client, served):
    served.engine.step_seconds = 0.005
    long = line("long", prompt="a", max_tokens=3000)
    batch = await create(client, *lines(60, max_tokens=8), long)
    while (await client.batches.retrieve(batch.id)).request_counts.completed < 5:
        await asyncio.sleep(0.01)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await finished(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.cancelling_at
    good = await answers(client, batch.output_file_id)
    bad = await answers(client, batch.error_file_id)
    assert 5 <= len(good) == batch.request_counts.completed and len(good) + len(bad) == 61
    assert bad["long"]["error"]["code"] == "batch_cancelled" and bad["long"]["response"] is None
    await until(lambda: not served.async_llm.num_unfinished)
    with pytest.raises(openai.BadRequestError, match="the batch is cancelled"):
        await client.batches.cancel(batch.id)


async def test_a_batch_ends_when_its_time_is_up(client, served, monkeypatch):
    monkeypatch.setattr(batch_store, "WINDOW", 0)
    served.engine.may_step.clear()
    odd_line = line("a\u2028b\u0085c", prompt="a")
    batch = await finished(client, await create(client, *lines(2), odd_line))
    assert batch.status == "expired" and batch.expired_at
    bad = await answers(client, batch.error_file_id)
    assert [result["error"]["code"] for result in bad.values()] == ["batch_expired"] * 3
    assert "a\u2028b\u0085c" in bad


async def test_a_batch_goes_on_in_the_next_server(tmp_path):
    async with running(tmp_path) as first:
        client = client_of(first)
        first.engine.step_seconds = 0.005
        batch = await create(client, *lines(100, max_tokens=8))
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 20:
            await asyncio.sleep(0.01)
    [results] = tmp_path.glob(f"*/{batch.id}.results")
    num_kept = len(results.read_text().splitlines())
    assert 20 <= num_kept < 100
    with results.open("a") as file:
        file.write('{"custom_id": "r99", "resp')  # cut off by a kill -9
    async with running(tmp_path) as second:
        client = client_of(second)
        batch = await finished(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 100)
        good = await answers(client, batch.output_file_id)
        for i in range(100):
            text = good[f"r{i}"]["response"]["body"]["choices"][0]["text"]
            assert text == output_text(f"text {i}", 8)
        assert len([m for m in second.engine.sent if hasattr(m, "options")]) == 100 - num_kept


async def test_two_servers_share_a_folder_and_one_of_them_runs_each_batch(tmp_path):
    async with running(tmp_path) as first, running(tmp_path) as second:
        clients = client_of(first), client_of(second)
        for served in (first, second):
            served.engine.step_seconds = 0.005
        batches = [await create(clients[i % 2], *lines(30)) for i in range(4)]
        for i, batch in enumerate(batches):
            batch = await finished(clients[1 - i % 2], batch)
            assert batch.status == "completed" and batch.request_counts.completed == 30
            assert len(await answers(clients[i % 2], batch.output_file_id)) == 30
        sent = [m for s in (first, second) for m in s.engine.sent if hasattr(m, "options")]
        assert len(sent) == 120  # none twice


async def test_a_drain_begins_no_more_lines_and_finishes_those_it_has(tmp_path):
    async with running(tmp_path) as first:
        client, runner = client_of(first), first.app.state.context.batches
        first.engine.step_seconds = 0.002
        batch = await create(client, *lines(200, max_tokens=8))
        await until(lambda: runner.num_open)
        first.async_llm.admission.drained_at = first.async_llm.admission.clock() + 60
        await until(lambda: not runner.num_open)
        num_sent = len([m for m in first.engine.sent if hasattr(m, "options")])
        batch = await client.batches.retrieve(batch.id)
        assert batch.status == "in_progress" and num_sent < 200
    [results] = tmp_path.glob(f"*/{batch.id}.results")
    assert len(results.read_text().splitlines()) == num_sent  # each that was begun is whole


async def test_removal_tolerates_vanished_files(client, served):
    store = served.app.state.context.batches.store
    (store.open / "gone").symlink_to("nowhere")  # its stat fails like that of a file just removed
    store.remove_old()


async def test_a_failure_of_the_folder_does_not_end_the_runner(client, served, monkeypatch):
    store, failures = served.app.state.context.batches.store, []
    take = store.take

    def fail_first(*args: Any) -> Any:
        if len(failures) < 3:
            failures.append(args)
            raise OSError("too many open files")
        return take(*args)

    monkeypatch.setattr(store, "take", fail_first)
    batch = await finished(client, await create(client, *lines(2)))
    assert batch.status == "completed" and len(failures) == 3


async def test_the_input_may_be_deleted_while_a_batch_reads_it(client, served):
    served.engine.may_step.clear()
    batch = await create(client, *lines(5))
    await until(lambda: served.async_llm.num_unfinished)
    await client.files.delete(batch.input_file_id)
    served.engine.may_step.set()
    batch = await finished(client, batch)
    assert batch.status == "completed", batch.errors
    assert len(await answers(client, batch.output_file_id)) == 5


async def test_lines_are_never_read_on_the_event_loop(client, served, monkeypatch):
    threads = []

    def read_line(text: bytes) -> Any:
        threads.append(threading.current_thread())
        return batch_files.read_line(text)

    monkeypatch.setattr(batch_runner, "read_line", read_line)
    await finished(client, await create(client, *lines(5)))
    assert threads and threading.main_thread() not in threads


async def test_no_file_is_opened_or_removed_on_the_event_loop(client, served, monkeypatch):
    """By what batches do; a client's download and upload are those of Starlette."""
    here, folder = [], str(served.app.state.context.batches.store.folder)

    def watch(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and folder in str(args):
                here.append((name, args))
            return call(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for name in ("open", "touch", "mkdir", "unlink"):
        watch(Path, name)
    for name in ("replace", "scandir", "stat"):
        watch(os, name)
    batch = await finished(client, await create(client, *lines(5)))
    assert batch.status == "completed"
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(batch.id)
    await client.files.retrieve(batch.output_file_id)
    await client.files.delete(batch.output_file_id)
    assert not here


async def test_a_key_cannot_hold_all_places(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_BATCHES_PER_KEY", 2)
    folder = tmp_path / "batches"
    folder.mkdir()
    async with running(folder, api_key=["a", "b"]) as served:
        served.engine.may_step.clear()
        first, second = client_of(served, "a"), client_of(served, "b")
        held = [await create(first, *lines(2)) for _ in range(4)]

        async def count() -> int:
            return [b.status async for b in first.batches.list()].count("in_progress")

        async with asyncio.timeout(WAIT_SECONDS):
            while await count() < 2:
                await asyncio.sleep(0.01)
        other = await create(second, *lines(2))
        async with asyncio.timeout(WAIT_SECONDS):
            while (await second.batches.retrieve(other.id)).status != "in_progress":
                await asyncio.sleep(0.01)
        assert await count() == 2
        served.engine.may_step.set()
        for batch in held:
            assert (await finished(first, batch)).status == "completed"


async def test_answers_stop_where_a_key_has_too_many_bytes(client, served, monkeypatch):
    monkeypatch.setattr(batch_store, "MAX_BYTES", 20_000)
    batch = await finished(client, await create(client, *lines(60, max_tokens=1000)))
    assert batch.status == "failed" and batch.failed_at
    assert batch.errors.data[0].code == "no_room"
    counts = batch.request_counts
    assert counts.completed + counts.failed == counts.total == 60 and counts.failed
    assert len(await answers(client, batch.output_file_id)) == counts.completed
    failed = (await answers(client, batch.error_file_id)).values()
    assert {result["error"]["code"] for result in failed} == {"batch_failed"}


async def test_a_file_is_kept_as_long_as_its_owner_says(client, served, monkeypatch):
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    short = await client.files.create(file=("a", b"x"), purpose="batch", expires_after=expiry)
    long = await client.files.create(file=("b", b"x"), purpose="batch")
    assert short.expires_at == short.created_at + 3600
    assert long.expires_at == long.created_at + batch_store.RETENTION
    now = time.time()
    monkeypatch.setattr(batch_store.time, "time", lambda: now + 3700)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(short.id)
    assert [file.id async for file in client.files.list()] == [long.id]
    store = served.app.state.context.batches.store
    store.remove_old()
    assert {path.stem for path in store.folder.glob("*/file-*")} == {long.id}
    for anchor, seconds in (("now", 3600), ("created_at", 3599), ("created_at", 2592001)):
        expiry = {"anchor": anchor, "seconds": seconds}
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await client.files.create(file=("a", b""), purpose="batch", expires_after=expiry)


@pytest.mark.parametrize(
    "charset", ["punycode", "undefined", "utf-7", "unicode_escape", '"idna"', "utf-8; charset=zip"]
)
async def test_a_form_is_utf_8_or_refused_unread(served, charset):
    body = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    body += b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n--b--\r\n'

    async def upload(parameters: str) -> httpx.Response:
        headers = {"content-type": f"multipart/form-data; boundary=b{parameters}"}
        return await served.http.post("/v1/files", content=body, headers=headers)

    for name in ("charset", "Charset", "charset*", "charset*0"):
        answer = await upload(f"; {name}={charset}")
        assert answer.status_code == 400 and "utf-8" in answer.json()["error"]["message"]
    assert not [*served.app.state.context.batches.store.folder.glob("*/file-*")]
    for suffix in ("", "; charset=utf-8", ';charset="UTF-8"', "; charset=utf8 ; x=y"):
        assert (await upload(suffix)).status_code == 200


@pytest.mark.parametrize("parameter", [";", ";a=b", ';a="', ";a*0=b"])
async def test_a_long_content_type_is_refused_unread(served, monkeypatch, parameter):
    """Time to read one grows with the square of its length, and the event loop waits meanwhile."""
    monkeypatch.setattr(Request, "form", None)
    content_type = "multipart/form-data; boundary=b" + parameter * 2_000
    answer = await served.http.post("/v1/files", headers={"content-type": content_type})
    assert answer.status_code == 400 and "Content-Type" in answer.json()["error"]["message"]


def full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/secret")


@pytest.mark.parametrize("place", ["content", "record", "spool"])
async def test_an_upload_to_a_full_disk_is_a_507_and_leaves_nothing(served, monkeypatch, place):
    if place == "content":
        copy = batch_store.shutil.copyfileobj

        def cut_off(source: Any, target: Any, size: int) -> None:
            copy(io.BytesIO(source.read(10)), target, size)
            full_disk()

        monkeypatch.setattr(batch_store.shutil, "copyfileobj", cut_off)
    elif place == "record":
        monkeypatch.setattr(batch_store.os, "replace", full_disk)
    else:
        monkeypatch.setattr(UploadFile, "write", full_disk)
    files = {"file": ("x", b"x" * 1000)}
    answer = await served.http.post("/v1/files", files=files, data={"purpose": "batch"})
    assert answer.status_code == 507
    error = answer.json()["error"]
    assert "delete files" in error["message"] and "secret" not in answer.text
    assert error["code"] == "storage_full"
    assert not [*served.app.state.context.batches.store.folder.glob("*/*")]
    monkeypatch.undo()
    answer = await served.http.post("/v1/files", files=files, data={"purpose": "batch"})
    assert answer.status_code == 200


async def test_interrupted_uploads_are_removed_at_start(tmp_path):
    async with running(tmp_path) as served:
        client = client_of(served)
        batch = await finished(client, await create(client, *lines(2)))
        kept = await client.files.create(file=("a", b"a"), purpose="batch")
        # The mark leaves after the batch is completed: a server that stops between keeps it.
        await until(lambda: not [*tmp_path.glob("open/*")])
    files_before = {*tmp_path.glob("*/*")}
    (shelf,) = (path for path in tmp_path.iterdir() if path.name != "open")
    number = "0" * 32
    leftovers = [shelf / f"file-{number}", shelf / f"file-{number}.tmp", shelf / f"file-{number}o"]
    leftovers.append(tmp_path / "open" / f"batch_{number}.new")
    in_use = [shelf / f"file-{'1' * 32}", shelf / f"file-{'2' * 32}o"]
    in_use.append(tmp_path / "open" / f"batch_{'2' * 32}")
    before = time.time() - 60
    for path in (*leftovers, *in_use):
        path.write_text("x")
        os.utime(path, (before, before))
    with in_use[0].open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)  # another server writes it
        BatchStore(tmp_path).remove_old()
    assert {*tmp_path.glob("*/*")} == {*files_before, *in_use}
    in_use[-1].unlink()
    async with running(tmp_path) as served:
        await until(lambda: {*tmp_path.glob("*/*")} == files_before)
        client = client_of(served)
        assert (await client.files.content(kept.id)).content == b"a"
        assert len(await answers(client, batch.output_file_id)) == 2


def test_an_upload_that_ends_during_the_sweep_stays(tmp_path, monkeypatch):
    store = BatchStore(tmp_path)
    (tmp_path / "key").mkdir()
    content = tmp_path / "key" / f"file-{'1' * 32}"
    content.write_text("x")
    os.utime(content, (0, time.time() - 60))
    lock = batch_store._lock

    def lock_once_written(path):
        content.with_suffix(".json").write_text("{}")
        return lock(path)

    monkeypatch.setattr(batch_store, "_lock", lock_once_written)
    store.remove_old()
    assert content.exists()


async def test_a_batch_waits_for_room_on_a_full_disk_and_says_so(client, served, monkeypatch):
    monkeypatch.setattr(batch_runner, "PAUSE", 0.02)
    is_full, add = ["yes"], batch_runner.Results.add

    def add_if_possible(results: Any, result: Any) -> None:
        if is_full:
            full_disk()
        add(results, result)

    monkeypatch.setattr(batch_runner.Results, "add", add_if_possible)
    batch = await create(client, *lines(5))
    async with asyncio.timeout(60):
        while batch.errors is None:
            batch = await client.batches.retrieve(batch.id)
    (error,) = batch.errors.data
    assert "No space left" in error.message and "secret" not in error.message
    assert batch.status == "in_progress"
    is_full.clear()
    batch = await finished(client, batch)
    assert batch.status == "completed" and batch.errors is None
    assert batch.request_counts.completed == 5


async def test_a_server_that_ends_gives_up_a_batch_with_its_files_at_rest(tmp_path, monkeypatch):
    begun, ended = threading.Event(), threading.Event()
    finish = batch_runner._finish

    def slow(*args: Any) -> None:
        begun.set()
        time.sleep(0.3)
        finish(*args)
        ended.set()

    monkeypatch.setattr(batch_runner, "_finish", slow)
    async with running(tmp_path) as served:
        await create(client_of(served), *lines(1))
        await until(begun.is_set)
    assert ended.is_set()


async def test_a_full_server_makes_a_batch_wait_and_not_fail(tmp_path):
    async with running(tmp_path, max_waiting_requests=4, max_num_seqs=2) as served:
        client = client_of(served)
        batch = await finished(client, await create(client, *lines(30)))
        assert batch.request_counts.completed == 30


async def test_files_can_be_listed_read_and_deleted(client):
    ids = []
    for i in range(3):
        content = b"x" * i + b"\n"
        file = await client.files.create(file=(f"f{i}.jsonl", content), purpose="batch")
        ids.append(file.id)
        assert (file.bytes, file.filename, file.purpose) == (i + 1, f"f{i}.jsonl", "batch")
        assert file.expires_at and file.expires_at > file.created_at
        assert (await client.files.content(file.id)).content == content
    assert [file.id async for file in client.files.list(limit=1)] == ids[::-1]
    assert [f.id async for f in client.files.list(order="asc", after=ids[0])] == ids[1:]
    assert [f async for f in client.files.list(purpose="batch_output")] == []
    assert (await client.files.delete(ids[1])).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await call(ids[1])
    assert (await client.files.retrieve(ids[2])).id == ids[2]


async def test_what_belongs_to_a_key_does_not_exist_for_others(tmp_path):
    keys = {"alice": "key-a", "bob": "key-b"}
    file = tmp_path / "keys.toml"

    def write(names: list[str]) -> None:
        hashes = {name: hash_key(keys[name].encode()) for name in names}
        entries = [f'[[keys]]\nname = "{n}"\nsha256 = "{digest}"\n' for n, digest in hashes.items()]
        file.write_text("".join(entries))

    write(["alice", "bob"])
    folder = tmp_path / "batches"
    folder.mkdir()
    async with running(folder, api_key_file=str(file)) as served:
        alice, bob = client_of(served, "key-a"), client_of(served, "key-b")
        batch = await finished(alice, await create(alice, *lines(2)))
        assert [b.id async for b in bob.batches.list()] == []
        assert [f.id async for f in bob.files.list()] == []
        for call in (
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.files.content(batch.output_file_id),
            bob.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        owners = {m.options.owner for m in served.engine.sent if hasattr(m, "options")}
        assert owners == {"alice/background"}  # which takes no turns from alice
        served.engine.may_step.clear()
        batch = await create(alice, *lines(2))
        await until(lambda: served.async_llm.num_unfinished)
        write(["bob"])
        context = served.app.state.context
        context.keys.load(context.config.access)
        shelf = context.batches.store.of("alice")
        await until(lambda: shelf.load(batch.id, Batch).is_over)
        assert shelf.load(batch.id, Batch).errors.data[0].code == "key_gone"
        await until(lambda: not served.async_llm.num_unfinished)


async def test_limits_of_a_key_do_not_stop_its_batches(tmp_path):
    file, folder = tmp_path / "keys.toml", tmp_path / "batches"
    folder.mkdir()
    limits = "max_concurrency = 1\nrequests_per_minute = 1\n"
    file.write_text(f'[[keys]]\nname = "a"\nsha256 = "{hash_key(b"key-a")}"\n{limits}')
    async with running(folder, api_key_file=str(file)) as served:
        client = client_of(served, "key-a")
        batch = await finished(client, await create(client, *lines(10)))
        assert batch.request_counts.completed == 10
        await client.completions.create(model="fake", prompt="a")  # its minute is untouched


async def test_wrong_requests_are_refused(client, served, monkeypatch):
    http = served.http
    file = {"file": ("a.jsonl", b"{}")}
    form = {"content-type": "multipart/form-data"}
    for answer, status, param in (
        (await http.post("/v1/files", data={"purpose": "batch"}), 400, None),
        (await http.post("/v1/files", data={"purpose": "batch"}, files={"f": b""}), 400, "file"),
        (await http.post("/v1/files", files=file, data={"purpose": "vision"}), 400, "purpose"),
        (await http.post("/v1/files", json={}), 400, None),
        (await http.post("/v1/files", content=b"x", headers=form), 400, None),
        (
            await http.post(
                "/v1/files",
                files=[("file", ("a", b"1")), ("file", ("b", b"2"))],
                data={"purpose": "batch"},
            ),
            400,
            None,
        ),
        (await http.get("/v1/files?limit=0"), 400, "limit"),
        (await http.get("/v1/files?after=x"), 400, "after"),
        (await http.get("/v1/batches?order=up"), 400, "order"),
        (await http.get("/v1/files/..%2f..%2fopen"), 404, None),
        (await http.get("/v1/files/batch_0"), 404, None),
        (await http.post("/v1/batches/x/cancel"), 404, None),
    ):
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param
    body = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    for changed, status in (
        ({}, 404),
        ({"endpoint": "/v1/models"}, 400),
        ({"completion_window": "1h"}, 400),
        ({"metadata": {str(i): "" for i in range(17)}}, 400),
    ):
        assert (await http.post("/v1/batches", json=body | changed)).status_code == status
    batch = await finished(client, await create(client, *lines(1)))
    answer = await http.post("/v1/batches", json=body | {"input_file_id": batch.output_file_id})
    assert answer.status_code == 400 and "batch_output" in answer.text


async def test_bounds_of_what_a_key_may_keep(client, served, monkeypatch, tmp_path):
    monkeypatch.setattr(batch_store, "MAX_BYTES", 1000)
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="the most is 1000"):
            await client.files.create(file=("a", b"x" * 2000), purpose="batch")
    assert [file async for file in client.files.list()] == []
    monkeypatch.setattr(batch_store, "MAX_OBJECTS", 1)
    file = await client.files.create(file=("a", b"x"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="delete files"):
        await client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
    too_long = {"content-length": str(batch_store.MAX_UPLOAD + 1)}
    too_long["content-type"] = "multipart/form-data; boundary=x"
    answer = await served.http.post("/v1/files", content=b"x", headers=too_long)
    assert answer.status_code == 413 and str(batch_store.MAX_UPLOAD) in answer.text
    monkeypatch.setattr(batch_store, "RETENTION", -1)
    served.app.state.context.batches.store.remove_old()
    assert not [*tmp_path.glob("*/*")]


async def test_without_a_folder_the_routes_say_so():
    async with serve() as served:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/x")):
            answer = await served.http.request(method, path)
            assert answer.status_code == 404 and "--batch-dir" in answer.text
