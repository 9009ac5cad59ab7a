"""Jamba 1.5 and later, and Hunyuan-A13B."""

from tests.api.tool_parsers.recorded import after

CASES = after("<tool_calls>", "</tool_calls>")
