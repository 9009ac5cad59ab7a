"""Granite 3.2."""

from tests.api.reasoning_parsers.recorded import between, untagged

START = "Here is my thought process:"
CASES = between(START, "Here is my response:") | untagged(START)
