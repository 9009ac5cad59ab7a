"""Seed-OSS."""

from tests.api.reasoning_parsers.recorded import between, untagged

START = "<seed:think>"
CASES = between(START, "</seed:think>") | untagged(START)
