"""Who may do what: the options of access, and the file of API keys."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from servd.errors import ConfigError

Scope = Literal["inference", "admin", "metrics"]
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may reach the server."""

    api_key: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(
            description="A key that clients must send as `Authorization: Bearer KEY`; for several, "
            "repeat the flag. Every user of the machine sees a command line: better give "
            "--api-key-file, or one key in $SERVD_API_KEY."
        ),
    ] = []
    api_key_file: Annotated[
        str | None,
        Meta(
            description="TOML file of keys with names, scopes, limits and expiry, as hashes; "
            "`servd key NAME >> FILE` adds one, SIGHUP reads it again."
        ),
    ] = None


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the file's `[[keys]]`. Its name is the owner of all that its requests leave behind, so
    that the key behind a name can be replaced.
    """

    name: Annotated[str, Meta(pattern=r"^[\w.@-]{1,64}$")]
    # Of the key, hexadecimal. A fast hash is enough, since keys are 256 random bits and not words
    # of people: nobody can try them all, and a slow hash would cost every request its time.
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    scopes: frozenset[Scope] = frozenset({"inference"})
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0  # share of the engine, beside other keys'
    max_concurrency: Annotated[int, Meta(ge=1)] | None = None  # unfinished requests
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    expires: Annotated[datetime, Meta(tz=True)] | None = None

    @property
    def has_expired(self) -> bool:
        """Whether it opens nothing any more."""
        return self.expires is not None and datetime.now(UTC) >= self.expires


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    """The file of API keys."""

    keys: list[Key] = []


def read_keys(access: AccessConfig) -> list[Key]:
    """All keys of the options. Those that are given as text may do everything.

    Raises:
        ConfigError: the file cannot be read, has a wrong field, or has a name or hash twice.
    """
    keys = [
        Key(name=f"api-key-{number}", sha256=hash_key(text.encode()), scopes=SCOPES)
        for number, text in enumerate(dict.fromkeys(access.api_key), 1)
    ]
    if access.api_key_file is not None:
        keys += _read_file(access.api_key_file)
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if twice := {value for value in values if values.count(value) > 1}:
            raise ConfigError(f"--api-key-file: the {field} {min(twice)} is there twice")
    return keys


def hash_key(key: bytes) -> str:
    """As it stands in the file."""
    return hashlib.sha256(key).hexdigest()


def _read_file(path: str) -> list[Key]:
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=KeyFile).keys
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:  # names the field, and never shows its value
        raise ConfigError(f"--api-key-file {path}: {error}") from None
