"""Phi-4-mini, with its own template and with vLLM's."""

from tests.api.tool_parsers.recorded import Case, after

CASES = (
    after("<|tool_call|>", "<|/tool_call|>")
    | {f"functools, {title}": case for title, case in after("functools").items()}
    | {"the module": Case("`functools` has `partial`.", [], "`functools` has `partial`.")}
)
