"""Gemma 4: `<|channel>thought ... <channel|>`."""

from servd.api.output.reasoning_parser import ReasoningParser


class Gemma4ReasoningParser(ReasoningParser):
    """A parser with Gemma's tags. The model reasons only if its system prompt has `<|think|>`."""

    start_tag = "<|channel>thought"
    end_tag = "<channel|>"
    markers = ("<|channel>",)
    asked_by = "<|think|>"
