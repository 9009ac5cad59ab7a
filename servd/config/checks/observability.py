"""Checks the options of tracing and of draft metrics."""

import importlib.metadata
import os

from servd.base.errors import ConfigError
from servd.config import Config

OTLP_EXPORTER = "opentelemetry-exporter-otlp-proto-http"


def check_observability(config: Config) -> None:
    """Check the options of tracing and of draft metrics."""
    tells_of_drafts = config.observability.per_request_spec_decode_metrics != "none"
    if tells_of_drafts and config.model.speculative_config is None:
        raise ConfigError(
            "--per-request-spec-decode-metrics needs speculative decoding: add --speculative-config"
        )
    if (endpoint := config.observability.otlp_traces_endpoint) is None:
        return
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    if not endpoint.startswith(("http://", "https://")) or protocol != "http/protobuf":
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} with {protocol}: servd only supports OTLP over "
            "HTTP (http/protobuf), e.g. http://HOST:4318/v1/traces"
        )
    try:
        importlib.metadata.version(OTLP_EXPORTER)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs a package: pip install {OTLP_EXPORTER}"
        ) from error
