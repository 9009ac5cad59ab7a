"""Grammar: a compiled grammar; Matcher: follows one output. The only file that uses llguidance.

Kinds of `StructuredOutput` and what their `value` holds:

| kind | value |
|---|---|
| json | a JSON schema, draft 2020-12; keywords that cannot be enforced are refused by name |
| json_object | empty: any JSON object |
| regex | a regular expression in Rust's syntax (no look-around) that the whole output matches |
| choice | a JSON list of strings |
| grammar | GBNF (`root ::= ...`) or llguidance's Lark (`start: ...`) |

In Lark, `%json {...}` embeds a JSON schema, `<|name|>` and `<[id]>` stand for special tokens, and
/regex/ and "text" for themselves: `start: "<tool_call>" call "</tool_call>"`, next line `call:
%json {"type": "object"}`.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from servd.core.structured_output.json_schema import simplify
from servd.core.structured_output.number_limit import MAX_DIGITS, NumberLimit, number_limit
from servd.messages.params import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Limits on the work of one compilation and of one mask, and on the lexer states that a grammar
# collects (0.4 to 0.7 kB each, so 14 MB in all). Most schemas have fewer than 500; strings with a
# maxLength have seven for each character. A mask of the most ambiguous grammar takes 60 ms with
# MAX_ITEMS; with the library's default, ten times as long. The items of a row are items of its
# mask, which reaches the limit earlier, so they need no smaller limit.
MAX_ITEMS = 10_000
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": MAX_ITEMS,
    "max_items_in_row": MAX_ITEMS,
    "max_lexer_states": 20_000,
}
# White space between JSON tokens: one or two blanks, or a new line and its indentation. With any
# white space allowed, models may write it until max_tokens.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t]{1,2}|[ \t]?\r?\n[ \t]{0,20}"}
OPTIONS_KEY = "x-guidance"  # the library's own options, in a schema
MAX_MESSAGE = 400  # characters of the library's messages
MAX_FORCED = 1024  # forced tokens that are kept
NO_OUTPUT = "no output could satisfy it"
DEAD_END = "it leads to a point where nothing may follow"


T = TypeVar("T")


class GrammarError(Exception):
    """An error of a grammar that cannot be compiled or followed. The message is for the client."""


class UsedUp(GrammarError):
    """An error of a grammar without lexer states left. Compiling it again resets the limit."""


class Grammar:
    """A compiled grammar. Its matchers share the lexer states that they discover. Raises
    GrammarError if the value is malformed, not supported, or exceeds LIMITS. `seconds`: CPU time of
    the compilation; `mask_seconds`: CPU time of the first mask.
    """

    def __init__(self, output: StructuredOutput, vocabulary: LLTokenizer) -> None:
        start = time.thread_time()
        self._origin = _call(_compile, output, vocabulary)
        _check(self._origin)
        compiled = time.thread_time()
        # The library's mask has one word more if the last one is full.
        self._mask_size = 4 * -(-vocabulary.vocab_size // 32)  # bytes
        self.first_mask = _call(self._origin.compute_bitmask)[: self._mask_size]
        _check(self._origin, dead_end=NO_OUTPUT)
        self.first_forced = _forced_tokens(self._origin)
        self._number_limit = number_limit(vocabulary) if _bounds_numbers(output) else None
        self.seconds = compiled - start
        self.mask_seconds = time.thread_time() - compiled

    def matcher(self) -> Matcher:
        copied = self._origin.deep_copy()
        return Matcher(
            copied, self._mask_size, self.first_mask, self.first_forced, self._number_limit
        )


@dataclass(eq=False)
class Matcher:
    """Tracks one output.

    At each forced token, the library tokenizes all remaining forced text again, which takes 80 ms
    for 50 kB. Therefore its first answer is kept until all the tokens in it are used.
    """

    _matcher: LLMatcher
    _mask_size: int
    _first_mask: bytes | None  # None after the first token
    _forced: list[int]  # the next tokens, as far as is known
    _number_limit: NumberLimit | None
    _num_digits: int = 0  # at the end of the output, if numbers have a limit

    def copy(self) -> Matcher:
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the sequence may follow."""
        return self._matcher.is_stopped()

    def bitmask(self) -> bytes:
        """Return the allowed next tokens: int32 [ceil(vocab_size / 32)], bit set = allowed. Raises
        GrammarError if there are none, or if finding them exceeds LIMITS; UsedUp if the lexer
        states reach their limit.
        """
        if self._first_mask is not None:
            return self._first_mask
        if self._forced:
            return _only(self._forced[0], self._mask_size)
        bitmask = _call(self._matcher.compute_bitmask)
        _check(self._matcher)
        bitmask = bitmask[: self._mask_size]
        if self._number_limit is not None and self._num_digits >= MAX_DIGITS:
            return _call(self._number_limit.forbid_digits, bitmask, self._matcher)
        return bitmask

    def forced_tokens(self) -> list[int]:
        """Return the next tokens as long as no other is allowed, at most MAX_FORCED. Raises
        GrammarError if the library fails.
        """
        if not self._forced:
            self._forced = _forced_tokens(self._matcher)
        return self._forced

    def accept(self, token_id: int) -> None:
        """Advance by the next token. Raises GrammarError if the grammar does not allow it."""
        self._first_mask = None
        self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
        if self._number_limit is not None:
            self._num_digits = self._number_limit.count_digits(self._num_digits, token_id)
        if not _call(self._matcher.consume_token, token_id):
            _check(self._matcher)


def _compile(output: StructuredOutput, vocabulary: LLTokenizer) -> LLMatcher:
    import llguidance  # here: an engine runs without it until a request has a grammar

    limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
    return llguidance.LLMatcher(vocabulary, _source(output), log_level=0, limits=limits)


def _source(output: StructuredOutput) -> str:
    from llguidance import LLMatcher, grammar_from  # here: see `_compile`

    match output.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(
                _simplified(output.value), defaults=JSON_OPTIONS
            )
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(output.value)
        case "choice":
            choices = " | ".join(
                # JSON leaves this control character as it is, and Lark refuses it.
                json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\u007f")
                for choice in json.loads(output.value)
            )
            # A terminal: as alternatives of a rule, thousands would be beyond MAX_ITEMS.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "grammar" | "structural_tag":
            return _embed_schemas(grammar_from("grammar", output.value))


def _simplified(text: str) -> str:
    """Return a JSON schema with the keywords that the library knows, or an equal schema unchanged:
    numbers may not survive being read and written.
    """
    try:
        schema = json.loads(text)
        simple = simplify(schema)
    except (ValueError, TypeError, RecursionError):  # the library states what is wrong with it
        return text
    return text if simple == schema else json.dumps(simple, ensure_ascii=False)


def _embed_schemas(lark: str) -> str:
    """Return the grammar with simplified schemas, and JSON_OPTIONS in each without options."""
    parts: list[str] = []
    end = 0
    for match in re.finditer(r"%json\s*(?=\{)", lark):
        if match.start() < end:  # text of a schema
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError):  # the library states what is wrong with it
            continue
        text = _simplified(lark[match.end() : after])
        if OPTIONS_KEY not in schema:
            remaining = text[1:].lstrip()
            separator = "" if remaining == "}" else ", "
            text = f'{{"{OPTIONS_KEY}": {json.dumps(JSON_OPTIONS)}{separator}{remaining}'
        parts.append(f"{lark[end : match.start()]}%json {text}")
        end = after
    return "".join(parts) + lark[end:]


def _bounds_numbers(output: StructuredOutput) -> bool:
    """Return whether the grammar has numbers of JSON, and no options of its own."""
    if f'"{OPTIONS_KEY}"' in output.value:
        return False
    is_json = output.kind in ("json", "json_object")
    return is_json or (output.kind == "grammar" and "%json" in output.value)


# Parts of the library's error messages -> messages for clients.
EXCEEDED = {
    "too many states": f"it has too many states, more than {LIMITS['max_lexer_states']}",
    "Too many items": f"it allows too much at once: more than {MAX_ITEMS} parser items",
    "Current row has": f"it allows too much at once: more than {MAX_ITEMS} parser items",
    "too many expressions": (
        "its regular expressions are too complex: a token takes more than "
        f"{LIMITS['step_lexer_fuel']} steps to follow; use fewer or smaller repetitions"
    ),
}


def _call(function: Callable[..., T], *args: Any) -> T:
    """Call the library. Raises GrammarError for any failure: it ends one output, not the engine."""
    try:
        return function(*args)
    except (SystemExit, KeyboardInterrupt):
        raise
    except ValueError as error:
        raise GrammarError(_shorten(str(error))) from None
    except BaseException as error:  # a Rust panic is no Exception
        raise GrammarError(f"the grammar library failed ({type(error).__name__})") from error


def _forced_tokens(matcher: LLMatcher) -> list[int]:
    return _call(matcher.compute_ff_tokens)[:MAX_FORCED]


def _only(token_id: int, mask_size: int) -> bytes:
    mask = bytearray(mask_size)
    mask[token_id // 8] = 1 << token_id % 8
    return bytes(mask)


def _check(matcher: LLMatcher, dead_end: str = DEAD_END) -> None:
    if not matcher.is_error():
        return
    message = matcher.get_error()
    if "too many states" in message:
        raise UsedUp(EXCEEDED["too many states"])
    for sign, reason in EXCEEDED.items():
        if sign in message:
            raise GrammarError(reason)
    raise GrammarError(dead_end if message.startswith("NoExtension") else _shorten(message))


def _shorten(message: str) -> str:
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    return " ".join(filter(None, lines))[:MAX_MESSAGE]
