"""ModelFormat: the format in which the served model writes reasoning and tool calls."""

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

import msgspec

from servd.api.output.call_grammar import ANY_OBJECT, AddedTokens, NotExpressible, calls_grammar
from servd.api.output.output_parser import ExpectedOutput
from servd.api.output.reasoning_parser import ReasoningParser
from servd.api.output.structural_tag import structural_tag_grammar
from servd.api.output.tool_parser import ForcedCallsParser, ToolParser
from servd.api.text.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from servd.api.text.prompt import ToolOptions
from servd.api.text.tokenizer import Tokenizer
from servd.base import plugins
from servd.base.errors import InvalidRequest
from servd.config import Config
from servd.messages.params import MAX_GRAMMAR_BYTES, StructuredOutput

log = logging.getLogger("servd.api")

TOOL_PARSERS = "servd.api.output.tool_parsers"
REASONING_PARSERS = "servd.api.output.reasoning_parsers"
# Kinds of structured output that are schemas.
SCHEMAS = {"json": "{}", "json_object": '{"type": "object"}'}


@dataclass(eq=False)
class ModelFormat:
    """The parsers for the served model's reasoning and tool calls."""

    tokenizer: Tokenizer
    # None if the model has no known format; required and named calls work all the same.
    tool_parser: type[ToolParser] | None
    reasoning_parser: type[ReasoningParser] | None  # None if the model does not reason
    # It begins to reason by itself where the prompt neither opens nor closes the tag.
    reasons_unasked: bool = False
    enforced: Literal["auto", "strict", "off"] = "auto"  # see --enforce-tool-schemas
    end_ids: frozenset[int] = frozenset()  # the tokens that end an output
    vocab_size: int | None = None  # of the model, whose tokenizer may have more; None: as many
    tokens: AddedTokens = field(init=False)

    def __post_init__(self) -> None:
        added = self.tokenizer.added_ids
        if self.vocab_size is not None:
            added = frozenset(token_id for token_id in added if token_id < self.vocab_size)
        texts = {self.tokenizer.vocabulary_string(token_id): token_id for token_id in added}
        # Special or not: llguidance takes all text in angle brackets for special tokens.
        self.tokens = AddedTokens(texts, self.end_ids)
        tool_parser = self.tool_parser
        reasoning_parser = self.reasoning_parser
        # Parser -> ids of its markers that are added tokens.
        self._visible_ids: dict[type, frozenset[int]] = {ForcedCallsParser: frozenset()}
        if tool_parser is not None:
            self._visible_ids[tool_parser] = self._added_ids(*tool_parser.markers)
        if reasoning_parser is not None:
            tags = (reasoning_parser.start_tag, reasoning_parser.end_tag)
            markers = (*tags, *reasoning_parser.markers)
            self._visible_ids[reasoning_parser] = self._added_ids(*markers)

    @classmethod
    def choose(
        cls,
        config: Config,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        end_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
    ) -> Self:
        """Return the format that the options select, or else the format of the chat template. Raise
        ConfigError for an unknown parser.
        """
        options = config.server
        tools = _choose(ToolParser, TOOL_PARSERS, options.tool_call_parser, template.tool_source)
        reasoning = _choose(
            ReasoningParser, REASONING_PARSERS, options.reasoning_parser, template.source
        )
        is_asserted = bool(config.server.reasoning_parser) or "enable_thinking" in template.source
        tools = tools if config.server.enable_auto_tool_choice else None
        if tools is not None and not tools.can_hold():
            log.info(
                "calls of tools with `strict` are not held to their schemas unless `tool_choice` "
                "forces one: in this model's format, nothing marks where a call begins"
            )
        enforced = options.enforce_tool_schemas
        return cls(tokenizer, tools, reasoning, is_asserted, enforced, end_ids, vocab_size)

    def without_tags(self, output: StructuredOutput | None) -> StructuredOutput | None:
        """Return the form of an output with a grammar in place of a structural tag. Raise
        InvalidRequest if the tag is not valid.
        """
        if output is None or output.kind != "structural_tag":
            return output
        grammar = structural_tag_grammar(output, self.tokens)
        return msgspec.structs.replace(output, kind="grammar", value=grammar)

    def unheld_fields(
        self, tool_options: ToolOptions, output: StructuredOutput | None = None
    ) -> list[str]:
        """Return the fields about tools that have no effect on calls that no one forces. `output`
        is the form of the output without them.
        """
        is_held = output is None and self._can_hold
        if output is not None and output.kind in SCHEMAS:  # see `_hold_calls`
            is_held = self.tool_parser is not None and bool(self.tool_parser.syntaxes)
        if tool_options.forced or is_held:
            return []
        is_strict = any(tool["function"].get("strict") for tool in tool_options.tools)
        has_grammar = any(tool_options.custom.values())
        fields = {"tools.strict": is_strict, "tools.format": has_grammar}
        return [name for name, is_set in fields.items() if is_set]

    @property
    def _can_hold(self) -> bool:
        parser = self.tool_parser
        return self.enforced != "off" and parser is not None and parser.can_hold()

    def expect(
        self,
        prompt: str,
        tool_options: ToolOptions | None = None,
        structured_output: StructuredOutput | None = None,
        skip_special_tokens: bool = True,
        continued: str = "",
    ) -> ExpectedOutput:
        """Return the expected output after `prompt`. The end of the prompt shows whether the output
        begins with reasoning. `continued` is content of a message that the output continues.

        Raises InvalidRequest: structured output cannot start after the reasoning, or its schema is
        not valid JSON.
        """
        tool_parser: type[ToolParser] | None = None
        free_calls: StructuredOutput | None = None  # calls with any text around them
        if tool_options is not None:
            tool_parser = self.tool_parser
            is_schema = structured_output is not None and structured_output.kind in SCHEMAS
            if tool_options.forced or is_schema:
                tool_parser, structured_output = self._hold_calls(tool_options, structured_output)
            elif structured_output is None and self._can_hold:
                structured_output = free_calls = self._hold_free_calls(tool_options)
        reasoning_parser = None
        is_reasoning = False
        if self.reasoning_parser is not None:
            reasoning_parser, is_reasoning = self._reasoning(
                self.reasoning_parser, prompt, continued
            )
        if reasoning_parser is not None and structured_output is not free_calls:
            assert structured_output is not None
            can_reason = self.reasons_unasked and reasoning_parser.asked_by in prompt
            if reasoning_parser.answer_tag or is_reasoning or can_reason:
                structured_output = self._after_reasoning(structured_output, reasoning_parser)
            else:
                reasoning_parser = None  # the form holds from the first token on
        if tool_parser is None and reasoning_parser is None:
            return ExpectedOutput(structured_output)
        visible_ids = frozenset[int]().union(
            *(self._visible_ids[parser] for parser in (tool_parser, reasoning_parser) if parser)
        )
        return ExpectedOutput(
            structured_output,
            reasoning_parser,
            is_reasoning,
            tool_parser,
            tool_options,
            visible_ids,
            self.tokenizer.byte_table(skip_special_tokens, visible_ids) if reasoning_parser else {},
        )

    def _hold_calls(
        self, tool_options: ToolOptions, structured_output: StructuredOutput | None
    ) -> tuple[type[ToolParser] | None, StructuredOutput | None]:
        """Return the parser of the calls, and the structured output that enforces the schemas."""
        content_schema = None
        if not tool_options.forced and structured_output is not None:
            content_schema = structured_output.value or SCHEMAS[structured_output.kind]
        try:
            grammar = self._calls_grammar(tool_options, content_schema)
        except (ValueError, RecursionError) as error:
            assert structured_output is not None
            param = structured_output.param
            raise InvalidRequest(
                f"{param}: the schema is not valid JSON: {error}", param=param
            ) from None
        if grammar is not None:
            return self.tool_parser, StructuredOutput("grammar", grammar, param="tools")
        if not tool_options.forced:
            return self.tool_parser, structured_output
        grammar = self._grammar(ForcedCallsParser, tool_options, tool_options.forced)
        return ForcedCallsParser, StructuredOutput("grammar", grammar, param="tools")

    def _calls_grammar(self, tool_options: ToolOptions, content_schema: str | None) -> str | None:
        """Return a grammar of calls in the model's format; None if schemas cannot be enforced."""
        parser = self.tool_parser
        if parser is None or not parser.syntaxes:
            return None
        try:
            tools = tool_options.forced or tool_options.tools
            grammar = self._grammar(parser, tool_options, tools, content_schema=content_schema)
        except NotExpressible as reason:
            log.debug("tool calls are held to a JSON array: %s", reason)
            return None
        return grammar if len(grammar.encode()) <= MAX_GRAMMAR_BYTES else None

    def _hold_free_calls(self, tool_options: ToolOptions) -> StructuredOutput | None:
        """Return the grammar of a text with calls; None if no tool is to be held to its schema.
        Raise InvalidRequest if the format cannot enforce the schema of a tool with `strict`.
        """
        parser = self.tool_parser
        assert parser is not None
        tools: list[dict[str, Any]] = []
        is_any_held = False
        for tool in tool_options.tools:
            name = tool["function"]["name"]
            has_grammar = tool_options.custom.get(name) is not None
            if has_grammar or self._holds(parser, tool["function"]):
                is_any_held = True
                tools.append(tool)
            elif name in tool_options.custom:
                tools.append(tool)
            else:
                tools.append({"function": {"name": name, "parameters": ANY_OBJECT}})
        if not is_any_held:
            return None
        grammar = self._grammar(parser, tool_options, tools, openings=parser.openings())
        is_strict = any(tool["function"].get("strict") for tool in tool_options.tools)
        num_bytes = len(grammar.encode())
        if num_bytes > MAX_GRAMMAR_BYTES and not (is_strict or any(tool_options.custom.values())):
            log.warning(
                "calls are not held to the schemas of %s tools: together they have %s bytes, more "
                "than %s",
                len(tools),
                num_bytes,
                MAX_GRAMMAR_BYTES,
            )
            return None
        return StructuredOutput("grammar", grammar, param="tools")

    def _holds(self, parser: type[ToolParser], function: dict[str, Any]) -> bool:
        """Return whether calls of a function must match its schema. Raise InvalidRequest if they
        should, but cannot.
        """
        is_strict = bool(function.get("strict"))
        if not is_strict and self.enforced != "strict":
            return False
        try:
            parser.arguments_grammar("arguments", function)
        except NotExpressible as reason:
            if not is_strict:
                return False
            raise InvalidRequest(
                f"the parameters of the tool `{function['name']}` cannot be enforced in this "
                f"model's format of calls: {reason}. Leave out `strict`",
                param="tools",
            ) from None
        return True

    def _grammar(
        self,
        parser: type[ToolParser],
        tool_options: ToolOptions,
        tools: list[dict[str, Any]],
        **options: Any,
    ) -> str:
        """Return the grammar of calls of `tools` in the format of `parser`; see `calls_grammar`."""
        arguments = partial(_arguments_grammar, parser, tool_options)
        parallel = tool_options.parallel
        return calls_grammar(parser.syntaxes, arguments, tools, parallel, self.tokens, **options)

    def _added_ids(self, *markers: str) -> frozenset[int]:
        return frozenset(self.tokens.ids[marker] for marker in markers if marker in self.tokens.ids)

    def _reasoning(
        self, parser: type[ReasoningParser], prompt: str, continued: str
    ) -> tuple[type[ReasoningParser] | None, bool]:
        """Return `parser`, or None if no reasoning can follow, and whether reasoning has begun."""
        end = prompt[-256:].rstrip()
        opened = continued.rfind(parser.start_tag)
        closed = continued.rfind(parser.end_tag)
        if end.endswith(parser.end_tag) or closed > opened:
            return None, False
        is_reasoning = end.endswith(parser.start_tag) or opened >= 0
        return parser, is_reasoning or (parser.always and not continued)

    def _after_reasoning(
        self, structured_output: StructuredOutput, parser: type[ReasoningParser]
    ) -> StructuredOutput:
        if parser.answer_tag:
            is_of_calls = (structured_output.kind, structured_output.param) == ("grammar", "tools")
            if is_of_calls and self.tool_parser and self.tool_parser.syntaxes[0].answer:
                return structured_output  # it has the reasoning in it
            tag = self.tokenizer.encode(parser.answer_tag, add_special_tokens=False)
            return msgspec.structs.replace(structured_output, starts_after=tag)
        end_tag = parser.end_tag
        end_id = self.tokenizer.token_id(end_tag)
        if end_id is None:
            raise InvalidRequest(
                f"this model reasons before it answers, and its {end_tag} is not one token, so "
                "servd cannot guarantee the form of the answer: switch reasoning off with "
                '"reasoning_effort": "none"',
                param=structured_output.param,
            )
        return msgspec.structs.replace(structured_output, starts_after=[end_id])


def _arguments_grammar(
    parser: type[ToolParser], tool_options: ToolOptions, rule: str, function: dict[str, Any]
) -> list[str]:
    if (grammar := tool_options.custom.get(function["name"])) is not None:
        return parser.input_grammar(rule, grammar)
    return parser.arguments_grammar(rule, function)


def _choose(base: type[Any], package: str, name: str | None, template: str) -> Any:
    """Return the parser with this name, or the first that matches the template, or None."""
    kind = package.rpartition(".")[2].replace("_", " ").removesuffix("s")
    if name == "none":
        return None
    if name is not None:
        return plugins.load_class(package, name, base)
    for name in plugins.names(package):
        parser = plugins.load_class(package, name, base)
        if parser.matches(template):
            log.info("%s: %s, by the chat template", kind, name)
            return parser
    if not template.endswith(DEFAULT_TEMPLATE):
        log.info("%s: none; the chat template has no known format", kind)
    return None
