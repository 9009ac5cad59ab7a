"""Phi-4-mini, with its own template and with vLLM's."""

from tests.api.tool_parsers.recorded import Case, after

CASES = (
    after("<|tool_call|>", "<|/tool_call|>")
    | {f"functools, {title}": case for title, case in after("functools").items()}
    | {
        name: Case(text, [], text)
        for name, text in {
            "the module": "`functools` has `partial`.",
            "functools, with line breaks": 'functools\n[{"name": "now"}]',
        }.items()
    }
)
