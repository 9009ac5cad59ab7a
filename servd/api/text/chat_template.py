"""ChatTemplate: renders chat messages into the prompt, with the model's Jinja template.

Templates and messages are untrusted. Templates run in Jinja's sandbox (no attribute access to
Python internals, no changes to objects, bounded `range`) with limits on time and size. Any error in
a template becomes the request's 400.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from servd.api.text.chat_messages import (
    REPAIRS,
    Message,
    Repair,
    count_pictures,
    normalise,
    surround_text,
    text_of,
)
from servd.api.text.prompt import Chat
from servd.api.text.special_tokens import SpecialTokens
from servd.api.text.template_files import read_model_templates, read_override
from servd.api.text.tokenizer import Tokenizer
from servd.base.abandoned import check_abandoned
from servd.base.errors import ConfigError, InvalidRequest

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

# Stands at the end of the message to continue; no client can send a lone surrogate.
CONTINUE_HERE = "\udffe"
# Stands with its number at the end of a message that the prompt may not show.
PROBE = "\udffd"
# A call with a result, as templates want them, after a text that ends with PROBE.
CALL_EXAMPLE: list[Message] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": PROBE,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "f", "arguments": {"a": 1}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "1"},
]
PROBED = re.compile(r"(?:\udffd|\\udffd)(\d+);")
# Filters that look for characters in a text.
SEARCHING_FILTERS = ("e", "escape", "forceescape", "replace", "string", "striptags", "title")
SEARCHING_FILTERS += ("tojson", "trim", "urlencode", "urlize", "xmlattr")
# Operator -> the filter of a pair in its place, and whether the result is negated.
COMPARISONS = {
    "eq": ("equals", False),
    "ne": ("equals", True),
    "in": ("contains", False),
    "notin": ("contains", True),
}
# Of which templates may make special tokens, as in "<|" + role + "|>".
ROLES = frozenset(
    {"system", "user", "assistant", "tool", "function", "developer", "ipython", "observation"}
)
LONG_TEXT = 32  # characters: a text that no other text contains by chance

MAX_SECONDS = 5.0  # CPU time for one prompt; long ones take some hundredths
MAX_CHARS = 1 << 26  # for a value in a template, and for its whole output
MAX_NUMBER = 1 << 20  # that a template may hand to a function, such as a width
LONG_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")  # in the format of `%`


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
        self._specials = SpecialTokens(escaped)
        self._template = _Compiled(template, self._specials)
        self._tool_template = self._template
        if tool_template is not None:
            self._tool_template = _Compiled(tool_template, self._specials)
        self.reads_tools = "tools" in self._tool_template.names

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
        if override:
            templates = read_override(override)
        else:
            templates = read_model_templates(tokenizer.folder, tokenizer.config)
        if not templates:
            # Where the tokenizer would add BOS, the prompt has to begin with it as other templates'
            # prompts do.
            template = DEFAULT_TEMPLATE
            default = "{{ bos_token }}" + template if tokenizer.adds_bos else template
            templates = {"default": default}
        default = templates.get("default") or next(iter(templates.values()))
        escaped = map(tokenizer.token_string, tokenizer.special_ids) if escape else ()
        tools = templates.get("tool_use")
        return cls(default, tools, tokenizer.special_tokens, [*escaped], defaults)

    def render(self, chat: Chat, placeholder: str = "") -> str:
        """Return the prompt with its special tokens as text. Special tokens in the chat itself are
        split by a SPLIT_HERE, so that they stay plain text. Messages that the template refuses, or
        does not show, are repaired if that is possible. `placeholder`: what the template writes for
        a picture.

        Raises InvalidRequest: the template rejects the messages or fails, it does not read the
        documents, or `chat_template_kwargs` has a reserved name.
        """
        variables = chat.chat_template_kwargs
        if reserved := RESERVED & variables.keys():
            raise InvalidRequest(
                f"chat_template_kwargs may not set {min(reserved)}", param="chat_template_kwargs"
            )
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message continues the last message, and add_generation_prompt "
                "begins a new one: set only one of them",
                param="continue_final_message",
            )
        compiled = self._tool_template if chat.tools else self._template
        if variables.get("documents") and "documents" not in compiled.names:
            raise InvalidRequest(
                "this model's chat template does not read documents: write them in a message",
                param="documents",
            )
        marked_variables, tools = map(self._specials.mark, (self.defaults | variables, chat.tools))
        context = {"documents": None} | self.special_tokens | marked_variables
        context |= {"tools": tools or None, "add_generation_prompt": chat.add_generation_prompt}
        gap = compiled.call_gap(self.special_tokens)
        messages = normalise(chat.messages, compiled.wants_parts, compiled.knows_developer, gap)
        is_continued = chat.continue_final_message
        if is_continued and not messages:
            raise InvalidRequest("continue_final_message needs a message", param="messages")
        _budget.set(_Budget(time.thread_time() + MAX_SECONDS))
        render = functools.partial(self._render, compiled, context, is_continued, placeholder)
        try:
            marked = render(messages)
        except InvalidRequest as refused:
            if is_continued and messages[-1]["role"] == "system":
                raise
            marked = _render_repaired(render, messages, REPAIRS, refused.message)
            if marked is None:
                raise
        return self._specials.split(marked)

    def before_last_turn(self, chat: Chat, prompt: str) -> str:
        """Return the beginning of a rendered chat, up to the text of the last user message. Return
        "" if the template does not show where that is.
        """
        messages = [*chat.messages]
        roles = [message.get("role") for message in messages]
        if "user" not in roles:
            return ""
        last = len(roles) - 1 - roles[::-1].index("user")
        content = messages[last].get("content") or ""
        parts = content if isinstance(content, list) else [content]
        mark = uuid.uuid4().hex  # a text that no chat has in it
        messages[last] = {**messages[last], "content": [mark, *parts]}
        try:
            probed = self.render(msgspec.structs.replace(chat, messages=messages))
        except InvalidRequest:
            return ""
        beginning, _, end = probed.partition(mark)
        return beginning if end and prompt.startswith(beginning) else ""

    def _render(
        self,
        compiled: _Compiled,
        context: dict[str, Any],
        is_continued: bool,
        placeholder: str,
        messages: list[Message],
    ) -> str:
        """Return the marked prompt. Raise InvalidRequest if the template fails or drops a text."""
        try:
            marked = self._specials.mark(messages)
            for message in marked:
                if message["role"] not in ROLES and message["role"] not in compiled.texts:
                    message["role"] = self._specials.mark_role(message["role"])
            if is_continued:
                marked[-1] = surround_text(marked[-1], "", CONTINUE_HERE)
            prompt = compiled.render(context | {"messages": marked})
            lost = _find_lost(compiled, marked, context, prompt)
        # Templates call Python: TypeError, OverflowError, KeyError... all mean "refused".
        except Exception as error:
            reason = self._specials.unmark(str(error))
            raise InvalidRequest(
                f"the chat template refuses the messages: {reason}", param="messages"
            ) from None
        if lost is not None:
            role = str(messages[lost]["role"])
            raise InvalidRequest(
                f"the chat template does not show messages[{lost}], of the role {role[:64]!r}: "
                "send its text in another role, or start the server with another --chat-template",
                param="messages",
            )
        if placeholder:
            num_pictures = count_pictures(messages)
            if (num_shown := prompt.count(placeholder)) != num_pictures:
                raise InvalidRequest(
                    f"the chat template shows {num_shown} of {num_pictures} pictures: send them in "
                    "a user's message",
                    param="messages",
                )
        end = prompt.rfind(CONTINUE_HERE) if is_continued else len(prompt)
        if end < 0:
            raise InvalidRequest(
                "the chat template does not show the last message's content", param="messages"
            )
        return prompt[:end]


def _render_repaired(
    render: Callable[[list[Message]], str],
    messages: list[Message],
    repairs: Sequence[Repair],
    reason: str,
) -> str | None:
    """Return the prompt of messages with the fewest repairs; None if no repairs help. `reason`: why
    the template refuses the messages as they are.
    """
    for repair in repairs:
        repaired = repair(messages)
        if repaired == messages:
            continue
        try:
            return render(repaired)
        except InvalidRequest as refused:
            if refused.message != reason:  # one of several reasons is gone
                other_repairs = [other for other in repairs if other is not repair]
                return _render_repaired(render, repaired, other_repairs, refused.message)
    for repair in repairs:  # one of them alone was not enough
        messages = repair(messages)
        with contextlib.suppress(InvalidRequest):
            return render(messages)
    return None


def _find_lost(
    compiled: _Compiled, messages: Sequence[Message], context: dict[str, Any], prompt: str
) -> int | None:
    """Return the index of the first message whose text is not in the prompt. Messages of users and
    assistants do not count: some templates drop them on purpose, such as those of classifiers.
    """
    texts = {
        index: text
        for index, message in enumerate(messages)
        if message["role"] not in ("user", "assistant") and (text := text_of(message).strip())
    }
    place = 0
    for index, message in enumerate(messages if texts else ()):
        text = text_of(message).strip()
        start = prompt.find(text, place)
        if start < 0 or (index in texts and len(text) < LONG_TEXT):
            break
        place = start + len(text)
    else:
        return None
    # A short text may be somewhere else, too, and the template may have changed a text.
    probes = {index: f"{PROBE}{index};" for index in texts}
    probed = [
        surround_text(message, probes.get(index, ""), probes.get(index, ""))
        for index, message in enumerate(messages)
    ]
    try:
        visible = PROBED.findall(compiled.render(context | {"messages": probed}))
    except Exception:  # the template reads the text, and may show it
        return None
    is_shown = set(map(int, visible))
    return next((index for index in texts if index not in is_shown), None)


class _Budget(msgspec.Struct):
    """The remaining time and size for rendering one prompt."""

    deadline: float  # on the clock of the thread's CPU time
    num_chars: int = MAX_CHARS

    def check(self, num_chars: int = 0) -> None:
        """Raise TemplateError if `num_chars` are too many for a value, or time is up."""
        check_abandoned()
        if num_chars > MAX_CHARS:
            raise jinja2.TemplateError(f"a value has more than {MAX_CHARS} characters")
        if time.thread_time() > self.deadline:
            raise jinja2.TemplateError(f"rendering takes more than {MAX_SECONDS:g} s")


_budget: ContextVar[_Budget] = ContextVar("_budget")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja sandbox whose loops, calls and operators check the budget, because they may be slow.
    Nested lists and the widths of filters may still take memory.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, specials: SpecialTokens) -> None:
        super().__init__(
            finalize=self._write,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.specials = specials
        self.filters["counted"] = _counted
        self.filters["concatenated"] = self._concatenated
        self.filters["tojson"] = _tojson
        for name in SEARCHING_FILTERS:
            self.filters[name] = self._as_search(self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        # Comparisons see texts as clients wrote them.
        self.filters["equals"] = specials.equals
        self.filters["contains"] = specials.contains
        for name in ("==", "eq", "equalto"):
            self.tests[name] = lambda first, second: specials.equals([first, second])
        for name in ("!=", "ne"):
            self.tests[name] = lambda first, second: not specials.equals([first, second])
        self.tests["in"] = lambda item, items: specials.contains([item, items])

    def _write(self, value: Any) -> Any:
        budget = _budget.get(None)
        if budget is None:  # a template is compiled
            return value
        if isinstance(value, dict | list | tuple):
            value = self._text_of(value)
        if isinstance(value, str):
            budget.num_chars -= len(value)
            if budget.num_chars < 0:
                raise jinja2.TemplateError(f"the result has more than {MAX_CHARS} characters")
        return value

    def _concatenated(self, values: list[Any]) -> str:
        _budget.get().check(sum(map(_length, values)))
        return "".join([str(self._text_of(value)) for value in values])

    def _text_of(self, value: Any) -> Any:
        """Return a list or an object as Python shows it, and any other value as it is."""
        is_nested = isinstance(value, dict | list | tuple)
        return self.specials.search(str, value) if is_nested else value

    def _as_search(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def search(*args: Any, **options: Any) -> Any:
            return self.specials.search(function, *args, **options)

        return search

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().check()
        if any(isinstance(arg, int) and abs(arg) > MAX_NUMBER for arg in (*args, *kwargs.values())):
            raise jinja2.TemplateError(f"out of range: a number above {MAX_NUMBER} in a call")
        call = functools.partial(super().call, context, obj)
        name = getattr(obj, "__name__", "")
        is_method = isinstance(getattr(obj, "__self__", None), str)
        if is_method and any(isinstance(arg, str | tuple) for arg in args):
            # `startswith`, `split`, `replace`...: the text has marks, but not what is looked for.
            call = functools.partial(self.specials.search, _call_method, name, obj.__self__)
            for variables in ("_loop_vars", "_block_vars"):  # Jinja's, for its own functions
                kwargs.pop(variables, None)
        result = call(*args, **kwargs)
        _budget.get().check(_length(result))
        return result

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
    """A transformer that makes loops and the operator `~` check the budget, too, and comparisons
    unmark texts.
    """

    def __init__(self, environment: jinja2.Environment) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = self._filter(node.iter, "counted")
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        values = nodes.List(node.nodes, lineno=node.lineno)
        return self.generic_visit(self._filter(values, "concatenated"))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        name, is_negated = COMPARISONS.get(node.ops[0].op, ("", False))
        if len(node.ops) > 1 or not name:
            return node
        pair = nodes.List([node.expr, node.ops[0].expr], lineno=node.lineno)
        result = self._filter(pair, name)
        return nodes.Not(result, lineno=node.lineno) if is_negated else result

    def _filter(self, value: nodes.Node, name: str) -> nodes.Filter:
        made = nodes.Filter(cast(nodes.Expr, value), name, [], [], None, None, lineno=value.lineno)
        made.set_environment(self.environment)
        return made


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a loop, and check the time before each item."""
    for item in items:
        _budget.get().check()
        yield item


def _call_method(name: str, text: str, *args: Any, **options: Any) -> Any:
    return getattr(text, name)(*args, **options)


def _length(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | tuple) else 0


class _Compiled:
    """A compiled template, and the format that it expects of a message's content."""

    def __init__(self, source: str, specials: SpecialTokens) -> None:
        environment = _Sandbox(specials)
        try:
            tree = environment.parse(source)
            self.wants_parts = _wants_parts(tree)
            self.names = {node.name for node in tree.find_all(nodes.Name)}
            self.texts = {str(node.value) for node in tree.find_all(nodes.Const)}
            self.knows_developer = "developer" in self.texts
            self._template = environment.from_string(_Limiter(environment).visit(tree))
            self._call_gap: str | None = None
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from None

    def render(self, context: dict[str, Any]) -> str:
        _budget.get().num_chars = MAX_CHARS
        return self._template.render(context)

    def call_gap(self, special_tokens: dict[str, str]) -> str:
        """Return the white space that the template writes between an assistant's text and call."""
        if self._call_gap is None:
            token = _budget.set(_Budget(time.thread_time() + MAX_SECONDS))
            messages = normalise(CALL_EXAMPLE, self.wants_parts, self.knows_developer, "")
            context = {"messages": messages, "tools": None, "add_generation_prompt": False}
            try:
                _, _, after = self.render(special_tokens | context).partition(PROBE)
            except Exception:  # it refuses such a call
                after = ""
            _budget.reset(token)
            self._call_gap = after[: len(after) - len(after.lstrip())]
        return self._call_gap


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
