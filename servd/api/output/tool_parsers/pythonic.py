"""Llama 4 and others: the output is a Python list of calls, `[f(a=1), g(b="x")]`."""

import ast
import json
import keyword
import re
import sys
import warnings
from typing import Any

from servd.api.output.call_grammar import (
    ANY_OBJECT,
    CallSyntax,
    NotExpressible,
    json_rule,
    parameters_of,
    properties_of,
    quoted,
)
from servd.api.output.incremental import Steps, without_surrogates
from servd.api.output.text_grammar import text_rules
from servd.api.output.tool_parser import ToolParser
from servd.api.text.prompt import TextGrammar
from servd.base.python_syntax import parse_python

START = "<|python_start|>"
END = "<|python_end|>"
MAX_CALL = 1 << 16  # characters; longer calls are content
MAX_DEPTH = 64

_NAME = re.compile(r"[\w.-]*")
_PLAIN = re.compile(r"[^'\"()\[\]{}]*")


class PythonicToolParser(ToolParser):
    """A parser that emits a call when it is complete, because only then it is known to be valid
    Python. Arguments are literals.
    """

    markers = (START, END)
    signs = ("[func_name1(",)  # in the example call of Llama 3.2 and 4
    syntaxes = (CallSyntax("NAME(ARGUMENTS)", begin="[", separator=", ", end="]"),)

    @classmethod
    def arguments_grammar(cls, rule: str, function: dict[str, Any]) -> list[str]:
        """Return rules for keyword arguments with JSON values. The parser reads them as Python,
        plus `true`, `false` and `null`.
        """
        if parameters_of(function) == ANY_OBJECT:
            anything = rf"{rule}_any: /[A-Za-z_]\w*=/ {json_rule({})}"
            return [f'{rule}: ({rule}_any (", " {rule}_any)*)?', anything]
        properties = properties_of(function)
        names = function["name"].split(".") + [name for name, *_ in properties]
        if not all(name.isidentifier() and name.isascii() for name in names):
            raise NotExpressible("names that are none in Python")
        if any(keyword.iskeyword(name) for name, *_ in properties):
            raise NotExpressible("keywords of Python as names")
        rules = [f"{rule}: {rule}_first0"]
        for i, (name, schema, is_required) in enumerate(properties):
            # firstN: arguments from the Nth on, none is written yet; moreN: the same after others.
            later = "" if is_required else f" | {rule}_first{i + 1}"
            more = f'", {name}=" {rule}_value{i}'
            rules += [
                f'{rule}_first{i}: "{name}=" {rule}_value{i} {rule}_more{i + 1}{later}',
                f"{rule}_more{i}: {more if is_required else f'({more})?'} {rule}_more{i + 1}",
                f"{rule}_value{i}: {json_rule(schema)}",
            ]
        return [*rules, f'{rule}_first{len(properties)}: ""', f'{rule}_more{len(properties)}: ""']

    @classmethod
    def input_grammar(cls, rule: str, grammar: TextGrammar) -> list[str]:
        inside = f"{rule}_input"
        opening, closing = map(quoted, ('input="', '"'))
        return [f"{rule}: {opening} {inside} {closing}", *text_rules(grammar, inside, True)]

    def body(self) -> Steps[None]:
        yield from self.reader.space()
        yield from self.reader.accept(START)
        yield from self.reader.space()
        yield from self.attempt(self._calls())
        yield from self.read_to_end()

    def _calls(self) -> Steps[bool]:
        reader = self.reader
        if not (yield from reader.accept("[")):
            return False
        while True:
            yield from reader.space()
            name = yield from reader.run(_NAME)
            # MCP servers have names with hyphens.
            is_name = all(part.isidentifier() for part in name.replace("-", "_").split("."))
            text = (yield from self._parenthesis()) if is_name else None
            yield from reader.space()
            last = yield from reader.peek()
            arguments = _arguments(text) if text and last in (",", "]") else None
            if arguments is None:
                return False
            yield from reader.next()
            self.begin_call(name)
            self.arguments(arguments)
            if last == "]":
                yield from reader.accept_after_space(self.markers[1])
                return True

    def _parenthesis(self) -> Steps[str | None]:
        """Consume and return `(...)`; None if it is missing, too long or incomplete."""
        text = ""
        depth = 0
        quote = ""
        if (yield from self.reader.peek()) != "(":
            return None
        while len(text) <= MAX_CALL:
            text += yield from self.reader.run(_IN_QUOTES[quote] if quote else _PLAIN)
            char = yield from self.reader.next()
            if not char:
                return None
            text += char
            if char == "\\":
                text += yield from self.reader.next()
            elif char == quote:
                quote = ""
            elif char in "'\"":
                quote = char
            else:
                depth += 1 if char in "([{" else -1
                if depth == 0:
                    return text
        return None


_IN_QUOTES = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}


def _arguments(parenthesis: str) -> str | None:
    """Return keyword arguments that are literals as JSON; None for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes such as "\d"
            call = parse_python(f"f{parenthesis}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {item.arg: _literal(item.value, MAX_DEPTH) for item in call.keywords}
        if len(values) < len(call.keywords) or None in values:  # a keyword twice, or `**x`
            return None
        return without_surrogates(json.dumps(values, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr, depth: int) -> Any:
    """Return the value of a Python literal. Raise ValueError for other nodes, and for deep ones."""
    if depth == 0:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value=float() as value):
            return min(value, sys.float_info.max)  # 1e999 is infinity, which JSON has not
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
            return -_literal(number, depth)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, depth - 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("keys must be strings")
            return {name: _literal(v, depth - 1) for name, v in zip(names, values, strict=True)}
    raise ValueError("not a literal")
