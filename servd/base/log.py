"""Logging: one format, with the process name, for every process of the tree."""

import json
import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TextIO

import msgspec

# Ids of the current request: `request_id`, and `trace_id` if the client sent one.
current_request: ContextVar[Mapping[str, str]] = ContextVar(
    "current_request", default=MappingProxyType({})
)

# Environment variable: the model's name, if each of several has its own processes.
MODEL = "SERVD_LOG_MODEL"

MAX_PENDING = 1024 * 1024  # bytes of lines that wait to be written
FLUSH_TIMEOUT = 0.5  # seconds that the end of a process waits for its last lines
# Control characters, and what readers of lines take for the end of one.
UNSAFE = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
ESCAPES = {code: repr(chr(code))[1:-1] for code in UNSAFE}
JSON_ESCAPES = {code: f"\\u{code:04x}" for code in UNSAFE}

logger = logging.getLogger("servd.log")


class LogOptions(Protocol):
    """The options of logging, as in ObservabilityConfig."""

    @property
    def log_format(self) -> str: ...
    @property
    def log_level(self) -> str: ...
    @property
    def access_log(self) -> str: ...


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line, with the record's `fields` beside `message`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": _as_utf8(record.getMessage()),
            **current_request.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = _as_utf8(self.formatException(record.exc_info))
        try:
            data = msgspec.json.encode(line)
        except UnicodeEncodeError:  # a lone surrogate, of a file's name or a client's text
            data = json.dumps(line, default=str).encode()
        return data.decode().translate(JSON_ESCAPES)


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text, and an exception as more lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escape(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return escape(super().formatException(ei), "\n")


def escape(text: str, kept: str = "") -> str:
    """Escape the control characters of `text`, apart from `kept`. They could forge lines."""
    return _as_utf8(text).translate(ESCAPES | {ord(char): char for char in kept})


def _as_utf8(text: str) -> str:
    """Return `text` without the lone surrogates of file names that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


class LineWriter(logging.StreamHandler[TextIO]):
    """Writes lines from a thread of its own. A pipe or a terminal that nobody reads blocks a write,
    which must not stop the loops that log. Lines that do not fit into MAX_PENDING are dropped, and
    a line counts them when the log flows again.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.descriptor = stream.fileno()  # the buffered stream would lock its buffer meanwhile
        self.num_dropped = 0  # lines, since the start
        self.num_taken = 0  # lines of them that `take_dropped` has returned
        self._num_reported = 0
        self._pending: deque[bytes] = deque()
        self._num_bytes = 0  # of the pending lines
        self._has_changed = threading.Condition()
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line of a record, however long, or drop it. A record that cannot be formatted
        is not its logger's failure.
        """
        try:
            data = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:
            self.handleError(record)
            return
        with self._has_changed:
            if self._num_bytes >= MAX_PENDING:
                self.num_dropped += 1
                return
            self._pending.append(data)
            self._num_bytes += len(data)
            self._has_changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, at most FLUSH_TIMEOUT."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: not self._pending, FLUSH_TIMEOUT)

    def _write_lines(self) -> None:
        while True:
            with self._has_changed:
                self._has_changed.wait_for(lambda: self._pending)
                data = self._pending[0]
            self._write(data)
            with self._has_changed:
                self._pending.popleft()
                self._num_bytes -= len(data)
                self._has_changed.notify_all()
            if not self._pending and self.num_dropped > self._num_reported:
                count = self.num_dropped - self._num_reported
                self._num_reported += count
                logger.warning("%d log lines were dropped: nobody read the log", count)

    def _write(self, data: bytes) -> None:
        """Write bytes, however long it takes. Drop them if nobody can read them anymore."""
        while data:
            try:
                data = data[os.write(self.descriptor, data) :]
            except BlockingIOError:  # another process made the terminal non-blocking
                select.select([], [self.descriptor], [])
            except OSError:  # no line about it, which could not be written either
                with self._has_changed:
                    self.num_dropped += 1
                    self._num_reported += 1
                return


def setup(process: str, options: LogOptions) -> None:
    """Log to stderr as `12:34:56.789 INFO  api-0  message`, or as JSON. Call once per process."""
    if model := os.environ.get(MODEL):
        process = f"{model}/{process}"
    handler = _handler()
    text = TextFormatter(
        f"%(asctime)s.%(msecs)03d %(levelname)-7s {process:<8} %(message)s", datefmt="%H:%M:%S"
    )
    handler.setFormatter(JsonFormatter(process) if options.log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    set_level(options)


def _handler() -> logging.Handler:
    try:
        return LineWriter(sys.stderr)
    except (AttributeError, OSError):  # no stderr, or a stream in memory, which blocks nobody
        return logging.StreamHandler(sys.stderr)


def flush() -> None:
    """Write the lines that wait, before this process ends or prints something itself."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def exit_with(error: Exception) -> NoReturn:
    """End this process with the message of `error` and exit code 2."""
    flush()
    print("servd: error:", escape(str(error), "\n"), file=sys.stderr)
    sys.exit(2)


def take_dropped() -> int:
    """Return how many lines this process has dropped since the last call."""
    count = 0
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineWriter):
            count += handler.num_dropped - handler.num_taken
            handler.num_taken = handler.num_dropped
    return count


def resolve_access_log(options: LogOptions) -> str:
    """Return the value of --access-log. For `auto`: `requests` on a terminal, otherwise `off`."""
    if options.access_log != "auto":
        return options.access_log
    return "requests" if sys.stderr.isatty() else "off"


def set_level(options: LogOptions) -> None:
    logging.getLogger("servd").setLevel(options.log_level.upper())
