"""Prometheus metrics under vLLM's names."""

from __future__ import annotations


class Metrics:
    def __init__(self, model_name: str, max_model_len: int = 131072, engine: int = 0) -> None:
        raise NotImplementedError

    def render(self) -> tuple[bytes, str]:
        """(body, content type) of GET /metrics."""
        raise NotImplementedError
