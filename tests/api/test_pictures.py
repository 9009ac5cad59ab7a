"""Pictures in chats: what templates get of them, and where their tokens are."""

from types import SimpleNamespace
from typing import Any

import pytest

from servd.api.engine.placeholders import expand, place
from servd.api.protocol.anthropic_blocks import chat_messages as messages_of_anthropic
from servd.api.protocol.ollama import chat_messages as messages_of_ollama
from servd.api.protocol.response_items import chat_messages as messages_of_responses
from servd.api.text.chat_messages import count_pictures, move_tool_pictures, normalise, text_of
from servd.api.text.chat_template import ChatTemplate
from servd.api.text.pictures import pictures_of, replace_by_notes
from servd.api.text.prompt import Chat, picture_part
from servd.base.errors import InvalidRequest
from servd.messages.multimodal import TensorPlace

URL = "data:image/png;base64,AA=="
IMAGE = picture_part(URL)
LOOK = {"type": "text", "text": "look"}
SHOWN = [{"type": "image"}, {"type": "text", "text": "look"}, {"type": "image"}]
IN_PARTS = """{% for message in messages %}{{ message.role }}:\
{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}\
{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %};{% endfor %}"""


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def test_text_and_pictures_keep_their_order():
    [message] = normalise(user(IMAGE, LOOK, IMAGE), wants_parts=False, knows_developer=False)
    assert message["content"] == SHOWN
    assert text_of(message) == "look"
    assert count_pictures([message]) == 2


@pytest.mark.parametrize(
    "messages",
    [
        messages_of_responses(
            None,
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL, "detail": "low"},
                        {"type": "input_text", "text": "look"},
                    ],
                }
            ],
        ),
        messages_of_anthropic(
            None, user({"type": "image", "source": {"type": "url", "url": URL}}, LOOK)
        ),
        messages_of_anthropic(
            None, user({"type": "image", "source": {"type": "base64", "data": "AA=="}}, LOOK)
        ),
        [*messages_of_ollama([{"role": "user", "content": "look", "images": ["AA=="]}])],
    ],
    ids=["responses", "anthropic url", "anthropic base64", "ollama"],
)
def test_every_api_makes_the_same_messages(messages):
    [picture] = pictures_of(messages)
    assert picture.url is not None and picture.url.endswith("base64,AA==")
    [message] = normalise(messages, wants_parts=False, knows_developer=False)
    assert message["content"] == SHOWN[:2]


def test_a_text_model_gets_notes_of_tools_and_refuses_users():
    tool = [{"role": "tool", "content": [IMAGE, LOOK]}]
    assert replace_by_notes(tool, "no")[0]["content"][0]["text"] == "[image: not available here]"
    noted = user(picture_part(URL, is_noted=True))
    assert replace_by_notes(noted, "no")[0]["content"][0]["type"] == "text"
    with pytest.raises(InvalidRequest, match="reads no pictures: why"):
        replace_by_notes(user(IMAGE), "why")


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_pictures_are_of_users_and_tools(role):
    with pytest.raises(InvalidRequest, match=role):
        pictures_of([{"role": role, "content": [IMAGE]}])


def test_a_template_that_shows_no_pictures_of_tools_gets_them_in_a_turn():
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'tool' and m.content is not string %}"
        "{{ raise_exception('no') }}{% endif %}{% endfor %}" + IN_PARTS,
        escaped=["<image>"],
    )
    chat = Chat(
        messages=[
            *user(IMAGE, LOOK),
            {"role": "tool", "content": [IMAGE, {"type": "text", "text": "done"}]},
            {"role": "tool", "content": [IMAGE]},
            {"role": "user", "content": "and now"},
        ]
    )
    assert template.render(chat, "<image>").split(";") == [
        "user:<image>look",
        "tool:done",
        "tool:[image: see below]",
        "user:<image><image>and now",
        "",
    ]
    assert move_tool_pictures([]) == []


def test_a_template_without_pictures_is_an_error():
    template = ChatTemplate("{% for m in messages %}{{ m.content[-1].text }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="0 of 1 pictures"):
        template.render(Chat(messages=user(IMAGE, LOOK)), "<image>")


def picture(text: str, num_embeds: int, num_parts: int = 1, tensors: Any = ()) -> Any:
    memory = SimpleNamespace(path="/memory", inode=1)
    return SimpleNamespace(
        identifier=text.encode(),
        placeholder="<image>",
        text=text,
        num_embeds=num_embeds,
        grid=(0, 0),
        memory=memory,
        tensors=tensors,
        num_parts=num_parts,
    )


def test_placeholders_of_clients_stay_text():
    template = ChatTemplate(IN_PARTS, escaped=["<image>"])
    chat = Chat(messages=user({"type": "text", "text": "a <image> b"}, IMAGE))
    rendered = template.render(chat, "<image>")
    prompt = expand(rendered, [picture("[0][0]", 2)])
    assert prompt.endswith(" b[0][0];")
    assert "<image>" not in prompt  # but for the mark in it


def test_ranges_go_from_the_first_to_the_last_image_token():
    pictures = [picture("a", 2), picture("b", 3)]
    features = place([1, 9, 9, 9, 5, 9, 9, 2], pictures, image_token_id=9)
    assert [(f.offset, f.length, f.identifier) for f in features] == [(1, 2, b"a"), (3, 4, b"b")]


@pytest.mark.parametrize("token_ids", [[1, 9], [9, 9, 9, 9], []])
def test_other_numbers_of_image_tokens_are_refused(token_ids):
    with pytest.raises(InvalidRequest, match="special tokens"):
        place(token_ids, [picture("a", 3)], image_token_id=9)


def test_parts_of_a_picture_have_ranges_identifiers_and_tensors_of_their_own():
    tensors = [TensorPlace("pixel_values", "float32", [1, 3, 2, 8], 64)]
    features = place([9, 5, 9, 5, 9], [picture("a", 3, 3, tensors)], image_token_id=9)
    assert [(f.offset, f.length, f.num_embeds) for f in features] == [(i, 1, 1) for i in (0, 2, 4)]
    assert len({feature.identifier for feature in features}) == 3
    of_parts = [feature.tensors[0] for feature in features]
    assert [tensor.shape for tensor in of_parts] == 3 * [[1, 1, 2, 8]]
    assert [tensor.offset for tensor in of_parts] == [64, 128, 192]
