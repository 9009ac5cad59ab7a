"""Whatever a client sends, the server has an answer for it, and is as it was before."""

import asyncio
import json
import math
import time
from collections import Counter
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.api.harness import MODEL, output_text, serve, until
from tests.api.hostile import Case, Hostile

AT_ONCE = 16
SHORT_TIMEOUT = 60.0  # seconds
PATIENCE = 240.0  # seconds for an answer: a machine is slow, and a grammar may take its time


async def exchange(url: str, data: bytes, is_all: bool = True) -> bytes:
    """Everything that a connection gets which sends this, and no more if that is all."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        if is_all:
            writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    except ConnectionError:  # it has said what it thinks, and not read on
        return b""
    finally:
        writer.close()


async def send(url: str, case: Case) -> int:
    """The status of the answer; 0 without one."""
    headers = {"host": "servd", "content-length": str(len(case.content)), "connection": "close"}
    head = f"{case.method} {case.path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in {**headers, **case.headers}.items())
    answer = await exchange(url, f"{head}\r\n".encode("latin-1") + case.content, False)
    return int(answer.split(maxsplit=2)[1]) if answer else 0


def asked_timeout(case: Case) -> float:
    """The seconds in which a request asks to be answered, by its body or its header."""
    body: Any = None
    with suppress(ValueError, RecursionError):
        body = json.loads(case.content)
    timeout = body.get("timeout") if isinstance(body, dict) else None
    if timeout is None:
        timeout = case.headers.get("x-request-timeout", "inf")
    with suppress(ValueError, TypeError, OverflowError):
        return float(timeout)
    return math.inf


def is_allowed(status: int, case: Case) -> bool:
    """Whether this is an answer to it; 504 only if it asked for an answer within a short time."""
    if status == 504:
        return asked_timeout(case) < SHORT_TIMEOUT
    return status < 500 or status in (503, 507)


async def attack(url: str, count: int, seed: int) -> Counter[tuple[str, int]]:
    """Send so many; returns how many of each kind got which status."""
    statuses: Counter[tuple[str, int]] = Counter()
    cases = Hostile(seed).cases(count)

    async def client() -> None:
        for case in cases:
            status = await send(url, case)
            statuses[case.kind, status] += 1
            assert is_allowed(status, case), (status, case)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(client())
    return statuses


async def send_raw(url: str, count: int, seed: int) -> int:
    """So many connections that say no HTTP; returns how many got an answer."""
    hostile, answers = Hostile(seed), 0

    async def client(data: bytes) -> None:
        nonlocal answers
        answer = await exchange(url, data)
        assert not answer or int(answer.split()[1]) < 500, (data, answer)
        answers += bool(answer)

    for begin in range(0, count, AT_ONCE):
        batch = [hostile.raw() for _ in range(min(AT_ONCE, count - begin))]
        await asyncio.gather(*map(client, batch))
    return answers


@pytest.mark.parametrize(
    ("timeout", "header", "is_right"),
    [
        ("1e-9", None, True),
        ("1", "100", True),
        ("null", "0.000001", True),
        ('"x"', "1", False),
        ("100", "1", False),
        ("null", None, False),
        ("null", "nan", False),
    ],
)
def test_504_is_an_answer_to_a_short_timeout_alone(timeout, header, is_right):
    headers = {} if header is None else {"x-request-timeout": header}
    case = Case("", "POST", "/v1/completions", f'{{"timeout": {timeout}}}'.encode(), headers)
    assert is_allowed(504, case) is is_right
    assert not is_allowed(500, case) and not is_allowed(501, case)


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]  # 60 to 400 s each, by the machine's load


@pytest.mark.parametrize(
    ("count", "seed"), [(300, 300), *(pytest.param(5000, i, marks=SLOW) for i in range(10))]
)
async def test_hostile_requests_are_answered_and_change_nothing(count, seed):
    options = {"data_parallel_size": 2, "max_num_batched_tokens": 512}
    async with serve(listen=True, max_waiting_requests=64, **options) as served:  # type: ignore[arg-type]
        before = time.monotonic()
        statuses = await attack(served.url, count, seed)
        num_answers = await send_raw(served.url, count // 10, seed)
        print(f"{count} in {time.monotonic() - before:.0f} s, {num_answers} raw", statuses)
        by_status = Counter(status for _, status in statuses.elements())
        assert by_status[200] and by_status[400] and num_answers
        body = {"model": MODEL, "prompt": "still", "max_tokens": 20, "ignore_eos": True}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == output_text("still", 20)
        await until(lambda: not served.async_llm.num_unfinished)
        await until(lambda: not any(e.core.scheduler.requests for e in served.engines))
        audit = (await served.http.get("/debug/audit")).json()
        assert audit["problems"] == [] and audit["engine_requests"] == 0
        metrics = (await served.http.get("/metrics")).text
        gauges = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_")]
        assert gauges and all(float(line.split()[-1]) == 0 for line in gauges)
