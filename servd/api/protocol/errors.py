"""The error bodies for every exception: OpenAI's, or Anthropic's or Ollama's on their routes."""

import errno
import logging
import re

import msgspec
from starlette.exceptions import HTTPException

from servd.base.errors import (
    ContextTooLong,
    EngineDeadError,
    EngineError,
    Overloaded,
    RequestError,
    ShuttingDown,
    Unauthorized,
)

log = logging.getLogger("servd.api")

MAX_MESSAGE = 2000  # characters; a message may quote the request
SECRET = re.compile(r"(?<![\w.])[~.]{0,2}/[^\s:'\",;)]+|0x[0-9a-fA-F]{6,}")  # paths, addresses
ANTHROPIC_ROUTES = "/v1/messages"
OLLAMA_ROUTES = "/api/"
TYPE_OF_STATUS = {401: "authentication_error", 404: "not_found_error"}


class ErrorDetail(msgspec.Struct):
    """The details of an error, in OpenAI's format."""

    message: str
    type: str
    param: str | None = None  # the request field at fault
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """The body `{"error": {...}}`: the SDKs require exactly this nesting."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    """The details of an error, in Anthropic's format."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    """The body `{"type": "error", "error": {...}}`."""

    error: AnthropicErrorDetail
    request_id: str


class OllamaErrorBody(msgspec.Struct):
    """The body `{"error": "..."}`."""

    error: str


class ErrorReply(msgspec.Struct):
    """The HTTP response to an exception."""

    status: int
    body: bytes
    headers: dict[str, str]


def error_reply(error: Exception, request_id: str, path: str = "") -> ErrorReply:
    """Return the response to the exception `error`. The route's `path` decides the format. Log the
    server's own errors. For an unexpected error, the client only gets the request id.
    """
    headers: dict[str, str] = {}
    match error:
        case RequestError():
            status = error.status
            detail = ErrorDetail(error.message, error.type, error.param, error.code)
            headers.update(error.headers)
            if isinstance(error, Unauthorized):
                headers["WWW-Authenticate"] = "Bearer"
        case EngineDeadError() | ShuttingDown():
            message = without_paths(str(error))
            code = "engine_dead" if isinstance(error, EngineDeadError) else "shutting_down"
            status = 503
            detail = ErrorDetail(message, "server_error", code=code)
        case EngineError():
            log.error("request %s failed: %s", request_id, error)
            message = without_paths(str(error))
            status = 500
            detail = ErrorDetail(message, "server_error", code="engine_error")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            log.error("request %s failed: %s", request_id, error)
            message = (
                "no space is left on the server's disk: delete files that you do not need "
                "(DELETE /v1/files/ID), or ask its operator to make room"
            )
            status = 507
            detail = ErrorDetail(message, "server_error", code="storage_full")
            headers["x-should-retry"] = "false"
        case HTTPException():  # raised by the router and by the body limit
            detail = ErrorDetail(error.detail, _type_of(error.status_code))
            status = error.status_code
            headers.update(error.headers or {})
        case _:
            log.error("request %s failed", request_id, exc_info=error)
            message = (
                f"internal error; the server's log has the details under request id {request_id}"
            )
            status = 500
            detail = ErrorDetail(message, "server_error", code="internal_error")
    if len(detail.message) > MAX_MESSAGE:
        detail.message = detail.message[:MAX_MESSAGE] + "..."
    if path.startswith(OLLAMA_ROUTES):
        return ErrorReply(status, msgspec.json.encode(OllamaErrorBody(detail.message)), headers)
    if path.startswith(ANTHROPIC_ROUTES):
        if isinstance(error, ContextTooLong):  # clients look for these words, and compact
            detail.message = (
                f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
            )
        return _anthropic(status, detail, headers, request_id)
    return ErrorReply(status, msgspec.json.encode(ErrorBody(detail)), headers)


def without_paths(message: str) -> str:
    """Return a message about the server's own failure, without file names and addresses."""
    return SECRET.sub("(see the log)", message)


def _type_of(status: int) -> str:
    return TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")


def _anthropic(
    status: int, detail: ErrorDetail, headers: dict[str, str], request_id: str
) -> ErrorReply:
    if detail.type == Overloaded.type:
        status = 529  # Anthropic's own status, which its clients retry
    kind = "api_error" if detail.type == "server_error" else detail.type
    if status == 413:
        kind = "request_too_large"
    body = AnthropicErrorBody(AnthropicErrorDetail(kind, detail.message), request_id)
    return ErrorReply(status, msgspec.json.encode(body), {**headers, "request-id": request_id})
