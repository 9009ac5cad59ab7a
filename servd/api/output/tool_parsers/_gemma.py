"""Gemma's format of calls: `call:F{key:value}`, without quotation marks, strings between tokens."""

import json
import re

from servd.api.output.incremental import Steps
from servd.api.output.json_reader import JsonReader, escape
from servd.api.output.tool_parser import ToolParser
from servd.api.output.tool_parsers._parameters import to_json

MAX_DEPTH = 64

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^:,{}\[\]<]*")
_WORD = re.compile(r"[^,{}\[\]<]*")


class GemmaParser(ToolParser):
    """A parser that converts the arguments to JSON as they arrive. Forced calls use a JSON array,
    because grammars of arguments cannot contain the string tokens. `markers` are the texts before
    and after a call, and the text around a string.
    """

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.markers[0] in template and cls.markers[2] in template

    def body(self) -> Steps[None]:
        yield from self.rest(self.markers[0], call=self._call)

    def _call(self) -> Steps[bool]:
        reader = self.reader
        yield from reader.space()
        name = ""
        if (yield from reader.accept("call:")):
            name = yield from reader.run(_NAME)
        if not name or (yield from reader.peek()) != "{":
            return False
        self.begin_call(name)
        if not (yield from self._value(MAX_DEPTH)):
            return False
        yield from reader.space()
        return (yield from reader.accept(self.markers[1]))

    def _value(self, depth: int) -> Steps[bool]:
        """Read a value. Return False if the value is incomplete or nested too deeply."""
        yield from self.reader.space()
        first = yield from self.reader.peek()
        if first in ("{", "["):
            return depth > 0 and (yield from self._items(first == "{", depth - 1))
        if (yield from self.reader.accept(self.markers[2])):
            return (yield from self._string())
        if first == '"':  # as in JSON
            return (yield from JsonReader(self.reader, self.arguments).value())
        self.arguments(to_json((yield from self.reader.run(_WORD)), {"any"}))
        return True

    def _string(self) -> Steps[bool]:
        self.arguments('"')
        while True:
            text, marker = yield from self.reader.piece(self.markers[2])
            self.arguments('"' if marker else escape(text))
            if marker or not text:
                return bool(marker)

    def _items(self, has_keys: bool, depth: int) -> Steps[bool]:
        reader = self.reader
        separator = ""
        close = "}" if has_keys else "]"
        self.arguments((yield from reader.next()))
        while True:
            yield from reader.space()
            if (yield from reader.accept(close)):
                self.arguments(close)
                return True
            if separator:
                if not (yield from reader.accept(",")):
                    return False
                yield from reader.space()
            self.arguments(separator)
            separator = ", "
            if has_keys and not (yield from self._key()):
                return False
            if not (yield from self._value(depth)):
                return False

    def _key(self) -> Steps[bool]:
        reader = self.reader
        if (yield from reader.accept(self.markers[2])):
            key = yield from reader.until(self.markers[2])
        else:
            key = (yield from reader.run(_KEY)).strip().strip('"')
        yield from reader.space()
        if not key or not (yield from reader.accept(":")):
            return False
        self.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
        return True
