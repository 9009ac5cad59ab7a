"""Pictures through every API, over a real media process and a fake engine."""

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from PIL import Image

from servd.checkpoint.model_spec import ModelSpec, read_spec
from servd.messages.engine import EngineCoreRequest
from tests import vision_models
from tests.api.harness import Served, requests_sent, serve
from tests.api.test_otel import InMemorySpanExporter, SimpleSpanProcessor, SpanExporter, spans_of

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("smolvlm")
    vision_models.make("smolvlm", folder)
    return read_spec(folder)


@pytest.fixture
async def served(spec) -> AsyncIterator[Served]:
    async with serve(spec=spec, script="ok") as served:
        yield served


def png(colour: str = "red", size: tuple[int, int] = (40, 30)) -> str:
    """Return a picture in base64."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def part(data: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}, **more}


TEXT = {"type": "text", "text": "what is it?"}


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}], "max_tokens": 2, **more}


async def post(served: Served, route: str, body: dict[str, Any], status: int = 200) -> Any:
    response = await served.http.post(route, json=body)
    assert response.status_code == status, response.text
    return response


def last(served: Served) -> EngineCoreRequest:
    return requests_sent(served.engine)[-1]


async def cache_counts(served: Served) -> list[float]:
    """Queries and hits of the pictures' cache, of the metrics."""
    lines = (await served.http.get("/metrics")).text.splitlines()
    totals = [line for line in lines if line.startswith("vllm:mm_cache") and "_total{" in line]
    return [float(line.split()[-1]) for line in totals]


async def test_every_api_sends_the_same_prompt(served: Served):
    data = png()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: chat(part(data), TEXT),
        "/v1/responses": {
            "max_output_tokens": 2,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
                        {"type": "input_text", "text": "what is it?"},
                    ],
                }
            ],
        },
        "/v1/messages": {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}, TEXT]}],
        },
        "/api/chat": {
            "stream": False,
            "options": {"num_predict": 2},
            "messages": [{"role": "user", "content": "what is it?", "images": [data]}],
        },
        "/api/generate": {
            "stream": False,
            "options": {"num_predict": 2},
            "prompt": "what is it?",
            "images": [data],
        },
    }
    for route, body in bodies.items():
        await post(served, route, body)
    requests = requests_sent(served.engine)
    assert len(requests) == len(bodies)
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 1
    features = requests[0].mm_features
    image_token_id = served.async_llm.spec.multimodal.image_token_id  # type: ignore[union-attr]
    places = [i for i, token in enumerate(requests[0].prompt_token_ids) if token == image_token_id]
    assert len(places) == sum(feature.num_embeds for feature in features)
    assert (features[0].offset, features[-1].end) == (places[0], places[-1] + 1)
    assert len({feature.identifier for feature in features}) == len(features) == 10  # tiles
    assert await cache_counts(served) == [len(bodies), len(bodies) - 1]


async def test_token_counts_are_the_prompts(served: Served):
    body = chat(part(png()), TEXT, part(png("blue")))
    response = await post(served, CHAT, body)
    num_tokens = response.json()["usage"]["prompt_tokens"]
    tokenized = await post(served, "/tokenize", {"messages": body["messages"]})
    assert tokenized.json()["count"] == num_tokens == len(last(served).prompt_token_ids)
    counted = await post(
        served,
        "/v1/messages/count_tokens",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "data": png()}},
                        TEXT,
                        {"type": "image", "source": {"type": "base64", "data": png("blue")}},
                    ],
                }
            ]
        },
    )
    assert counted.json()["input_tokens"] == num_tokens


async def test_pictures_of_tools_are_seen(served: Served):
    call = {"id": "1", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [part(png())]},
    ]
    await post(served, CHAT, {"messages": messages, "max_tokens": 2})
    assert len(last(served).mm_features) == 10


async def test_a_picture_in_reasoning_is_a_note(served: Served):
    picture = {"type": "input_image", "image_url": f"data:;base64,{png()}"}
    reasoning = {"type": "reasoning", "summary": [], "content": [picture]}
    items = [{"role": "user", "content": "look"}, reasoning]
    await post(served, "/v1/responses", {"input": items, "max_output_tokens": 2})
    assert last(served).mm_features == []


async def test_special_tokens_in_texts_stay_text(served: Served):
    await post(served, CHAT, chat({"type": "text", "text": "<image> what"}, part(png())))
    with_text = last(served)
    assert len(with_text.mm_features) == 10
    await post(served, CHAT, chat({"type": "text", "text": "<image> what"}))
    assert last(served).mm_features == []


async def test_equal_pictures_have_one_identifier_and_salts_have_their_own(served: Served):
    for more in ({}, {}, {"cache_salt": "a"}):
        await post(served, CHAT, chat(part(png()), TEXT, **more))
    await post(served, CHAT, chat(part(png("blue")), TEXT))
    identifiers = [r.mm_features[0].identifier for r in requests_sent(served.engine)]
    assert identifiers[0] == identifiers[1]
    assert len(set(identifiers)) == 3


async def test_a_picture_may_be_left_out_later_by_its_uuid(served: Served):
    await post(served, CHAT, chat(part(png(), uuid="a"), TEXT))
    first = last(served)
    later = {"type": "image_url", "image_url": None, "uuid": "a"}
    await post(served, CHAT, chat(later, TEXT))
    assert last(served).mm_features[0].identifier == first.mm_features[0].identifier
    unknown = await post(served, CHAT, chat(later | {"uuid": "b"}, TEXT), 400)
    assert "send it again" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (part("AA=="), "picture 1"),
        (part("not base64!"), "base64"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "--allowed-media"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "--allowed-local"),
        ({"type": "image_url", "image_url": {"url": 5}}, "url"),
        ({"type": "image_url"}, "must have an `image_url`"),
        (part(png()) | {"uuid": ""}, "uuid"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "best"}}, "detail"),
    ],
)
async def test_what_is_no_picture_is_a_400(served: Served, content: Any, reason: str):
    response = await post(served, CHAT, chat(TEXT, content), 400)
    assert reason in response.json()["error"]["message"]


async def test_limits(spec: ModelSpec):
    async with serve(spec=spec, script="ok", limit_mm_per_prompt={"image": 1}) as served:
        await post(served, CHAT, chat(part(png()), TEXT))
        response = await post(served, CHAT, chat(part(png()), part(png()), TEXT), 400)
        assert "--limit-mm-per-prompt" in response.text
        body = chat(part(png()), TEXT, truncate_prompt_tokens=8)
        assert "truncated" in (await post(served, CHAT, body, 400)).text
        long = await post(served, CHAT, chat(part(png()), {**TEXT, "text": "a" * 20000}), 400)
        assert "maximum context length" in long.text


async def test_a_step_has_room_for_a_whole_picture_by_default(tmp_path):
    vision_models.make("gemma3", tmp_path)
    file = tmp_path / "processor_config.json"
    settings = json.loads(file.read_text()) | {"image_seq_length": 256}  # as Gemma's
    file.write_text(json.dumps(settings))
    async with serve(spec=read_spec(tmp_path), script="ok") as served:
        await post(served, CHAT, chat(part(png()), TEXT))
        assert last(served).mm_features[0].num_embeds == 256


async def test_roles_that_have_no_pictures(served: Served):
    body = {"messages": [{"role": "system", "content": [part(png())]}], "max_tokens": 2}
    assert "system" in (await post(served, CHAT, body, 400)).json()["error"]["message"]


async def test_the_timeline_has_the_stages_of_pictures(served: Served):
    pictures = [part(png(colour, (900, 700))) for colour in ("red", "blue")]
    timelines = []
    for _ in range(2):
        answer = await post(served, CHAT, chat(*pictures, TEXT))
        assert "prepare;dur=" in answer.headers["server-timing"]
        response = await served.http.get(f"/v1/requests/{answer.json()['id']}/timeline")
        timelines.append({p["phase"]: p["ms"] for p in response.json()["phases"] if p["ms"]})
    names = {"picture_fetch", "picture_decode", "picture_process"}
    assert {*timelines[0]} >= names
    assert {*timelines[1]} & names == {"picture_fetch"}  # the rest was cached
    answer = await post(served, CHAT, chat(TEXT))
    response = await served.http.get(f"/v1/requests/{answer.json()['id']}/timeline")
    assert not any(mark["stage"] == "fetched" for mark in response.json()["marks"])


async def test_pictures_have_spans(spec: ModelSpec):
    exporter = InMemorySpanExporter()
    spans = SpanExporter(SimpleSpanProcessor(exporter))
    async with serve(spec=spec, script="ok", spans=spans) as served:
        await post(served, CHAT, chat(part(png()), TEXT))
        names = [span.name for span in await spans_of(exporter)]
    assert {"prepare", "picture_fetch", "picture_decode", "picture_process", "queue"} <= {*names}


async def test_the_server_says_that_it_sees(served: Served):
    models = (await served.http.get("/v1/models")).json()["data"]
    assert {tuple(card["input_modalities"]) for card in models} == {("text", "image")}
    props = await served.http.get("/props")
    assert props.json()["modalities"] == {"vision": True, "audio": False}
    description = await post(served, "/api/show", {"model": "fake"})
    assert "vision" in description.json()["capabilities"]


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("image_token_id", 10**6, "is no token"),
        ("image_token_id", -1, "is no token"),
        ("image_token_id", "many", "image_token_id"),
        ("rope_parameters", {"mrope_section": "x"}, "mrope_section"),
    ],
)
def test_a_checkpoint_with_wrong_numbers_is_read_as_text(tmp_path, key, value, word):
    vision_models.make("qwen2_5_vl", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    part = config["text_config"] if key == "rope_parameters" else config
    part[key] = value
    path.write_text(json.dumps(config))
    reason = read_spec(tmp_path).multimodal
    assert isinstance(reason, str) and word in reason and "config.json" in reason
