"""The options of logs and traces."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.config._section import Section, about


class ObservabilityConfig(Section, frozen=True):
    """Logs and traces."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("Lowest level of log lines to show.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        about("json: one object per line, with the request id and the W3C trace id."),
    ] = "text"
    access_log: Annotated[
        Literal["auto", "off", "requests", "all"],
        about(
            "Log a line per answer, without its content. requests: all but health checks and "
            "metrics. auto: requests on a terminal, else off."
        ),
    ] = "auto"
    enable_log_requests: Annotated[
        bool,
        about(
            "Log the text, token ids and parameters of prompts. Without this option, the log does "
            "not contain what clients ask."
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
            "OpenTelemetry collector (HTTP) for a trace of each request, such as "
            "http://localhost:4318/v1/traces. Needs the extra servd[otel]."
        ),
    ] = None
    record_trace: Annotated[
        str | None,
        about(
            "File for times, lengths and shared prefixes of requests, and for engine steps, as "
            "JSON lines without text. `servd simulate` replays it."
        ),
    ] = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        about(
            "Report the number of accepted drafts in `metrics.speculative_decoding`, for answers "
            "with one choice. detailed: also for each step."
        ),
    ] = "none"
