"""API keys: every route is guarded but liveness, the index and the files of the console."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from servd.errors import Unauthorized

OPEN_PATHS = frozenset({"/", "/health", "/ping"})  # they tell nothing of the model
ANYONE = ""  # the owner of everything where no key is needed


class ApiKeyAuth:
    """Lets a request pass that carries one of the keys as `Authorization: Bearer KEY` or
    `x-api-key: KEY`, and notes in `scope["state"]` as `owner` and `client` which.

    Decides on the ASGI path, which the router uses too, and never on a URL rebuilt from headers.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self.app = app
        self.open_paths = open_paths
        self.hashes = [_hash(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http" and scope["path"] not in self.open_paths:
            owner = self._check(scope["headers"])
            scope["state"].update(owner=owner, client=owner)
        await self.app(scope, receive, send)

    def _check(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The owner of the key."""
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
        digest = _hash(offered)
        matches = [hmac.compare_digest(digest, known) for known in self.hashes]
        if not any(matches):
            raise Unauthorized("the API key is not valid here")
        return digest.hex()


def owners(keys: Sequence[str]) -> list[str]:
    """Whom what is kept here may belong to: one owner per API key; ANYONE without keys."""
    return [_hash(key.encode()).hex() for key in keys] or [ANYONE]


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
