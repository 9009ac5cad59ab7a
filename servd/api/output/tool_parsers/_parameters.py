"""ParametersParser: parses calls that write each argument as text between tags."""

import json
from typing import Any, ClassVar, NoReturn

from servd.api.output.call_grammar import (
    ANY_OBJECT,
    NotExpressible,
    json_rule,
    parameters_of,
    properties_of,
    quoted,
)
from servd.api.output.incremental import Brackets, Steps
from servd.api.output.json_reader import LITERALS, escape, repaired
from servd.api.output.text_grammar import text_rules
from servd.api.output.tool_parser import ToolParser
from servd.api.output.tool_parsers._text_values import texts_of, types_of, types_of_property
from servd.api.text.prompt import TextGrammar


class ParametersParser(ToolParser):
    """A parser that converts text values to JSON by the tools' schemas. The first two `markers` are
    around one or more calls. The opening marker may be missing.
    """

    function: ClassVar[tuple[str, str]] = ("<function=", ">")  # around the name
    function_end: ClassVar[str] = "</function>"  # after its arguments
    parameter: ClassVar[tuple[str, str]] = ("<parameter=", ">")  # around the name
    parameter_end: ClassVar[str] = "</parameter>"  # after its value
    line: ClassVar[str] = ""  # at both ends of a value, but no part of it

    @classmethod
    def arguments_grammar(cls, rule: str, function: dict[str, Any]) -> list[str]:
        """Return rules for the parameters in the schema's order. Values that `_value` reads as
        strings are written as text, others as JSON.
        """
        root = parameters_of(function)
        if root == ANY_OBJECT:
            inside = rf'"{cls.parameter[0]}" /[^<>\n]+/ "{cls.parameter[1]}" /(?s:.*)/'
            value = f'{rule}_any[lazy]: {inside} "{cls.parameter_end}"'
            return [rf"{rule}: ({rule}_any /\n/)*", value]
        properties = properties_of(function)
        parts = [f"{rule}_{i}{'' if p.is_required else '?'}" for i, p in enumerate(properties)]
        rules = [f"{rule}: {' '.join(parts) or quoted('')}"]
        for i, (name, schema, _) in enumerate(properties):
            if cls.parameter[1][0] in name:
                raise NotExpressible("a bracket in the name of a parameter")
            property_rule = f"{rule}_{i}"
            written = root["properties"][name]
            opening = quoted(cls.parameter[0] + name + cls.parameter[1] + cls.line)
            closing = quoted(cls.line + cls.parameter_end)
            if "string" in types_of(written, root):
                texts = texts_of(written, root, cls.parameter_end, cls.line)
                values = [f"{property_rule}_text{n}" for n in range(len(texts))]
                rules += [f"{value}[lazy]: {t}" for value, t in zip(values, texts, strict=True)]
            else:
                values = [f"{property_rule}_json {closing}"]
                rules.append(f"{property_rule}_json: {json_rule(schema)}")
            rules.append(rf"{property_rule}: {opening} ({' | '.join(values)}) /\n/")
        return rules

    @classmethod
    def input_grammar(cls, rule: str, grammar: TextGrammar) -> list[str]:
        opening = quoted(f"{cls.parameter[0]}input{cls.parameter[1]}{cls.line}")
        inside = f"{rule}_input"
        texts = text_rules(grammar, inside, False, cls.parameter_end, cls.line)
        return [rf"{rule}: {opening} {inside} /\n/", *texts]

    @classmethod
    def openings(cls) -> tuple[str, ...]:
        return tuple(filter(None, (cls.markers[0], cls.function[0])))

    def body(self) -> Steps[None]:
        yield from self.read_to_end(*self.openings(), call=self._call)

    def function_name(self) -> Steps[str | None]:
        """Read and return a function's name, and read the text after it. None if malformed."""
        return (yield from self.reader.until(self.function[1]))

    def parameter_name(self) -> Steps[str | None]:
        return (yield from self.reader.until(self.parameter[1]))

    def _call(self) -> Steps[bool]:
        reader = self.reader
        has_function = reader.consumed == self.function[0]  # without the opening tag
        yield from reader.space()
        if not has_function and not (yield from reader.accept(self.function[0])):
            return False
        name = yield from self.function_name()
        if not name:
            return False
        self.begin_call(name)
        self.arguments("{")
        functions = [tool["function"] for tool in self.tools if tool["function"]["name"] == name]
        parameters = functions[0].get("parameters") if functions else None
        separator = ""
        while True:
            yield from reader.space()
            if not (yield from reader.accept(self.parameter[0])):
                break
            key = yield from self.parameter_name()
            if key is None:
                return False
            self.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._value(types_of_property(parameters, key))):
                return False
        close = self.markers[1]
        if (yield from reader.accept(self.function_end)):
            self.arguments("}")
            yield from reader.accept_after_space(close)
            return True
        has_tag = yield from reader.accept(close)
        if has_tag or (yield from reader.peek()):  # not cut off
            self.arguments("}")
        return has_tag

    def _value(self, types: set[str]) -> Steps[bool]:
        yield from self.reader.accept(self.line)
        if types == {"string"}:
            return (yield from self._string())
        text = yield from self.reader.until(self.parameter_end)
        if text is not None and "string" not in types and _breaks_off_in_a_string(text):
            text = yield from self._rest_of_json(text)
        if text is None:
            return False
        self.arguments(to_json(text.removesuffix(self.line), types))
        return True

    def _rest_of_json(self, text: str) -> Steps[str | None]:
        """Read JSON whose strings may contain end tags, and the end tag after the JSON. Return the
        JSON; None without end tag.
        """
        brackets = Brackets()
        pieces = [text]
        brackets.end(text, 0)
        while brackets.in_string:
            more = yield from self.reader.until(self.parameter_end)
            if more is None:
                return None
            pieces.append(self.parameter_end + more)
            brackets.end(pieces[-1], 0)
        return "".join(pieces)

    def _string(self) -> Steps[bool]:
        self.arguments('"')
        held = ""  # a line break that may be the last
        while True:
            text, marker = yield from self.reader.piece(self.parameter_end)
            if marker:
                self.arguments('"')
                return True
            if not text:
                self.arguments(escape(held))
                return False
            text = held + text
            held = self.line if text.endswith(self.line) else ""
            self.arguments(escape(text.removesuffix(self.line)))


def _breaks_off_in_a_string(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def to_json(text: str, types: set[str]) -> str:
    """Return a value as JSON: a string if the schema allows strings or if the value is not JSON.
    `null` stays null if the schema allows null.
    """
    word = LITERALS.get(text.strip(), text.strip())
    if "string" not in types or (word == "null" and "null" in types):
        try:
            json.loads(word, parse_constant=_refuse)
            return word
        except ValueError:
            if word.startswith(("{", "[")) and (value := repaired(word)):
                return value
        except RecursionError:
            pass
    return f'"{escape(text)}"'


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
