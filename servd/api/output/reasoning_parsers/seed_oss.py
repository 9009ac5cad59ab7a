"""Seed-OSS: `<seed:think>...</seed:think>`."""

from servd.api.output.reasoning_parser import ReasoningParser


class SeedOssReasoningParser(ReasoningParser):
    start_tag = "<seed:think>"
    end_tag = "</seed:think>"
