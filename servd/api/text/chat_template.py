"""ChatTemplate: renders chat messages into the prompt, with the model's Jinja template.

Templates and messages are untrusted. Templates run in Jinja's sandbox (no attribute access to
Python internals, no changes to objects, bounded `range`) with limits on time and size. Any error in
a template becomes the request's 400.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from servd.api.text.prompt import Chat
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ConfigError, InvalidRequest, ModelNotFound

# For models without a template, such as GPT-2: "User: ...\nAssistant: ...", the next line being the
# model's.
DEFAULT_TEMPLATE = """\
{%- for message in messages %}
{{- message.role | capitalize }}: {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:' }}
{%- endif %}"""

# Arguments that `render` sets itself; chat_template_kwargs may not.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "conversation",
        "return_dict",
        "return_tensors",
        "raise_exception",
        "strftime_now",
    }
)

# Splits text of a message that equals a special token: the tokenizer gets the parts before and
# after it separately. It is random, so that clients cannot send it.
SPLIT_HERE = f"\uf8ff{secrets.token_hex(8)}"

MAX_SECONDS = 5.0  # CPU time for one prompt; long ones take some hundredths
MAX_CHARS = 1 << 26  # for a value in a template, and for its whole output
MAX_NUMBER = 1 << 20  # that a template may hand to a function, such as a width
LONG_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")  # in the format of `%`

# Stands at the end of the message to continue; a private-use character that no template strips or
# splits at.
_CONTINUE_HERE = "\uf8ffcontinue\uf8ff"


class ChatTemplate:
    """A compiled chat template in Jinja, with the extensions that Hugging Face templates use.

    Requests with tools use `tool_template`. `special_tokens` are variables such as `bos_token`. The
    `escaped` special tokens are plain text if they occur in a chat.
    """

    def __init__(
        self,
        template: str,
        tool_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        escaped: Collection[str] = (),
        defaults: dict[str, Any] | None = None,
    ) -> None:
        if reserved := RESERVED & (defaults or {}).keys():
            raise ConfigError(f"--default-chat-template-kwargs may not set {min(reserved)}")
        self.defaults = defaults or {}
        self.source = template
        self.tool_source = template if tool_template is None else tool_template
        self.special_tokens = special_tokens or {}
        tokens = sorted((re.escape(token) for token in escaped if len(token) > 1), key=len)
        self._escaped = re.compile("|".join(reversed(tokens))) if tokens else None
        self._template = _Compiled(template)
        self._tool_template = self._template if tool_template is None else _Compiled(tool_template)

    @property
    def is_default(self) -> bool:
        """Whether neither the model nor --chat-template provides a template."""
        return self.source.endswith(DEFAULT_TEMPLATE)

    @classmethod
    def load(
        cls,
        tokenizer: Tokenizer,
        override: str | None = None,
        escape: bool = True,
        defaults: dict[str, Any] | None = None,
    ) -> ChatTemplate:
        """Return the template: `override` (--chat-template: a file or Jinja text), else the
        model's, else the default. Raise ConfigError, also if `defaults` has a reserved name.
        """
        named = _read_override(override) if override else _read_model_templates(tokenizer)
        if not named:
            # Where the tokenizer would add BOS, the prompt has to begin with it as other templates'
            # prompts do.
            template = DEFAULT_TEMPLATE
            named = {"default": "{{ bos_token }}" + template if tokenizer.adds_bos else template}
        default = named.get("default") or next(iter(named.values()))
        escaped = map(tokenizer.token_string, tokenizer.special_ids) if escape else ()
        tools = named.get("tool_use")
        return cls(default, tools, tokenizer.special_tokens, [*escaped], defaults)

    def render(self, chat: Chat) -> str:
        """Return the prompt with its special tokens as text. Special tokens in the chat itself are
        split by a SPLIT_HERE, so that they stay plain text.

        Raises InvalidRequest: the template rejects the messages or fails, it does not read the
        documents, or `chat_template_kwargs` has a reserved name.
        """
        variables = chat.chat_template_kwargs
        is_continued = chat.continue_final_message
        if reserved := RESERVED & variables.keys():
            raise InvalidRequest(
                f"chat_template_kwargs may not set {min(reserved)}", param="chat_template_kwargs"
            )
        if is_continued and chat.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message continues the last message, and add_generation_prompt "
                "begins a new one: set only one of them",
                param="continue_final_message",
            )
        compiled = self._tool_template if chat.tools else self._template
        if variables.get("documents") and not compiled.reads_documents:
            raise InvalidRequest(
                "this model's chat template does not read documents: write them in a message",
                param="documents",
            )
        variables = self.defaults | variables
        chat_messages, tools, variables = map(self._escape, (chat.messages, chat.tools, variables))
        messages = [_normalise(m, compiled.wants_parts, i) for i, m in enumerate(chat_messages)]
        if is_continued:
            _append_to_last(messages, _CONTINUE_HERE)
        context = {"documents": None} | self.special_tokens | variables
        context |= {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            _budget.set(_Budget(time.thread_time() + MAX_SECONDS))
            prompt = compiled.template.render(context)
        # Templates call Python: TypeError, OverflowError, KeyError... all mean "refused".
        except Exception as error:
            raise InvalidRequest(
                f"the chat template refuses the messages: {error}", param="messages"
            ) from None
        end = prompt.rfind(_CONTINUE_HERE) if is_continued else len(prompt)
        if end < 0:
            raise InvalidRequest(
                "the chat template does not show the last message's content", param="messages"
            )
        return prompt[:end]

    def _escape(self, value: Any) -> Any:
        """Return a copy of JSON in which a SPLIT_HERE splits each special token in a string."""
        if isinstance(value, dict):
            return {key: self._escape(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._escape(each) for each in value]
        if isinstance(value, str) and self._escaped is not None:
            while self._escaped.search(value):  # the rest of a token may contain another token
                value = self._escaped.sub(_split, value)
        return value


def _split(token: re.Match[str]) -> str:
    return f"{token[0][0]}{SPLIT_HERE}{token[0][1:]}"


class _Budget(msgspec.Struct):
    """The remaining time and size for rendering one prompt."""

    deadline: float  # on the clock of the thread's CPU time
    num_chars: int = MAX_CHARS

    def check(self, num_chars: int = 0) -> None:
        """Raise TemplateError if `num_chars` are too many for a value, or time is up."""
        if num_chars > MAX_CHARS:
            raise jinja2.TemplateError(f"a value has more than {MAX_CHARS} characters")
        if time.thread_time() > self.deadline:
            raise jinja2.TemplateError(f"rendering takes more than {MAX_SECONDS:g} s")

    def write(self, value: Any) -> Any:
        if isinstance(value, str):
            self.num_chars -= len(value)
            if self.num_chars < 0:
                raise jinja2.TemplateError(f"the result has more than {MAX_CHARS} characters")
        return value


_budget: ContextVar[_Budget] = ContextVar("_budget")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja sandbox whose loops, calls and operators check the budget, because they may be slow.
    Nested lists and the widths of filters may still take memory.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().check()
        if any(isinstance(arg, int) and abs(arg) > MAX_NUMBER for arg in (*args, *kwargs.values())):
            raise jinja2.TemplateError(f"out of range: a number above {MAX_NUMBER} in a call")
        found = super().call(context, obj, *args, **kwargs)
        _budget.get().check(_length(found))
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.check(_length(left) + _length(right))
        for value, number in ((left, right), (right, left)):
            if operator == "*" and isinstance(number, int) and not isinstance(value, int):
                budget.check(_length(value) * number)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.check(_length(left) * right)
        if operator == "%" and isinstance(left, str) and LONG_WIDTH.search(left):
            raise jinja2.TemplateError("a width is too large")
        return super().call_binop(context, operator, left, right)


class _Limiter(NodeTransformer):
    """A transformer that makes loops and the operator `~` check the budget, too."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = self._filter(node.iter, "counted")
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        values = nodes.List(node.nodes, lineno=node.lineno)
        return self.generic_visit(self._filter(values, "concatenated"))

    def _filter(self, value: nodes.Node, name: str) -> nodes.Filter:
        made = nodes.Filter(cast(nodes.Expr, value), name, [], [], None, None, lineno=value.lineno)
        made.set_environment(self.environment)
        return made


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a loop, and check the time before each item."""
    for item in items:
        _budget.get().check()
        yield item


def _concatenated(values: list[Any]) -> str:
    _budget.get().check(sum(map(_length, values)))
    return "".join(map(str, values))


def _length(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | tuple) else 0


class _Compiled:
    """A compiled template, and the format that it expects of a message's content."""

    def __init__(self, source: str) -> None:
        environment = _Sandbox(
            finalize=lambda value: _budget.get().write(value) if _budget.get(None) else value,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["counted"] = _counted
        environment.filters["concatenated"] = _concatenated
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self.wants_parts = _wants_parts(tree)
            self.reads_documents = any(n.name == "documents" for n in tree.find_all(nodes.Name))
            self.template = environment.from_string(_Limiter(environment).visit(tree))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from None


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks text for training. Only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON like Jinja's filter, but without HTML escapes and with keys in order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _wants_parts(tree: nodes.Template) -> bool:
    """Return whether a template loops over a message's content and never tests for a string.

    Such a template renders strings wrongly. Every other template gets text parts joined to a
    string.
    """
    if any(test.name == "string" for test in tree.find_all(nodes.Test)):
        return False

    def is_content(node: nodes.Node) -> bool:
        while isinstance(node, nodes.Filter) and node.node is not None:
            node = node.node
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in aliases

    aliases: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            aliases.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _normalise(message: dict[str, Any], wants_parts: bool, index: int) -> dict[str, Any]:
    """Return a message in the format that the template expects, without null values."""
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content", "")
    parts = content if isinstance(content, list) else [content]
    thoughts: list[str] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "thinking":
            thoughts.append(part["thinking"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            texts.append(_text_of_part(part, f"messages[{index}].content"))
    if thoughts:
        message.setdefault("reasoning", "\n".join(thoughts))
    if wants_parts:
        message["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        message["content"] = "\n".join(texts)
    # Templates read one of these names. GPT-OSS's refuses what it calls thinking beside content and
    # calls: a message before a call takes its place.
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if not (message["content"] and message.get("tool_calls")):
            message["thinking"] = reasoning
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return message


def _text_of_part(part: Any, param: str) -> str:
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return part[key]
        part = part.get("type")
    message = f"{param}: servd reads text parts only, got {part!r}"
    raise InvalidRequest(message, param="messages")


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, if they are the JSON text of an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _append_to_last(messages: list[dict[str, Any]], text: str) -> None:
    if not messages:
        raise InvalidRequest("continue_final_message needs a message", param="messages")
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + text
    elif content:
        content[-1]["text"] += text


def _read_override(override: str) -> dict[str, str]:
    is_text = "{%" in override or "{{" in override or "\n" in override
    try:
        return {"default": override if is_text else Path(override).read_text(encoding="utf8")}
    except OSError as error:
        raise ConfigError(
            f"--chat-template {override}: {error.strerror}, and it contains no Jinja"
        ) from None


def _read_model_templates(tokenizer: Tokenizer) -> dict[str, str]:
    """Return templates by name, from chat_template.jinja or else from tokenizer_config.json."""
    if tokenizer.folder and (file := Path(tokenizer.folder) / "chat_template.jinja").exists():
        return {"default": file.read_text(encoding="utf8")}
    templates = tokenizer.config.get("chat_template")
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in templates}
    except (TypeError, KeyError):
        raise ModelNotFound(
            f"{tokenizer.folder}/tokenizer_config.json: chat_template has an unknown format"
        ) from None
