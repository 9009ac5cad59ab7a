"""Qwen 3, QwQ, and others with the same tags."""

from tests.api.reasoning_parsers.recorded import between, untagged

CASES = between("<think>", "</think>") | untagged("<think>")
