"""GET /: the console for browsers, a list of useful paths for other clients."""

from fastapi import APIRouter, Request, Response

from servd.api.console import files
from servd.api.context import context_of, json_response
from servd.api.http.route import PathPart, Route, text_content, without_model
from servd.base.errors import NotFound

router = APIRouter(route_class=Route)

# The same on every server, for it is open without an API key.
INDEX = {
    "server": "servd",
    "models": "/v1/models",
    "openapi": "/openapi.json",
    "docs": "/docs",
    "health": "/health",
    "metrics": "/metrics",
}
FILES = text_content("text/css", "text/html", "text/javascript", "image/svg+xml")


@router.get("/", response_model=dict[str, str], responses=text_content("text/html"))
@router.head("/", response_model=dict[str, str], responses=text_content("text/html"))
@without_model
async def index(request: Request) -> Response:
    """Show the console in a browser; list useful paths to other clients."""
    has_console = context_of(request).config.server.console
    if has_console and "text/html" in request.headers.get("accept", ""):
        return _answer(request, "index.html")
    return json_response(INDEX, headers={"vary": "Accept"})


@router.get("/console/{file:path}", response_class=Response, responses=FILES)
@router.head("/console/{file:path}", response_class=Response, responses=FILES)
@without_model
async def console_file(request: Request, file: PathPart) -> Response:
    """Return a file of the console."""
    if file not in files() or not context_of(request).config.server.console:
        raise NotFound(f"there is no route {request.method} /console/{file[:200]}")
    return _answer(request, file)


def _answer(request: Request, name: str) -> Response:
    file = files()[name]
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
