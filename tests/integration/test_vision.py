"""Pictures in a real server: clients that know nothing of it, an engine that dies, memory."""

import base64
import io
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import psutil
import pytest
from PIL import Image

from tests import vision_models
from tests.integration.conftest import Server
from tests.integration.test_processes import wait_until

QUESTION = "What is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm")
    vision_models.make("smolvlm", folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path):
    server = Server(str(folder), "--served-model-name", "m", "--device", "cpu")
    server.wait_ready()
    yield server
    assert server.stop() == 0


def png(colour: str) -> str:
    """Return a picture in base64."""
    file = io.BytesIO()
    Image.new("RGB", (90, 70), colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def message(*colours: str, text: str = QUESTION) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{png(colour)}" for colour in colours]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def ask(server: Server, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


async def test_clients_get_the_same_answer(server: Server):
    expected = text(ask(server, message("red")))
    assert expected != text(ask(server, message("blue")))
    data = png("red")
    more: dict[str, Any] = {"ignore_eos": True}
    async with server.client() as client:
        chat = await client.chat.completions.create(
            model="m",
            messages=[message("red")],  # type: ignore[list-item]
            max_tokens=12,
            temperature=0,
            extra_body=more,
        )
        assert chat.choices[0].message.content == expected
        url = f"data:image/png;base64,{data}"
        response = await client.responses.create(
            model="m",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": url, "detail": "auto"},
                        {"type": "input_text", "text": QUESTION},
                    ],
                }
            ],
            max_output_tokens=12,
            temperature=0,
            extra_body=more,
        )
        assert response.output_text == expected
        with pytest.raises(openai.BadRequestError, match="--allowed-media-domains"):
            url = "https://images.example/a.png"
            part = {"type": "image_url", "image_url": {"url": url}}
            await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": [part]}],  # type: ignore[list-item]
            )
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        block = {"type": "image", "source": source}
        answer = await client.messages.create(
            model="m",
            max_tokens=12,
            messages=[{"role": "user", "content": [block, {"type": "text", "text": QUESTION}]}],  # type: ignore[list-item]
            extra_body=more | {"temperature": 0},
        )
        assert answer.content[0].text == expected  # type: ignore[union-attr]
    async with ollama.AsyncClient(server.url) as client:
        reply = await client.chat(
            "m",
            [{"role": "user", "content": QUESTION, "images": [data]}],
            options={"num_predict": 12, "temperature": 0, "ignore_eos": True},
        )
    assert reply.message.content is not None and expected.startswith(reply.message.content)


def test_text_requests_beside_pictures_are_as_without(server: Server):
    plain = message(text="Tell me a story.")
    expected = text(ask(server, plain, max_tokens=40))
    with ThreadPoolExecutor() as pool:
        pictures = [pool.submit(ask, server, message(f"#0000{i:02x}")) for i in range(8)]
        stories = [pool.submit(ask, server, plain, max_tokens=40) for _ in range(4)]
        assert {text(story.result()) for story in stories} == {expected}
        assert len({text(picture.result()) for picture in pictures}) > 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--executor", "uniproc"], id="one worker"),
        pytest.param(
            ["--executor", "multiproc", "--tensor-parallel-size", "2"],
            id="two ranks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_answers_are_the_same_though_the_engine_dies(start, folder, options):
    server = start(str(folder), "--device", "cpu", "--mm-processor-cache-gb", "0", *options)
    expected = [text(ask(server, message("red", "blue"), max_tokens=n)) for n in (600, 900)]
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(ask, server, message("red", "blue"), max_tokens=n) for n in (600, 900)
        ]
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0, "nothing runs")
        engine = server.children()["engine"]
        (engine.children() or [engine])[-1].send_signal(signal.SIGKILL)
        server.wait_for_line("restarting it")
        assert [text(answer.result()) for answer in answers] == expected
    server.wait_ready()
    server.check_audit()


def media_process(server: Server) -> psutil.Process:
    children = psutil.Process(server.children()["api"].pid).children()
    return next(child for child in children if "media_process" in " ".join(child.cmdline()))


def test_the_api_process_stays_small_and_without_torch(server: Server):
    ask(server, message("red"))
    api = server.children()["api"]
    for process in (api, media_process(server)):
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    assert api.memory_info().rss < 135e6


def test_a_dead_media_process_is_started_again(server: Server):
    ask(server, message("red"))
    media_process(server).kill()
    assert ask(server, message("#123456"))["usage"]["completion_tokens"] == 12


def test_the_language_model_alone(start, folder):
    server = start(str(folder), "--device", "cpu", "--language-model-only")
    body = {"messages": [message("red")]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "--language-model-only" in answer.text
    assert ask(server, message(text="hi"))["usage"]["completion_tokens"] == 12


def test_options_of_the_image_processor_are_checked_at_the_start(folder):
    server = Server(str(folder), "--device", "cpu", "--mm-processor-kwargs", '{"nope": 1}')
    assert server.process.wait(60) == 2
    server.wait_for_line(r"--mm-processor-kwargs: 'nope' is unknown")
    server.stop()
