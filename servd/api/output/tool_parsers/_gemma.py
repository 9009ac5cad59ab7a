"""Gemma's format of calls: `call:F{key:value}`, without quotation marks, strings between tokens."""

import json
import re

from servd.api.output.incremental import Steps
from servd.api.output.json_reader import CLOSING, LITERALS, RAW_KEY, SCALAR, JsonReader, escape
from servd.api.output.tool_parser import ToolParser

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
        yield from self.read_to_end(self.markers[0], call=self._call)

    def _call(self) -> Steps[bool]:
        reader = self.reader
        yield from reader.space()
        name = ""
        if (yield from reader.accept("call:")):
            name = yield from reader.run(_NAME)
        if not name or (yield from reader.peek()) != "{":
            return False
        self.begin_call(name)
        _, end, quote = self.markers
        arguments = _ArgumentsReader(reader, self.arguments, (end,))
        arguments.quote = quote
        if not (yield from arguments.value()):
            return False
        yield from reader.space()
        return (yield from reader.accept(end))


class _ArgumentsReader(JsonReader):
    """A reader of Gemma's arguments that repairs like its base. `quote` is around strings."""

    quote: str

    def _key(self, comma: str) -> Steps[bool]:
        reader = self.reader
        if (yield from reader.accept(self.quote)):
            key = yield from reader.until(self.quote)
            text = f"{self.quote}{key}{self.quote}"
        else:
            text = yield from reader.run(_KEY)
            key = text.strip().strip('"')
        text += yield from reader.space()
        if not (yield from reader.peek()):
            return False
        if not key or not (yield from reader.accept(":")):
            return (yield from self._raw_text(comma + RAW_KEY, text))
        self.emit(f"{comma}{json.dumps(key, ensure_ascii=False)}:")
        self.emit((yield from self._space()))
        return True

    def _begin_value(self) -> Steps[bool]:
        reader = self.reader
        if (yield from reader.accept(self.quote)):
            return (yield from self._string())
        first = yield from reader.peek()
        if first in CLOSING:
            return (yield from super()._begin_value())
        if first == '"':  # as in JSON
            return (yield from JsonReader(reader, self.emit).value())
        word = yield from reader.run(_WORD)
        following = yield from reader.peek()
        if not word and following not in (",", self.brackets[-1]):
            return bool(following) and (yield from self._raw_text(""))
        value = LITERALS.get(word.strip(), word.strip())
        self.emit(value if SCALAR.fullmatch(value) else f'"{escape(word)}"')
        return True

    def _string(self) -> Steps[bool]:
        self.emit('"')
        while True:
            text, marker = yield from self.reader.piece(self.quote)
            self.emit('"' if marker else escape(text))
            if marker or not text:
                return bool(marker)
