"""A client of any OpenAI-compatible server, and its flags."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from servd.base.errors import ServdError

SAMPLING = ("temperature", "max_tokens", "seed")
RETRIES = 5  # when the server has no room for a request
LONGEST_WAIT = 60.0  # seconds between retries
REOPEN = (ConnectionError, http.client.ImproperConnectionState)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        "--base-url",
        default="http://127.0.0.1:8000",
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
        help="longest answer in tokens; default: the server's",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")


def connect(arguments: argparse.Namespace) -> tuple[Client, dict[str, Any]]:
    """Return a client, and the model and the sampling parameters for its requests."""
    client = Client(arguments.url, arguments.api_key)
    body = {name: getattr(arguments, name) for name in SAMPLING}
    given = {name: value for name, value in body.items() if value is not None}
    return client, {"model": arguments.model or client.first_model(), **given}


class Answer(NamedTuple):
    status: int
    request_id: str | None
    body: Any  # parsed if it is JSON


class Client:
    """A client of one server over one connection, for a single thread. Connects to `uds`, if given,
    instead of the URL's host. Raises ServdError if the URL is invalid.
    """

    def __init__(self, url: str, api_key: str | None = None, uds: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"content-type": "application/json"}
        if api_key:
            self.headers["authorization"] = f"Bearer {api_key}"
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            is_tls = parts.scheme == "https"
            kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
            self.connection = UnixConnection(uds) if uds else kind(parts.netloc)
        except (ValueError, http.client.InvalidURL) as error:
            raise ServdError(f"{url}: {error}") from None
        self.prefix = parts.path

    def send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Return the answer's head. Its body can be read until the next request. Raises OSError or
        HTTPException.

        If a used connection fails, a new one is tried: the server may have closed it, or an answer
        was not read to its end.
        """
        data = None if body is None else json.dumps(body)
        was_open = self.connection.sock is not None
        try:
            self.connection.request(method, self.prefix + path, data, self.headers)
            return self.connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()  # the next request opens it again
            if was_open and isinstance(error, REOPEN):
                return self.send(method, path, body)
            raise

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Return the whole answer. Retries while the server is too busy. Raises like `send`."""
        attempts_left = RETRIES
        while True:
            reply = self.send(method, path, body)
            data = reply.read()
            seconds = seconds_of(reply.headers.get("retry-after"))
            if seconds is None or not attempts_left:
                break
            attempts_left -= 1
            time.sleep(seconds)
        try:
            content = json.loads(data)
        except ValueError:
            content = data.decode("utf8", "replace")
        return Answer(reply.status, reply.headers.get("x-request-id"), content)

    def is_healthy(self) -> bool:
        try:
            return self.send("GET", "/health").status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            self.connection.close()

    def open(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Return `send`'s answer. Raises ServdError if there is no answer, or not status 200."""
        try:
            reply = self.send(method, path, body)
            if reply.status == 200:
                return reply
            answer = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServdError(
                f"no server answers at {self.url} ({error}); start one with `servd serve`"
            ) from None
        try:
            message = json.loads(answer)["error"]["message"]  # the server's own words
        except (ValueError, KeyError, TypeError):
            message = f"{reply.status} {reply.reason}"
        hint = "; give it with --api-key or $SERVD_API_KEY" if reply.status == 401 else ""
        raise ServdError(f"{self.url}{path}: {message}{hint}")

    def first_model(self) -> str:
        """Return the first model that the server lists."""
        try:
            return json.load(self.open("GET", "/v1/models"))["data"][0]["id"]
        finally:
            self.connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer. Raises ServdError, also if the stream reports an
        error.
        """
        try:
            for line in self.open("POST", path, {**body, "stream": True}):
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServdError(chunk["error"]["message"])
                yield chunk
        finally:
            self.connection.close()  # the rest of the answer is not needed


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


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
