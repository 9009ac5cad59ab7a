"""ToolParser: the common base of tool parsers: emits calls, and parses calls in JSON."""

import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, cast

from servd.api.output.call_grammar import CallSyntax, json_rule, parameters_of, quoted
from servd.api.output.incremental import (
    Content,
    Delta,
    IncrementalParser,
    Steps,
    ToolCallArguments,
    ToolCallStart,
)
from servd.api.output.json_reader import CLOSING, QUOTES, JsonReader, json_text, repaired
from servd.api.output.text_grammar import text_rules
from servd.api.text.prompt import TextGrammar


@dataclass(eq=False)
class ToolParser(IncrementalParser):
    """A parser that finds tool calls in an output. Everything else is content.

    A call is emitted as soon as its name is certain, and its arguments as the model writes them.
    Text that looks like a call, but is malformed, becomes content. White space alone before,
    between and after calls is dropped.

    Attributes:
        markers: texts that may be special tokens and that the parser must see.
            The first one begins a call, or a section of calls.
        signs: texts of which a chat template for this format has one. Empty: the first marker.
        syntaxes: for grammars of calls. Empty if the format has no grammar.
        stray: a text to drop once: the end of reasoning that a call has ended before.

    Args:
        tools: the tools of the request.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    signs: ClassVar[tuple[str, ...]] = ()
    syntaxes: ClassVar[tuple[CallSyntax, ...]] = ()

    tools: Sequence[dict[str, Any]]
    num_calls: int = field(default=0, init=False)
    stray: str = field(default="", init=False)
    # White space before a text, as it came; dropped if a call follows.
    _spaces: list[str] = field(default_factory=list[str], init=False)
    _is_in_text: bool = field(default=False, init=False)

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return whether a chat template uses this format for tool calls."""
        return any(sign in template for sign in cls.signs or cls.markers[:1])

    @classmethod
    def arguments_grammar(cls, rule: str, function: dict[str, Any]) -> list[str]:
        """Return Lark rules for the ARGUMENTS of a call.

        Args:
            rule: the name of the first rule, and the prefix of all other rules' names.
            function: in OpenAI's format.

        Raises:
            NotExpressible: the format cannot enforce the function's schema.
        """
        return [f"{rule}: {json_rule(parameters_of(function))}"]

    @classmethod
    def input_grammar(cls, rule: str, grammar: TextGrammar) -> list[str]:
        """Return Lark rules for the ARGUMENTS of a custom tool's call: its text, as `input`. Raise
        InvalidRequest: see `text_rules`.
        """
        inside = f"{rule}_input"
        opening, closing = map(quoted, ('{"input": "', '"}'))
        return [f"{rule}: {opening} {inside} {closing}", *text_rules(grammar, inside, True)]

    @classmethod
    def openings(cls) -> tuple[str, ...]:
        """Return all texts with which the parser begins to read a call."""
        return cls.markers[:1]

    @classmethod
    def can_hold(cls) -> bool:
        """Return whether a grammar can hold calls in free text: they begin with known texts."""
        openings = [syntax.opening(cls.openings()) for syntax in cls.syntaxes]
        return bool(openings) and None not in openings

    @abstractmethod
    def body(self) -> Steps[None]:
        """Read the whole output, and call `content`, `begin_call` and `arguments`."""

    def parse(self) -> Steps[None]:
        """Read the whole output, and append its deltas to `deltas`."""
        yield from self.body()
        if (space := "".join(self._spaces)) and not self.num_calls:
            self.deltas.append(Content(space))

    def new_id(self) -> str:
        """Return a unique id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def content(self, text: str) -> None:
        """Emit text that is not part of a call."""
        self.reader.forget()
        if not text:
            return
        self._spaces.append(text)
        self._is_in_text = self._is_in_text or not text.isspace()
        if self._is_in_text:
            self.deltas.append(Content("".join(self._spaces)))
            self._spaces.clear()

    def read_to_end(
        self, *markers: str, call: Callable[[], Steps[bool]] | None = None
    ) -> Steps[None]:
        """Read to the end. After a marker, `call` reads (see `attempt`). Other text is content."""
        while True:
            stray = (self.stray,) if self.stray else ()
            text, marker = yield from self.reader.piece(*markers, *stray)
            if marker in stray:
                yield from self.reader.space()
                self.reader.forget()
                self._spaces.clear()
                self.stray = ""
            elif marker and call:
                yield from self.attempt(call())
            elif text:
                self.content(text)
            else:
                return

    def begin_call(self, name: str) -> None:
        """Emit the beginning of a call of the function `name`."""
        self.reader.forget()
        self._spaces.clear()
        self.deltas.append(ToolCallStart(self.num_calls, self.new_id(), name))
        self.num_calls += 1
        self._is_in_text = False

    def arguments(self, text: str) -> None:
        """Emit more arguments of the last call."""
        self.reader.forget()
        if text:
            self.deltas.append(ToolCallArguments(self.num_calls - 1, text))

    def _advance(self) -> list[Delta]:
        """Return the deltas, with adjacent arguments joined at once to avoid repeated copies."""
        joined: list[Delta] = []
        for kind, group in groupby(super()._advance(), type):
            if kind is ToolCallArguments:
                pieces = cast(list[ToolCallArguments], [*group])
                group = [ToolCallArguments(pieces[0].index, "".join(p.text for p in pieces))]
            joined += group
        return joined

    def attempt(self, call: Steps[bool]) -> Steps[None]:
        """Read a possible call. If `call` returns False, as it is malformed, emit it as content."""
        num_calls = self.num_calls
        is_call = yield from call
        is_cut_off = (
            self.num_calls > num_calls and self.reader.ended and not (yield from self.reader.peek())
        )
        if not is_call and not is_cut_off:
            self.content(self.reader.consumed)
        self.reader.forget()

    def calls_until(self, end: str, begin: str, call: Callable[[], Steps[bool]]) -> Steps[bool]:
        """Read calls up to `end`: for each, `begin` and then `call`. Return False if malformed."""
        has_call = False
        while True:
            yield from self.reader.space()
            if has_call and (yield from self.reader.accept(end)):
                return True
            if not (yield from self.reader.accept(begin)) or not (yield from call()):
                return False
            has_call = True

    def json_call(self, needs_arguments: bool = False) -> Steps[bool]:
        """Read `{"name": ..., "arguments": {...}}`, or `parameters` for `arguments`, in any order.
        Return whether this is a call. With `needs_arguments`, the arguments are required.
        """
        reader = self.reader
        if not (yield from reader.accept("{")):
            return False
        call = _JsonCall(self)
        yield from reader.space()
        while not (yield from reader.accept("}")):
            yield from reader.space()
            key, is_key = yield from json_text(reader)
            yield from reader.space()
            if not is_key or not (yield from reader.accept(":")):
                return False
            yield from reader.space()
            if not (yield from call.take(key)):
                return False
            yield from reader.space()
            if not (yield from reader.accept(",")) and (yield from reader.peek()) != "}":
                # The last bracket may be missing.
                is_end = (yield from reader.is_at((*self.markers, "]"))) and call.has_begun
                return is_end and call.end(needs_arguments)
        return call.end(needs_arguments)

    def json_call_until(self, end: str) -> Steps[bool]:
        """Read a JSON call up to `end`, with white space around it. Return False if malformed."""
        yield from self.reader.space()
        if not (yield from self.json_call()):
            return False
        yield from self.reader.space()
        return (yield from self.reader.accept(end))

    def json_calls(self) -> Steps[bool]:
        """Read a JSON array of calls. Return False if malformed."""
        reader = self.reader
        if not (yield from reader.accept("[")):
            return False
        while True:
            yield from reader.space()
            if not (yield from self.json_call()):
                return False
            yield from reader.space()
            if (yield from reader.accept("]")):
                return True
            if not (yield from reader.accept(",")):
                return False

    def json_arguments(self) -> Steps[bool]:
        """Read a call's arguments: an object, JSON text or null. Return False if malformed."""
        first = yield from self.reader.peek()
        if first in CLOSING:
            return (yield from JsonReader(self.reader, self.arguments, self.markers).value())
        if first in QUOTES:
            text, is_valid = yield from json_text(self.reader)
        else:
            pieces: list[str] = []
            is_valid = yield from JsonReader(self.reader, pieces.append).value()
            text = "".join(pieces)
        self.arguments(_unwrapped(text) if is_valid else text)
        return is_valid


class ForcedCallsParser(ToolParser):
    """Parses forced calls of a model without a known format: a JSON array."""

    syntaxes = (CallSyntax('{"name": "NAME", "arguments": ARGUMENTS}', "[", ", ", "]"),)

    def body(self) -> Steps[None]:
        yield from self.reader.space()
        yield from self.attempt(self.json_calls())
        yield from self.read_to_end()


def _unwrapped(text: str) -> str:
    """Return arguments as JSON text, from text that may be null, or JSON with mistakes."""
    return "{}" if text in ("", "null") else repaired(text) or text


class _JsonCall:
    """A JSON call whose keys are being read."""

    def __init__(self, parser: ToolParser) -> None:
        self.parser = parser
        self.name: str | None = None
        self.has_begun = False
        self.early: str | None = None  # arguments that came before the name

    def take(self, key: str) -> Steps[bool]:
        """Read the value of `key`. Return False if the call is malformed."""
        if key == "name" and self.name is None:
            self.name, is_whole = yield from json_text(self.parser.reader)
            if is_whole and self.name and self.early is not None:
                self._begin(self.name)
                self.parser.arguments(_unwrapped(self.early))
            return is_whole and bool(self.name)
        names = ("arguments", "parameters")
        is_arguments = key in names and not self.has_begun and self.early is None
        if is_arguments and self.name is not None:
            self._begin(self.name)
            return (yield from self.parser.json_arguments())
        reader = self.parser.reader
        if is_arguments and (yield from reader.peek()) in QUOTES:
            self.early, is_valid = yield from json_text(reader)
            return is_valid
        pieces: list[str] = []
        is_valid = yield from JsonReader(reader, pieces.append, self.parser.markers).value()
        if is_arguments:
            self.early = "".join(pieces)
        return is_valid

    def end(self, needs_arguments: bool) -> bool:
        """Finish the call after its closing bracket. Return False if the object is not a call."""
        if self.name is None or (needs_arguments and not self.has_begun):
            return False
        if not self.has_begun:
            self._begin(self.name)
            self.parser.arguments("{}")
        self.parser.reader.forget()
        return True

    def _begin(self, name: str) -> None:
        self.has_begun = True
        self.parser.begin_call(name)
