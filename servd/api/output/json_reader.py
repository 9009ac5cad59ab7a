"""Reads JSON as models write it: repairs what has one meaning, and keeps all other text."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec

from servd.api.output.incremental import Brackets, Reader, Steps, without_surrogates
from servd.api.text.chat_messages import RAW_ARGUMENTS

# Python's words, which models like.
LITERALS = {"True": "true", "False": "false", "None": "null"}
QUOTES = ('"', "'")
RAW_KEY = f'"{RAW_ARGUMENTS}": '
CLOSING = {"{": "}", "[": "]"}
# Repairs of one value. The rest is kept as text: each takes about 20 us, and other requests wait.
MAX_REPAIRS = 10_000

_WORD = re.compile(r"[^\s,:{}\[\]\"'<>|]*")
SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
_GAP = re.compile(r"\s*(?:,\s*)?")
# After a quotation mark in a string with unescaped ones: the next key, or only closing brackets.
# A longer key is not looked for: a stream would wait for its end, and read it again and again.
_KEY = r"\"[^\"\n]{0,128}\"?|'[^'\n]{0,128}'?"
_WIDE_GAP = re.compile(rf"\s*(?:,\s*(?:{_KEY})?\s*|[\s}}\]]*)")
_OTHER_SPACE = re.compile(r"[^\S \t\n\r]")
_HEX_DIGIT = re.compile(r"[0-9a-fA-F]")

# Parts of valid JSON. Each matches in one way alone, so that no search takes long.
_SPACE = r"[ \t\n\r]*+"
_COMMA = rf"{_SPACE},{_SPACE}"
_TEXT = r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_NUMBER = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
_PLAIN = rf"(?:{_TEXT}|{_NUMBER}|true|false|null)"
_NAME = rf"{_TEXT}{_SPACE}:{_SPACE}"


def _with_brackets(value: str) -> str:
    """Return a pattern for plain values, and for arrays and objects of values like `value`."""
    array = rf"\[{_SPACE}(?:{value}(?:{_COMMA}(?!\])|{_SPACE}(?=\])))*+\]"
    members = rf"\{{{_SPACE}(?:{_NAME}{value}(?:{_COMMA}(?!\}})|{_SPACE}(?=\}})))*+\}}"
    return f"(?:{_PLAIN}|{array}|{members})"


_VALUE = _with_brackets(_with_brackets(_PLAIN))


@cache
def _valid(close: str, is_first: bool, markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for whole members before the bracket `close`, or for a bracket: valid JSON
    that stays as it is, whatever follows.
    """
    name, following = ("", r"\S") if close == "]" else (_NAME, "[\"']")
    no_marker = "".join(f"(?!{re.escape(marker[:2])})" for marker in markers)
    begin = (_SPACE if is_first else _COMMA) + no_marker + name
    times = "" if is_first else "++"
    return re.compile(
        rf"(?:{begin}{_VALUE}(?={_COMMA}{following}|{_SPACE}\{close})){times}"
        rf"|{begin}([\[{{])(?=[\s\S])|{_SPACE}(\{close})"
    )


_RUNS = {
    quote: re.compile(
        rf"(?:[^{quote}\\]++|\\(?:[^u]|u[0-9a-fA-F]{{4}}|u[0-9a-fA-F]{{0,3}}(?=[^0-9a-fA-F])))*+"
    )
    for quote in QUOTES
}
_encode = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` makes one each time
_UNSAFE = re.compile(r'\\u[0-9a-fA-F]{0,4}|\\[^u]|["\x00-\x1f]')


def _as_json(unsafe: re.Match[str]) -> str:
    """Return an escape sequence, or what must be one in a string, as JSON."""
    text = unsafe[0]
    if text[0] != "\\":
        return escape(text)
    if text[1] == "'":
        return "'"
    return text if text[1] in '"\\/bfnrt' or len(text) == 6 else f"\\\\{escape(text[1:])}"


def escape(text: str) -> str:
    """Return text as it is written in a JSON string, without quotation marks."""
    return _encode(text)[1:-1]


def string_of(text: str) -> str:
    """Return the string that a text without quotation marks means in JSON, or almost."""
    return without_surrogates(json.loads(f'"{_UNSAFE.sub(_as_json, text)}"'))


class JsonReader:
    """A reader that emits JSON while the text arrives. Valid JSON is emitted as it is.

    The reader escapes line breaks in strings, corrects quotation marks and Python's words, and
    adds commas between members and brackets before a marker. If a text has no meaning as JSON, the
    reader emits the text as a string in that place. What is emitted is always valid JSON, or the
    beginning of it if the text breaks off.

    Attributes:
        brackets: the closing brackets to come, the next one last.
        missing: text that would complete the open string or member, before `brackets`.
        has_raw_text: a string holds text that could not be read.

    Args:
        markers: texts that end the JSON outside of strings.
    """

    def __init__(
        self, reader: Reader, emit: Callable[[str], None], markers: Sequence[str] = ()
    ) -> None:
        self.reader = reader
        self.emit = emit
        self.markers = tuple(filter(None, markers))
        self.brackets: list[str] = []
        self.missing = ""
        self.has_raw_text = False
        self._is_first = True  # nothing is in the innermost brackets yet
        self._has_names = False  # keys without quotation marks
        self._num_repairs = 0

    def value(self) -> Steps[bool]:
        """Read a value up to its end. Return False if there is none, or if the text breaks off."""
        is_whole = yield from self._begin_value()
        while is_whole and self.brackets:
            if self._num_repairs > MAX_REPAIRS or not self._take_valid():
                is_whole = yield from self._advance()
        return is_whole

    def string(self, is_key: bool = True) -> Steps[bool]:
        """Read a string in quotation marks. Return False if the text breaks off.

        In a value, a quotation mark that no JSON can follow is part of the string.
        """
        reader = self.reader
        quote = yield from reader.next()
        self.emit('"')
        self.missing = '": null' if is_key else '"'
        is_repaired = quote != '"'
        ends: tuple[str, ...] = ()  # markers, if a mark in the string was not escaped
        while True:
            run = None if ends else reader.take_match(_RUNS[quote])
            text = run[0] if run else ""
            mark = ""
            if not text:
                text, mark = yield from reader.piece(quote, "\\", *ends)
            if mark == "\\":
                text = yield from self._escape_sequence()
            elif mark in ends:
                reader.untake(mark)
                break
            elif mark:
                if is_key or (yield from self._is_end_of_string(bool(ends))):
                    break
                self.has_raw_text = True
                self._num_repairs += 1
                if self._num_repairs > MAX_REPAIRS:
                    self.emit(escape(mark))
                    return (yield from self._raw_rest())
                ends = self.markers
                text = mark
            if not text:
                return False
            written = _UNSAFE.sub(_as_json, text) if "\\" in text else escape(text)
            is_repaired = is_repaired or written != text
            self.emit(written)
        self._num_repairs += is_repaired
        self.emit('"')
        self.missing = ": null" if is_key else ""
        return True

    def _take_valid(self) -> bool:
        """Read members or a bracket of valid JSON. Return False if there are none yet."""
        pattern = _valid(self.brackets[-1], self._is_first, self.markers)
        match = self.reader.take_match(pattern)
        if match is None:
            return False
        self.emit(match[0])
        opening, close = match.groups()
        if opening:
            self.brackets.append(CLOSING[opening])
        elif close:
            self.brackets.pop()
        self._is_first = bool(opening)
        return True

    def _advance(self) -> Steps[bool]:
        """Read a bracket or a member of the innermost brackets. Return False at the text's end."""
        reader = self.reader
        self.emit((yield from self._space()))
        comma = ""
        if not self._is_first and (yield from reader.accept(",")):
            comma = "," + (yield from self._space())
        first = yield from reader.peek()
        if first == self.brackets[-1]:
            self.emit((yield from reader.next()))
            self.brackets.pop()
            self._is_first = False
            return True
        if (yield from reader.is_at(self.markers)):
            self._close()
            return True
        if not first:
            return False
        is_object = self.brackets[-1] == "}"
        is_raw = False
        if not self._is_first and not comma:
            comma = ", "
            self._num_repairs += 1
            is_raw = first not in QUOTES and (is_object or first not in CLOSING)
        if is_raw or self._num_repairs > MAX_REPAIRS:
            return (yield from self._raw_text(comma + (RAW_KEY if is_object else "")))
        self._is_first = False
        if not is_object:
            self.emit(comma)
        elif not (yield from self._key(comma)):
            return False
        if not self.brackets:  # the rest was no JSON
            return True
        return (yield from self._begin_value())

    def _key(self, comma: str) -> Steps[bool]:
        """Read a key and a colon. Emit `comma` before. Return False if the text breaks off."""
        reader = self.reader
        if (yield from reader.peek()) in QUOTES:
            self.emit(comma)
            if not (yield from self.string()):
                return False
            gap = yield from reader.space()
        else:
            name = yield from reader.run(_WORD)
            gap = yield from reader.space()
            following = yield from reader.peek()
            if not following:
                return False
            if not name or following != ":":
                return (yield from self._raw_text(comma + RAW_KEY, name + gap))
            self._has_names = True
            self._num_repairs += 1
            self.emit(f'{comma}"{escape(name)}"')
            self.missing = ": null"
        if not (yield from reader.peek()):
            return False
        if not (yield from reader.accept(":")):
            return (yield from self._raw_text(": ", gap))
        self.emit(f"{_OTHER_SPACE.sub(' ', gap)}:")
        self.missing = "null"
        self.emit((yield from self._space()))
        return True

    def _space(self) -> Steps[str]:
        """Read white space. Return it as JSON allows it."""
        return _OTHER_SPACE.sub(" ", (yield from self.reader.space()))

    def _begin_value(self) -> Steps[bool]:
        """Read a string, a word, or an opening bracket. Return False if the text breaks off."""
        reader = self.reader
        first = yield from reader.peek()
        if first in QUOTES:
            return (yield from self.string(is_key=False))
        if first in CLOSING:
            self.emit((yield from reader.next()))
            self.brackets.append(CLOSING[first])
            self.missing = ""
            self._is_first = True
            return True
        word = yield from reader.run(_WORD)
        if not self.brackets:
            self.emit(word)
            return bool(word)
        _, following = yield from reader.ahead(_GAP)
        if not following:
            self._begin_word(word)
            return False
        if word in LITERALS:
            self._num_repairs += 1
            word = LITERALS[word]
        if not SCALAR.fullmatch(word):
            if not word or not (yield from self._is_end_of_string(False)):
                return (yield from self._raw_text("", word))
            self.has_raw_text = True
            self._num_repairs += 1
            word = f'"{escape(word)}"'
        self.emit(word)
        self.missing = ""
        return True

    def _begin_word(self, word: str) -> None:
        """Emit the beginning of a word of JSON. What is none becomes null."""
        for whole in (word, f"{word}0", "true", "false", "null"):
            if whole.startswith(word) and SCALAR.fullmatch(whole):
                self.emit(word)
                self.missing = whole.removeprefix(word)
                return

    def _escape_sequence(self) -> Steps[str]:
        """Read what follows a backslash. Return both, or emit both and return "" at the end."""
        char = yield from self.reader.next()
        while char[:1] == "u" and len(char) < 5:
            if not _HEX_DIGIT.match((yield from self.reader.peek())):
                break
            char += yield from self.reader.next()
        if char and (char[0] != "u" or len(char) == 5 or (yield from self.reader.peek())):
            return f"\\{char}"
        self.emit(f"\\{char}")
        self.missing = ("0" * (5 - len(char)) if char else "\\") + self.missing
        return ""

    def _is_end_of_string(self, has_marks: bool) -> Steps[bool]:
        """Return whether JSON can go on here, after a quotation mark. If the string `has_marks`
        that should have been escaped, look for the next key or the end of the JSON.
        """
        if not self.brackets:
            return True
        is_object = self.brackets[-1] == "}"
        gap, char = yield from self.reader.ahead(_WIDE_GAP if has_marks else _GAP)
        if not char or (yield from self.reader.is_at(self.markers, len(gap))):
            return True
        is_comma = gap.lstrip().startswith(",")
        if has_marks:
            return is_comma and (char == ":" if is_object else char in ",]")
        if is_comma and is_object:
            is_key = char in QUOTES or (self._has_names and char.isidentifier())
            return is_key or char == "}"
        return is_comma or char == self.brackets[-1]

    def _raw_text(self, opening: str, beginning: str = "") -> Steps[bool]:
        """Read the rest, with `beginning` before it, as a string after `opening`."""
        self.has_raw_text = True
        self.emit(f'{opening}"{escape(beginning)}')
        return (yield from self._raw_rest())

    def _raw_rest(self) -> Steps[bool]:
        """Read the rest as the end of a string, up to a marker or the last bracket."""
        brackets = Brackets()
        brackets.depth = len(self.brackets)
        while True:
            text, marker = yield from self.reader.piece(*self.markers)
            if marker:
                self.reader.untake(marker)
                break
            end = brackets.end(text, 0)
            if end:
                self.reader.untake(text[end:])
                text = text[: end - 1]
            self.emit(escape(text))
            if end or not text:
                break
        self.emit('"')
        self._close()
        return True

    def _close(self) -> None:
        self.emit("".join(reversed(self.brackets)))
        self.brackets.clear()
        self.missing = ""


def json_text(reader: Reader) -> Steps[tuple[str, bool]]:
    """Read a JSON string. Return its text, and whether all of it is there."""
    if (yield from reader.peek()) not in QUOTES:
        return "", False
    pieces: list[str] = []
    json_reader = JsonReader(reader, pieces.append)
    is_whole = yield from json_reader.string(is_key=False)
    written = "".join(pieces) + json_reader.missing
    return without_surrogates(json.loads(written)), is_whole


def repaired(text: str) -> str | None:
    """Return a text as JSON, or None if not all of it has a meaning as JSON."""
    pieces: list[str] = []
    json_reader, is_whole = _read(text, pieces.append)
    unread = json_reader.reader.unread()
    return None if json_reader.has_raw_text or not is_whole or unread.strip() else "".join(pieces)


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object, which holds the text if that is no object."""
    try:
        written = json.dumps(json.loads(arguments), ensure_ascii=False)
        value = msgspec.json.decode(without_surrogates(written))  # so that it can be encoded
        if isinstance(value, dict):
            return value
    except (ValueError, RecursionError):
        pass
    return {RAW_ARGUMENTS: arguments}


def missing_end(arguments: str) -> str:
    """Return the text that completes the JSON of an object that broke off, and holds its text."""
    json_reader, is_whole = _read(arguments, lambda text: None)
    if is_whole:
        return ""
    comma = "" if arguments.strip() == "{" else ", "
    inner = "".join(reversed(json_reader.brackets[1:]))
    raw = json.dumps(arguments, ensure_ascii=False)
    return f"{json_reader.missing}{inner}{comma}{RAW_KEY}{raw}}}"


def _read(text: str, emit: Callable[[str], None]) -> tuple[JsonReader, bool]:
    """Read a whole text. Return its reader, and whether the text has a whole value."""
    reader = Reader(ended=True)
    reader.push(text)
    json_reader = JsonReader(reader, emit)
    try:
        next(json_reader.value())
    except StopIteration as stop:
        return json_reader, stop.value
    raise AssertionError("the text has ended")
