"""ApiKeyAuth asks each request for an API key, and ScopedRoute for the key's scope."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from servd.api.keys import CALL, ON_BEHALF_OF, ApiKeys
from servd.base.errors import Forbidden, InvalidRequest
from servd.config import Config
from servd.config.keys import NOBODY, Scope

if TYPE_CHECKING:
    from servd.api.call import Call

OPEN_PATHS = frozenset({"/", "/health", "/ping"})  # reveal nothing about the model
# Routes that need no scope. The files of the console are open, its other paths need any key.
OPEN_ROUTES = OPEN_PATHS | {"/console/{file:path}"}
# Routes about other clients or the machine, and their scope. All others need "inference".
SCOPE_OF_ROUTE: dict[str, Scope] = {
    "/collective_rpc": "admin",
    "/debug/audit": "admin",
    "/is_sleeping": "admin",
    "/kv_event_sources": "metrics",
    "/load": "metrics",
    "/metrics": "metrics",
    "/reset_prefix_cache": "admin",
    "/server_info": "admin",
    "/sleep": "admin",
    "/slots": "metrics",
    "/v1/cache": "metrics",
    "/v1/load_lora_adapter": "admin",
    "/v1/steps": "metrics",
    "/v1/unload_lora_adapter": "admin",
    "/wake_up": "admin",
}


class ScopedRoute(Route):
    """A route that checks the scope of the request's key itself, because only the router knows
    which route a path means. `assemble` refuses routes of other classes.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # `$` would also match before a line feed at the end of the path.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")
        self.key_scope = None if path in OPEN_ROUTES else SCOPE_OF_ROUTE.get(path, "inference")
        self.query_names: Collection[str] | None = None  # None: another server reads the query

    async def handle(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Answer a request. Raise Forbidden if its key lacks the route's scope."""
        key = scope[CALL].key
        if self.key_scope is not None and self.key_scope not in key.scopes:
            raise Forbidden(
                f"this route needs the scope {self.key_scope}, and the API key {key.name} has: "
                f"{', '.join(sorted(key.scopes)) or 'none'}"
            )
        if self.query_names is not None and scope["query_string"]:
            self._check_query(scope, self.query_names)
        await super().handle(scope, receive, send)

    def _check_query(self, scope: Connection, query_names: Collection[str]) -> None:
        """Name the query parameters that have no effect in X-Servd-Ignored. Raise InvalidRequest
        with --strict-fields, and on the routes of admins: `/wake_up?tags=weights` asks for less
        than would happen.
        """
        unknown = [name for name in QueryParams(scope["query_string"]) if name not in query_names]
        if not unknown:
            return
        call: Call = scope[CALL]
        config: Config = scope["app"].state.context.config
        if self.key_scope == "admin" or config.server.strict_fields:
            listed = ", ".join(sorted(query_names)) or "none"
            raise InvalidRequest(
                f"{self.path} has no query parameter {unknown[0][:64]!r}, only: {listed}",
                param=unknown[0][:64],
            )
        call.ignored = [name[:64] for name in unknown]


@dataclass(eq=False)
class ApiKeyAuth:
    """Middleware that requires a key, as `Authorization: Bearer KEY` or `x-api-key: KEY`, for all
    but `open_paths`. Sets `key`, and its name as `owner` and `client`, in the Call.

    Without a key, a request has no scope: if it reached another route than an open one, that route
    would refuse it.
    """

    app: ASGIApp
    keys: ApiKeys
    open_paths: Collection[str]

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            call: Call = scope[CALL]
            if scope["path"] in self.open_paths:
                call.key = NOBODY
            else:
                behalf_key = scope.get(ON_BEHALF_OF)
                key = behalf_key or self.keys.find(scope["headers"])
                call.key = key
                call.owner = key.name
                # Background requests take turns separately.
                call.client = f"{key.name}/background" if behalf_key else key.name
        await self.app(scope, receive, send)
