"""Qwen3 and most others: `<think>...</think>`, opened by the prompt or by the model."""

from __future__ import annotations

from servd.api.reasoning_parsers._think import ThinkParser


class Parser(ThinkParser):
    """A reply that does not begin with the tag has no thoughts, unless the prompt opened it."""
