"""GET /server_info, /v1/models and what is told of the server."""

import asyncio

import httpx
import msgspec
import pytest

import servd
from servd.api.app import build_app
from servd.config import flag_of, options_by_name
from servd.config.machine import Machine
from servd.config.resolve import decide
from servd.messages.engine import EngineReady
from tests.api.harness import ALIAS, FAKE_SPEC, MODEL, requests_sent, serve, until


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
        "flag": "--block-size",
        "section": "KV cache",
        "value": 16,
        "source": "default",
        "about": "",
    }


async def test_what_servd_decided_has_a_reason():
    async with serve(executor="fake") as served:
        config = served.app.state.context.config.replace(max_num_seqs=None)
        config, decided = decide(config, FAKE_SPEC, Machine())
        reasons = {name: decision.why for name, decision in decided.items()}
        app = build_app(config.replace(max_num_seqs=64), served.async_llm, reasons=reasons)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            option = by_flag((await http.get("/server_info")).json())["--max-num-seqs"]
    assert (option["source"], option["value"]) == ("decided", 64)
    assert option["why"] == "the default on a CPU"


async def test_no_key_is_shown():
    async with serve(api_key=["first-secret", "second-secret"]) as served:
        assert (await served.http.get("/server_info")).status_code == 401
        answer = await served.http.get("/server_info", headers={"x-api-key": "first-secret"})
    assert "-secret" not in answer.text
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


# ---- /v1/models ----


async def test_all_names_are_listed(http):
    answer = (await http.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == [MODEL, ALIAS]
    card = answer["data"][0]
    names = "id object created owned_by root parent max_model_len permission"
    names += " input_modalities default_parameters"
    assert set(card) == {*names.split()}
    assert (card["object"], card["max_model_len"]) == ("model", 4096)


async def test_the_sampling_parameters_of_requests_that_state_none_are_listed():
    spec = msgspec.structs.replace(FAKE_SPEC, generation={"temperature": 0.5, "top_k": 9})
    async with serve(spec=spec, override_generation_config='{"max_new_tokens": 3}') as served:
        card = (await served.http.get(f"/v1/models/{MODEL}")).json()
        listed = card["default_parameters"]
        assert (await served.http.get("/v1/models")).json()["data"][0] == card
        props = (await served.http.get("/props")).json()
        params = props["default_generation_settings"]["params"]
        assert params["n_predict"] == listed["max_tokens"]
        assert params["repeat_penalty"] == listed["repetition_penalty"]
        assert params["temperature"] == listed["temperature"]
        text = (await served.http.post("/api/show", json={"model": MODEL})).json()["parameters"]
        lines = dict(line.split() for line in text.splitlines())
        assert lines["num_predict"] == "3" and lines["temperature"] == "0.5"
        assert float(lines["repeat_penalty"]) == listed["repetition_penalty"]
        assert len(lines) == len(listed)
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
        (request,) = requests_sent(served.engine)
        assert {name: getattr(request.params, name) for name in listed} == listed
        assert listed == {
            **{"temperature": 0.5, "top_p": 1, "top_k": 9, "min_p": 0, "max_tokens": 3},
            **{"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
        }


@pytest.mark.parametrize("path", ["/v1/models/org/fake-model", "/v1/models/org%2Ffake-model"])
async def test_one_name_with_a_slash(http, path):
    assert (await http.get(path)).json()["id"] == MODEL


async def test_no_route_tells_where_the_folder_is(tmp_path):
    names = [tmp_path.name, str(tmp_path)]  # as `resolve` has them for a folder
    async with serve(model=str(tmp_path), served_model_name=names) as served:
        for path in ("/v1/models", f"/v1/models/{tmp_path.name}", "/props", "/v1/models/none"):
            assert str(tmp_path) not in (await served.http.get(path)).text
        assert (await served.http.get("/props")).json()["model_path"] == tmp_path.name
        for name in names:
            assert (await served.http.get(f"/v1/models/{name}")).json()["root"] == tmp_path.name
    async with serve(model="org/on-the-hub", served_model_name=["short"]) as served:
        assert (await served.http.get("/v1/models/short")).json()["root"] == "org/on-the-hub"
        assert (await served.http.get("/props")).json()["model_path"] == "org/on-the-hub"
