"""GET /."""

from __future__ import annotations

import re
import shlex

import httpx
import pytest

import servd
from tests.api.harness import MODEL, Served, serve


async def test_the_page_says_what_this_server_is(http: httpx.AsyncClient):
    answer = await http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert MODEL in answer.text and servd.__version__ in answer.text
    assert 'name="viewport"' in answer.text and "color-scheme: light dark" in answer.text
    for path in re.findall(r'href="([^"]*)"', answer.text):
        assert (await http.get(path)).status_code == 200, path
    assert (await http.head("/")).status_code == 200


async def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(http: httpx.AsyncClient):
    answer = await http.get("/")
    assert answer.headers["content-security-policy"].startswith(
        "default-src 'none'; style-src 'sha"
    )
    assert not re.search(r"<script|<img|<link|<form| style=| on\w+=|@import|url\(", answer.text)


async def test_the_example_works(listening_server: Served):
    page = (await listening_server.http.get("/")).text
    [example] = re.findall(r"<code>(.*?)</code>", page, re.DOTALL)
    curl, url, *options = shlex.split(example.replace("\\\n", " "))
    fields = dict(zip(options[::2], options[1::2], strict=True))
    assert curl == "curl" and url.startswith(listening_server.url)
    name, value = fields["-H"].split(": ")
    answer = await listening_server.http.post(url, content=fields["-d"], headers={name: value})
    assert answer.status_code == 200


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x>', "{version}"])
async def test_names_are_text(name: str):
    async with serve(served_model_name=[name]) as served:
        page = (await served.http.get("/", headers={"host": "evil<b>.test"})).text
    assert "<script" not in page and "<img" not in page and "<b>.test" not in page


async def test_the_page_needs_a_key_where_the_others_do():
    async with serve(api_key=["key"]) as served:
        assert (await served.http.get("/")).status_code == 401
        page = (await served.http.get("/", headers={"x-api-key": "key"})).text
        assert "Authorization: Bearer $SERVD_API_KEY" in page
