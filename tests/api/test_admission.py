"""Admission: bounds of the queue, deadlines, limits of keys, draining, on a clock of its own."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from servd.api.call import Call
from servd.api.engine.admission import Admission
from servd.api.http import json_body
from servd.api.observability.metrics import Metrics
from servd.base.errors import InvalidRequest, Overloaded, RateLimited, Unavailable
from servd.config import Config
from servd.config.keys import ANYONE, Key, hash_key
from servd.messages.engine import RequestOptions
from tests.api.harness import Served, requests_sent, serve, until, user
from tests.api.hostile import VALID

CHAT = "/v1/chat/completions"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, **options) -> Admission:
    return Admission(Config.load(options).scheduler, Metrics("m"), clock)


@pytest.fixture
def entered() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def enter(
    admission: Admission,
    stack: ExitStack,
    owner: str = "",
    num_prompts: int = 1,
    key: Key = ANYONE,
    num_waiting: int = 0,
    priority_class: int = 0,
    timeout: float = math.inf,
):
    return stack.enter_context(
        admission.enter(key, owner, num_prompts, num_waiting, priority_class, timeout)
    )


def serve_some(admission: Admission, clock: Clock, count: int, seconds: float) -> None:
    """Requests one after another, each taking so long."""
    for _ in range(count):
        with admission.enter(ANYONE, "x", 1):
            clock.now += seconds


def limit_headers(retry_after: str, limit: str, reset: str) -> dict[str, str]:
    """What a client without anything left is told."""
    rates = {"limit": limit, "remaining": "0", "reset": reset}
    names = {f"x-ratelimit-{name}-requests": value for name, value in rates.items()}
    return {"Retry-After": retry_after, **names}


# ---- the queue ----


def test_retry_after_is_the_measured_time_until_there_is_room(clock, entered):
    admission = make(clock, max_waiting_requests=8)
    serve_some(admission, clock, 20, 3.0)
    clock.now += 500.0  # idle times say nothing of the rate
    for _ in range(8):
        enter(admission, entered, "a")
    with pytest.raises(Overloaded, match="8 requests are unfinished.*limit is 8") as error:
        enter(admission, entered, "a", num_prompts=2)
    assert error.value.retry_after == 6 and error.value.status == 429
    assert error.value.headers["Retry-After"] == "6"


def test_a_full_queue_admits_clients_below_their_share(clock, entered):
    admission = make(clock, max_waiting_requests=8)
    for _ in range(8):
        enter(admission, entered, "a")
    for _ in range(4):
        enter(admission, entered, "b")
    for owner in "ab":
        with pytest.raises(Overloaded):
            enter(admission, entered, owner)
    for i in range(200):  # the memory stays bounded, whoever comes
        with pytest.raises(Overloaded) if admission.prompts.total() >= 16 else ExitStack():
            enter(admission, entered, f"c{i}")
    assert admission.prompts.total() <= 16


def test_the_queue_is_bounded_by_tokens(clock, entered):
    admission = make(clock, max_waiting_tokens=1000)
    enter(admission, entered, "a").count_tokens(900)
    more = enter(admission, entered, "a")
    with pytest.raises(Overloaded, match="900 prompt tokens .* 200, .*--max-waiting-tokens"):
        more.count_tokens(200)
    with pytest.raises(InvalidRequest, match="the most at once is 1000"):
        more.count_tokens(1001)
    enter(admission, entered, "b").count_tokens(400)  # less than half of the limit
    entered.close()
    assert not admission.tokens.total() and not admission.prompts


def test_what_a_prompt_has_replaces_what_it_was_thought_to_have(clock, entered):
    admission = make(clock, max_waiting_tokens=1000)
    first, second = enter(admission, entered, "a"), enter(admission, entered, "a")
    first.count_tokens(600)
    with pytest.raises(Overloaded, match="600 prompt tokens .* adds 500"):
        second.count_tokens(500)
    first.count_tokens(400)
    second.count_tokens(500)
    assert admission.tokens == {"a": 900}
    with pytest.raises(Overloaded, match="900 prompt tokens .* adds 200"):
        second.count_tokens(700)
    assert admission.tokens == {"a": 900}


LONG = "word " * 800  # a little less than the context has


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [LONG] * 1024, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [[65] * 4000] * 100, "max_tokens": 1}),
        ("/v1/embeddings", {"input": [LONG] * 1024}),
    ],
)
async def test_many_prompts_are_refused_before_they_are_tokenised(path, body, monkeypatch):
    async with serve(max_waiting_tokens=200_000) as served:
        processed = []
        monkeypatch.setattr(served.async_llm.processor, "process_inputs", processed.append)
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 400 and "--max-waiting-tokens" in answer.text
        assert not processed and not served.async_llm.admission.tokens


async def test_prompts_that_fit_are_not_refused_for_their_length():
    async with serve(max_waiting_tokens=200_000) as served:
        body = {"prompt": [LONG] * 49, "max_tokens": 1}  # 196,000 tokens
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        body = {"input": [LONG] * 1024, "truncate_prompt_tokens": 100}
        assert (await served.http.post("/v1/embeddings", json=body)).status_code == 200


def test_the_background_leaves_half_of_the_queue(clock, entered):
    admission = make(clock, max_waiting_requests=8)
    for _ in range(4):
        enter(admission, entered, "a", priority_class=1)
    with pytest.raises(Overloaded, match="background"):
        enter(admission, entered, "a", priority_class=1)
    for _ in range(4):
        enter(admission, entered, "a")
    entered.close()
    assert admission.num_background == 0


# ---- deadlines ----


def test_a_deadline_that_cannot_be_met_is_refused_at_once(clock, entered):
    enter(make(clock), entered, "a", num_waiting=9, timeout=1e-3)  # nobody knows yet
    admission = make(clock)
    serve_some(admission, clock, 20, 2.0)
    for _ in range(10):
        enter(admission, entered, "a")
    with pytest.raises(Overloaded, match="10 requests .* about 20 s, more than the 5 s") as error:
        enter(admission, entered, "a", num_waiting=10, timeout=5.0)
    assert error.value.retry_after in (15, 16)  # a sum of floats, rounded up
    enter(admission, entered, "a", num_waiting=10, timeout=30.0)
    enter(admission, entered, "b", num_waiting=10, timeout=5.0)  # its turn is next


@pytest.mark.parametrize("by", ["body", "header"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_at_its_deadline(served: Served, by: str, stream: bool):
    served.engine.may_step.clear()
    fields = {"timeout": 0.05} if by == "body" else {}
    headers = {"x-request-timeout": "0.05"} if by == "header" else {}
    body = {"messages": user("hi"), "stream": stream, **fields}
    answer = await served.http.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 504  # a stream has not begun
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    served.engine.may_step.set()
    await until(lambda: not served.engine.core.scheduler.requests, 30)
    assert served.async_llm.num_unfinished == 0


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1e3", "99999999", "nan"])
async def test_a_deadline_has_to_be_a_number_of_seconds(http, text):
    headers = {"x-request-timeout": text}
    answer = await http.post(CHAT, json={"messages": user("hi")}, headers=headers)
    assert answer.status_code == 400 and "X-Request-Timeout" in answer.text
    answer = await http.get("/v1/models", headers={"x-request-timeout": text})
    assert answer.status_code == 400 and "X-Request-Timeout" in answer.text
    assert (await http.get("/health", headers={"x-request-timeout": text})).status_code == 200


# ---- keys ----


def make_key(**limits) -> Key:
    return Key(name="k", sha256=hash_key(b"k"), **limits)


def test_a_key_has_its_limit_of_unfinished_requests(clock, entered):
    admission, key = make(clock), make_key(max_concurrency=2)
    enter(admission, entered, "k", 2, key=key)
    with pytest.raises(RateLimited, match="2 unfinished requests, at most 2") as error:
        enter(admission, entered, "k", key=key)
    assert error.value.headers == limit_headers("1", "2", "1.000s")
    entered.close()
    enter(admission, entered, "k", key=key)


def test_a_key_has_its_limit_of_requests_per_minute(clock, entered):
    admission, key = make(clock), make_key(requests_per_minute=6)
    admitted = [enter(admission, entered, "k", key=key) for _ in range(6)]
    num_remaining = [answer.headers["x-ratelimit-remaining-requests"] for answer in admitted]
    assert num_remaining == ["5", "4", "3", "2", "1", "0"]
    with pytest.raises(RateLimited, match="6 requests per minute") as error:
        enter(admission, entered, "k", key=key)
    assert error.value.retry_after == 10
    assert error.value.headers == limit_headers("10", "6", "60.000s")
    clock.now += 10.0
    enter(admission, entered, "k", key=key)
    clock.now += 1e6
    assert enter(admission, entered, "k", key=key).headers["x-ratelimit-remaining-requests"] == "5"


def write_keys(tmp_path: Path, **fields: str) -> str:
    """A file with the key `secret`; returns its path."""
    lines = [f"{name} = {value}" for name, value in fields.items()]
    file = tmp_path / "keys.toml"
    head = ["[[keys]]", 'name = "k"', f'sha256 = "{hash_key(b"secret")}"']
    file.write_text("\n".join([*head, *lines]))
    return str(file)


AUTHORIZED = {"authorization": "Bearer secret"}


async def test_the_limits_of_a_key_are_in_the_headers(tmp_path):
    path = write_keys(tmp_path, requests_per_minute="2")
    async with serve(api_key_file=path) as served:
        body = {"messages": user("hi"), "max_tokens": 2}
        answers = [
            await served.http.post(CHAT, json={**body, "stream": stream}, headers=AUTHORIZED)
            for stream in (False, True, False)
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        num_remaining = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert num_remaining == ["1", "0", "0"]
        assert int(answers[2].headers["retry-after"]) >= 1
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"


async def sent_options(served: Served, headers: dict[str, str], **fields):
    served.engine.sent.clear()
    body = {"messages": user("hi"), "max_tokens": 1, **fields}
    answer = await served.http.post(CHAT, json=body, headers=headers)
    requests = requests_sent(served.engine)
    return answer, requests[0].options if requests else None


async def test_a_client_may_not_ask_for_more_urgency_than_its_key_has(tmp_path):
    path = write_keys(tmp_path, min_priority="-1")
    async with serve(api_key_file=path, scheduling_policy="priority") as served:
        answer, options = await sent_options(served, AUTHORIZED, priority=-1)
        assert answer.status_code == 200 and options.priority == -1
        answer, options = await sent_options(served, AUTHORIZED, priority=-2)
        assert answer.status_code == 403 and options is None
        assert "min_priority" in answer.text


async def test_a_key_without_urgency_may_count_tokens(tmp_path):
    path = write_keys(tmp_path, min_priority="5")
    async with serve(api_key_file=path, scheduling_policy="priority") as served:
        body = {"messages": user("hi")}
        for route in ("/tokenize", "/v1/messages/count_tokens"):
            answer = await served.http.post(route, json=body, headers=AUTHORIZED)
            assert answer.status_code == 200, answer.text


async def test_weight_users_and_tier_reach_the_engine(tmp_path):
    path = write_keys(tmp_path, weight="2.5", by_user="true")
    async with serve(api_key_file=path) as served:
        _, options = await sent_options(served, AUTHORIZED, user="u", service_tier="flex")
        assert (options.weight, options.owner, options.priority_class) == (2.5, "k/u", 1)
    async with serve() as served:  # without a key that says so, a name is no share
        _, options = await sent_options(served, {}, user="u", service_tier="auto")
        assert options.owner != "u" and options.priority_class == 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank"])
async def test_requests_for_vectors_can_run_in_the_background(served: Served, path):
    answer = await served.http.post(path, json={**VALID[path], "service_tier": "flex"})
    assert answer.status_code == 200 and "x-servd-ignored" not in answer.headers
    requests = requests_sent(served.engine)
    assert {request.options.priority_class for request in requests} == {1}


# ---- draining ----


async def test_a_draining_server_finishes_open_requests_and_admits_none(served: Served):
    served.engine.may_step.clear()
    body = {"messages": user("hi"), "max_tokens": 2}
    asking = asyncio.create_task(served.http.post(CHAT, json=body))
    await until(lambda: served.engine.sent, 30)
    served.async_llm.admission.drained_at = time.monotonic() + 50
    health = await served.http.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "draining", "num_open": 1})
    refused = await served.http.post(CHAT, json=body)
    assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 50
    served.engine.may_step.set()
    assert (await asking).status_code == 200
    with pytest.raises(Unavailable), served.async_llm.admit(Call(), RequestOptions(), ["r"]):
        pass
    counter = served.async_llm.metrics.labelled["vllm:admission_rejections", "draining"]
    assert counter._value.get() == 2


# ---- long bodies ----

LONG_BODY = {"input": [{"role": "user", "content": "x" * 8192}]}


def count_parses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that a thread has begun to parse."""
    begun: list[int] = []
    parse = json_body.parse

    def counting(kind: type[Any], data: bytes, max_values: int) -> Any:
        begun.append(len(data))
        return parse(kind, data, max_values)

    monkeypatch.setattr(json_body, "parse", counting)
    return begun


@contextmanager
def busy(served: Served) -> Iterator[None]:
    """All threads are busy until the end."""
    free = threading.Event()
    pool = served.async_llm._threads
    tasks = [asyncio.ensure_future(pool.run(name, free.wait)) for name in "abc"]
    try:
        yield
    finally:
        free.set()
        assert tasks


async def test_a_body_that_waits_for_a_thread_is_dropped_with_its_client(monkeypatch):
    begun = count_parses(monkeypatch)
    async with serve(listen=True) as served:
        with busy(served):
            prompt = {"prompt": "x" * 9000}
            for path, body in (("/v1/responses", LONG_BODY), ("/v1/completions", prompt)):
                with pytest.raises(httpx.ReadTimeout):
                    await served.http.post(path, json=body, timeout=0.2)
            waiting = served.async_llm._threads._waiting.values()
            await until(lambda: all(turn.cancelled() for turns in waiting for turn in turns))
        answer = await served.http.post("/v1/responses", json={**LONG_BODY, "max_output_tokens": 1})
        assert answer.status_code in (200, 400) and len(begun) == 1


async def test_a_body_that_waits_for_a_thread_ends_at_its_deadline(monkeypatch):
    begun = count_parses(monkeypatch)
    async with serve(listen=True) as served:
        with busy(served):
            headers = {"x-request-timeout": "0.2"}
            answer = await served.http.post("/v1/responses", json=LONG_BODY, headers=headers)
        assert answer.status_code == 504 and not begun
        assert answer.json()["error"]["code"] == "deadline_exceeded"
