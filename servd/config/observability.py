"""The options of logs and traces."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.config._section import Section, about


class ObservabilityConfig(Section, frozen=True):
    """Logs, and what responses report about their computation."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("Lowest level of log lines to show.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        about("text, or json: one object per line, with the request id and the W3C trace id."),
    ] = "text"
    access_log: Annotated[
        Literal["auto", "off", "requests", "all"],
        about(
            "Log a line per answer, without its content. requests: except health checks and "
            "metrics. auto: requests if the log goes to a terminal, else off."
        ),
    ] = "auto"
    enable_log_requests: Annotated[
        bool,
        about(
            "Log the text, token ids and parameters of each prompt. Without this option, "
            "the log does not contain what clients ask."
        ),
    ] = False
    max_log_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about(
            "Maximum characters and token ids per line of --enable-log-requests. Default: no limit."
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        about(
            "OpenTelemetry collector (HTTP) that gets a trace of each request, such as "
            "http://localhost:4318/v1/traces. Needs the extra servd[otel]."
        ),
    ] = None
    record_trace: Annotated[
        str | None,
        about(
            "File to which servd appends times, lengths and shared prefixes of requests, "
            "and all engine steps, as JSON lines without text. `servd simulate` replays it."
        ),
    ] = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        about(
            "Report in `metrics.speculative_decoding` how many drafts were accepted, for "
            "answers with one choice. detailed: also for each step."
        ),
    ] = "none"
