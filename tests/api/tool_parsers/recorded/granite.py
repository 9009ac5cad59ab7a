"""Granite 3.0 to 3.3."""

from tests.api.tool_parsers.recorded import after

CASES = after("<|tool_call|>")
