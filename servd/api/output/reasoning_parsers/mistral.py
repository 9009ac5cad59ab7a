"""Magistral: `[THINK]...[/THINK]`."""

from servd.api.output.reasoning_parser import ReasoningParser


class Parser(ReasoningParser):
    start_tag = "[THINK]"
    end_tag = "[/THINK]"
