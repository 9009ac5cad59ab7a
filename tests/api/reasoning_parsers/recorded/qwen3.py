"""Qwen 3 and 3.5, QwQ, LFM2.5, and others with the same tags."""

from tests.api.reasoning_parsers.recorded import Case, between, untagged

CALL = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CASES = (
    between("<think>", "</think>")
    | untagged("<think>")
    | {
        "Qwen 3.5": Case(
            f"The user asks for the time.\n</think>\n\n{CALL}",
            "The user asks for the time.",
            CALL,
            True,
        ),
        "LFM2.5": Case(
            "<think>I call it.</think><|tool_call_start|>[now()]<|tool_call_end|>",
            "I call it.",
            "<|tool_call_start|>[now()]<|tool_call_end|>",
        ),
    }
)
