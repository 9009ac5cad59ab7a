"""Qwen3 and most others: `<think>...</think>`, opened by the prompt or by the model."""

from servd.api.output.reasoning_parser import ReasoningParser


class Parser(ReasoningParser):
    """An output that does not begin with the tag has no reasoning, unless the prompt opened it."""
