"""The openai client against real processes: helpers, parse, embeddings, retries, timeouts."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pydantic
import pytest
import torch

MESSAGES = [{"role": "user", "content": "Licensed under what?"}]


@pytest.fixture(scope="module")
def client(llama_server) -> Iterator[openai.OpenAI]:
    """The synchronous client of a small real model."""
    with openai.OpenAI(base_url=f"{llama_server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def reference(tiny_llama: Path):
    """The same checkpoint in transformers, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(tiny_llama)


def test_a_chat_equals_transformers(client, reference):
    model, tokenizer = reference
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=0
        )[0, len(ids) :]
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, temperature=0
    )
    assert answer.choices[0].message.content == tokenizer.decode(out, skip_special_tokens=True)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer._request_id


def test_streams_by_iteration_and_by_helper(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert last.usage.completion_tokens > 0 and last.choices == []
    # The helpers raise for an answer that was cut by max_tokens.
    options["stop"] = whole[9:12]
    whole = whole[: whole.index(options["stop"])]
    with client.chat.completions.stream(**options) as helper:
        deltas = [event.delta for event in helper if event.type == "content.delta"]
        assert "".join(deltas) == whole == helper.get_final_completion().choices[0].message.content


class Licence(pydantic.BaseModel):
    """An answer with a form."""

    name: str = pydantic.Field(max_length=8)
    is_free: bool


def test_parse_gives_an_object(client):
    answer = client.chat.completions.parse(
        model="tiny",
        messages=MESSAGES,
        max_tokens=200,
        temperature=1,
        seed=1,
        response_format=Licence,
    )
    assert isinstance(answer.choices[0].message.parsed, Licence)


def test_errors_have_their_class_and_fields(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert error.value.code == "model_not_found" and error.value.request_id
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=MESSAGES, top_p=2, stream=True)
    assert error.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10**6)
    assert error.value.code == "context_length_exceeded"


def test_the_request_id_of_the_client_comes_back(client):
    raw = client.with_options(
        default_headers={"X-Request-Id": "mine-1"}
    ).models.with_raw_response.list()
    assert raw.request_id == "mine-1"
    assert raw.parse().data[0].id == "tiny"


def test_a_timeout_ends_the_request_on_the_server(start):
    server = start("--executor", "fake", "--log-level", "debug")
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=0.5
    ) as client:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(
                model="fake", prompt="x", n=32, max_tokens=8000, extra_body={"ignore_eos": True}
            )
    server.wait_for_line("aborted after")


class Flaky(http.server.BaseHTTPRequestHandler):
    """A proxy that answers every second request with 503, as a server that is loading does."""

    target: str
    num_requests = 0

    def do_POST(self) -> None:
        type(self).num_requests += 1
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.num_requests % 2:
            status, data = (
                503,
                json.dumps({"error": {"message": "loading", "type": "overloaded_error"}}).encode(),
            )
        else:
            answer = httpx.post(
                self.target + self.path, content=body, headers={"content-type": "application/json"}
            )
            status, data = answer.status_code, answer.content
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_client_retries_what_is_overloaded(llama_server):
    Flaky.target = llama_server.url
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flaky) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_address[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=2) as client:
            assert (
                client.completions.create(
                    model="tiny", prompt="a", max_tokens=2
                ).usage.completion_tokens
                == 2
            )
        proxy.shutdown()
    assert Flaky.num_requests == 2
