"""The OpenAPI description of the server, made of what each route file declares of its routes.

Request bodies are pydantic models and responses are msgspec structs: the schemas come from the
same classes that read and write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, get_args

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

import servd
from servd.api.auth import OPEN_PATHS
from servd.api.middleware import MAX_BODY
from servd.api.protocol.errors import ANTHROPIC_ROUTES, AnthropicErrorBody, ErrorBody
from servd.api.protocol.generation import GenerationRequest
from servd.api.protocol.translation import TranslatedRequest
from servd.params import RepetitionDetection, SamplingParams

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Schema = dict[str, Any]

INFO: Schema = {
    "title": "servd",
    "version": servd.__version__,
    "description": "An OpenAI-compatible serving daemon for language models. Fields that are not "
    "listed are accepted, have no effect, and are named in the header `X-Servd-Ignored`; with "
    "`--strict-fields` they are a 400. What one field asks of another is not in the schemas: "
    "`stream_options` needs `stream`, for example. Breaking such a rule is a 400 that says so.",
    "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}
SECURITY_SCHEMES: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
HEADERS: Schema = {
    "X-Request-Id": {
        "description": "The id of the request: the client's, from the same header, or a new one.",
        "schema": {"type": "string"},
    },
    "X-Servd-Ignored": {
        "description": "Names of fields in the body that had no effect.",
        "schema": {"type": "string"},
    },
    "Server-Timing": {
        "description": "Milliseconds of the stages of an answer that is not streamed.",
        "schema": {"type": "string"},
    },
    "traceresponse": {
        "description": "The OpenTelemetry span of the request, if spans are exported.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds after which to try again, where that may help.",
        "schema": {"type": "integer"},
    },
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
# Field of SamplingParams -> what else requests call it.
ALIASES = {"stop": ("stop_sequences",)}
SCHEMAS = "#/components/schemas/"
# What pydantic and msgspec call classes of one name in two modules.
LONG_NAME = re.compile(r"servd(__|[._])api\1protocol\1([a-z_]+)\1(?=[A-Z])")


class Operation(msgspec.Struct, frozen=True):
    """What a route reads and answers; its path and methods are the router's."""

    answers: tuple[Any, ...]
    body: Any
    form: Schema | None
    errors: tuple[int, ...]
    events: tuple[Any, ...]
    media_types: tuple[str, ...]
    query: dict[str, Schema]
    statuses: dict[int, tuple[str, Any]]


def describes(
    *answers: Any,
    body: Any = None,
    form: Schema | None = None,
    errors: tuple[int, ...] = (),
    events: tuple[Any, ...] = (),
    media_types: tuple[str, ...] = ("application/json",),
    query: dict[str, Schema] | None = None,
    statuses: dict[int, tuple[str, Any]] | None = None,
) -> Callable[[Endpoint], Endpoint]:
    """Declare the types of an endpoint for the description; the endpoint stays as it is.

    Args:
        answers: msgspec types, one of which a 200 has; none if the route always refuses.
        body: the `RequestBody` that it reads, or a union of them.
        form: JSON schema of the multipart form that it reads.
        errors: statuses of errors beside those that path, query and body bring.
        events: msgspec types of the documents in a stream, if the client may ask for one.
        media_types: those of a 200; the client chooses.
        query: parameter name -> JSON schema.
        statuses: more that are no errors: what the status means, and the type of its body.
    """

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.operation = Operation(  # type: ignore[attr-defined]
            answers, body, form, errors, events, media_types, query or {}, statuses or {}
        )
        return endpoint

    return declare


def document(routers: Iterable[APIRouter], needs_key: bool) -> Schema:
    """The OpenAPI document of all routes. Takes about a tenth of a second.

    Args:
        routers: whose every endpoint is declared by `describes`.
        needs_key: whether clients have to send an API key.
    """
    routes = [r for router in routers for r in router.routes if isinstance(r, APIRoute)]
    operations: list[Operation] = [vars(route.endpoint)["operation"] for route in routes]
    schemas = _Schemas(operations)
    paths: dict[str, Schema] = {}
    for route, operation in zip(routes, operations, strict=True):
        path = paths.setdefault(route.path.replace(":path}", "}"), {})
        for method in sorted(route.methods or ()):
            path[method.lower()] = _operation(route, method, operation, schemas, needs_key)
    components = {
        "schemas": schemas.components,
        "headers": HEADERS,
        "securitySchemes": SECURITY_SCHEMES if needs_key else {},
    }
    whole = {"openapi": "3.2.0", "info": INFO, "paths": paths, "components": components}
    return json.loads(LONG_NAME.sub(r"\2.", json.dumps(whole)))


class _Schemas:
    """JSON schemas of all declared types; what they share is in `components`."""

    def __init__(self, operations: list[Operation]) -> None:
        bodies: dict[int, Any] = {id(o.body): o.body for o in operations if o.body is not None}
        answers: dict[int, Any] = {id(kind): kind for kind in (ErrorBody, AnthropicErrorBody)}
        for operation in operations:
            others = [kind for _, kind in operation.statuses.values()]
            for kind in (*operation.answers, *operation.events, *others):
                answers[id(kind)] = kind
        read, definitions = TypeAdapter.json_schemas(
            [(key, "validation", TypeAdapter(body)) for key, body in bodies.items()],
            ref_template=SCHEMAS + "{model}",
            schema_generator=_WithoutTitles,
        )
        template = SCHEMAS + "{name}"
        written, components = msgspec.json.schema_components(
            answers.values(), ref_template=template
        )
        shared = definitions.get("$defs", {})
        assert not shared.keys() & components.keys(), shared.keys() & components.keys()
        for body in bodies.values():
            for kind in get_args(body) or (body,):  # each one of a union
                properties = shared[kind.__name__]["properties"]
                _describe(properties, kind.descriptions())
                for name in sorted(kind.from_chat):
                    taken = shared["ChatCompletionRequest"]["properties"][name]
                    properties.setdefault(name, taken)
                if issubclass(kind, GenerationRequest | TranslatedRequest):
                    _add_bounds(properties, SamplingParams)
        _add_bounds(shared["RepetitionFields"]["properties"], RepetitionDetection)
        self.components: Schema = {**shared, **components}
        self._of = {key: schema for (key, _), schema in read.items()}
        self._of |= dict(zip(answers, written, strict=True))

    def of(self, *kinds: Any) -> Schema:
        """The schema of a value of one of these types."""
        schemas = [self._of[id(kind)] for kind in kinds]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _describe(properties: dict[str, Schema], own: dict[str, str]) -> None:
    """Give the fields their descriptions; sampling fields mean the same in all requests."""
    shared = GenerationRequest.descriptions()
    for field in SamplingParams.__struct_fields__:
        for name in (field, *ALIASES.get(field, ())):
            if text := shared.get(field):
                own.setdefault(name, text)
    for name in own.keys() & properties.keys():
        properties[name]["description"] = own[name]


def _add_bounds(properties: dict[str, Schema], params: type[msgspec.Struct]) -> None:
    """Give the fields that become fields of `params` the bounds that `verify` enforces there."""
    for field in msgspec.structs.fields(params):
        for name in (field.name, *ALIASES.get(field.name, ())):
            if name in properties:
                _tighten(properties[name], msgspec.json.schema(field.type))


def _tighten(schema: Schema, bounded: Schema) -> None:
    by_type = {option.get("type"): option for option in bounded.get("anyOf", [bounded])}
    for option in schema.get("anyOf", [schema]):
        for key, bound in by_type.get(option.get("type"), {}).items():
            if isinstance(bound, dict):
                _tighten(option.setdefault(key, {}), bound)
            else:
                option.setdefault(key, bound)


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would be the name of the field again


def _operation(
    route: APIRoute, method: str, operation: Operation, schemas: _Schemas, needs_key: bool
) -> Schema:
    text = " ".join((route.endpoint.__doc__ or "").partition("Raises:")[0].split())
    summary, stop, _ = text.partition(". ")
    described: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{route.path}").rstrip("_"),
        "summary": summary.removesuffix("."),
        "tags": [route.endpoint.__module__.rpartition(".")[2]],
    }
    if stop:
        described["description"] = text
    if parameters := list(_parameters(route, operation)):
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(schemas.of(operation.body))}
    elif operation.form is not None:
        content = {"multipart/form-data": {"schema": operation.form}}
        described["requestBody"] = {"required": True, "content": content}
    described["responses"] = dict(_responses(route, operation, schemas, needs_key))
    if needs_key and route.path not in OPEN_PATHS:
        described["security"] = [{name: []} for name in SECURITY_SCHEMES]
    return described


def _parameters(route: APIRoute, operation: Operation) -> Iterator[Schema]:
    for name in re.findall(r"{(\w+)", route.path):
        schema = {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    for name, schema in operation.query.items():
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _responses(
    route: APIRoute, operation: Operation, schemas: _Schemas, needs_key: bool
) -> Iterator[tuple[str, Schema]]:
    headers = ["X-Request-Id"] if operation.body is None else ["X-Request-Id", "X-Servd-Ignored"]
    content: Schema = {}
    if operation.answers:
        whole = {"schema": schemas.of(*operation.answers)}
        content = dict.fromkeys(operation.media_types, whole)
    if operation.events:
        content["text/event-stream"] = {"itemSchema": _event(schemas.of(*operation.events))}
    if content:
        yield "200", _response("The answer.", content, headers)
    for status, (meaning, kind) in operation.statuses.items():
        yield str(status), _response(meaning, _json(schemas.of(kind)), headers)
    is_anthropic = route.path.startswith(ANTHROPIC_ROUTES)
    error = schemas.of(AnthropicErrorBody if is_anthropic else ErrorBody)
    for status in _errors(route, operation, needs_key):
        names = ["X-Request-Id", *(["Retry-After"] if status in (429, 503, 529) else ())]
        yield str(status), _response(ERRORS[status], _json(error), names)


def _errors(route: APIRoute, operation: Operation, needs_key: bool) -> list[int]:
    statuses = {401, 403} if needs_key and route.path not in OPEN_PATHS else set()
    statuses |= {*operation.errors}
    if "{" in route.path:
        statuses |= {404}
    if operation.query:
        statuses |= {400}
    if operation.form is not None:
        statuses |= {400, 408, 413}
    if operation.body is not None:
        statuses |= {400, 404, 408, 413, 429, 500, 503, 504}
        if route.path.startswith(ANTHROPIC_ROUTES):
            statuses |= {529}
    return sorted(statuses)


def _response(meaning: str, content: Schema, headers: list[str]) -> Schema:
    refs = {name: {"$ref": f"#/components/headers/{name}"} for name in headers}
    return {"description": meaning, "headers": refs, "content": content}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _event(schema: Schema) -> Schema:
    """A server-sent event that holds a document, or says that it is the last one."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    fields = {"event": {"type": "string"}, "data": {"anyOf": [text, {"const": "[DONE]"}]}}
    return {"type": "object", "properties": fields, "required": ["data"]}
