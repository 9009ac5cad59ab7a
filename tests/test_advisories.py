"""One test for each security advisory of other engines that could have been servd's."""

import json
import re
import time
from pathlib import Path

import httpx
import pytest

from servd.api import keys
from servd.api.http.http_protocol import MAX_HEAD
from servd.api.output.tool_parsers import pythonic
from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import Chat
from servd.base.errors import InvalidRequest
from servd.checkpoint.tokenizer_files import find_tokenizer
from servd.messages.params import MAX_N
from tests.api.harness import listening, serve, user
from tests.test_architecture import SOURCES

CHAT = "/v1/chat/completions"
HI = {"messages": user("hi"), "max_tokens": 1}
URL = {"url": "http://169.254.169.254/latest"}


async def test_cve_2025_59425_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    compared: list[int] = []

    def compare(offered: str, stored: str) -> bool:
        compared.append(len(offered))
        return offered == stored

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    async with serve(api_key=["first", "second"]) as served:
        for key in ("first", "f", "x" * 999):
            await served.http.get("/version", headers={"x-api-key": key})
    assert compared == [64] * 6  # hashes, and all of them each time


async def test_cve_2026_48746_no_header_renames_the_path():
    headers = {"host": "x/health?", "x-forwarded-path": "/health", "x-forwarded-prefix": "/health"}
    async with serve(api_key=["key"]) as served:
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 401


async def test_pr_42064_42594_10531_routes_outside_v1_are_guarded():
    async with serve(api_key=["key"]) as served:
        for path in ("/invocations", "/v2/embed", "/inference/v1/generate", "/tokenize", "/score"):
            assert (await served.http.post(path, json={})).status_code == 401


async def test_sglang_cve_2025_10164_sglang_24618_no_route_takes_weights():
    async with serve() as served:
        for name in ("update_weights_from_tensor", "update_weights_from_disk", "load_model"):
            answer = await served.http.post(f"/{name}", json={"serialized_named_tensors": ["gA=="]})
            assert answer.status_code == 404


async def test_cve_2025_48956_headers_are_bounded():
    async with serve() as served, listening(served.app) as url, httpx.AsyncClient() as http:
        answer = await http.get(f"{url}/health", headers={"x": "x" * 2 * MAX_HEAD})
    assert answer.status_code == 431


def test_cve_2025_48887_no_call_takes_the_parser_long():
    for text in ("[get_weather(a=" + "[" * 100_000, "[f(a=1), " * 20_000 + "f(", "[" * 100_000):
        begin = time.process_time()
        parser = pythonic.PythonicToolParser([])
        parser.feed(text)
        parser.finish()
        assert time.process_time() - begin < 3


async def test_cve_2025_48944_a_bad_schema_is_its_own_requests_400():
    for pattern in ("(", "(?!x)", "[" * 99):
        schema = {"type": "string", "pattern": pattern}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        async with serve() as served:
            answer = await served.http.post(CHAT, json=HI | {"response_format": form})
            assert answer.status_code == 400
            assert (await served.http.post(CHAT, json=HI)).status_code == 200


async def test_cve_2025_46570_no_tenant_sees_anothers_cache():
    async with serve(api_key=["a", "b"]) as served:
        for key in ("a", "b"):
            body = {"prompt": "x" * 200, "max_tokens": 1}
            answer = await served.http.post(
                "/v1/completions", json=body, headers={"x-api-key": key}
            )
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_cve_2026_22778_errors_have_no_paths_and_addresses():
    bodies: list[object] = [
        {},
        [],
        {"messages": 3},
        HI | {"n": 0},
        HI | {"model": "/etc/passwd0"},
        HI | {"stop": [{}]},
        HI | {"logit_bias": {"x": 1}},
        HI | {"tools": 3},
        HI | {"response_format": {"type": "json_schema"}},
    ]
    async with serve() as served:
        answers = [await served.http.post(CHAT, json=body) for body in bodies]
        answers += [await served.http.get(path) for path in ("/nowhere", "/v1/models/none", CHAT)]
    for answer in answers:
        if answer.status_code >= 400:
            text = answer.text.replace("/etc/passwd0", "").replace(CHAT, "")
            assert not re.search(r"0x[0-9a-f]{6,}|/(usr|home|root|tmp|work|opt)/|\.py\b", text)


def test_cve_2026_22807_no_code_of_a_checkpoint_runs_unasked(tmp_path: Path):
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(Exception, match="tokenizer"):
        find_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_cve_2025_66448_a_configuration_brings_no_code():
    """Models have no code but servd's; only tokenizers may, where the operator says so."""
    models = [source for source in SOURCES if source.path.startswith("servd/worker/models/")]
    trusts = [re.findall(r"trust_remote_code=(\w+)", source.text) for source in models]
    assert {value for values in trusts for value in values} == {"False"}
    assert not any("get_class_from_dynamic_module" in source.text for source in SOURCES)


async def test_49239_an_error_is_no_larger_than_the_request_deserves():
    async with serve() as served:
        body = {"messages": [{"role": "user", "content": [{"x": {}}] * 400}] * 4}
        answer = await served.http.post(CHAT, json=body)
    assert answer.status_code == 400 and len(answer.content) < 8192


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        # CVE-2025-6242, 2026-5497, 2026-22773, GHSA-c65p: no media is opened by a model that reads
        # none; tests/api/test_media_loader.py has what a model that sees opens
        *(
            (CHAT, {"messages": [{"role": "user", "content": [{"type": kind, kind: URL}]}]}, part)
            for kind, part in {
                "image_url": "pictures",
                "video_url": "video_url",
                "audio_url": "audio_url",
            }.items()
        ),
        # CVE-2025-62164: no tensor of a client is loaded
        ("/v1/completions", {"prompt": "x", "prompt_embeds": "gASVAAA="}, "prompt_embeds"),
        # CVE-2025-62426: template arguments cannot replace the server's
        *(
            (path, {"messages": user("hi"), "chat_template_kwargs": {name: "x"}}, name)
            for path in (CHAT, "/tokenize")
            for name in ("chat_template", "tokenize", "messages")
        ),
        # CVE-2025-61620: no template of a client is run
        (CHAT, HI | {"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
        # CVE-2026-34756: n is bounded
        (CHAT, HI | {"n": MAX_N + 1}, str(MAX_N)),
    ],
)
async def test_what_a_body_may_not_ask_for_is_refused(path: str, body: dict, part: str):
    # Only a template of a client is refused because it has no effect.
    async with serve(strict_fields="chat_template" in body) as served:
        answer = await served.http.post(path, json=body)
    assert answer.status_code == 400
    assert part in answer.text and "49" not in answer.text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ (messages|attr('__class__')).__base__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_cve_2026_5760_2024_34359_a_template_reaches_nothing_of_python(template: str):
    try:
        rendered = ChatTemplate(template).render(Chat(messages=user("hi")))
    except InvalidRequest:
        return
    assert "class" not in rendered and "uid" not in rendered
