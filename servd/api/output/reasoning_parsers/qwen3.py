"""Qwen3 and most other models: `<think>...</think>`, opened by the prompt or by the model."""

from servd.api.output.reasoning_parser import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    """A parser that finds reasoning only at the tag, unless the prompt opened the tag."""
