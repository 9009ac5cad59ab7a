"""Magistral: `[THINK]...[/THINK]`."""

from __future__ import annotations

from servd.api.reasoning_parsers._think import ThinkParser


class Parser(ThinkParser):
    """As for `<think>`, with Mistral's tags."""

    start_tag = "[THINK]"
    end_tag = "[/THINK]"
