"""DeepSeek R1: `<think>...</think>`, where the first tag may be missing."""

from __future__ import annotations

from servd.api.reasoning_parsers._think import ThinkParser


class Parser(ThinkParser):
    """A reply begins with thoughts, unless the prompt has already closed the tag."""

    always = True

    @classmethod
    def matches(cls, template: str) -> bool:
        """Only by option: the template cannot tell whether the model thinks without being asked
        to.
        """
        return False
