"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import openai
import pytest

from tests.api.harness import ALIAS, MODEL, Served, serve


async def test_all_names_are_listed(http):
    answer = (await http.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == [MODEL, ALIAS]
    card = answer["data"][0]
    assert set(card) == {
        "id",
        "object",
        "created",
        "owned_by",
        "root",
        "parent",
        "max_model_len",
        "permission",
    }
    assert (card["object"], card["max_model_len"]) == ("model", 4096)


@pytest.mark.parametrize("path", ["/v1/models/org/fake-model", "/v1/models/org%2Ffake-model"])
async def test_one_name_with_a_slash(http, path):
    assert (await http.get(path)).json()["id"] == MODEL


async def test_the_openai_client(listening_server: Served):
    async with openai.AsyncOpenAI(
        base_url=f"{listening_server.url}/v1", api_key="any", max_retries=0
    ) as client:
        assert [model.id async for model in client.models.list()] == [MODEL, ALIAS]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.models.retrieve("org/other")
        assert unknown.value.code == "model_not_found" and unknown.value.param == "model"


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
