"""DeepSeek R1: `<think>...</think>`, where the start tag may be missing."""

from servd.api.output.reasoning_parser import ReasoningParser


class DeepSeekR1ReasoningParser(ReasoningParser):
    """A parser of outputs that begin with reasoning, unless the prompt closed the tag."""

    always = True

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return False: no template shows that a model always reasons. Use --reasoning-parser."""
        return False
