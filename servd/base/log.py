"""Logging: one format, with the process name, for every process of the tree."""

import logging
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Protocol

import msgspec

# Ids of the current request: `request_id`, and `trace_id` if the client sent one.
current_request: ContextVar[Mapping[str, str]] = ContextVar(
    "current_request", default=MappingProxyType({})
)

# Environment variable: the model's name, if each of several has its own processes.
MODEL = "SERVD_LOG_MODEL"


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
            "message": record.getMessage(),
            **current_request.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def setup(process: str, options: LogOptions) -> None:
    """Log to stderr as `12:34:56.789 INFO  api-0  message`, or as JSON. Call once per process."""
    if model := os.environ.get(MODEL):
        process = f"{model}/{process}"
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)-7s {process:<8} %(message)s", datefmt="%H:%M:%S"
    )
    handler.setFormatter(JsonFormatter(process) if options.log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    set_level(options)


def resolve_access_log(options: LogOptions) -> str:
    """Return the value of --access-log. For `auto`: `requests` on a terminal, otherwise `off`."""
    if options.access_log != "auto":
        return options.access_log
    return "requests" if sys.stderr.isatty() else "off"


def set_level(options: LogOptions) -> None:
    logging.getLogger("servd").setLevel(options.log_level.upper())
