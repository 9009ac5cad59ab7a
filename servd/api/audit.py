"""audit: whether an API server and its engine agree on what is open; what the server holds."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from itertools import count

import msgspec

from servd.api.async_llm import AsyncLLM
from servd.errors import Unavailable
from servd.messages import Audit, EngineReady

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
    """Ask the engine, and compare: both ends keep order, so what was open when it was asked and is
    open when it has answered must be open there, and nothing else may be.

    Raises:
        Unavailable: there is no engine at the moment, or another audit is running.
    """
    is_ready = isinstance(async_llm.status, EngineReady) and not async_llm.recovery.is_restarting
    if not is_ready or async_llm.recovery.is_trying:  # some are held back
        raise Unavailable("the engine is not ready: retry later")
    if async_llm.audits:  # each takes the engine as long as a step
        raise Unavailable("another audit is running: retry later")
    number = next(numbers)
    answer = async_llm.audits[number] = asyncio.get_running_loop().create_future()
    before = async_llm.output_processor.open_ids()
    async_llm.client.send(Audit(async_llm.client.client, number))
    try:
        engine = await asyncio.wait_for(answer, TIMEOUT)
    except TimeoutError:
        raise Unavailable("the engine did not answer: retry later") from None
    finally:
        del async_llm.audits[number]
    theirs, after = set(engine.request_ids), async_llm.output_processor.open_ids()
    problems = [f"engine: {problem}" for problem in engine.problems]
    for what, ids in (
        ("in the engine, and not open here", theirs - before),
        ("open here, and not in the engine", (before & after) - theirs),
    ):
        if ids:
            problems.append(f"{len(ids)} requests are {what}: {sorted(ids)[:8]}")
    admission, stats = async_llm.admission, async_llm.stats
    counts = [*admission.prompts.values(), *(num + 1 for num in admission.tokens.values())]
    if min(counts, default=1) <= 0:
        problems.append("admission counts an owner without requests")
    if not engine.num_requests and not after and stats.num_running + stats.num_waiting:
        problems.append(f"no request is open, the gauges say {stats.num_running} run")
    return AuditReport(problems, engine.num_requests, holdings(async_llm))


def holdings(async_llm: AsyncLLM) -> Holdings:
    """What there is at this moment."""
    return Holdings(
        requests=len(async_llm.output_processor.open_ids()),
        admitted=async_llm.admission.prompts.total(),
        tasks=len(asyncio.all_tasks()),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        max_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
