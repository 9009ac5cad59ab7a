"""MediaFetcher: fetches pictures over https, from public addresses of hosts that are allowed."""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from servd.base.errors import InvalidRequest

MAX_BYTES = 20 << 20  # of a picture
TIMEOUT = 15.0  # seconds for a picture, with all redirects
CONNECT_TIMEOUT = 5.0  # seconds, with the lookup of the name
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = [("Accept", "image/*"), ("Accept-Encoding", "identity"), ("User-Agent", "servd")]
PLACE = re.compile(r"([a-z0-9_-]+(\.[a-z0-9_-]+)*)\.?(:(\d{1,5}))?\Z", re.I)
SAFE = "/%:@!$&'()*+,;=~?"  # characters of an address that stay as they are
# What `is_global` leaves out: IPv6 beside 2000::/3, which has all forms that contain an address of
# IPv4 but 6to4; and clouds' metadata.
NOT_PUBLIC = [
    ip_network(text)
    for text in "::/3 4000::/2 8000::/1 2002::/16 192.0.0.0/24 168.63.129.16/32".split()
]


def is_public(text: str) -> bool:
    """Return whether an IP address belongs to a host of the internet."""
    address = ip_address(text)
    if any(address in network for network in NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast


def make_context() -> ssl.SSLContext:
    context = httpcore.default_ssl_context()
    context.load_default_certs()
    return context


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a host. Raise OSError."""
    loop = asyncio.get_running_loop()
    places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(place[4][0]) for place in places]


@dataclass(eq=False)
class MediaFetcher(httpcore.AsyncNetworkBackend):
    """Fetches pictures, without cookies and proxies. Connects to addresses that it has checked."""

    domains: Sequence[str]  # --allowed-media-domains
    resolve: Callable[[str, int], Awaitable[Sequence[str]]] = resolve  # addresses of a host
    is_allowed: Callable[[str], bool] = is_public  # whether an address may be connected to
    # Of TLS; default: the certificates of certifi and of the machine.
    context: ssl.SSLContext = field(default_factory=make_context)

    def __post_init__(self) -> None:
        self.domains = [domain.lower() for domain in self.domains]
        self.network: Any = httpcore.AnyIOBackend()

    async def fetch(self, url: str, count: Callable[[int], None]) -> bytes:
        """Return the body at an https address. Call `count` with the bytes of each part of it, and
        raise its errors. Raise InvalidRequest if the address is not allowed, or not answered with a
        body of at most MAX_BYTES within TIMEOUT.
        """
        host = ""
        try:
            async with asyncio.timeout(TIMEOUT):
                for _ in range(1 + MAX_REDIRECTS):
                    place, host = self.check(url)
                    body = await self._get(place, count)
                    if isinstance(body, bytes):
                        return body
                    url = urljoin(url, body)
        except (TimeoutError, httpcore.TimeoutException):
            raise InvalidRequest(f"{host} did not send it within {TIMEOUT:.0f} s") from None
        except (OSError, OverflowError, httpcore.NetworkError, httpcore.ProtocolError):
            raise InvalidRequest(f"{host} cannot be reached, or does not send it") from None
        raise InvalidRequest(f"its address redirects more than {MAX_REDIRECTS} times")

    def check(self, url: str) -> tuple[httpcore.URL, str]:
        """Return an address and its host. Raise InvalidRequest if it is not allowed."""
        try:
            parts = urlsplit(url)
        except ValueError:
            raise InvalidRequest("its address is malformed") from None
        if parts.scheme != "https":
            raise InvalidRequest("its address must begin with data: or https:")
        place = PLACE.match(parts.netloc)
        if place is None:
            raise InvalidRequest("its address has no plain host name, or a user name beside it")
        host = place[1].lower()
        for domain in self.domains:
            if host == domain or (domain.startswith("*.") and host.endswith(domain[1:])):
                target = quote(f"{parts.path or '/'}?{parts.query}".removesuffix("?"), safe=SAFE)
                port = int(place[4] or 443)
                return httpcore.URL(scheme="https", host=host, port=port, target=target), host
        raise InvalidRequest(
            f"this server may not fetch from {host:.100}: send a data: address, or start the "
            "server with --allowed-media-domains"
        )

    async def _get(self, url: httpcore.URL, count: Callable[[int], None]) -> bytes | str:
        """Return the body at an address, or the address to which it redirects."""
        host = url.host.decode()
        timeout = {"connect": CONNECT_TIMEOUT, "read": TIMEOUT, "write": TIMEOUT, "pool": TIMEOUT}
        pool = httpcore.AsyncConnectionPool(self.context, network_backend=self)
        async with (
            pool,
            pool.stream("GET", url, headers=HEADERS, extensions={"timeout": timeout}) as response,
        ):
            headers = {name.lower(): value.decode("latin1") for name, value in response.headers}
            if response.status in REDIRECTS:
                return headers.get(b"location", "")
            if response.status != 200:
                raise InvalidRequest(f"{host} answers {response.status}")
            if headers.get(b"content-encoding", "identity") != "identity":
                raise InvalidRequest(f"{host} sends it compressed")
            body = bytearray()
            async for part in response.aiter_stream():
                count(len(part))
                body += part
                if len(body) > MAX_BYTES:
                    raise InvalidRequest(f"it has more than {MAX_BYTES >> 20} MB")
            return bytes(body)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to a host for `httpcore`. It is looked up once: a second time, its addresses may
        be others.
        """
        async with asyncio.timeout(timeout):
            addresses = await self.resolve(host, port)
            if not all(map(self.is_allowed, addresses)):
                raise InvalidRequest(f"{host} has an address that is not public")
            for address in addresses:
                with contextlib.suppress(httpcore.ConnectError):
                    return await self.network.connect_tcp(address, port)
        raise OSError
