"""`suffix` of completions: the prompt that each family of code models was trained with."""

from __future__ import annotations

import msgspec
import pytest
import tokenizers

from servd.api.engine.processor import Processor
from servd.api.text.fill_in_middle import FillInMiddle
from servd.api.text.prompt import Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ConfigError, InvalidRequest
from servd.checkpoint.hf import FAKE_SPEC
from servd.config import Config
from servd.messages.params import MAX_STOP_TOKEN_IDS, SamplingParams
from tests.api.harness import output_text, serve
from tests.api.test_errors import COMPLETIONS, check

FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
}


def tokenizer_with(*words: str) -> Tokenizer:
    """A byte tokenizer with more tokens."""
    backend = Tokenizer.bytes()._backend
    backend.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in words])
    return Tokenizer(backend, {"eos_token": "<eos>"}, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_found_by_their_tokens(family):
    words = FAMILIES[family]
    begin, hole, end = words[:3]
    tokenizer = tokenizer_with(*words)
    found = FillInMiddle.choose(tokenizer)
    assert (
        found
        and found.prompt("a{suffix}", "b{prefix}") == f"{begin}a{{suffix}}{hole}b{{prefix}}{end}"
    )
    assert found.end_token_ids == [tokenizer.token_id(word) for word in words[3:]]
    token_ids = tokenizer.encode(found.prompt("a", "b"))
    assert token_ids == [
        tokenizer.token_id(word) if word in words else ord(word)
        for word in (begin, "a", hole, "b", end)
    ]


def test_codestral_has_the_suffix_first():
    found = FillInMiddle.choose(tokenizer_with("[SUFFIX]", "[PREFIX]"))
    assert found and found.prompt("a", "b") == "[SUFFIX]b[PREFIX]a"


def test_some_of_the_tokens_are_not_enough():
    assert FillInMiddle.choose(tokenizer_with("<|fim_prefix|>", "<|fim_middle|>")) is None


@pytest.mark.parametrize("template", ["", "{prefix}", "{prefix}{suffix}{suffix}"])
def test_templates_that_lack_something(template):
    with pytest.raises(ConfigError, match="--fim-template"):
        FillInMiddle.choose(Tokenizer.bytes(), template)


def test_stop_tokens_of_the_model_count_in_the_limit_of_stop_token_ids():
    """Else the engine would refuse what the API has let in."""
    tokenizer = tokenizer_with(*FAMILIES["qwen"])
    spec = msgspec.structs.replace(FAKE_SPEC, vocab_size=2048)
    processor = Processor(Config(), spec, tokenizer, 1000)
    prompt = Prompt(content="a", suffix="b", request_id="r")
    params = SamplingParams(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS - 1))
    prepared = processor.process(prompt, params)
    assert prepared.params.stop_token_ids[-1] == tokenizer.token_id("<|endoftext|>")
    with pytest.raises(InvalidRequest) as refusal:
        processor.process(prompt, SamplingParams(stop_token_ids=[1] * MAX_STOP_TOKEN_IDS))
    assert refusal.value.param == "stop_token_ids"


async def test_completions():
    async with serve(fim_template="P{prefix}S{suffix}M") as served:
        body = {"prompt": ["def f(", "x"], "suffix": "return", "max_tokens": 5}
        whole = (await served.http.post(COMPLETIONS, json=body)).json()
        assert [choice["text"] for choice in whole["choices"]] == [
            output_text(f"P{prefix}SreturnM", 5) for prefix in body["prompt"]
        ]
        assert whole["usage"]["prompt_tokens"] == len("Pdef f(SreturnM" + "PxSreturnM")
        for more in ({"echo": True}, {"prompt": [65, 66]}):
            check(await served.http.post(COMPLETIONS, json={**body, **more}), 400, "suffix")
        plain = (await served.http.post(COMPLETIONS, json={**body, "suffix": ""})).json()
        assert plain["choices"][1]["text"] == output_text("x", 5)


async def test_a_model_without_such_tokens(http):
    assert "--fim-template" in check(
        await http.post(COMPLETIONS, json={"prompt": "a", "suffix": "b"}), 400, "suffix"
    )
