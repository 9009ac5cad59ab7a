"""Gemma 4: `<|channel>thought ... <channel|>`."""

from servd.api.output.reasoning_parser import ReasoningParser


class Parser(ReasoningParser):
    """As for `<think>`; the model reasons only where its system prompt has a token for it."""

    start_tag = "<|channel>thought"
    end_tag = "<channel|>"
    markers = ("<|channel>",)
    asked_by = "<|think|>"
