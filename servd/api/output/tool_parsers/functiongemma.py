"""FunctionGemma: `<start_function_call>call:F{key:<escape>text<escape>}<end_function_call>`."""

from servd.api.output.tool_parsers._gemma import GemmaParser


class FunctionGemmaToolParser(GemmaParser):
    """A parser of Gemma's format with FunctionGemma's tokens."""

    markers = ("<start_function_call>", "<end_function_call>", "<escape>")
