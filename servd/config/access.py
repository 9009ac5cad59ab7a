"""The options of access to the server."""

from typing import Annotated

from msgspec import Meta

from servd.config._section import Section, about


class AccessConfig(Section, frozen=True):
    """Who may reach the server."""

    api_key: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        about(
            "API key that clients send as `Authorization: Bearer KEY`; repeat the flag for more. "
            "Other users of the machine see command lines: prefer --api-key-file or "
            "$SERVD_API_KEY."
        ),
    ] = []
    api_key_file: Annotated[
        str | None,
        about(
            "TOML file of hashed API keys with names, scopes, limits and expiry. `servd key NAME "
            ">> FILE` adds a key; SIGHUP reloads the file."
        ),
    ] = None
    ssl_certfile: Annotated[str | None, about("Certificate chain (PEM). Turns on HTTPS.")] = None
    ssl_keyfile: Annotated[
        str | None,
        about("Private key of the certificate (PEM). Default: the key in --ssl-certfile."),
    ] = None
    ssl_ca_certs: Annotated[
        str | None, about("Certificate authorities (PEM) for the certificates of clients.")
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        about(
            "Certificates of clients. 0: not requested. 1: verified if sent. 2: required (mTLS).",
            ge=0,
            le=2,
        ),
    ] = 0
    ssl_ciphers: Annotated[
        str | None, about("Ciphers for TLS 1.2 and below, in OpenSSL's notation.")
    ] = None
    allowed_origins: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|https?://[^\s/\"]+)$")]],
        about(
            "Web origins whose pages may use the server (CORS), such as "
            "`https://chat.example.com`, or `*` for all. Default: only the server's own."
        ),
    ] = []
    allowed_methods: Annotated[
        list[str], about("HTTP methods that pages of other origins may use. Default: all.")
    ] = []
    allowed_headers: Annotated[
        list[str], about("HTTP headers that pages of other origins may send. Default: all.")
    ] = []
    allow_credentials: Annotated[
        bool, about("Let pages of other origins send cookies and client certificates.")
    ] = False

    @property
    def needs_keys(self) -> bool:
        """Whether clients must send an API key. A key file without keys lets nobody in."""
        return bool(self.api_key or self.api_key_file)
