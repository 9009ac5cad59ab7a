"""API keys: guard every route except liveness, the index page and the console's files."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from servd.base.errors import ConfigError, Forbidden, Unauthorized
from servd.config import AccessConfig
from servd.config.keys import SCOPES, Key, Scope, hash_key, read_keys

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
# The key of every request to a server without API keys.
ANYONE = Key(name="", sha256="", scopes=SCOPES)
# In an ASGI scope made by this process: the API key on whose behalf it sends a batch's request.
ON_BEHALF_OF = "servd.on_behalf_of"
CALL = "servd.call"  # the Call in the ASGI scope


class Keys:
    def __init__(self, access: AccessConfig) -> None:
        self.are_needed = access.needs_keys
        self.load(access)

    def load(self, access: AccessConfig) -> None:
        """Read the keys, at start and on reload. After a ConfigError, which a server started
        without keys raises too, the current keys stay.
        """
        known = read_keys(access)
        if known and not self.are_needed:
            raise ConfigError("a server that started without API keys asks for none: restart it")
        self.current = known
        self.is_multi_tenant = len(known) > 1  # then their clients are isolated from each other

    def named(self, owner: str) -> Key | None:
        """The key with this name, unless it is gone or has expired."""
        known = self.current if self.are_needed else [ANYONE]
        return next((key for key in known if key.name == owner and not key.has_expired), None)

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> Key:
        """Return the key that a request was sent with. Raises Unauthorized: there is none, or it is
        wrong or has expired.
        """
        offered: bytes | None = None
        for name, value in headers:
            if name == b"x-api-key":
                offered = value
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                offered = value[7:].strip()
        if offered is None:
            raise Unauthorized("an API key is needed: send it as `Authorization: Bearer KEY`")
        # Constant time: hashes have one length, and all keys are compared.
        digest = hash_key(offered)
        found = [key for key in self.current if hmac.compare_digest(digest, key.sha256)]
        if not found:
            raise Unauthorized("the API key is not valid here")
        if found[0].has_expired:
            raise Unauthorized("the API key has expired")
        return found[0]


@dataclass(eq=False)
class ApiKeyAuth:
    """Requires a key as `Authorization: Bearer KEY` or `x-api-key: KEY`, with the scope of the
    route. Sets `key`, and its name as `owner` and `client`, in its Call.

    Decides on the ASGI path, which the router uses too, and never on a URL rebuilt from headers.
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
