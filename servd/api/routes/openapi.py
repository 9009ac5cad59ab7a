"""GET /openapi.json, and the same for people: /docs and /redoc."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from servd.api.context import context_of
from servd.api.openapi import describes, document
from servd.api.openapi_page import CONTENT_SECURITY_POLICY, page
from servd.api.routes import load_routers

router = APIRouter()


@router.get("/openapi.json")
@describes(dict[str, Any])
async def openapi(request: Request) -> Response:
    """Every route with its fields, bounds and errors."""
    content, _ = await _described(request)
    return Response(content, media_type="application/json")


@router.get("/docs")
@router.get("/redoc")
@describes(str, media_types=("text/html",))
async def docs(request: Request) -> Response:
    """The description as a page."""
    _, content = await _described(request)
    return HTMLResponse(content, headers={"content-security-policy": CONTENT_SECURITY_POLICY})


async def _described(request: Request) -> tuple[bytes, str]:
    needs_key = context_of(request).keys.are_needed
    return await asyncio.to_thread(_describe, needs_key)  # the first takes a tenth of a second


@lru_cache
def _describe(needs_key: bool) -> tuple[bytes, str]:
    described = document(load_routers(), needs_key)
    return msgspec.json.encode(described), page(described)
