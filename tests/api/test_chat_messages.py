"""Messages that a chat template refuses or drops: repaired for all APIs, or refused in the open."""

import json
import time
from typing import Any

import pytest

from servd.api.text.chat_messages import REPAIRS
from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import Chat
from servd.base.errors import InvalidRequest
from tests.api.harness import serve, user

Message = dict[str, Any]
# As Qwen 3.5's and many GGUF files': one system message, at the beginning.
ONE_SYSTEM = """{%- for m in messages %}{%- if m.role == "system" and not loop.first %}{{
    raise_exception("System message must be at the beginning.") }}{%- endif %}{{
    m.role }}: {{ m.content }}\n{% endfor %}"""
# As Gemma's: none.
NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{
    raise_exception('System role not supported') }}{% endif %}{{ m.role }}: {{ m.content }}
{% endfor %}"""
# As Mistral's: turns alternate after one system message, and ids have nine letters.
STRICT = """{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}[{{
    messages[0].content }}]{% else %}{% set rest = messages %}{% endif %}
{% set ns = namespace(index=0) %}{% for m in rest %}
{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
{% set ns.index = ns.index + 1 %}{% endif %}
{% for call in m.tool_calls or [] %}{% if call.id is undefined or call.id | length != 9 %}{{
    raise_exception('ids must have length 9!') }}{% endif %}{{ call.id }}={{
    call.function.name }}{% endfor %}
{% if m.role == 'tool' %}{% if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}{{
    raise_exception('ids must have length 9!') }}{% endif %}{{ m.tool_call_id }}->{% endif %}
{{ m.role }}: {{ m.content }};{% endfor %}"""
KNOWN_ROLES = """{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}{{
    m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"""
# As older templates: a system message at the beginning, and turns. Others vanish.
FIRST_SYSTEM = """{% if messages[0].role == 'system' %}system: {{ messages[0].content }}
{% endif %}{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{
    m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"""
ITEMS = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% for call in m.tool_calls or [] %}{% for key, value in call.function.arguments | items %}{{
    key }}={{ value }};{% endfor %}{% endfor %}{% endfor %}"""
TEXT_ARGUMENTS = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}{{ 'call ' + call.function.arguments }}{% endfor %}
{% endfor %}"""


def message(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def calling(arguments: str | None = "{}", **fields: Any) -> Message:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}, **fields}
    return message("assistant", None, tool_calls=[call])


def render(template: str, *messages: Message, **options: Any) -> str:
    return ChatTemplate(template).render(Chat(messages=[*messages], **options))


def lines(prompt: str) -> list[str]:
    return [line for line in prompt.split("\n") if line]


# ---- system messages (T1) ----


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([message("system", "A"), message("user", "q")], ["system: A", "user: q"]),
        (
            [message("system", "A"), message("system", "B"), message("user", "q")],
            ["system: A", "B", "user: q"],
        ),
        (
            [message("system", "A"), message("developer", "B"), message("user", "q")],
            ["system: A", "B", "user: q"],
        ),
        (
            [message("system", "A"), message("user", "q"), message("system", "late")],
            ["system: A", "user: q", "<system>", "late", "</system>"],
        ),
        (
            [
                message("user", "q"),
                message("assistant", "a"),
                message("system", "late"),
                message("user", "r"),
            ],
            ["user: q", "assistant: a", "user: <system>", "late", "</system>", "r"],
        ),
        (
            [message("user", "q"), message("tool", "found"), message("system", "late")],
            ["user: q", "tool: found", "<system>", "late", "</system>"],
        ),
        (
            [message("user", "q"), message("assistant", "a"), message("system", "late")],
            ["user: q", "assistant: a", "user: <system>", "late", "</system>"],
        ),
        (
            [message("user", [{"type": "text", "text": "q"}]), message("system", "late")],
            ["user: q", "<system>", "late", "</system>"],
        ),
    ],
)
def test_a_template_that_wants_one_system_message(messages: list[Message], expected: list[str]):
    assert lines(render(ONE_SYSTEM, *messages)) == expected


def test_what_a_template_accepts_is_rendered_as_it_is():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    messages = [message("system", "A"), message("system", "B"), message("user", "q")]
    assert lines(render(template, *messages)) == ["system: A", "system: B", "user: q"]


@pytest.mark.parametrize("template", [NO_SYSTEM, STRICT])
def test_a_template_without_system_messages_or_with_strict_turns(template: str):
    messages = [
        message("assistant", "Welcome"),
        message("system", "A"),
        message("user", "q"),
        message("user", "r"),
        message("assistant", "a"),
        message("system", "late"),
    ]
    prompt = render(template, *messages)
    for text in ("Welcome", "A", "q", "r", "a", "late"):
        assert text in prompt


def test_a_system_message_that_vanishes_is_put_into_its_turn():
    """GPT-OSS's template drops it in silence."""
    messages = [message("system", "A"), message("user", "q"), message("system", "late")]
    expected = ["system: A", "user: q", "<system>", "late", "</system>"]
    assert lines(render(FIRST_SYSTEM, *messages)) == expected


def test_the_first_reason_is_told_if_no_repair_helps():
    template = "{{ raise_exception('never') }}"
    messages = [message("system", "A"), message("system", "B"), message("user", "q")]
    with pytest.raises(InvalidRequest, match="never"):
        render(template, *messages)


SYSTEM_LATER: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [*user("hi"), message("system", "Agents: x")]},
    "/v1/messages": {
        "max_tokens": 8,
        "system": "A",
        "messages": [*user("hi"), message("system", "Agents: x")],
    },
    "/v1/responses": {"input": [*user("hi"), message("developer", "Agents: x")]},
    "/api/chat": {"stream": False, "messages": [*user("hi"), message("system", "Agents: x")]},
}


@pytest.mark.parametrize("route", SYSTEM_LATER)
async def test_all_apis_take_later_system_messages(route: str):
    async with serve(chat_template=ONE_SYSTEM, script="ok") as served:
        answer = await served.http.post(route, json=SYSTEM_LATER[route])
        assert answer.status_code == 200, answer.text
        sent = bytes(served.engine.sent[-1].prompt_token_ids).decode()
    assert "user: hi\n\n<system>\nAgents: x\n</system>" in sent


# ---- roles (T2) ----


def test_a_developer_is_the_system_unless_the_template_knows_it():
    messages = [message("developer", "Obey"), message("user", "q")]
    assert lines(render(KNOWN_ROLES, *messages)) == ["system: Obey", "user: q"]
    template = "{% for m in messages %}{% if m.role == 'developer' %}!{% endif %}{{ m.role }};"
    assert render(template + "{{ m.content }}{% endfor %}", *messages) == "!developer;Obeyuser;q"


@pytest.mark.parametrize("role", ["tool", "function", "critic", "ipython"])
@pytest.mark.parametrize("text", ["4", "a result of more than thirty-two characters"])
def test_a_message_that_vanishes_is_refused_by_its_number(role: str, text: str):
    with pytest.raises(InvalidRequest, match=rf"messages\[1\], of the role '{role}'"):
        render(KNOWN_ROLES, message("user", f"What is {text}?"), message(role, text))


@pytest.mark.parametrize(
    "content", ["m.content", "m.content | tojson", "m.content | upper", "m.content[:3]"]
)
def test_a_changed_text_has_not_vanished(content: str):
    template = f"{{% for m in messages %}}{{{{ {content} }}}};{{% endfor %}}"
    assert render(template, message("user", "q"), message("tool", "a\n'b' and " + "c" * 40))


def test_a_function_is_a_tool_if_the_template_does_not_know_it():
    template = KNOWN_ROLES.replace("'user'", "'user', 'tool'")
    rendered = render(template, message("user", "q"), message("function", "4", name="f"))
    assert lines(rendered) == ["user: q", "tool: 4"]


# ---- calls (T3, T4) ----


@pytest.mark.parametrize("text", ['{"city": "Ro', "null", "[]", '"x"', "not json", "[" * 10_000])
@pytest.mark.parametrize("template", [ITEMS, TEXT_ARGUMENTS])
def test_arguments_that_are_no_object_are_shown(text: str, template: str):
    prompt = render(template, message("user", "q"), calling(text), message("tool", "bad arguments"))
    assert text in prompt and "bad arguments" in prompt


def test_a_template_may_want_arguments_as_text():
    rendered = render(TEXT_ARGUMENTS, message("user", "q"), calling('{"a": "ü"}'))
    assert 'call {"a": "ü"}' in rendered


@pytest.mark.parametrize("call_id", ["toolu_01A0bcdefghijk", "call_abc123def456", "1", "ü" * 300])
def test_ids_of_other_servers(call_id: str):
    messages = [
        message("user", "q"),
        calling(id=call_id),
        message("tool", "4", tool_call_id=call_id),
        message("assistant", "a"),
        message("user", "r"),
        calling(id=call_id[::-1]),
        message("tool", "5", tool_call_id=call_id[::-1]),
    ]
    prompt = render(STRICT, *messages)
    first = prompt.partition("=f")[0].rpartition("\n")[2].rpartition(";")[2].strip()
    assert len(first) == 9 and first.isascii() and first.isalnum()
    assert f"{first}->" in prompt.replace("\n", "")
    assert render(STRICT, *messages) == prompt  # for the prefix cache
    assert call_id not in prompt


def test_calls_and_results_without_ids_belong_together():
    messages = [message("user", "q"), calling(), message("tool", "4"), message("assistant", "a")]
    prompt = render(STRICT, *messages).replace("\n", "")
    name, arrow = prompt.index("=f"), prompt.index("->")
    assert prompt[name - 9 : name] == prompt[arrow - 9 : arrow]


def test_an_id_of_nine_letters_stays():
    prompt = render(STRICT, message("user", "q"), calling(id="abcDEF123"))
    assert "abcDEF123=f" in prompt


def test_several_repairs_at_once():
    messages = [
        message("system", "A"),
        message("system", "B"),
        message("user", "q"),
        calling("[", id="toolu_1"),
        message("tool", "4", tool_call_id="toolu_1"),
        message("system", "late"),
        message("assistant", "a"),
        message("user", "r"),
        message("user", "s"),
    ]
    prompt = render(STRICT, *messages)
    for text in ("A", "B", "q", "4", "late", "a", "r", "s"):
        assert text in prompt


@pytest.mark.parametrize("repair", REPAIRS)
def test_repairs_take_linear_time(repair: Any):
    function = {"name": "f", "arguments": {}}
    turn = [
        message("system", "x"),
        message("user", "x"),
        message("user", "x"),
        message("assistant", "x", tool_calls=[{"function": function}]),
        message("tool", "x"),
    ]
    began = time.thread_time()
    repair([dict(part) for _ in range(20_000) for part in turn])
    assert time.thread_time() - began < 5


# ---- stamps (T7) ----

STAMP = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={};"
LONG = "You are an agent.\nBe brief."
STAMPED: dict[str, Any] = {
    "blocks": (
        "/v1/messages",
        lambda stamp: {
            "max_tokens": 4,
            "system": [{"type": "text", "text": stamp}, {"type": "text", "text": LONG}],
        },
    ),
    "one string": ("/v1/messages", lambda stamp: {"max_tokens": 4, "system": f"{stamp}\n\n{LONG}"}),
    "joined": ("/v1/messages", lambda stamp: {"max_tokens": 4, "system": f"{stamp}{LONG}"}),
    "proxy": (
        "/v1/chat/completions",
        lambda stamp: {"messages": [message("system", f"{stamp}\n{LONG}"), *user("hi")]},
    ),
    "proxy, parts": (
        "/v1/chat/completions",
        lambda stamp: {
            "messages": [
                message("system", [{"type": "text", "text": t} for t in (stamp, LONG)]),
                *user("hi"),
            ]
        },
    ),
    "own message": (
        "/v1/chat/completions",
        lambda stamp: {
            "messages": [message("system", stamp), message("system", LONG), *user("hi")]
        },
    ),
    "instructions": (
        "/v1/responses",
        lambda stamp: {"instructions": f"{stamp}\n{LONG}", "input": "hi"},
    ),
}


@pytest.mark.parametrize("name", STAMPED)
async def test_a_clients_stamp_does_not_change_the_prompt(name: str):
    route, make = STAMPED[name]
    prompts = []
    async with serve(script="ok") as served:
        for number in ("fa690", "0b1c2"):
            body = {"messages": user("hi")} if "responses" not in route else {}
            body |= make(STAMP.format(number))
            answer = await served.http.post(route, json=body)
            assert answer.status_code == 200, answer.text
            prompts.append(bytes(served.engine.sent[-1].prompt_token_ids).decode())
    assert prompts == [f"System: {LONG}\nUser: hi\nAssistant:"] * 2


def test_only_the_systems_stamp_is_dropped():
    text = STAMP.format("1")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert lines(render(template, message("user", text))) == [f"user: {text}"]
    other = "x-anthropic-billing-header: is a header."
    assert lines(render(template, message("system", other))) == [f"system: {other}"]
    assert json.dumps(other)
