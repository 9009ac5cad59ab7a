"""The options of logs and traces."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.config._section import Section, about


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
        Literal["auto", "off", "requests", "all"],
        about(
            "Log a line for each answer, without what was asked and said. requests: not for health "
            "checks and metrics. auto: requests if the log goes to a terminal, else off."
        ),
    ] = "auto"
    enable_log_requests: Annotated[
        bool,
        about(
            "A line for each prompt that the model gets, with its text, its token ids and its "
            "parameters. Without it no line states what was asked."
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
            "`servd simulate`."
        ),
    ] = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        about(
            "Answers with one choice report what became of their drafts, in "
            "`metrics.speculative_decoding`. detailed: also step by step."
        ),
    ] = "none"
