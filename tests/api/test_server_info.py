"""GET /server_info."""

from __future__ import annotations

import asyncio

import httpx
import msgspec

import servd
from servd.api.app import create_app
from servd.config import flag_of, options_by_name
from servd.config.resolve import Machine, decide
from servd.messages.engine import EngineReady
from tests.api.harness import FAKE_SPEC, MODEL, serve, until


def by_flag(info: dict) -> dict[str, dict]:
    return {option["flag"]: option for option in info["options"]}


async def test_every_option_is_shown_with_where_its_value_comes_from(http: httpx.AsyncClient):
    info = (await http.get("/server_info")).json()
    assert info["version"] == servd.__version__ and info["model"][0] == MODEL
    options = by_flag(info)
    assert options.keys() == {flag_of(name) for name in options_by_name()}
    assert all(option["about"] for option in options.values())
    assert options["--max-model-len"]["value"] == 4096
    assert options["--max-model-len"]["source"] == "given"
    assert options["--block-size"] | {"about": ""} == {
        "flag": "--block-size", "section": "KV cache", "value": 16, "source": "default",
        "about": "",
    }  # fmt: skip


async def test_what_servd_decided_has_a_reason():
    async with serve(executor="fake") as served:
        config = served.app.state.context.config.replace(max_num_seqs=None)
        config, decided = decide(config, FAKE_SPEC, Machine())
        reasons = {name: decision.why for name, decision in decided.items()}
        app = create_app(config.replace(max_num_seqs=64), served.async_llm, reasons=reasons)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            option = by_flag((await http.get("/server_info")).json())["--max-num-seqs"]
    assert (option["source"], option["value"]) == ("decided", 64)
    assert option["why"] == "the default on a CPU"


async def test_no_key_is_shown():
    async with serve(api_key=["first-secret", "second-secret"]) as served:
        assert (await served.http.get("/server_info")).status_code == 401
        answer = await served.http.get("/server_info", headers={"x-api-key": "first-secret"})
    assert "secret" not in answer.text
    assert by_flag(answer.json())["--api-key"]["value"] == ["2 of them"]


async def test_the_engine_tells_what_it_found_out_and_how_long_it_took():
    async with serve(is_ready=False) as served:
        loading = (await served.http.get("/server_info")).json()
        worker = msgspec.structs.replace(served.engine.worker, device="NVIDIA H200")
        served.engine.tell(EngineReady(worker, 2048, 32, {"loading weights": 1.5}))
        while not served.async_llm.is_ready:
            await asyncio.sleep(0.001)
        ready = (await served.http.get("/server_info")).json()
    assert "engine" not in loading and loading["startup_seconds"] == {}
    assert ready["engine"]["device"] == "NVIDIA H200" and ready["engine"]["block_size"] == 32
    assert ready["engine"]["max_model_len"] == 2048
    assert ready["startup_seconds"] == {"loading weights": 1.5}


async def test_props_and_slots_of_llama_server():
    async with serve(max_num_seqs=3) as served:
        props = (await served.http.get("/props")).json()
        assert props["default_generation_settings"]["n_ctx"] == 4096 and props["total_slots"] == 3
        assert props["model_alias"] == MODEL and props["eos_token"] == "<eos>"
        template = (await served.http.get("/tokenizer_info")).json()["chat_template"]
        assert props["chat_template"] == template
        served.engine.step_seconds = 0.01
        body = {"prompt": ["a", "b"], "max_tokens": 2000}
        asking = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await until(lambda: served.async_llm.engines[0].stats.num_running == 2)
        slots = (await served.http.get("/slots")).json()
        assert [slot["id"] for slot in slots] == [0, 1, 2]
        assert [slot["is_processing"] for slot in slots] == [True, True, False]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
