"""Pages: keeps pages of other sites, in the browsers of this server's users, from using it."""

import ipaddress
import re
import socket
from contextlib import suppress
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from servd.base.errors import Forbidden
from servd.config import Config

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
MAX_HOSTS = 32  # that are remembered


class Pages:
    """The hosts under which clients reach the server, and the origins of pages that may use it.

    A page can give its own name the address 127.0.0.1 (DNS rebinding). Its browser then takes this
    server for the page's own, and only the name in Host tells the difference.
    """

    def __init__(self, config: Config) -> None:
        access = config.access
        server = config.server
        self.hosts = [_name_of(host) for host in access.allowed_hosts]
        is_open = not self.hosts and not access.needs_keys and server.uds is None
        self.is_by_default = is_open and _is_loopback(_address_of(server.host))
        hostname = socket.gethostname().lower()
        self.own_names = {hostname, f"{hostname}.local", hostname.partition(".")[0]}
        self.origins = re.compile(access.origin_pattern)
        self._knows = lru_cache(MAX_HOSTS)(self._is_own)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Check where a request comes from.

        Raises:
            HTTPException: 421, the host is none of this server's.
            Forbidden: a page of another site sends it.
        """
        address, _ = scope.get("server") or ("", None)
        for host in headers.getlist("host"):
            if not self._knows(host, address):
                raise HTTPException(
                    421,
                    f"this server is not known as {host[:100]!r}: start it with --allowed-hosts "
                    f"{_name_of(host)[:100]}, or let the proxy send `Host: localhost`",
                )
        if scope["method"] not in SAFE_METHODS and self._is_foreign(headers):
            raise Forbidden("this origin must not send requests: add it to --allowed-origins")

    def _is_own(self, host: str, address: str) -> bool:
        """Return whether the server has this Host at its `address`."""
        name = _name_of(host)
        if self.is_by_default:
            if not _is_loopback(address):  # a socket of systemd, or a Unix socket
                return True
        elif not self.hosts or "*" in self.hosts:
            return True
        if _is_loopback(name) or name in self.own_names or name in self.hosts:
            return True
        if self.is_by_default and "." not in name and ":" not in name:
            return True  # a name of the local network, which no foreign page has
        return any(pattern[:2] == "*." and name.endswith(pattern[1:]) for pattern in self.hosts)

    def _is_foreign(self, headers: Headers) -> bool:
        """Return whether a page sends the request that is neither this server's nor allowed."""
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site")  # browsers send it to https and to localhost only
        if site is None:
            host = headers.get("host", "?").lower()  # without one, no origin is its own
            is_foreign = origin is not None and origin.lower().partition("://")[2] != host
        else:
            is_foreign = site == "cross-site"
        return is_foreign and not self.origins.fullmatch(origin or "")


def _name_of(host: str) -> str:
    """Return a Host header without its port, in lower case."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    if name.count(":") > 1:  # an IPv6 address without brackets
        return name
    return name.partition(":")[0].removesuffix(".")


def _address_of(host: str) -> str:
    """Return the address that --host means, which may be a name, or short: 127.1."""
    with suppress(OSError):
        return host if ":" in host else socket.gethostbyname(host)
    return host


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
