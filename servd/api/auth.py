"""API keys: every route is guarded but liveness, the index and the files of the console."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from servd.access import SCOPES, AccessConfig, Key, Scope, hash_key, read_keys
from servd.errors import ConfigError, Forbidden, Unauthorized

OPEN_PATHS = frozenset({"/", "/health", "/ping"})  # they tell nothing of the model
# What tells of other clients, or of the machine. Whatever is not here is for inference.
SCOPE_OF_PATH: dict[str, Scope] = {
    "/debug/audit": "admin",
    "/load": "metrics",
    "/metrics": "metrics",
    "/server_info": "admin",
    "/v1/steps": "metrics",
}
# Whose request it is where no key is needed.
ANYONE = Key(name="", sha256="", scopes=SCOPES)
# Key of an ASGI scope that this process made: the API key for which it asks, in the background.
ON_BEHALF_OF = "servd.on_behalf_of"


class Keys:
    """The keys of this server, as they were last read."""

    def __init__(self, access: AccessConfig) -> None:
        # A file without keys opens nothing.
        self.are_needed = bool(access.api_key or access.api_key_file)
        self.load(access)

    def load(self, access: AccessConfig) -> None:
        """Read them, again.

        Raises:
            ConfigError: see `read_keys`, or there were none before; those of before stay.
        """
        known = read_keys(access)
        if known and not self.are_needed:
            raise ConfigError("a server that started without API keys asks for none: restart it")
        self.known = known

    @property
    def are_several(self) -> bool:
        """Whether clients have to be kept apart."""
        return len(self.known) > 1

    def named(self, owner: str) -> Key | None:
        """The key with this name, unless it is gone or has expired."""
        known = self.known if self.are_needed else [ANYONE]
        return next((key for key in known if key.name == owner and not key.has_expired), None)

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> Key:
        """The key that a request carries.

        Raises:
            Unauthorized: it carries none, a wrong one or one that has expired.
        """
        offered: bytes | None = None
        for name, value in headers:
            if name == b"x-api-key":
                offered = value
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                offered = value[7:].strip()
        if offered is None:
            raise Unauthorized("an API key is needed: send it as `Authorization: Bearer KEY`")
        # Hashes have one length, and all keys are compared: time tells neither length, prefix nor
        # position.
        digest = hash_key(offered)
        found = [key for key in self.known if hmac.compare_digest(digest, key.sha256)]
        if not found:
            raise Unauthorized("the API key is not valid here")
        if found[0].has_expired:
            raise Unauthorized("the API key has expired")
        return found[0]


class ApiKeyAuth:
    """Lets a request pass that carries one of the keys as `Authorization: Bearer KEY` or
    `x-api-key: KEY`, with the scope of the route, and notes in `scope["state"]` the `key`, its
    `owner`, and as `client` the same.

    Decides on the ASGI path, which the router uses too, and never on a URL rebuilt from headers.
    """

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Collection[str]) -> None:
        self.app = app
        self.keys = keys
        self.open_paths = open_paths

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and scope["path"] not in self.open_paths:
            own = scope.get(ON_BEHALF_OF)
            key = own or self.keys.find(scope["headers"])
            needed = SCOPE_OF_PATH.get(scope["path"], "inference")
            if needed not in key.scopes:
                raise Forbidden(
                    f"this route needs the scope {needed}, and the API key {key.name} has: "
                    f"{', '.join(sorted(key.scopes)) or 'none'}"
                )
            # What it asks for in the background takes turns with others' alone.
            client = f"{key.name}/background" if own else key.name
            scope["state"].update(key=key, owner=key.name, client=client)
        await self.app(scope, receive, send)
