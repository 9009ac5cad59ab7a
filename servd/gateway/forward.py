"""Forwards a request to a server of this host, and streams the response."""

import httpx
from starlette.requests import Request

from servd.api.http.middleware import SINCE

Header = tuple[bytes, bytes]

NO_TIMEOUT = httpx.Timeout(None, connect=10)  # the server has its own timeouts
# Hop-by-hop headers, and those that a proxy sets itself or has checked.
NOT_FORWARDED = {
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"upgrade",
    b"x-request-id",
    b"date",
}
NOT_FORWARDED_OF_REQUESTS = NOT_FORWARDED | {
    b"host",
    b"origin",
    b"content-length",
    b"expect",
    b"sec-fetch-site",
    b"x-forwarded-for",
    SINCE.encode(),
}


def connect(path: str) -> httpx.AsyncClient:
    """Return a client of the server behind a Unix socket."""
    transport = httpx.AsyncHTTPTransport(uds=path, limits=httpx.Limits(max_connections=None))
    return httpx.AsyncClient(base_url="http://servd", transport=transport, timeout=NO_TIMEOUT)


def request_headers(request: Request) -> list[Header]:
    """Return the headers to forward, without those that a proxy sets itself."""
    return [(k, v) for k, v in request.headers.raw if k not in NOT_FORWARDED_OF_REQUESTS]


async def send_request(
    http: httpx.AsyncClient, request: Request, path: bytes, headers: list[Header], body: bytes
) -> httpx.Response:
    """Send a request to `path`, as it stands: httpx would resolve `..`. Return the response, whose
    body is read later. Raise httpx.LocalProtocolError if the request is malformed, and
    httpx.TransportError if the server does not answer.
    """
    query = request.scope["query_string"]
    target = path + b"?" + query if query else path
    forwarded = http.build_request(
        request.method, "/", headers=headers, content=body, extensions={"target": target}
    )
    return await http.send(forwarded, stream=True)


def response_headers(response: httpx.Response) -> list[Header]:
    """Return the headers of a server's response that the client gets."""
    headers = [(k.lower(), v) for k, v in response.headers.raw]
    return [(k, v) for k, v in headers if k not in NOT_FORWARDED]
