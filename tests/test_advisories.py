"""One test for each security advisory of other engines that could have been servd's.

Those of pickles on a socket are in test_architecture.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import Chat
from servd.base.errors import InvalidRequest
from servd.checkpoint.hf import find_tokenizer
from tests.api.harness import serve, user
from tests.test_architecture import SOURCES

CHAT = "/v1/chat/completions"
HI = {"messages": user("hi"), "max_tokens": 1}


async def test_sglang_cve_2025_10164_sglang_24618_no_route_takes_weights():
    async with serve() as served:
        for name in ("update_weights_from_tensor", "update_weights_from_disk", "load_model"):
            answer = await served.http.post(f"/{name}", json={"serialized_named_tensors": ["gA=="]})
            assert answer.status_code == 404


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_cve_2025_62426_template_arguments_cannot_replace_the_servers(path: str):
    async with serve() as served:
        for name in ("chat_template", "tokenize", "messages"):
            body = HI | {"chat_template_kwargs": {name: "x"}}
            assert (await served.http.post(path, json=body)).status_code == 400


async def test_cve_2025_61620_no_template_of_a_client_is_run():
    async with serve(strict_fields=True) as served:
        answer = await served.http.post(CHAT, json=HI | {"chat_template": "{{ 7 * 7 }}"})
    assert answer.status_code == 400 and "49" not in answer.text


async def test_cve_2026_22778_errors_have_no_paths_and_addresses():
    bodies: list[object] = [
        {}, [], {"messages": 3}, HI | {"n": 0}, HI | {"model": "/etc/passwd0"}, HI | {"stop": [{}]},
        HI | {"logit_bias": {"x": 1}}, HI | {"tools": 3},
        HI | {"response_format": {"type": "json_schema"}},
    ]  # fmt: skip
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
    trusts = [re.findall(r"trust_remote_code=(\w+)", each.text) for each in models]
    assert {each for found in trusts for each in found} == {"False"}
    assert not any("get_class_from_dynamic_module" in source.text for source in SOURCES)


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
        shown = ChatTemplate(template).render(Chat(messages=user("hi")))
    except InvalidRequest:
        return
    assert "class" not in shown and "uid" not in shown
