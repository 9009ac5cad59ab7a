"""kv_transfer_params: a prompt that one server computes and another continues with."""

import json
import time

import pytest

from servd.api.engine import kv_transfer
from servd.config import Config
from servd.core.kv_cache.connector import remote
from servd.core.kv_cache.connector.costs import LoadCosts
from tests.api.harness import chat_prompt, events, output_text, serve, user
from tests.core.kv_cache.test_transfer import TOKEN, free_port

TEXT = "a long beginning of a text"
# As vLLM's proxies send them.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("SERVD_JOIN_TOKEN", TOKEN)
    monkeypatch.setattr(LoadCosts, "is_worth_loading", lambda self, place: True)
    monkeypatch.setattr(remote, "IDLE", 0.05)


def config(role: str, port: int, **more) -> str:
    if role != "kv_producer":
        peers = {"peers": [f"127.0.0.1:{port}"], "timeout": 20}
        more = {"kv_connector_extra_config": peers, "kv_load_failure_policy": "fail"} | more
    return json.dumps({"kv_role": role, "kv_port": port} | more)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_that_of_one_server(route, stream):
    port = free_port()
    is_chat = "chat" in route
    body = {"messages": user(TEXT)} if is_chat else {"prompt": TEXT}
    text = output_text(chat_prompt(TEXT) if is_chat else TEXT, 9)
    async with (
        serve(block_size=4, kv_transfer_config=config("kv_producer", port)) as producer,
        serve(block_size=4, kv_transfer_config=config("kv_consumer", port)) as consumer,
    ):
        first = {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
        answer = (await producer.http.post(route, json=body | first)).json()
        params = answer["kv_transfer_params"]
        assert params["remote_port"] == port and params["do_remote_prefill"] is True
        assert params["remote_num_tokens"] == answer["usage"]["prompt_tokens"]
        assert 60 < params["remote_blocks_expiry_time"] - time.time() <= 120
        body |= {"max_tokens": 9, "kv_transfer_params": params, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        answered = await consumer.http.post(route, json=body)
        if stream:
            *chunks, last = events(answered.text)
            parts = [c["choices"][0] for c in chunks]
            said = "".join(c["delta"].get("content") or "" if is_chat else c["text"] for c in parts)
        else:
            last = answered.json()
            [choice] = last["choices"]
            said = choice["message"]["content"] if is_chat else choice["text"]
            assert "kv_transfer_params" not in last
        assert said == text
        num_cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert num_cached == (last["usage"]["prompt_tokens"] - 1) // 4 * 4
        tier = (await consumer.http.get("/v1/cache")).json()["engines"][0]["tiers"][-1]
        assert (tier["name"], tier["hits"]) == ("remote", num_cached // 4)


async def test_what_this_server_has_no_part_in_is_refused():
    port = free_port()
    from_peer = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}

    async def refusal(served, params, **more) -> str:
        body = {"prompt": TEXT, "kv_transfer_params": params} | more
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("kv_transfer_params")
        return answer.json()["error"]["message"]

    async with serve() as served:
        for params in (PREFILL, from_peer):
            assert "without --kv-transfer-config" in await refusal(served, params)
        body = {"prompt": TEXT, "kv_transfer_params": PREFILL | {"do_remote_decode": False}}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 200 and "kv_transfer_params" not in answer.json()
    async with serve(kv_transfer_config=config("kv_consumer", port)) as served:
        assert "kv_consumer" in await refusal(served, PREFILL)
        for host, other in (
            ("127.0.0.1", port + 1),
            ("169.254.169.254", port),
            ("localhost", port),
        ):
            params = from_peer | {"remote_host": host, "remote_port": other}
            assert f"{host}:{other} is not among the peers" in await refusal(served, params)
        assert "remote_port" in await refusal(served, from_peer | {"remote_port": None})
    async with serve(kv_transfer_config=config("kv_producer", port)) as served:
        assert "not among the peers" in await refusal(served, from_peer)
        assert "stream" in await refusal(served, PREFILL, stream=True)
        assert "one prompt" in await refusal(served, PREFILL, prompt=["a", "b"])


async def test_what_cannot_be_had_is_an_error_that_says_so():
    port = free_port()
    async with serve(block_size=16, kv_transfer_config=config("kv_both", port)) as served:
        params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
        body = {"prompt": TEXT, "kv_transfer_params": params}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert "1 of 1 KV blocks could not be had" in answer.json()["error"]["message"]
        assert (await served.http.post("/v1/completions", json={"prompt": TEXT})).status_code == 200


def test_an_engine_is_named_with_the_port_of_its_rank():
    options = {"kv_transfer_config": config("kv_producer", 7000), "data_parallel_size": 4}
    answer = kv_transfer.answer(Config.load(options), 3, "a", 5)
    assert (answer.remote_port, answer.remote_engine_id) == (7003, "127.0.0.1:7003")
