"""FunctionGemma: `<start_function_call>call:F{key:<escape>text<escape>}<end_function_call>`."""

from servd.api.output.tool_parsers._gemma import GemmaParser


class Parser(GemmaParser):
    """As Gemma 4, with other tokens."""

    markers = ("<start_function_call>", "<end_function_call>", "<escape>")
