"""The options of access to the server."""

import re
from typing import Annotated

from msgspec import Meta

from servd.config._section import Section

# A scheme of browsers, apps or extensions, and a host; the port may be `*`. Browsers send names of
# other alphabets as ASCII ("xn--").
ORIGIN = r"^(?=[!-~]*\Z)(\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/*\"]+(:\*)?)\Z"
HOST = r"^(\*|(\*\.)?[A-Za-z0-9_.:\[\]-]+)\Z"
DEFAULT_PORT = re.compile(r"(?i)^(http:.*):80$|^(https:.*):443$")


class AccessConfig(Section, frozen=True):
    """Who may reach the server."""

    api_key: list[Annotated[str, Meta(min_length=1)]] = []
    """API key that clients send as `Authorization: Bearer KEY`; repeat the flag for more. Other
    users of the machine see command lines: prefer --api-key-file or $SERVD_API_KEY.
    """
    api_key_file: str | None = None
    """TOML file of hashed API keys with names, scopes, limits and expiry. `servd key NAME >> FILE`
    adds a key; SIGHUP reloads the file.
    """
    ssl_certfile: str | None = None
    """Certificate chain (PEM). Turns on HTTPS."""
    ssl_keyfile: str | None = None
    """Private key of the certificate (PEM). Default: the key in --ssl-certfile."""
    ssl_ca_certs: str | None = None
    """Certificate authorities (PEM) for the certificates of clients."""
    ssl_cert_reqs: Annotated[int, Meta(ge=0, le=2)] = 0
    """Certificates of clients. 0: not requested. 1: verified if sent. 2: required (mTLS)."""
    ssl_ciphers: str | None = None
    """Ciphers for TLS 1.2 and below, in OpenSSL's notation."""
    allowed_hosts: list[Annotated[str, Meta(pattern=HOST)]] = []
    """Names under which clients may reach the server: `llm.example.com`, `*.example.com`, or `*`
    for all. Names of this machine always work. Default: these and names without a dot on
    a loopback address without API keys, all names otherwise.
    """
    allowed_origins: list[Annotated[str, Meta(pattern=ORIGIN)]] = []
    """Web origins whose pages may use the server (CORS), such as `https://chat.example.com`,
    `http://localhost:*`, `app://obsidian.md` or `null`, or `*` for all. Default: only the server's
    own.
    """
    allowed_methods: list[str] = []
    """HTTP methods that pages of other origins may use. Default: all."""
    allowed_headers: list[str] = []
    """HTTP headers that pages of other origins may send. Default: all."""
    allow_credentials: bool = False
    """Let pages of other origins send cookies and client certificates."""

    @property
    def origin_pattern(self) -> str:
        """The regular expression of --allowed-origins, for a whole origin. Browsers write hosts in
        lower case, and leave the default port out.
        """
        if "*" in self.allowed_origins:
            return ".*"
        origins = [DEFAULT_PORT.sub(r"\1\2", origin) for origin in self.allowed_origins]
        patterns = [re.sub(r":\\\*$", r"(:\\d+)?", re.escape(origin)) for origin in origins]
        return "(?i)" + ("|".join(patterns) or "(?!)")

    @property
    def needs_keys(self) -> bool:
        """Whether clients must send an API key. A key file without keys lets nobody in."""
        return bool(self.api_key or self.api_key_file)
