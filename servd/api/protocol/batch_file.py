"""Batch files in OpenAI's format, a request or response per line."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from servd.base.bounds import shorten
from servd.base.json_reader import read_json
from servd.base.line_ends import escape_line_ends

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
MAX_LINE = 8 * 2**20  # bytes
MAX_LINES = 50_000

CustomId = Annotated[str, Meta(min_length=1, max_length=512)] | int


class Line(msgspec.Struct):
    """A request of a batch, before `check` has validated it."""

    custom_id: CustomId
    url: Any = None
    method: Any = "POST"
    body: Raw = Raw(b"null")


class Problem(msgspec.Struct):
    """The error of a line, in the format of OpenAI's batch errors."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchResponseData(msgspec.Struct):
    """The server's response to the request of a line."""

    status_code: int
    request_id: str | None = None
    body: Raw = Raw(b"null")


class BatchRequestOutput(msgspec.Struct):
    """A line of the output file: a response or an error."""

    custom_id: CustomId
    response: BatchResponseData | None = None
    error: Problem | None = None
    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid.uuid4().hex}")

    @property
    def status(self) -> int:
        """The HTTP status of the response; 0 if there is no response."""
        return self.response.status_code if self.response else 0


def lines_of(source: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number. Only line feeds end lines. Of a line that
    is longer than MAX_LINE, the first MAX_LINE + 1 bytes are yielded.
    """
    with source.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            end = line
            while len(end) > MAX_LINE and not end.endswith(b"\n"):
                end = file.readline(MAX_LINE + 1)
            if line.strip():
                yield number, line


def read_line(text: bytes) -> Line:
    """Parse a line. Raise ValueError if it is not a JSON object with a custom_id."""
    if len(text) > MAX_LINE:
        raise ValueError(f"a line may have at most {MAX_LINE} bytes")
    return read_json(text, Line)


def check(line: Line) -> None:
    """Raise ValueError, with the reason, if a line cannot be part of a batch."""
    if line.method != "POST" or line.url not in ROUTES:
        raise ValueError(f"method must be POST and url one of {', '.join(ROUTES)}")
    try:
        body = read_json(line.body, dict[str, Raw])
    except ValueError:
        raise ValueError("body must be a JSON object") from None
    for field in ("stream", "background"):
        if body.get(field, b"null") not in (b"false", b"null"):
            raise ValueError(f"a batch does not support `{field}`: leave it out")


def inspect(source: Path, endpoint: str | None = None) -> Iterator[Problem | None]:
    """Validate a batch file, and yield the problem of each line, or None. If `endpoint` is given,
    every line must have it as its url.
    """
    first: dict[CustomId, int] = {}
    for number, text in lines_of(source):
        try:
            line = read_line(text)
            other = first.setdefault(line.custom_id, number)
            check(line)
        except ValueError as error:
            yield Problem("invalid_line", str(error), number)
            continue
        if other != number:
            message = (
                f"lines {other} and {number} have the same custom_id {shorten(line.custom_id)}"
            )
            yield Problem("duplicate_custom_id", message, number, "custom_id")
        elif endpoint is not None and line.url != endpoint:
            message = f"the url is {line.url}, but the endpoint of the batch {endpoint}"
            yield Problem("mismatched_url", message, number, "url")
        else:
            yield None


class Results:
    """The results so far, in a file that a later run continues. Complete lines that report no
    server failure are kept, with their `statuses`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.statuses: dict[CustomId, int] = {}
        temporary = path.with_name(f"{path.name}.tmp")
        if path.exists():
            with temporary.open("wb") as file:
                for result, line in results_of(path):
                    if 0 < result.status < 500 and result.custom_id not in self.statuses:
                        self.statuses[result.custom_id] = result.status
                        file.write(line)
            os.replace(temporary, path)
        self.file = path.open("ab")

    def add(self, result: BatchRequestOutput) -> None:
        """Append a result to the file."""
        self.file.write(escape_line_ends(msgspec.json.encode(result)) + b"\n")
        self.file.flush()


def results_of(path: Path) -> Iterator[tuple[BatchRequestOutput, bytes]]:
    """Yield each complete result of an output file, with its line."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield read_json(line, BatchRequestOutput), line.rstrip(b"\n") + b"\n"
            except ValueError:
                continue  # cut off in the middle
