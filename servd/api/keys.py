"""The API keys of a server, and the names that servd uses in an ASGI scope."""

import hmac
from collections.abc import Sequence
from itertools import product

from servd.base.errors import ConfigError, Unauthorized
from servd.config import AccessConfig
from servd.config.keys import ANYONE, Key, hash_key, read_keys

# In an ASGI scope made by this process: the API key on whose behalf it sends a batch's request.
ON_BEHALF_OF = "servd.on_behalf_of"
CALL = "servd.call"  # the Call in the ASGI scope


class ApiKeys:
    def __init__(self, access: AccessConfig) -> None:
        self.are_needed = access.needs_keys
        self.load(access)

    def load(self, access: AccessConfig) -> None:
        """Read the keys, at start and on reload. Raise ConfigError, and keep the current keys, if
        keys are invalid, or if a server that started without keys gets some.
        """
        keys = read_keys(access)
        if keys and not self.are_needed:
            raise ConfigError("a server that started without API keys cannot add them: restart it")
        self.current = keys
        self.is_multi_tenant = len(keys) > 1  # clients of several keys are isolated

    def find_by_owner(self, owner: str) -> Key | None:
        """Return the key with this name; None if it was removed or has expired."""
        keys = self.current if self.are_needed else [ANYONE]
        return next((key for key in keys if key.name == owner and not key.has_expired), None)

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> Key:
        """Return the first valid API key in the request's `headers`. Clients may send two, one of
        them for another server. Raise Unauthorized if there is none, or all are unknown or expired.
        """
        offered: list[bytes] = []
        for name, value in headers:
            if name == b"x-api-key":
                offered.append(value)
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                offered.append(value[7:].strip())
        if not offered:
            raise Unauthorized("an API key is needed: send it as `Authorization: Bearer KEY`")
        # Constant time: hashes have one length, and all keys are compared.
        digests = map(hash_key, offered)
        pairs = product(digests, self.current)
        matches = [key for digest, key in pairs if hmac.compare_digest(digest, key.sha256)]
        if not matches:
            raise Unauthorized("the API key is not valid")
        if (key := next((key for key in matches if not key.has_expired), None)) is None:
            raise Unauthorized("the API key has expired")
        return key
