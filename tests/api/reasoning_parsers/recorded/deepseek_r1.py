"""DeepSeek R1 and its distillates."""

from tests.api.reasoning_parsers.recorded import Case, between

CASES = between("<think>", "</think>") | {
    "never opened": Case("Let me see.\n</think>\n\nYes.", "Let me see.", "Yes."),
    "neither": Case("Let me see. ", "Let me see.", ""),
}
