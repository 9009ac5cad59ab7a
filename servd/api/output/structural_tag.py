"""Builds Lark grammars of structural tags, the format of XGrammar, vLLM and SGLang: parts of an
output that follow a form, with free text around them.
"""

import json
from collections.abc import Sequence
from typing import Any

from servd.api.output.call_grammar import AddedTokens, json_rule, quoted, regex_in_slashes
from servd.base.errors import InvalidRequest
from servd.messages.params import MAX_GRAMMAR_BYTES, StructuredOutput

MAX_DEPTH = 16  # of formats in formats
# Of the grammar, about, and of the looks for a trigger. A content is repeated for each of its ends.
MAX_SIZE = MAX_GRAMMAR_BYTES
ANY_TEXT = "/(?s:.*)/"


def structural_tag_grammar(output: StructuredOutput, tokens: AddedTokens) -> str:
    """Return the grammar of a structural tag. Raise InvalidRequest if it is not valid."""
    try:
        return _grammar(json.loads(output.value), tokens)
    except (_NotATag, ValueError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"the structural tag is not valid: {error}", param=output.param
        ) from None


class _NotATag(Exception):
    """The error of a structural tag that is not valid."""


def _grammar(tag: Any, tokens: AddedTokens) -> str:
    form = tag.get("format")
    if form is None:  # the older form
        tags = [
            {"begin": s.get("begin"), "content": _schema(s.get("schema")), "end": s.get("end")}
            for s in _list(tag, "structures")
        ]
        form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    builder = _Builder(tokens)
    start = builder.expression(form, "", 0)
    return "\n".join([f"start: {start}", *builder.rules])


class _Builder:
    """A builder of rules. An expression of a format has the text `end` after it. If `end` is None,
    an expression follows that begins with no token of its own, which would end any text.
    """

    def __init__(self, tokens: AddedTokens) -> None:
        self.tokens = tokens
        self.rules: list[str] = []
        self.has_triggers = False
        self.size = 0

    def expression(self, form: Any, end: str | None, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise _NotATag(f"it has more than {MAX_DEPTH} formats inside of each other")
        kind = form.get("type") if isinstance(form, dict) else None
        closing = self._literal(end or "")
        match kind:
            case "const_string":
                return f"{self._literal(_text(form, 'value'))} {closing}"
            case "json_schema":
                return f"{self._add(json_rule(form.get('json_schema', {})))} {closing}"
            case "regex":
                pattern = self._add(regex_in_slashes(_text(form, "pattern")))
                return f"{pattern} {closing}"
            case "grammar":
                grammar = self._add(f"%lark {{\n{_text(form, 'grammar')}\n}}")
                return f"{grammar} {closing}"
            case "any_text":
                return self._text(end)
            case "sequence":
                elements = _list(form, "elements") or [{"type": "const_string", "value": ""}]
                begins = [element.get("begin", element.get("value")) for element in elements[1:]]
                ends = ["" if self._begins_with_token(begin) else None for begin in begins]
                pairs = zip(elements, [*ends, end], strict=True)
                return " ".join(self.expression(*pair, depth + 1) for pair in pairs)
            case "or":
                return self._any_of(_list(form, "elements"), end, depth)
            case "tag":
                return f"{self._tag(form, '', depth, is_last=end == '')} {closing}"
            case "triggered_tags":
                if end is None or (end and not self._begins_with_token(end)):
                    raise _NotATag("only a token may follow `triggered_tags`")
                return f"{self._triggered(form, depth)} {closing}"
            case _:
                raise _NotATag(f"formats of type {str(kind)[:64]!r} are not supported")

    def _begins_with_token(self, text: Any) -> bool:
        return isinstance(text, str) and self.tokens.literal(text).startswith("<[")

    def _count(self, size: int) -> None:
        self.size += size
        if self.size > MAX_SIZE:
            raise _NotATag(f"its grammar has more than {MAX_SIZE} characters")

    def _literal(self, text: str) -> str:
        self._count(len(text) + 1)
        return self.tokens.literal(text)

    def _add(self, body: str, attributes: str = "") -> str:
        self._count(len(body))
        name = f"part{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _text(self, end: str | None) -> str:
        if end is None:
            raise _NotATag("only a token, or the `end` of its tag, may follow `any_text`")
        if not end or end in self.tokens.ids:
            return f"{self._add(ANY_TEXT)} {self._literal(end)}"
        return self._add(f"{ANY_TEXT} {quoted(end)}", "[lazy]")

    def _any_of(self, forms: Sequence[Any], end: str | None, depth: int) -> str:
        options = [self.expression(form, end, depth + 1) for form in forms]
        if not options:
            raise _NotATag("`elements` must not be empty")
        return f"({' | '.join(options)})"

    def _tag(self, tag: Any, trigger: str, depth: int, is_last: bool = False) -> str:
        """Return the expression of a tag after its trigger. `is_last`: nothing follows it."""
        begin = _text(tag, "begin").removeprefix(trigger)
        ends = tag.get("end")
        contents = [
            self.expression(
                tag.get("content"),
                _text({"end": end}, "end") or ("" if is_last else None),
                depth + 1,
            )
            for end in (ends if isinstance(ends, list) else [ends])
        ]
        return f"{self._literal(begin)} ({' | '.join(contents)})"

    def _triggered(self, form: Any, depth: int) -> str:
        if self.has_triggers:
            raise _NotATag("only one format may be triggered_tags")
        self.has_triggers = True
        triggers = [_text({"triggers": item}, "triggers") for item in _list(form, "triggers")]
        # The shorter of two triggers begins both tags.
        triggers = [t for t in triggers if not any(t != o and t.startswith(o) for o in triggers)]
        self.rules += self.tokens.text_rules(triggers)
        options: list[str] = []
        for tag in _list(form, "tags"):
            begin = _text(tag, "begin")
            self._count(len(triggers))
            index = next((i for i, t in enumerate(triggers) if begin.startswith(t)), None)
            if index is None:
                raise _NotATag(f"no trigger begins the tag {begin[:64]!r}")
            options.append(f"opening{index} {self._tag(tag, triggers[index], depth, is_last=True)}")
        if not options:
            raise _NotATag("`tags` must not be empty")
        tags = self._add(" | ".join(options))
        if form.get("stop_after_first"):
            return f"other* {tags}" if form.get("at_least_one") else f"other* ({tags} | TEXT?)"
        repeated = f"(other | {tags})* TEXT?"
        return f"other* {tags} {repeated}" if form.get("at_least_one") else repeated


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema or {}}


def _list(form: Any, key: str) -> list[Any]:
    value = form.get(key)
    if not isinstance(value, list):
        raise _NotATag(f"`{key}` must be a list")
    return value


def _text(form: Any, key: str) -> str:
    value = form.get(key) if isinstance(form, dict) else None
    if not isinstance(value, str):
        raise _NotATag(f"`{key}` must be a string")
    return value
