"""Logs: their options, and one format, with the process name, for every process of the tree."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from servd.options import Section, about

# Ids of the request that is being served: `request_id`, and `trace_id` where the client gave one.
current_request: ContextVar[Mapping[str, str]] = ContextVar(
    "current_request", default=MappingProxyType({})
)

# Environment variable: the model, where each of several has processes of its own.
MODEL = "SERVD_LOG_MODEL"


class ObservabilityConfig(Section, frozen=True):
    """Logs, and what responses say about how they were made."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("Least level shown.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        about("json: one object per line, with the ids of the request and of its W3C trace."),
    ] = "text"
    access_log: Annotated[
        Literal["off", "requests", "all"],
        about(
            "A line for each answer, without what was asked and said. requests: not for health "
            "checks and metrics."
        ),
    ] = "off"
    enable_log_requests: Annotated[
        bool,
        about(
            "A line for each prompt that the model gets, with its text, its token ids and its "
            "parameters. Without it no line says what was asked."
        ),
    ] = False
    max_log_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about("Most characters of the text, and token ids, in such a line."),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        about(
            "Export a span of each request to this OpenTelemetry collector, over HTTP, e.g. "
            "http://localhost:4318/v1/traces. Needs the extra servd[otel]."
        ),
    ] = None
    record_trace: Annotated[
        str | None,
        about(
            "Append when each request came, how long it and its answer were and what it had in "
            "common with others, and all steps, to this file, as JSON lines without text, for "
            "`servd what-if`."
        ),
    ] = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        about(
            "Answers with one choice tell what became of their drafts, in "
            "`metrics.speculative_decoding`. detailed: also step by step."
        ),
    ] = "none"


class JsonFormatter(logging.Formatter):
    """A JSON object each line; what a record has as `fields` stands beside its message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
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


def setup(process: str, options: ObservabilityConfig) -> None:
    """Log to stderr as `12:34:56.789 INFO  api-0  message`, or as JSON. Called once by each
    process.
    """
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


def set_level(options: ObservabilityConfig) -> None:
    """Show what `options` says, from now on."""
    logging.getLogger("servd").setLevel(options.log_level.upper())
