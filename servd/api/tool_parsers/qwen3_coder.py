"""Qwen3-Coder: `<tool_call><function=F><parameter=P>value</parameter></function></tool_call>`."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from servd.api.incremental import Brackets, Steps
from servd.api.tool_parser import ToolParser
from servd.api.tool_parsers._grammar import (
    CallSyntax,
    NotExpressible,
    json_rule,
    parameters_of,
    properties_of,
    quoted,
)
from servd.api.tool_parsers._text_values import texts_of, types_of

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"

LITERALS = {
    "True": "true",
    "False": "false",
    "None": "null",
}  # Python's words, which the model likes


class Parser(ToolParser):
    """Reads values, which are text, by the tools' schemas. The opening tag may be missing."""

    markers = (OPEN, CLOSE)
    syntaxes = (CallSyntax(f"{OPEN}\n{FUNCTION}NAME>\nARGUMENTS{FUNCTION_END}\n{CLOSE}"),)

    @classmethod
    def matches(cls, template: str) -> bool:
        """The function tag."""
        return FUNCTION in template

    @classmethod
    def arguments_grammar(cls, rule: str, function: dict[str, Any]) -> list[str]:
        """Parameters in the schema's order. Those that `_value` reads as strings are written as
        text, the others as JSON.
        """
        properties, root = properties_of(function), parameters_of(function)
        parts = [f"{rule}_{i}{'' if p.is_required else '?'}" for i, p in enumerate(properties)]
        rules = [f"{rule}: {' '.join(parts) or quoted('')}"]
        for i, (name, schema, _) in enumerate(properties):
            if ">" in name:
                raise NotExpressible("a bracket in the name of a parameter")
            own, written = f"{rule}_{i}", root["properties"][name]
            opening, closing = quoted(f"{PARAMETER}{name}>\n"), quoted(f"\n{PARAMETER_END}")
            if "string" in types_of(written, root):
                texts = texts_of(written, root, PARAMETER_END)
                values = [f"{own}_text{n}" for n in range(len(texts))]
                rules += [f"{value}[lazy]: {t}" for value, t in zip(values, texts, strict=True)]
            else:
                values = [f"{own}_json {closing}"]
                rules.append(f"{own}_json: {json_rule(schema)}")
            rules.append(rf"{own}: {opening} ({' | '.join(values)}) /\n/")
        return rules

    def body(self) -> Steps[None]:
        """Read the whole output."""
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
        functions = [tool["function"] for tool in self.tools if tool["function"]["name"] == name]
        parameters = functions[0].get("parameters") if functions else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        properties = properties if isinstance(properties, dict) else {}
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
            if not (yield from self._value(types_of(properties.get(key), parameters))):
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

    def _value(self, types: set[str]) -> Steps[bool]:
        """Read a value up to its end tag, without the line break after the first tag and the one
        before the end tag.
        """
        yield from self.reader.accept("\n")
        if types == {"string"}:
            return (yield from self._string())
        text = yield from self.reader.until(PARAMETER_END)
        if text is not None and "string" not in types and _breaks_off_in_a_string(text):
            text = yield from self._rest_of_json(text)
        if text is None:
            return False
        self.arguments(_to_json(text.removesuffix("\n"), types))
        return True

    def _rest_of_json(self, text: str) -> Steps[str | None]:
        """Read JSON whose strings may contain end tags, up to the end tag behind it; None if there
        is none.
        """
        brackets, pieces = Brackets(), [text]
        brackets.end(text, 0)
        while brackets.in_string:
            more = yield from self.reader.until(PARAMETER_END)
            if more is None:
                return None
            pieces.append(PARAMETER_END + more)
            brackets.end(pieces[-1], 0)
        return "".join(pieces)

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


def _breaks_off_in_a_string(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _to_json(text: str, types: set[str]) -> str:
    """A value as JSON: a string if the schema allows one or if it is no JSON. `null` stays where
    the schema names it.
    """
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
