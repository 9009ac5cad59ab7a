"""DeepSeek R1: `<think>...</think>`, where the first tag may be missing."""

from servd.api.output.reasoning_parser import ReasoningParser


class Parser(ReasoningParser):
    """An output begins with reasoning, unless the prompt has already closed the tag."""

    always = True

    @classmethod
    def matches(cls, template: str) -> bool:
        """Only by option: the template cannot tell whether the model reasons unasked."""
        return False
