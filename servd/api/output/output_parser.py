"""OutputParser: splits output text into reasoning, content and tool calls."""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from servd.api.output.incremental import Brackets, Content, Delta, ToolCallArguments, ToolCallStart
from servd.api.output.json_reader import string_of
from servd.api.output.reasoning_parser import ReasoningParser
from servd.api.output.tool_parser import ToolParser
from servd.api.text.detokenizer import Utf8Decoder
from servd.api.text.prompt import ToolOptions
from servd.messages.params import StructuredOutput


class ExpectedOutput(msgspec.Struct, frozen=True):
    structured_output: StructuredOutput | None = None
    reasoning_parser: type[ReasoningParser] | None = None
    is_reasoning: bool = False  # the output begins inside the reasoning
    tool_parser: type[ToolParser] | None = None
    tool_options: ToolOptions | None = None
    visible_ids: frozenset[int] = frozenset()  # added tokens that the parsers need to see as text
    # The bytes of tokens, as the detokenizer sees them, for counting reasoning tokens.
    table: Mapping[int, bytes] = {}

    def make_reasoning_parser(self) -> ReasoningParser | None:
        """Return a parser of the reasoning, which ends at its tag or at a call."""
        if self.reasoning_parser is None:
            return None
        has_markers = self.tool_parser is not None and self.tool_parser.markers
        call_marker = self.tool_parser.markers[0] if self.tool_parser and has_markers else ""
        return self.reasoning_parser(self.is_reasoning, call_marker)


class OutputAnswerFinder:
    """A reader of an output that separates text of the answer from reasoning and headers."""

    def __init__(self, parser: ReasoningParser) -> None:
        self._parser = parser
        self._text = ""  # it may be either
        self._start = 0  # where it begins in the output

    def push(self, text: str) -> tuple[str, str]:
        """Add text. Return the next text that is not of the answer, and the text after it that is.
        Both lack what is not certain.
        """
        self._parser.feed(text)
        self._text += text
        return self._split()

    def finish(self) -> tuple[str, str]:
        """Return the rest."""
        self._parser.finish()
        return self._split()

    def _split(self) -> tuple[str, str]:
        parser = self._parser
        end = len(self._text)
        begin = end
        if parser.answer_start is not None:
            begin = max(parser.answer_start - self._start, 0)
        elif not parser.reader.ended:
            begin = end = parser.reader.num_taken - self._start if parser.spans else 0
        before = self._text[:begin]
        answer = self._text[begin:end]
        self._text = self._text[end:]
        self._start += end
        return before, answer


class CustomInput:
    """A reader of a custom tool's text from the arguments of its call, `{"input": "TEXT"}`."""

    _HEAD = re.compile(r'\s*\{\s*"(?:[^"\\]++|\\.)*+"\s*:\s*"')
    # Up to an escape that is incomplete, alone or as the first half of a pair.
    _TEXT = re.compile(
        r'(?:[^"\\]++|\\(?:[^u]|u[0-9a-fA-F]{0,3}(?=[^0-9a-fA-F])|u(?![dD][89abAB])[0-9a-fA-F]{4}'
        r"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}"
        r"|(?!(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z))))*+"
    )
    _MAX_HEAD = 256  # characters
    _MAX_ESCAPE = 12

    def __init__(self) -> None:
        self._unread = ""
        self._is_read = False  # whether the text has begun
        self._is_other = False  # the arguments begin in another way: all of them are the text

    def feed(self, arguments: str) -> str:
        """Add arguments. Return the next text."""
        self._unread += arguments
        if not self._is_read:
            head = self._HEAD.match(self._unread)
            self._is_other = self._is_other or (head is None and len(self._unread) > self._MAX_HEAD)
            if self._is_other:
                other, self._unread = self._unread, ""
                return other
            if head is None:
                return ""
            self._is_read = True
            self._unread = self._unread[head.end() :]
        text = self._TEXT.match(self._unread)
        assert text is not None
        self._unread = self._unread[text.end() :][: self._MAX_ESCAPE]  # nothing follows the text
        return string_of(text[0])

    def finish(self) -> str:
        """Return what arguments that begin in another way are, unless they broke off before."""
        unread = self._unread.strip()
        is_cut = unread.startswith("{") and not unread.endswith("}")
        return "" if self._is_read or is_cut else self._unread


class OutputParser:
    """A parser of one choice's output, whole or in pieces. It counts begun tool calls."""

    def __init__(self, expected: ExpectedOutput) -> None:
        tools = expected.tool_parser
        options = expected.tool_options
        self.num_calls = 0
        self.looks_for_calls = tools is not None
        self._open_call: Brackets | None = None  # reads its arguments
        # None once the reasoning is over.
        self._reasoning = expected.make_reasoning_parser()
        self._num_reasoning_tokens = 0  # of spans that have ended and been counted
        self._num_spans = 0
        self._tools = tools(options.tools) if tools and options else None
        self._only_first = options is not None and not options.parallel
        self._custom = options.custom if options else {}
        self._input: CustomInput | None = None  # of the latest call
        self._table = expected.table  # for counting the tokens of the reasoning
        self._decoder = Utf8Decoder("replace")
        self._num_chars = 0
        # Where tokens begin in the text, in characters, until the reasoning ends.
        self._token_starts: list[int] = []

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """Add text, and the tokens since the last call, whose text the detokenizer may still hold
        back. Return the deltas that are certain so far.
        """
        if self._reasoning is None:
            if self._tools is None:
                return [Content(text)] if text else []
            return self._select(self._tools.feed(text))
        for token_id in token_ids:
            self._token_starts.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(self._table[token_id]))
        deltas = self._reasoning.feed(text)
        if self._reasoning.is_over and self._reasoning.has_call and self._tools is not None:
            self._tools.stray = self._reasoning.end_tag
        deltas = self._sort(deltas)
        for begin, end in self._reasoning.spans[self._num_spans :]:
            if end < math.inf:  # count each span once: there may be thousands
                self._num_reasoning_tokens += self._num_tokens(begin, end)
                self._num_spans += 1
        if self._reasoning.is_over:
            self._num_reasoning_tokens = self.num_reasoning_tokens  # the last time
            self._reasoning = None
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._sort(self._reasoning.finish()) if self._reasoning else []
        deltas += self._select(self._tools.finish()) if self._tools else []
        return deltas + self._rest_of_input()

    @property
    def is_in_call(self) -> bool:
        return self._open_call is not None

    @property
    def num_reasoning_tokens(self) -> int:
        open_spans = self._reasoning.spans[self._num_spans :] if self._reasoning else []
        return self._num_reasoning_tokens + sum(self._num_tokens(*span) for span in open_spans)

    def _num_tokens(self, begin: int, end: float) -> int:
        """Return how many tokens start between the characters `begin` and `end`."""
        return bisect_left(self._token_starts, end) - bisect_left(self._token_starts, begin)

    def _sort(self, deltas: list[Delta]) -> list[Delta]:
        """Return the deltas, with the calls in their content parsed."""
        tools = self._tools
        if tools is None:
            return deltas
        parts = [
            self._select(tools.feed(d.text)) if isinstance(d, Content) else [d] for d in deltas
        ]
        return [delta for part in parts for delta in part]

    def _select(self, deltas: list[Delta]) -> list[Delta]:
        if self._only_first:
            deltas = [
                d
                for d in deltas
                if not (isinstance(d, ToolCallStart | ToolCallArguments) and d.index > 0)
            ]
        selected: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                selected += self._rest_of_input()
                self.num_calls += 1
                self._open_call = Brackets()
                delta.is_custom = delta.name in self._custom
                self._input = CustomInput() if delta.is_custom else None
            elif isinstance(delta, ToolCallArguments):
                self._follow_call(delta)
                if not delta.text:  # held back
                    continue
            selected.append(delta)
        return selected

    def _rest_of_input(self) -> list[Delta]:
        text = self._input.finish() if self._input else ""
        return [ToolCallArguments(self.num_calls - 1, text, is_custom=True)] if text else []

    def _follow_call(self, delta: ToolCallArguments) -> None:
        """Note whether the arguments end, and turn those of a custom tool into its text."""
        call = self._open_call
        if call is not None:
            is_other_text = call.depth == 0 and not delta.text.lstrip().startswith(("{", "["))
            if is_other_text or call.end(delta.text, 0):
                self._open_call = None
        if self._input is not None:
            delta.text = self._input.feed(delta.text)
            delta.is_custom = True
