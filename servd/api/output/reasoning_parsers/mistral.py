"""Magistral: `[THINK]...[/THINK]`."""

from servd.api.output.reasoning_parser import ReasoningParser


class MistralReasoningParser(ReasoningParser):
    start_tag = "[THINK]"
    end_tag = "[/THINK]"
