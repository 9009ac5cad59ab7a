"""Magistral."""

from tests.api.reasoning_parsers.recorded import between, untagged

CASES = between("[THINK]", "[/THINK]") | untagged("[THINK]")
