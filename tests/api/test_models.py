"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import openai
import pytest

from tests.api.harness import ALIAS, MODEL, Served


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
