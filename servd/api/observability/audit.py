"""audit: whether an API server and its engines agree on what is open; what the server holds."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from itertools import count

import msgspec

from servd.api.async_llm import AsyncLLM
from servd.api.engine_client import EngineClient
from servd.errors import Unavailable
from servd.messages import Audit

TIMEOUT = 30.0  # seconds for the engine's answer, which comes between two steps

numbers = count()  # a late answer must not be taken for another audit's


class Holdings(msgspec.Struct):
    """What this API server holds; to be compared with an earlier time."""

    requests: int  # prompts in the engine
    admitted: int  # prompts that count for the limits
    tasks: int
    threads: int
    files: int  # descriptors, connections among them
    max_rss_bytes: int  # the most so far


class AuditReport(msgspec.Struct):
    """Without `problems`, all is well."""

    problems: list[str]
    engine_requests: int  # all API servers' together
    server: Holdings


async def audit(async_llm: AsyncLLM) -> AuditReport:
    """Ask each engine, and compare: both ends keep order, so what was open when it was asked and is
    open when it has answered must be open there, and nothing else may be.

    Raises:
        Unavailable: there is no engine at the moment, or another audit is running.
    """
    for engine in async_llm.engines:
        if not engine.is_ready or engine.recovery.is_trying:  # some are held back
            raise Unavailable("the engine is not ready: retry later")
        if engine.audits:  # each takes the engine as long as a step
            raise Unavailable("another audit is running: retry later")
    found = [await audit_engine(engine) for engine in async_llm.engines]
    problems = [
        f"rank {rank}: {problem}" if len(found) > 1 else problem
        for rank, (its_problems, _) in enumerate(found)
        for problem in its_problems
    ]
    admission = async_llm.admission
    counts = [*admission.prompts.values(), *(num + 1 for num in admission.tokens.values())]
    if min(counts, default=1) <= 0:
        problems.append("admission counts an owner without requests")
    num_requests = sum(its_requests for _, its_requests in found)
    return AuditReport(problems, num_requests, holdings(async_llm))


async def audit_engine(client: EngineClient) -> tuple[list[str], int]:
    """Problems of one engine, and how many requests it has.

    Raises:
        Unavailable: it did not answer.
    """
    number = next(numbers)
    answer = client.audits[number] = asyncio.get_running_loop().create_future()
    before = client.open_ids()
    client.client.send(Audit(client.client.client, number))
    try:
        engine = await asyncio.wait_for(answer, TIMEOUT)
    except TimeoutError:
        raise Unavailable("the engine did not answer: retry later") from None
    finally:
        del client.audits[number]
    theirs, after = set(engine.request_ids), client.open_ids()
    problems = [f"engine: {problem}" for problem in engine.problems]
    for what, ids in (
        ("in the engine, and not open here", theirs - before),
        ("open here, and not in the engine", (before & after) - theirs),
    ):
        if ids:
            problems.append(f"{len(ids)} requests are {what}: {sorted(ids)[:8]}")
    stats = client.stats
    if not engine.num_requests and not after and stats.num_running + stats.num_waiting:
        problems.append(f"no request is open, the gauges say {stats.num_running} run")
    return problems, engine.num_requests


def holdings(async_llm: AsyncLLM) -> Holdings:
    """What there is at this moment."""
    return Holdings(
        requests=sum(len(engine.open_ids()) for engine in async_llm.engines),
        admitted=async_llm.admission.prompts.total(),
        tasks=len(asyncio.all_tasks()),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        max_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
