"""Replies of models that think, and what they mean: `CASES` in a file for each parser."""

from typing import NamedTuple


class Case(NamedTuple):
    """A reply, the reasoning in it and the content after it."""

    text: str
    reasoning: str
    content: str
    is_thinking: bool = False  # the prompt opened the tag


def between(start: str, end: str) -> dict[str, Case]:
    """Replies that differ only in the tags."""
    return {
        "reasoning and answer": Case(
            f"{start}\nTwo and two.\n{end}\n\nFour.", "Two and two.", "Four."
        ),
        "opened by the prompt": Case(
            f"Hm, 2 < 3.\n\nYes.\n{end}\n\nOk.\n", "Hm, 2 < 3.\n\nYes.", "Ok.\n", True
        ),
        "opened by the prompt, and again": Case(f"{start}a{end}b", "a", "b", True),
        "no reasoning in the tags": Case(f"{start}\n\n{end}\n\nHello", "", "Hello"),
        "no answer": Case(f"{start}all of it{end}", "all of it", ""),
        "unicode": Case(f"{start}日本語 🤔{end}はい ✅", "日本語 🤔", "はい ✅"),
        "a call follows": Case(
            f"{start}I need it.{end}\n<tool_call>\n{{}}</tool_call>",
            "I need it.",
            "<tool_call>\n{}</tool_call>",
        ),
        "tags in the answer": Case(
            f"{start}x{end} say {start} or {end}", "x", f"say {start} or {end}"
        ),
        "cut off in the reasoning": Case(f"{start}I wonder if ", "I wonder if", ""),
        "cut off in the end tag": Case(f"{start}so {end[:-2]}", f"so {end[:-2]}", ""),
        "white space before": Case(f"\n {start}a{end}b", "a", "b"),
        "nothing": Case("", "", "", True),
    }


def untagged(start: str) -> dict[str, Case]:
    """Replies without reasoning, where the tag is needed."""
    return {
        "no reasoning": Case("Hello.\n\nBye ", "", "Hello.\n\nBye "),
        "a tag later": Case(f"  The tag {start} begins", "", f"  The tag {start} begins"),
        "a part of a tag": Case(start[:-1], "", start[:-1]),
        "another tag": Case(f"{start[:3]} x", "", f"{start[:3]} x"),
    }
