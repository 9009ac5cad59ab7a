"""A client of any OpenAI-compatible server, and its flags."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx
from httpx import HTTPError

from servd.base.errors import ContextTooLong, ServdError
from servd.config.keys import clean_key

DEFAULT_URL = "http://127.0.0.1:8000"
SAMPLING = ("temperature", "max_tokens", "seed")
RETRIES = 5  # when the server has no room for a request
LONGEST_WAIT = 60.0  # seconds between retries
ONE_REQUEST = httpx.Limits(max_keepalive_connections=0)  # the server closes idle ones


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        "--base-url",
        default=DEFAULT_URL,
        help="any OpenAI-compatible server [%(default)s]",
    )
    key = os.environ.get("SERVD_API_KEY")
    parser.add_argument("--api-key", default=key, metavar="KEY", help="default: $SERVD_API_KEY")
    parser.add_argument(
        "--model", "--model-name", metavar="NAME", help="default: the first that the server lists"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that request text from a running server."""
    add_server_options(parser)
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 for the most probable tokens; default: the model's",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="longest answer in tokens; default: the server's, and of `chat` 4096",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")


def connect(arguments: argparse.Namespace) -> tuple[Client, dict[str, Any]]:
    """Return a client, and the model and the sampling parameters for its requests."""
    client = Client(arguments.url, arguments.api_key)
    body = {name: getattr(arguments, name) for name in SAMPLING}
    fields = {name: value for name, value in body.items() if value is not None}
    return client, {"model": arguments.model or client.first_model(), **fields}


class ApiAnswer(NamedTuple):
    status: int
    request_id: str | None
    body: Any  # parsed if it is JSON


class Client:
    """A client of one server, at a URL or the Unix socket `uds`. Raises ServdError: a wrong URL."""

    def __init__(self, url: str, api_key: str | None = None, uds: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        auth = {"authorization": f"Bearer {clean_key(api_key)}"} if api_key else {}
        base = self.url if "://" in self.url else f"http://{self.url or 'localhost'}"
        self.uds = uds
        tls = ssl.create_default_context()  # reads $SSL_CERT_FILE
        try:
            self.http = httpx.Client(
                base_url=base,
                headers={"content-type": "application/json", **auth},
                timeout=None,
                transport=httpx.HTTPTransport(verify=tls, uds=uds, limits=ONE_REQUEST),
            )
        except (ValueError, httpx.InvalidURL) as error:
            raise ServdError(f"{url}: {error}") from None

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Return the whole response. Raises httpx.HTTPError."""
        return self.http.request(method, path, content=body and json.dumps(body))

    def ask(self, method: str, path: str, body: Any = None) -> ApiAnswer:
        """Return the whole answer. Retries while the server is too busy. Raises like `send`."""
        attempts_left = RETRIES
        while True:
            reply = self.send(method, path, body)
            seconds = seconds_of(reply.headers.get("retry-after"))
            if seconds is None or not attempts_left:
                break
            attempts_left -= 1
            time.sleep(seconds)
        try:
            content = reply.json()
        except ValueError:
            content = reply.text
        return ApiAnswer(reply.status_code, reply.headers.get("x-request-id"), content)

    def is_healthy(self) -> bool:
        if self.uds is not None:  # httpcore would leave the socket open
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(self.uds):
                    return False
        try:
            return self.send("GET", "/health").status_code == 200
        except HTTPError:
            return False

    @contextmanager
    def open(self, method: str, path: str, body: Any = None) -> Iterator[httpx.Response]:
        """Yield a response before it is read. Raises ServdError if there is none, or an error."""
        try:
            with self.http.stream(method, path, content=body and json.dumps(body)) as reply:
                if reply.status_code == 200:
                    yield reply
                    return
                answer = reply.read()
        except HTTPError as error:
            hint = f" at {self.url}; start one with `servd serve`" if self.url else ""
            raise ServdError(f"no server answers{hint} ({error})") from None
        try:
            message = json.loads(answer)["error"]["message"]  # the server's own words
        except (ValueError, KeyError, TypeError):
            message = f"{reply.status_code} {reply.reason_phrase}"
        hint = "; give a key with --api-key or $SERVD_API_KEY" if reply.status_code == 401 else ""
        kind = ContextTooLong if b"context_length_exceeded" in answer else ServdError
        raise kind(f"{self.url}{path}: {message}{hint}")

    def get(self, path: str) -> Any:
        """Return the JSON of a response. Raises like `open`."""
        with self.open("GET", path) as reply:
            return json.loads(reply.read())

    def first_model(self) -> str:
        """Return the first model that the server lists."""
        return self.get("/v1/models")["data"][0]["id"]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer. Raises ServdError, also during the stream."""
        with self.open("POST", path, {**body, "stream": True}) as reply:
            for line in split_lines(reply.iter_bytes()):
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServdError(chunk["error"]["message"])
                yield chunk


def split_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text in pieces, divided at line feeds only, unlike str.splitlines."""
    buffer = b""
    for piece in pieces:
        *lines, buffer = (buffer + piece).split(b"\n")
        yield from lines
    yield buffer


def seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which may be a date; None if it is neither."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else None
