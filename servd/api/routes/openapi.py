"""GET /openapi.json: the OpenAPI description; GET /docs and /redoc: pages that show it."""

import asyncio
import base64
import hashlib
import re
from functools import lru_cache
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from servd.api.context import context_of
from servd.api.http.route import PathPart, Route, document, text_content, without_model
from servd.api.routes import load_routers

router = APIRouter(route_class=Route)

# Swagger UI, which the package keeps for servers without access to the internet.
FILES = StaticFiles(packages=[("fastapi_offline", "static")])
INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)
POLICY = (
    "default-src 'none'; script-src 'self' 'sha256-{}'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/openapi.json", response_model=dict[str, Any])
@without_model
async def openapi(request: Request) -> Response:
    """Return the OpenAPI description of all routes."""
    needs_key = context_of(request).keys.are_needed
    content = await asyncio.to_thread(_describe, needs_key)  # the first takes a tenth of a second
    return Response(content, media_type="application/json")


@lru_cache
def _describe(needs_key: bool) -> bytes:
    return msgspec.json.encode(document(load_routers(), needs_key))


@router.get("/docs", response_class=HTMLResponse)
@router.get("/redoc", response_class=HTMLResponse)
@without_model
async def docs(request: Request) -> Response:
    """Show the OpenAPI description in the browser."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="servd",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
    (script,) = INLINE.findall(bytes(page.body).decode())
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page.headers["content-security-policy"] = POLICY.format(digest)
    return page


@router.get(
    "/docs/{asset}",
    response_class=Response,
    responses=text_content("text/css", "text/javascript", "image/png"),
)
@without_model
async def docs_asset(request: Request, asset: PathPart) -> Response:
    """Return a file of the documentation page."""
    return await FILES.get_response(asset, request.scope)
