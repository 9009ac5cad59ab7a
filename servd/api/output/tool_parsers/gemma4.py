"""Gemma 4: `<|tool_call>call:F{key:<|"|>text<|"|>}<tool_call|>`."""

from servd.api.output.tool_parsers._gemma import GemmaParser


class Gemma4ToolParser(GemmaParser):
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
