"""MessageFormat: how the served model writes thoughts and tool calls; MessageParser: one reply,
taken apart.
"""

from __future__ import annotations

import codecs
import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from servd import plugins
from servd.api.chat_template import ChatTemplate
from servd.api.grammar_checker import MAX_BYTES
from servd.api.incremental import Brackets, Content, Delta, ToolCallArguments, ToolCallStart
from servd.api.reasoning_parsers._think import ThinkParser
from servd.api.tokenizer import Tokenizer
from servd.api.tool_parsers._base import ToolParser
from servd.api.tool_parsers._forced import ForcedCallsParser, calls_schema
from servd.api.tool_parsers._grammar import NotExpressible, calls_grammar
from servd.config import Config
from servd.errors import InvalidRequest
from servd.params import StructuredOutput

log = logging.getLogger("servd.api")

TOOL_PARSERS = "servd.api.tool_parsers"
REASONING_PARSERS = "servd.api.reasoning_parsers"
SCHEMAS = {
    "json": "{}",
    "json_object": '{"type": "object"}',
}  # kinds of structured output that are schemas


class ToolUse(msgspec.Struct, frozen=True):
    """The tools of a request, in OpenAI's form."""

    tools: list[dict[str, Any]]  # shown to the model
    forced: list[dict[str, Any]] = []  # one of these must be called
    parallel: bool = True  # else only the first call counts


class MessageParser:
    """Splits one reply into thoughts, content and tool calls, whole or piece by piece.

    Attributes:
        num_calls: tool calls told so far.

    Args:
        reasoning: finds thoughts.
        tools: finds calls in the rest.
        only_first: drop all calls after the first.
        table: the bytes of tokens, for counting those of the thoughts.
    """

    def __init__(
        self,
        reasoning: ThinkParser | None,
        tools: ToolParser | None,
        only_first: bool,
        table: Mapping[int, bytes],
    ) -> None:
        self.num_calls = 0
        self._open_call: Brackets | None = None  # of its arguments
        self._reasoning = reasoning  # until the thoughts are over
        self._num_reasoning_tokens = 0  # once they are
        self._tools = tools
        self._only_first = only_first
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf8")("replace")
        self._num_chars = 0
        self._token_starts: list[
            int
        ] = []  # where tokens begin in the text, in characters, until the thoughts end

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Delta]:
        """Take more text; return what is certain now.

        Args:
            text: from the detokenizer, which may hold some of the tokens' text back.
            token_ids: all tokens that came since the last call.
        """
        if self._reasoning is None:
            return self._split(text)
        if self._reasoning.end is None:
            for token_id in token_ids:
                self._token_starts.append(self._num_chars)
                self._num_chars += len(self._decoder.decode(self._table[token_id]))
        deltas = self._sort(self._reasoning.feed(text))
        if self._reasoning.is_over:
            self._num_reasoning_tokens = self.num_reasoning_tokens
            self._reasoning = None
        return deltas

    def finish(self) -> list[Delta]:
        """The rest, after the last text."""
        deltas = self._sort(self._reasoning.finish()) if self._reasoning else []
        return deltas + (self._select(self._tools.finish()) if self._tools else [])

    @property
    def is_in_call(self) -> bool:
        """Whether the arguments of the last call are not whole yet."""
        return self._open_call is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thoughts so far, without their tags."""
        if self._reasoning is None or self._reasoning.begin is None:
            return self._num_reasoning_tokens
        end = self._reasoning.end
        num_before_end = (
            len(self._token_starts) if end is None else bisect_left(self._token_starts, end)
        )
        return num_before_end - bisect_left(self._token_starts, self._reasoning.begin)

    def _sort(self, deltas: list[Delta]) -> list[Delta]:
        """Look for calls in what is no thought."""
        if self._tools is None:
            return deltas
        parts = [
            self._split(delta.text) if isinstance(delta, Content) else [delta] for delta in deltas
        ]
        return [delta for part in parts for delta in part]

    def _split(self, text: str) -> list[Delta]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._select(self._tools.feed(text))

    def _select(self, deltas: list[Delta]) -> list[Delta]:
        if self._only_first:
            deltas = [
                d
                for d in deltas
                if not (isinstance(d, ToolCallStart | ToolCallArguments) and d.index > 0)
            ]
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                self.num_calls += 1
                self._open_call = Brackets()
            elif (
                isinstance(delta, ToolCallArguments)
                and self._open_call
                and self._open_call.end(delta.text, 0)
            ):
                self._open_call = None
        return deltas


class ReplyFormat(msgspec.Struct, frozen=True):
    """What one chat request expects of its reply."""

    structured_output: StructuredOutput | None = None
    reasoning_parser: type[ThinkParser] | None = None
    is_thinking: bool = False  # the reply begins inside the thoughts
    tool_parser: type[ToolParser] | None = None
    tool_use: ToolUse | None = None
    visible_ids: frozenset[int] = frozenset()  # added tokens that the parsers need to see as text
    table: Mapping[int, bytes] = {}  # the bytes of tokens, as the detokenizer sees them

    @property
    def is_plain(self) -> bool:
        """The whole reply is content."""
        return self.tool_parser is None and self.reasoning_parser is None

    def new_parser(self) -> MessageParser:
        """A parser for one choice."""
        use = self.tool_use
        return MessageParser(
            self.reasoning_parser(self.is_thinking) if self.reasoning_parser else None,
            self.tool_parser(use.tools) if self.tool_parser and use else None,
            only_first=use is not None and not use.parallel,
            table=self.table,
        )


class MessageFormat:
    """How the served model writes thoughts and tool calls.

    Args:
        tokenizer: of the model.
        tool_parser: None if the model has no known format; required and named calls work all the
            same.
        reasoning_parser: None if the model does not think.
        thinks_unasked: the model opens the thoughts by itself where the prompt neither opens nor
            closes them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_parser: type[ToolParser] | None,
        reasoning_parser: type[ThinkParser] | None,
        thinks_unasked: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.thinks_unasked = thinks_unasked

    @classmethod
    def choose(cls, config: Config, template: ChatTemplate, tokenizer: Tokenizer) -> MessageFormat:
        """What the options name, else what the chat template shows.

        Raises:
            ConfigError: no such parser.
        """
        tools = _choose(TOOL_PARSERS, config.server.tool_call_parser, template.tool_source)
        reasoning = _choose(REASONING_PARSERS, config.server.reasoning_parser, template.source)
        is_asserted = (
            config.server.reasoning_parser is not None or "enable_thinking" in template.source
        )
        return cls(
            tokenizer,
            tools if config.server.enable_auto_tool_choice else None,
            reasoning,
            is_asserted,
        )

    def reply(
        self,
        prompt: str,
        tool_use: ToolUse | None = None,
        structured_output: StructuredOutput | None = None,
        skip_special_tokens: bool = True,
        continued: str = "",
    ) -> ReplyFormat:
        """What to expect after `prompt`.

        Args:
            prompt: as rendered: its end tells whether the reply begins with thoughts.
            tool_use: None where the model may not call tools.
            structured_output: what the content must look like, unless the model calls tools.
            skip_special_tokens: as of the detokenizer.
            continued: content of the message that the reply goes on with.

        Raises:
            InvalidRequest: the form of the reply cannot be held to begin after the thoughts, or is
                no JSON.
        """
        tool_parser: type[ToolParser] | None = None
        if tool_use is not None:
            tool_parser, structured_output = self._calls(tool_use, structured_output)
        reasoning_parser, is_thinking = self._reasoning(prompt, continued)
        if reasoning_parser is not None and structured_output is not None:
            if is_thinking or self.thinks_unasked:
                structured_output = self._after_thoughts(
                    structured_output, reasoning_parser.end_tag
                )
            else:
                reasoning_parser = None  # the form holds from the first token on
        if tool_parser is None and reasoning_parser is None:
            return ReplyFormat(structured_output)
        markers = [*(tool_parser.markers if tool_parser else ())]
        if reasoning_parser is not None:
            markers += [reasoning_parser.start_tag, reasoning_parser.end_tag]
        visible_ids = frozenset(
            i for marker in markers if (i := self._added_id(marker)) is not None
        )
        return ReplyFormat(
            structured_output,
            reasoning_parser,
            is_thinking,
            tool_parser,
            tool_use,
            visible_ids,
            self.tokenizer.byte_table(skip_special_tokens, visible_ids),
        )

    def _calls(
        self, tool_use: ToolUse, structured_output: StructuredOutput | None
    ) -> tuple[type[ToolParser] | None, StructuredOutput | None]:
        """What finds calls in the reply, and the form that the reply must have."""
        content_schema = None
        if not tool_use.forced:
            if structured_output is None or structured_output.kind not in SCHEMAS:
                return self.tool_parser, structured_output
            content_schema = structured_output.value or SCHEMAS[structured_output.kind]
        try:
            grammar = self._calls_grammar(tool_use, content_schema)
        except (ValueError, RecursionError) as error:
            assert structured_output is not None
            param = structured_output.param
            raise InvalidRequest(
                f"{param}: the schema is not valid JSON: {error}", param=param
            ) from None
        if grammar is not None:
            return self.tool_parser, StructuredOutput("grammar", grammar, param="tools")
        if not tool_use.forced:
            return self.tool_parser, structured_output
        schema = calls_schema(tool_use.forced, tool_use.parallel)
        return ForcedCallsParser, StructuredOutput("json", schema, param="tools")

    def _calls_grammar(self, tool_use: ToolUse, content_schema: str | None) -> str | None:
        """Calls in the model's own format; None if that cannot be held to the tools' schemas."""
        parser = self.tool_parser
        if parser is None or not parser.syntaxes:
            return None
        tools = tool_use.forced or tool_use.tools
        try:
            grammar = calls_grammar(
                parser.syntaxes,
                parser.arguments_grammar,
                tools,
                tool_use.parallel,
                self._added_id,
                content_schema,
            )
        except NotExpressible as reason:
            log.debug("tool calls are held to a JSON array: %s", reason)
            return None
        return grammar if len(grammar.encode()) <= MAX_BYTES else None

    def _added_id(self, marker: str) -> int | None:
        # All of them, special or not: those in angle brackets are special to llguidance, whatever
        # the tokenizer says.
        token_id = self.tokenizer.token_id(marker)
        return token_id if token_id in self.tokenizer.added_ids else None

    def _reasoning(self, prompt: str, continued: str) -> tuple[type[ThinkParser] | None, bool]:
        """The parser, if the reply can have thoughts; and whether it begins inside them."""
        parser = self.reasoning_parser
        if parser is None:
            return None, False
        end = prompt[-256:].rstrip()
        opened, closed = continued.rfind(parser.start_tag), continued.rfind(parser.end_tag)
        if end.endswith(parser.end_tag) or closed > opened:
            return None, False
        is_thinking = end.endswith(parser.start_tag) or opened >= 0
        return parser, is_thinking or (parser.always and not continued)

    def _after_thoughts(
        self, structured_output: StructuredOutput, end_tag: str
    ) -> StructuredOutput:
        end_id = self.tokenizer.token_id(end_tag)
        if end_id is None:
            raise InvalidRequest(
                f"this model thinks before it answers, and its {end_tag} is not one token, so the "
                f"form of the answer "
                'cannot be held: switch thinking off with "reasoning_effort": "none"',
                param=structured_output.param,
            )
        return msgspec.structs.replace(structured_output, starts_after=[end_id])


def _choose(package: str, name: str | None, template: str) -> Any:
    """The parser with this name, or the first one that fits the template; None if there is none."""
    kind = package.rpartition(".")[2].replace("_", " ").removesuffix("s")
    if name == "none":
        return None
    if name is not None:
        return plugins.load(package, name, "Parser")
    for name in plugins.names(package):
        parser = plugins.load(package, name, "Parser")
        if parser.matches(template):
            log.info("%s: %s, by the chat template", kind, name)
            return parser
    log.info("%s: none, the chat template shows no known format", kind)
    return None
