"""Access control: the file of API keys, and TLS certificates."""

import hashlib
import os
import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from servd.base.errors import ConfigError
from servd.config import AccessConfig, Config

TOKEN = "SERVD_JOIN_TOKEN"  # the environment's, if there is no file
MIN_TOKEN = 32  # characters
Scope = Literal["inference", "admin", "metrics"]
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the file's `[[keys]]`. Objects that a key's requests create belong to the key's
    name, so that you can replace the key.
    """

    name: Annotated[str, Meta(pattern=r"^[\w.@-]{1,64}$")]
    # The key's hash, hexadecimal. A fast hash is enough: unlike passwords, keys are 256 random
    # bits, which cannot be guessed, and a slow hash would delay every request.
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    scopes: frozenset[Scope] = frozenset({"inference"})
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0  # share of the engine, beside other keys'
    max_concurrency: Annotated[int, Meta(ge=1)] | None = None  # unfinished requests
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    min_priority: int = 0  # under --scheduling-policy priority; lower is more urgent
    # Its requests are shared out by their `user`, whom its holder vouches for.
    by_user: bool = False
    expires: Annotated[datetime, Meta(tz=True)] | None = None

    @property
    def has_expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires


# The key of every request to a server without API keys.
ANYONE = Key(name="", sha256="", scopes=SCOPES)
# The key of a request without one, to a server with API keys.
NOBODY = Key(name="", sha256="", scopes=frozenset())


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    """The file of API keys."""

    keys: list[Key] = []


def read_keys(access: AccessConfig) -> list[Key]:
    """Return all keys of the options. Keys given as text on the command line have full access.

    Raises ConfigError if the file cannot be read, has a wrong field, or has a name or hash twice.
    """
    keys = [
        Key(name=f"api-key-{digest[:12]}", sha256=digest, scopes=SCOPES)
        for digest in dict.fromkeys(hash_key(clean_key(text).encode()) for text in access.api_key)
    ]
    if access.api_key_file is not None:
        keys += _read_file(access.api_key_file)
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if twice := {value for value in values if values.count(value) > 1}:
            raise ConfigError(
                f"--api-key-file {access.api_key_file}: the {field} {min(twice)} occurs twice: "
                "remove one of the entries"
            )
    return keys


def clean_key(text: str) -> str:
    """Return an API key without the white space around it, such as the line end of a file.

    Raises ConfigError, which does not show the key, if no header can carry it.
    """
    key = text.strip()
    if not key or not key.isprintable():  # nor can lone surrogates of bytes that are no UTF-8
        raise ConfigError(
            "an API key (--api-key, $SERVD_API_KEY) is empty, or has a control character or bytes "
            "that are not UTF-8: no header can carry it"
        )
    return key


def check_new_keys(access: AccessConfig) -> None:
    """Check the keys that replace the current keys.

    Raises ConfigError like `read_keys`, or if the file would let nobody in.
    """
    keys = read_keys(access)
    if access.api_key_file is not None and all(key.has_expired for key in keys):
        raise ConfigError(
            f"--api-key-file {access.api_key_file} has no valid key, so every request would "
            "fail: add one with `servd key`, or stop the server"
        )


def tls_context(access: AccessConfig) -> ssl.SSLContext | None:
    """Return the SSL context of new connections; None without TLS.

    Raises ConfigError like `load_certificates`, or if OpenSSL knows none of the ciphers.
    """
    if access.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(access, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile")
        return None
    if access.ssl_cert_reqs and access.ssl_ca_certs is None:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, signers of client certificates")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.verify_mode = ssl.VerifyMode(access.ssl_cert_reqs)
    try:
        if access.ssl_ciphers:
            context.set_ciphers(access.ssl_ciphers)
    except ssl.SSLError:
        raise ConfigError(f"--ssl-ciphers {access.ssl_ciphers}: OpenSSL knows none") from None
    load_certificates(context, access)
    return context


def load_certificates(context: ssl.SSLContext, access: AccessConfig) -> None:
    """Load or reload the files. Existing connections keep the old certificates. Authorities are
    added, never removed. Raises ConfigError if a file cannot be read, or if key and certificate do
    not match; the context then stays unchanged.
    """
    assert access.ssl_certfile is not None
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # a failure leaves a certificate without key
    try:
        for tls in (trial, context):
            tls.load_cert_chain(access.ssl_certfile, access.ssl_keyfile, password=lambda: "")
            if access.ssl_ca_certs is not None:
                tls.load_verify_locations(access.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        files = (access.ssl_certfile, access.ssl_keyfile, access.ssl_ca_certs)
        file_names = ", ".join(filter(None, files))
        why = error.strerror or str(error)
        if "PEM lib" in why:  # all that OpenSSL says
            why = "a PEM certificate and its PEM private key are needed"
            why += "" if access.ssl_keyfile else "; the key may be in another file: --ssl-keyfile"
        raise ConfigError(f"TLS: {file_names}: {why}") from None


def hash_key(key: bytes) -> str:
    """Return the hash of a key, as in the file."""
    return hashlib.sha256(key).hexdigest()


def _read_file(path: str) -> list[Key]:
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=KeyFile).keys
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path}: this is not UTF-8 text") from None
    except RecursionError:
        raise ConfigError(f"--api-key-file {path}: nested too deeply") from None
    except msgspec.DecodeError as error:  # names the field, and never shows its value
        raise ConfigError(f"--api-key-file {path}: {error}") from None


def read_token(config: Config) -> str:
    """Return the token that all peers share.

    Raises ConfigError if there is no token, it is too short, or other users can read it.
    """
    path = config.parallel.join_token_file
    if path is None:
        token = os.environ.get(TOKEN, "")
        source = f"${TOKEN}"
    else:
        source = f"--join-token-file {path}"
        try:
            token = Path(path).read_text().strip()
            if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                raise ConfigError(f"{source}: other users may read this file; chmod 600 it")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: {getattr(error, 'strerror', error)}") from None
    if not token:
        raise ConfigError(
            "--kv-transfer-config needs a token that all peers share: --join-token-file FILE, "
            f"or ${TOKEN}; `openssl rand -hex 32` makes one"
        )
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{source}: {len(token)} characters are too few for a token, which has at least "
            f"{MIN_TOKEN}; `openssl rand -hex 32` makes one"
        )
    return token
