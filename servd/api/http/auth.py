"""ApiKeyAuth: requires an API key for all routes except `open_paths`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from servd.api.keys import CALL, ON_BEHALF_OF, Keys
from servd.base.errors import Forbidden
from servd.config.keys import Scope

if TYPE_CHECKING:
    from servd.api.call import Call

OPEN_PATHS = frozenset({"/", "/health", "/ping"})  # reveal nothing about the model
# Routes about other clients or the machine, and their scope. All others need "inference".
SCOPE_OF_PATH: dict[str, Scope] = {
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


@dataclass(eq=False)
class ApiKeyAuth:
    """Middleware that requires a key with the route's scope, as `Authorization: Bearer KEY` or
    `x-api-key: KEY`. Sets `key`, and its name as `owner` and `client`, in the Call.

    The ASGI path identifies the route, as in the router, never a URL built from headers.
    """

    app: ASGIApp
    keys: Keys
    open_paths: Collection[str]

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open_paths:
            own = scope.get(ON_BEHALF_OF)
            key = own or self.keys.find(scope["headers"])
            needed = SCOPE_OF_PATH.get(scope["path"], "inference")
            if needed not in key.scopes:
                raise Forbidden(
                    f"this route needs the scope {needed}, and the API key {key.name} has: "
                    f"{', '.join(sorted(key.scopes)) or 'none'}"
                )
            # Background requests take turns separately.
            client = f"{key.name}/background" if own else key.name
            call: Call = scope[CALL]
            call.key = key
            call.owner = key.name
            call.client = client
        await self.app(scope, receive, send)
