"""Seed-OSS: `<seed:think>...</seed:think>`."""

from __future__ import annotations

from servd.api.reasoning_parser import ReasoningParser


class Parser(ReasoningParser):
    """As for `<think>`, with Seed's tags."""

    start_tag = "<seed:think>"
    end_tag = "</seed:think>"
