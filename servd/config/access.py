"""The options of who may reach the server."""

from typing import Annotated

from msgspec import Meta

from servd.config._section import Section, about


class AccessConfig(Section, frozen=True):
    """Who may reach the server."""

    api_key: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        about(
            "A key that clients must send as `Authorization: Bearer KEY`; for several, repeat the "
            "flag. Every user of the machine sees a command line: better give --api-key-file, or "
            "one key in $SERVD_API_KEY."
        ),
    ] = []
    api_key_file: Annotated[
        str | None,
        about(
            "TOML file of keys with names, scopes, limits and expiry, as hashes; `servd key NAME "
            ">> FILE` adds one, SIGHUP reads it again."
        ),
    ] = None
    ssl_certfile: Annotated[str | None, about("Serve HTTPS with this certificate chain (PEM).")] = (
        None
    )
    ssl_keyfile: Annotated[
        str | None, about("The certificate's private key, if in a file of its own.")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, about("Authorities that certificates of clients must come from.")
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        about(
            "Certificates of clients: 0 asks for none, 1 checks those that come, 2 lets nobody in "
            "without one (mTLS).",
            ge=0,
            le=2,
        ),
    ] = 0
    ssl_ciphers: Annotated[str | None, about("Ciphers up to TLS 1.2, as OpenSSL names them.")] = (
        None
    )
    allowed_origins: Annotated[
        list[Annotated[str, Meta(pattern=r"^(\*|https?://[^\s/\"]+)$")]],
        about(
            "Origins whose pages may use the server from a browser (CORS), such as "
            "`https://chat.example.com`; `*` for all. Default: only the server's own."
        ),
    ] = []
    allowed_methods: Annotated[
        list[str], about("Methods that pages of other origins may use. Default: all.")
    ] = []
    allowed_headers: Annotated[
        list[str], about("Headers that pages of other origins may send. Default: all.")
    ] = []
    allow_credentials: Annotated[
        bool, about("Let pages of other origins send cookies and certificates.")
    ] = False

    @property
    def needs_keys(self) -> bool:
        """Whether clients must have one; a key file without keys lets nobody in."""
        return bool(self.api_key or self.api_key_file)
