"""GET /v1/requests, /v1/requests/{id}/timeline and /v1/steps: where the time went."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.context import context_of, json_response, offload
from servd.api.explanation import explain, steps_of, summarize, trace_of
from servd.api.openapi import describes
from servd.api.prefix_explanation import explain_prefix
from servd.api.protocol.requests import RequestList, RequestTimeline, StepList, Trace
from servd.api.timeline import Inquiry, Tracer
from servd.errors import InvalidRequest, NotFound
from servd.tracing import now_ns

router = APIRouter()

MAX_LISTED, MAX_STEPS_LISTED = 200, 1000
CHARS_PER_STEP = 16  # a step takes about as long as so many characters, see `AsyncLLM.offload`


def _count(most: int) -> dict[str, int | str]:
    return {"type": "integer", "minimum": 1, "maximum": most}


@router.get("/v1/requests")
@describes(RequestList, query={name: _count(MAX_LISTED) for name in ("recent", "slowest")})
async def list_requests(request: Request) -> Response:
    """The most recent requests, running ones first, or the slowest finished ones; of this API key,
    and of the API process that answers.
    """
    tracer, owner = _tracer(request), request.state.owner
    if "slowest" in request.query_params:
        found = tracer.longest(owner, _asked(request, "slowest", 20, MAX_LISTED))
    else:
        found = tracer.latest(owner, _asked(request, "recent", 20, MAX_LISTED))
    inquiries = tracer.inquiries(found)
    size = _size(inquiry for inquiry in inquiries if inquiry.timeline.summary is None)
    data = await offload(request, size, lambda: list(map(summarize, inquiries)))
    return json_response(RequestList(data))


@router.get("/v1/requests/{request_id}/timeline")
@router.get("/debug/requests/{request_id}")
@describes(
    RequestTimeline, Trace, query={"format": {"enum": ["json", "perfetto"], "default": "json"}}
)
async def request_timeline(request: Request, request_id: str) -> Response:
    """Where the time of a running, recent or slow request went, by the `id` of its answer: every
    millisecond has a cause. `format=perfetto` gives it as trace events for ui.perfetto.dev.
    """
    tracer, owner = _tracer(request), request.state.owner
    async_llm = context_of(request).async_llm
    cache, token_text = async_llm.config.cache, async_llm.processor.tokenizer.token_string
    kind = request.query_params.get("format", "json")
    if kind not in ("json", "perfetto"):
        raise InvalidRequest("format must be json or perfetto", param="format")
    timeline = tracer.get(request_id, owner)
    if timeline is None:
        raise NotFound(
            f"there is no running or recent request {request_id[:200]!r} of this API key",
            param="request_id",
        )
    others = tracer.latest(owner, tracer.keep)
    (inquiry,) = tracer.inquiries([timeline])

    def answer() -> RequestTimeline | Trace:
        found = explain(inquiry, others, lambda engine_id: tracer.knows(engine_id, owner))
        if timeline.prompt and any(mark.stage == "scheduled" for mark in inquiry.marks):
            found.prefix_cache = explain_prefix(timeline, others, cache, token_text)
        return found if kind == "json" else trace_of(found)

    size = _size([inquiry]) + sum(len(other.prompt) for other in others)
    return json_response(await offload(request, size, answer))


@router.get("/v1/steps")
@describes(StepList, query={"recent": _count(MAX_STEPS_LISTED)})
async def list_steps(request: Request) -> Response:
    """The latest steps of the engine of which this API process has heard."""
    steps = _tracer(request).latest_steps(_asked(request, "recent", 100, MAX_STEPS_LISTED))
    size = CHARS_PER_STEP * len(steps)
    data = await offload(request, size, lambda: steps_of(steps, 0))
    return json_response(StepList(data, round(now_ns() / 1e6, 3)))


def _tracer(request: Request) -> Tracer:
    return context_of(request).async_llm.tracer


def _asked(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most):
        raise InvalidRequest(f"{name} must be a whole number from 1 to {most}", param=name)
    return int(text)


def _size(inquiries: Iterable[Inquiry]) -> int:
    return sum(CHARS_PER_STEP * len(inquiry.steps) for inquiry in inquiries)
