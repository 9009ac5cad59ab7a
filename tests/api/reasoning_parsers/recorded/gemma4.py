"""Gemma 4."""

from tests.api.reasoning_parsers.recorded import between, untagged

START = "<|channel>thought"
CASES = between(START, "<channel|>") | untagged(START)
