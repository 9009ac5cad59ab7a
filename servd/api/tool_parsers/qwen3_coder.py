"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from servd.api.incremental import Steps
from servd.api.tool_parsers._base import ToolParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"

LITERALS = {"True": "true", "False": "false", "None": "null"}  # Python's words, which the model likes


class Parser(ToolParser):
    """Values are plain text; the tool's schema says which of them are strings. The opening tag may be missing."""

    markers = (OPEN, CLOSE)

    @classmethod
    def matches(cls, template: str) -> bool:
        """The function tag."""
        return FUNCTION in template

    def body(self) -> Steps[None]:
        """Read the whole reply."""
        yield from self.rest(OPEN, FUNCTION, call=self._call)

    def _call(self) -> Steps[bool]:
        reader = self.reader
        has_function = reader.taken == FUNCTION  # without the opening tag
        yield from reader.space()
        if not has_function and not (yield from reader.accept(FUNCTION)):
            return False
        name = yield from reader.until(">")
        if not name:
            return False
        self.begin_call(name)
        self.arguments("{")
        properties = self._properties(name)
        separator = ""
        while True:
            yield from reader.space()
            if not (yield from reader.accept(PARAMETER)):
                break
            key = yield from reader.until(">")
            if key is None:
                return False
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._value(_types(properties.get(key)))):
                return False
        if (yield from reader.accept(FUNCTION_END)):
            self.arguments("}")
            yield from reader.space()
            yield from reader.accept(CLOSE)
            return True
        has_tag = yield from reader.accept(CLOSE)
        if has_tag or (yield from reader.peek()):  # not cut off
            self.arguments("}")
        return has_tag

    def _properties(self, name: str) -> dict[str, Any]:
        parameters = (self.functions.get(name) or {}).get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        return properties if isinstance(properties, dict) else {}

    def _value(self, types: set[str]) -> Steps[bool]:
        """Read a value to its end tag. A line break after the first tag and one before the last do not belong to it."""
        yield from self.reader.accept("\n")
        if types == {"string"}:
            return (yield from self._string())
        text = yield from self.reader.until(PARAMETER_END)
        if text is None:
            return False
        self.arguments(_to_json(text.removesuffix("\n"), types))
        return True

    def _string(self) -> Steps[bool]:
        self.arguments('"')
        held = ""  # a line break that may be the last
        while True:
            text, marker = yield from self.reader.piece(PARAMETER_END)
            if marker:
                self.arguments('"')
                return True
            if not text:
                self.arguments(_escape(held))
                return False
            text = held + text
            held = "\n" if text.endswith("\n") else ""
            self.arguments(_escape(text.removesuffix("\n")))


def _types(schema: Any) -> set[str]:
    """JSON types that a schema allows; string where it does not say."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if isinstance(kind, str):
            return {kind}
        if isinstance(kind, list):
            return {str(one) for one in kind}
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return set().union(*(_types(option) for option in schema[key]))
        if isinstance(schema.get("enum"), list) and not all(isinstance(value, str) for value in schema["enum"]):
            return {"any"}
        if "$ref" in schema or "allOf" in schema:
            return {"any"}
    return {"string"}


def _to_json(text: str, types: set[str]) -> str:
    """A value as JSON: what it says if that is JSON and not surely a string, else a string."""
    word = LITERALS.get(text.strip(), text.strip())
    if "string" not in types or (word == "null" and "null" in types):
        try:
            json.loads(word, parse_constant=_refuse)
            return word
        except (ValueError, RecursionError):
            pass
    return f'"{_escape(text)}"'


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
