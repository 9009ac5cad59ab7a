"""SpecialTokens: keeps special tokens in clients' texts apart from those that a template writes."""

import re
from collections.abc import Callable, Collection
from typing import Any

from servd.base.abandoned import check_abandoned

# No client can send a lone surrogate, because it is not Unicode text.
SURROGATE = re.compile("[\ud800-\udfff]")
FIRST_MARK = 0xD800
MAX_MARKS = 0x600
# Stands between two texts that the tokenizer gets separately.
SPLIT_HERE = "\udfff"


class SpecialTokens:
    """The special tokens that are plain text if a client writes them.

    In clients' texts, a lone surrogate stands for each character that begins or ends a special
    token. So a template cannot make a token of a client's text, and lengths and positions stay the
    same. `split` restores the characters.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = {token for token in tokens if len(token) > 1}  # others cannot be split
        self._lengths = sorted({len(token) for token in self._tokens}, reverse=True)
        symbols = {char for token in self._tokens for char in _symbols(token)}
        # Letters are marked only in whole tokens: a template may change their case.
        words = sorted((t for t in self._tokens if not _symbols(t)), key=len, reverse=True)
        # What a template may complete to a token, as in "<|" + role + "|>".
        self._inner_words = {re.sub(r"^[\W_]+|[\W_]+$", "", token) for token in self._tokens} - {""}
        chars = sorted(symbols)
        chars += sorted({word[0] for word in (*words, *self._inner_words)} - symbols)
        marks = {char: chr(FIRST_MARK + i) for i, char in enumerate(chars[:MAX_MARKS])}
        self._marks = {char: mark for char, mark in marks.items() if char in symbols}
        self._chars = {mark: char for char, mark in marks.items()}
        self._word_marks = marks
        self._words = re.compile("|".join(map(re.escape, words))) if words else None
        begins = sorted({f"{re.escape(t[0])}(?={re.escape(t[1])})" for t in self._tokens})
        self._begin = re.compile("|".join(begins)) if begins else None

    def mark(self, value: Any) -> Any:
        """Return a copy of a client's JSON with marks in all texts, keys included. A lone
        surrogate, as a call's arguments may have, becomes U+FFFD.
        """
        return _change(value, lambda text: self._mark_text(SURROGATE.sub("\ufffd", text)))

    def mark_role(self, role: str) -> str:
        """Return a role with another mark if a template might complete it to a special token."""
        if role not in self._inner_words:
            return role
        return self._word_marks.get(role[0], role[0]) + role[1:]

    def unmark(self, value: Any) -> Any:
        """Return a copy of JSON without marks."""
        return _change(value, self._unmark_text)

    def search(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function that looks for characters. It sees the texts as clients wrote them, and
        its result is marked. A text that has some unmarked characters stays as it is.
        """
        plain = self.unmark(args)
        if plain == args:
            return function(*args, **options)
        texts = (arg for arg in args if isinstance(arg, str))
        text = next(filter(SURROGATE.search, texts), "")
        if self._mark_text(text) != text:
            return function(*args, **options)  # a special token of the template may be in it
        return _change(function(*plain, **options), self._mark_text)

    def equals(self, pair: list[Any]) -> bool:
        """Return whether two values are equal as clients wrote them."""
        first, second = pair
        if isinstance(first, str) and isinstance(second, str):
            return self._unmark_text(first) == self._unmark_text(second)
        return first == second

    def contains(self, pair: list[Any]) -> bool:
        """Return whether the first value is in the second, as clients wrote them."""
        item, container = pair
        if not isinstance(item, str):
            return item in container
        if isinstance(container, str):
            return self._unmark_text(item) in self._unmark_text(container)
        plain = self._unmark_text(item)
        return any(text in container for text in (item, plain, self._mark_text(plain)))

    def split(self, marked: str) -> str:
        """Return a rendered prompt without marks, with a SPLIT_HERE in each special token that a
        client wrote at least partly.
        """
        if marked.isascii():  # it has no marks
            return marked
        text = self._unmark_text(marked)
        if self._begin is None or text == marked:
            return text
        pieces: list[str] = []
        begin = 0
        own_end = 0  # of the last token that the template wrote
        for match in self._begin.finditer(text):
            start = match.start()
            if start < own_end:
                continue
            for length in self._lengths:
                end = start + length
                if text[start:end] not in self._tokens:
                    continue
                if text[start:end] == marked[start:end]:
                    own_end = end
                else:
                    pieces.append(text[begin : start + 1])
                    begin = start + 1
                break
        pieces.append(text[begin:])
        return SPLIT_HERE.join(pieces)

    def _mark_text(self, text: str) -> str:
        for char, mark in self._marks.items():
            text = text.replace(char, mark)
        while self._words and self._words.search(text):  # a token's rest may contain another token
            text = self._words.sub(lambda word: self._word_marks[word[0][0]] + word[0][1:], text)
        return text

    def _unmark_text(self, text: str) -> str:
        if text.isascii():
            return text
        for mark, char in self._chars.items():
            text = text.replace(mark, char)
        return text


def _symbols(token: str) -> list[str]:
    """Return the characters to mark: a token's first and last symbol, if they are at its ends, or
    its first one. Quotes and backslashes stay, because JSON escapes them.
    """

    def is_symbol(char: str) -> bool:
        return not (char.isalnum() or char.isspace() or char in "\"'\\_")

    ends = [char for char in (token[0], token[-1]) if is_symbol(char)]
    return ends or [char for char in token if is_symbol(char)][:1]


def _change(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case dict():
            check_abandoned()
            return {_change(key, change): _change(item, change) for key, item in value.items()}
        case list():
            return [_change(item, change) for item in value]
        case tuple():
            return tuple([_change(item, change) for item in value])
        case _:
            return value
