"""A client of any OpenAI-compatible server, and its flags."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from servd.errors import ServdError

SAMPLING = ("temperature", "max_tokens", "seed")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands that speak to a running server."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="any OpenAI-compatible server [%(default)s]"
    )
    key = os.environ.get("SERVD_API_KEY")
    parser.add_argument("--api-key", default=key, metavar="KEY", help="default: $SERVD_API_KEY")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
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


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    values = {name: getattr(arguments, name) for name in SAMPLING}
    return {name: value for name, value in values.items() if value is not None}


class Client:
    """Speaks to one server.

    Args:
        url: of the server, with or without /v1.
        api_key: sent as bearer token, if given.
        model: None: the first that the server lists.

    Raises:
        ServdError: the server does not answer or answers with an error.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self.model: str = model or self.request("/v1/models")["data"][0]["id"]

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Open a route; POST if there is a body."""
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            remedy = "; give it with --api-key or $SERVD_API_KEY" if error.code == 401 else ""
            raise ServdError(f"{self.url}{path}: {message_of(error)}{remedy}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            raise ServdError(
                f"no server answers at {self.url} ({reason}); start one with `servd serve`"
            ) from None

    def request(self, path: str) -> Any:
        """The JSON reply of a GET."""
        with self.open(path) as reply:
            return json.load(reply)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer.

        Raises:
            ServdError: the request is refused, or the stream reports an error.
        """
        with self.open(path, {"model": self.model, **body, "stream": True}) as reply:
            for line in reply:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServdError(chunk["error"]["message"])
                yield chunk


def message_of(error: urllib.error.HTTPError) -> str:
    """The server's own words, if it has any."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.load(error)["error"]["message"]
    return f"{error.code} {error.reason}"
