"""Grammar: what an output may look like, token by token. The one door to llguidance.

Kinds of `StructuredOutput` and what their `value` holds:

| kind | value |
|---|---|
| json | a JSON schema, draft 2020-12 without the keywords that a generator cannot obey; those are refused by name |
| json_object | nothing: any JSON object |
| regex | a regular expression in Rust's syntax (no look-around, no back-references) that the whole output matches |
| choice | a JSON list of strings |
| grammar | GBNF (`root ::= ...`) or llguidance's Lark (`start: ...`) |

In Lark, `%json {...}` embeds a JSON schema, `<|name|>` and `<[id]>` stand for special tokens, and
/regex/ and "text" for themselves: `start: "<tool_call>" call "</tool_call>"`, next line `call:
%json {"type": "object"}`.
"""

from __future__ import annotations

import json
import time
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer

from servd.config import Config
from servd.hf import ModelSpec, find_model, find_tokenizer
from servd.params import StructuredOutput

# Bounds on the work of one compilation and of one mask, and on the states that a grammar gathers
# (0.4 to 0.7 kB each, so 14 MB in all). Most schemas have fewer than 500; texts with a maxLength
# have seven for each of their characters. A mask of the most ambiguous grammar takes 60 ms with
# these items; with the library's default, ten times as long.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
# Models that may write any white space can go on with it for ever.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
MAX_MESSAGE = 400  # characters of the library's messages
NO_OUTPUT = "no output could satisfy it"


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed; the message is for the client."""


class UsedUp(GrammarError):
    """A grammar has gathered all states that it may have; another one of the same value has none
    yet.
    """


class Grammar:
    """One compiled grammar. Its matchers share the lexer states that they discover.

    Attributes:
        seconds: that it took to compile.

    Raises:
        GrammarError: the value is malformed, asks for what is not supported, or is beyond LIMITS.
    """

    def __init__(self, output: StructuredOutput, vocabulary: LLTokenizer) -> None:
        start = time.thread_time()
        try:
            self._origin = LLMatcher(vocabulary, _source(output), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise GrammarError(_shorten(str(error))) from None
        self.seconds = time.thread_time() - start
        _check(self._origin)

    def matcher(self) -> Matcher:
        """A follower of one output, at its beginning."""
        return Matcher(self._origin.deep_copy())


class Matcher:
    """Follows one output."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end of the sequence."""
        return self._matcher.is_stopped()

    def bitmask(self) -> bytes:
        """The tokens that may come next: int32 [ceil(vocab_size / 32)], bit set = allowed.

        Raises:
            GrammarError: none may, or finding them goes beyond LIMITS.
            UsedUp: of states.
        """
        bitmask = self._matcher.compute_bitmask()
        _check(self._matcher)
        return bitmask

    def accept(self, token_id: int) -> None:
        """Take in the next token.

        Raises:
            GrammarError: the grammar does not allow it.
            UsedUp: see `bitmask`.
        """
        if not self._matcher.consume_token(token_id):
            _check(self._matcher)


def load_vocabulary(config: Config, spec: ModelSpec) -> LLTokenizer:
    """The bytes of every token, arranged for fast masks. Takes a fifth of a second for 50,000
    tokens.
    """
    model = config.model
    folder = (
        str(find_model(model.tokenizer, download_dir=model.download_dir))
        if model.tokenizer
        else spec.folder
    )
    if not folder:
        return LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary(spec.eos_token_ids[0])))
    file = str(find_tokenizer(folder, config.model.trust_remote_code))
    # The library guesses the end-of-sequence tokens where the model names none.
    return LLTokenizer(file, n_vocab=spec.vocab_size, eos_token=spec.eos_token_ids or None)


class ByteVocabulary:
    """The fake model's: a token per byte, and the end of the sequence."""

    bos_token_id = None

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = [eos_token_id]
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _source(output: StructuredOutput) -> str:
    """The grammar in llguidance's own form."""
    match output.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(output.value, defaults=JSON_OPTIONS)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(output.value)
        case "choice":
            choices = " | ".join(
                json.dumps(choice, ensure_ascii=False) for choice in json.loads(output.value)
            )
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case "grammar":
            return llguidance.grammar_from("grammar", output.value)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        message = _shorten(matcher.get_error())
        kind = UsedUp if "too many states" in message else GrammarError
        raise kind(NO_OUTPUT if message.startswith("NoExtension") else message)


def _shorten(message: str) -> str:
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    return " ".join(filter(None, lines))[:MAX_MESSAGE]
