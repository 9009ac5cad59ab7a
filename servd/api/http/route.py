"""Route: FastAPI's route with servd's own reading of bodies and additions to OpenAPI.

An endpoint is an ordinary endpoint of FastAPI, with typed parameters. The body is a dependency; see
`JsonBody`. `response_model` takes msgspec structs. `Route` adds bodies, answers, errors and
headers to the `openapi_extra` and `responses` from which FastAPI makes its document.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, cast, get_args, get_type_hints

import msgspec
from fastapi import APIRouter, Path
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import servd
from servd.api.http.auth import OPEN_PATHS, ScopedRoute
from servd.api.http.middleware import MAX_BODY
from servd.api.protocol.errors import (
    ANTHROPIC_ROUTES,
    OLLAMA_ROUTES,
    AnthropicErrorBody,
    ErrorBody,
    OllamaErrorBody,
)
from servd.api.protocol.validation import RequestBody

Schema = dict[str, Any]
Responses = dict[int | str, Schema]

# A part of the path. The router finds no route for an empty part.
PathPart = Annotated[str, Path(json_schema_extra={"minLength": 1})]

DESCRIPTION = (
    "An OpenAI-compatible serving daemon for language models. servd ignores fields that are not "
    "listed, and names them in the header `X-Servd-Ignored`; with `--strict-fields`, it answers "
    "400. The schemas omit rules between fields, such as that `stream_options` needs `stream`. A "
    "request that breaks such a rule gets 400 with the rule."
)
SECURITY_SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
HEADER_TEXTS = {
    "X-Request-Id": "The id of the request: the client's, from the same header, or a new one.",
    "X-Servd-Ignored": "Names of fields in the body that had no effect.",
    "Server-Timing": "Milliseconds of the stages of an answer that is not streamed.",
    "traceresponse": "The OpenTelemetry span of the request, if spans are exported.",
    "Retry-After": "Seconds after which to try again, where that may help.",
}
HEADERS: Schema = {
    name: {
        "description": text,
        "schema": {"type": "integer" if name == "Retry-After" else "string"},
    }
    for name, text in HEADER_TEXTS.items()
}
ERRORS = {
    400: "A field or a header is missing, malformed or out of bounds; `param` names the field.",
    401: "There is no API key, or a wrong one.",
    403: "The API key lacks the scope of this route.",
    404: "There is no such model or object here.",
    408: "The rest of the body did not come in time.",
    413: f"The body has more than {MAX_BODY} bytes.",
    429: "Too many requests are unfinished, or the API key has reached a limit.",
    500: "The server failed; its log has the details under the id of the request.",
    503: "The model is loading, the server is shutting down, or the engine is gone.",
    504: "The request's own deadline passed before its answer was whole.",
    529: "The model is loading, or too many requests are waiting.",
}
SCHEMAS = "#/components/schemas/"
# Errors that a body brings.
OF_BODIES = {400, 404, 408, 413, 429, 500, 503, 504}
# Schemas of the msgspec structs that answers of the imported routes have, by name.
ANSWERS: dict[str, Schema] = {}

Endpoint = Callable[..., Any]


def without_model(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that knows no model: the gateway answers it itself."""
    vars(endpoint)["needs_model"] = False
    return endpoint


def without_weights(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that needs no weights: the gateway wakes up no model for it."""
    vars(endpoint)["needs_weights"] = False
    return endpoint


class Methods(set[str]):
    """The methods of a route. HEAD is one beside GET, and uvicorn leaves out the body."""

    def __contains__(self, method: object) -> bool:
        return super().__contains__("GET" if method == "HEAD" else method)


class Route(ScopedRoute, APIRoute):
    """The class of all routes. An endpoint returns a Response, and its parameter `body` is its
    body; see `JsonBody`.

    `response_model` is the msgspec type of the JSON in a 200, or a tuple of types. `responses` need
    not list the errors that all such routes have.
    """

    def __init__(
        self, path: str, endpoint: Endpoint, *, response_model: Any = None, **options: Any
    ) -> None:
        super().__init__(path, endpoint, response_model=None, **options)
        self.methods = Methods(self.methods)
        self.needs_model: bool = getattr(endpoint, "needs_model", True)
        self.needs_weights: bool = getattr(endpoint, "needs_weights", "POST" in self.methods)
        self.query_names = {"model", *_query_names(self.dependant.query_params)}
        self.tags = self.tags or [endpoint.__module__.rpartition(".")[2]]
        headers = ["X-Request-Id"]
        if self.kinds:
            headers.append("X-Servd-Ignored")
            schema = any_of([{"$ref": SCHEMAS + kind.__name__} for kind in self.kinds])
            body = {"required": True, "content": {"application/json": {"schema": schema}}}
            self.openapi_extra = {"requestBody": body}
        answers: Responses = {200: {}, **self.responses}
        if response_model:  # FastAPI marks an absent one
            kinds = response_model if isinstance(response_model, tuple) else (response_model,)
            content = json_content(*kinds) | answers[200].get("content", {})
            answers[200] = answers[200] | {"content": content}
        kinds = {ANTHROPIC_ROUTES: AnthropicErrorBody, OLLAMA_ROUTES: OllamaErrorBody}
        kind = next((kinds[start] for start in kinds if path.startswith(start)), ErrorBody)
        described = {
            status: {"headers": _refs(headers)} | answer for status, answer in answers.items()
        }
        self.responses = refusals(*self._refused(), kind=kind) | described

    @functools.cached_property
    def kinds(self) -> Sequence[type[RequestBody]]:
        """The possible models of the body: several for a union, none without a body."""
        body = get_type_hints(self.endpoint).get("body")
        return get_args(body) or (() if body is None else (body,))

    def _refused(self) -> list[int]:
        """Return the statuses of errors that path, query and body can cause."""
        statuses: set[int] = set()
        if self.path not in OPEN_PATHS:
            statuses |= {400, 401, 403}  # 400: X-Request-Timeout
        if "{" in self.path:
            statuses |= {404}
        if self.dependant.query_params:
            statuses |= {400}
        if self.kinds:
            statuses |= OF_BODIES
            if self.path.startswith(ANTHROPIC_ROUTES):
                statuses |= {529}
        return sorted(statuses)


def _query_names(params: Iterable[Any]) -> Iterator[str]:
    """Yield the names of query parameters; of a model such as Page, those of its fields."""
    for param in params:
        kind = param.field_info.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
        yield from kind.model_fields if is_model else (param.alias,)


@functools.cache
def schema_of(kind: Any) -> Schema:
    """Return the JSON schema of a msgspec type, and add its structs to `ANSWERS`."""
    (schema,), structs = msgspec.json.schema_components((kind,), ref_template=SCHEMAS + "{name}")
    for name, struct in structs.items():
        assert ANSWERS.setdefault(name, struct) == struct, f"there are two structs {name}"
    return schema


def any_of(schemas: Sequence[Schema]) -> Schema:
    """Return the JSON schema of a value that matches one of `schemas`."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def json_content(*kinds: Any) -> Schema:
    """Return the `content` of a JSON response that has one of the msgspec types `kinds`."""
    return {"application/json": {"schema": any_of([schema_of(kind) for kind in kinds])}}


def text_content(*media_types: str) -> Responses:
    """Return the `responses` of a route whose 200 is text of one of `media_types`."""
    return {200: {"content": {name: {"schema": {"type": "string"}} for name in media_types}}}


def events(*kinds: Any) -> Responses:
    """Return the `responses` of a route that may stream documents of these msgspec types, each as
    the data of a server-sent event. The last event may be `[DONE]`.
    """
    document = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": any_of([schema_of(kind) for kind in kinds]),
    }
    fields = {"event": {"type": "string"}, "data": {"anyOf": [document, {"const": "[DONE]"}]}}
    event = {"type": "object", "properties": fields, "required": ["data"]}
    return {200: {"content": {"text/event-stream": {"itemSchema": event}}}}


def json_lines() -> Responses:
    """Return the `responses` of a route that may stream JSON objects, one a line."""
    return {200: {"content": {"application/x-ndjson": {"itemSchema": {"type": "object"}}}}}


def refusals(*statuses: int, kind: Any = ErrorBody) -> Responses:
    """Return FastAPI's `responses` for these statuses, described as in `ERRORS`."""
    responses: Responses = {}
    for status in statuses:
        headers = ["X-Request-Id"]
        if status in (429, 503, 529):
            headers.append("Retry-After")
        responses[status] = {
            "description": ERRORS[status],
            "headers": _refs(headers),
            "content": json_content(kind),
        }
    return responses


def _refs(headers: Iterable[str]) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in headers}


def _bodies(routes: Iterable[Route]) -> dict[str, Schema]:
    """Return the JSON schemas of all bodies, and of the models in them, by name."""
    models = {kind for route in routes for kind in route.kinds}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schema = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=SCHEMAS + "{model}"
    )
    return schema["$defs"]


def document(routers: Iterable[APIRouter], needs_key: bool) -> Schema:
    """Return the OpenAPI document of all routes, of class `Route`. Takes about 0.1 seconds."""
    routes = [cast(Route, route) for router in routers for route in router.routes]
    openapi = get_openapi(
        title="servd",
        version=servd.__version__,
        openapi_version="3.2.0",
        description=DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        routes=routes,
    )
    components = openapi["components"]
    components["schemas"] = _bodies(routes) | ANSWERS
    components["headers"] = HEADERS
    components["securitySchemes"] = SECURITY_SCHEMES if needs_key else {}
    for path, operations in openapi["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # it is a 400 here
            if needs_key and path not in OPEN_PATHS:
                operation["security"] = [{name: []} for name in SECURITY_SCHEMES]
    return openapi
