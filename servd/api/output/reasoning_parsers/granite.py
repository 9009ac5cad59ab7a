"""Granite 3.2: `Here is my thought process: ... Here is my response: ...`."""

from servd.api.output.reasoning_parser import ReasoningParser


class GraniteReasoningParser(ReasoningParser):
    """A parser with sentences as tags. The model reasons only if the system prompt has them."""

    start_tag = "Here is my thought process:"
    end_tag = "Here is my response:"
    asked_by = end_tag
