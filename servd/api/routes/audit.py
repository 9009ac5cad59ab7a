"""GET /debug/audit: check for leaked requests, blocks and slots."""

import asyncio
import os
import resource
import threading

import msgspec
from fastapi import APIRouter, Request, Response

from servd.api.context import context_of, json_response
from servd.api.engine.engine_client import EngineClient
from servd.api.http.route import Route, refusals
from servd.base.errors import Unavailable
from servd.messages.engine import Audit, EngineAudit

router = APIRouter(route_class=Route)

TIMEOUT = 30.0  # seconds for the engine's answer, which comes between two steps


class Holdings(msgspec.Struct):
    """Resources held by this API server. Compare two reports to find leaks."""

    requests: int  # prompts in the engine
    admitted: int  # prompts that count for the limits
    tasks: int
    threads: int
    files: int  # descriptors, connections among them
    max_rss_bytes: int  # the most so far


class AuditReport(msgspec.Struct):
    """Result of an audit. If `problems` is empty, the audit found none."""

    problems: list[str]
    engine_requests: int  # all API servers' together
    server: Holdings


@router.get("/debug/audit", response_model=AuditReport, responses=refusals(503))
async def audit_server(request: Request) -> Response:
    """Check that the engine and this API server agree on blocks, slots, queues and open requests.
    You can call this while requests run.
    """
    async_llm = context_of(request).async_llm
    for engine in async_llm.engines:
        if not engine.is_ready or engine.recovery.is_trying:  # some are held back
            raise Unavailable("the engine is not ready: retry later")
        if engine.answers:  # each takes the engine as long as a step
            raise Unavailable("another audit or collective_rpc is running: retry later")
    admission = async_llm.admission
    open_ids = [engine.open_ids() for engine in async_llm.engines]
    report = AuditReport(
        problems=[],
        engine_requests=0,
        server=Holdings(
            requests=sum(map(len, open_ids)),
            admitted=admission.prompts.total(),
            tasks=len(asyncio.all_tasks()),
            threads=threading.active_count(),
            files=len(os.listdir("/proc/self/fd")),
            max_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        ),
    )
    for engine in async_llm.engines:
        await _audit_engine(engine, report)
    counts = [*admission.prompts.values(), *(num + 1 for num in admission.tokens.values())]
    if min(counts, default=1) <= 0:
        report.problems.append("admission counts an owner without requests")
    return json_response(report)


async def _audit_engine(client: EngineClient, report: AuditReport) -> None:
    """Ask an engine for an audit and add its problems to `report`. As messages keep their order,
    the engine must have all requests open before and after, and none that was not open before.
    """
    before = client.open_ids()
    try:
        engine: EngineAudit = await asyncio.wait_for(client.ask(Audit(0, 0)), TIMEOUT)
    except TimeoutError:
        raise Unavailable("the engine did not answer: retry later") from None
    theirs = set(engine.request_ids)
    after = client.open_ids()
    problems = list(engine.problems)
    for what, ids in (
        ("in the engine, and not open here", theirs - before),
        ("open here, and not in the engine", (before & after) - theirs),
    ):
        if ids:
            problems.append(f"{len(ids)} requests are {what}: {sorted(ids)[:8]}")
    num_running = client.stats.num_running + client.stats.num_waiting
    if not engine.num_requests and not after and num_running:
        problems.append(f"no request is open, but the gauges count {num_running}")
    report.engine_requests += engine.num_requests
    report.problems += [f"engine {client.rank}: {problem}" for problem in problems]
