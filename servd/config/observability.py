"""The options of logs and traces."""

from typing import Annotated, Literal

from msgspec import Meta

from servd.config._section import Section


class ObservabilityConfig(Section, frozen=True):
    """Logs and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines to show."""
    log_format: Literal["text", "json"] = "text"
    """json: one object per line, with the request id and the W3C trace id."""
    access_log: Literal["auto", "off", "requests", "all"] = "auto"
    """Log a line per answer, without its content. requests: all but health checks and metrics.
    auto: requests on a terminal, else off.
    """
    enable_log_requests: bool = False
    """Log the text, token ids and parameters of prompts. Without this option, the log does not
    contain what clients ask.
    """
    max_log_len: Annotated[int, Meta(ge=0)] | None = None
    """Maximum characters and token ids per line of --enable-log-requests. Default: no limit."""
    otlp_traces_endpoint: str | None = None
    """OpenTelemetry collector (HTTP) for a trace of each request, such as
    http://localhost:4318/v1/traces. Needs opentelemetry-exporter-otlp-proto-http.
    """
    record_trace: str | None = None
    """File for times, lengths and shared prefixes of requests, and for engine steps, as JSON lines
    without text. `servd simulate` replays it.
    """
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    """Report the number of accepted drafts in `metrics.speculative_decoding`, for answers with one
    choice. detailed: also for each step.
    """
