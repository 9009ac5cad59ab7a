"""POST /v1/completions, by HTTP and by the openai client."""

import re

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from servd.api.engine.processor import Processor
from servd.api.serving.logprobs import TokenTexts
from servd.api.text.fill_in_middle import FillInMiddle
from servd.api.text.prompt import Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ConfigError, InvalidRequest
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.messages.engine import TokenLogprobs
from servd.messages.params import MAX_STOP_TOKEN_IDS, SamplingParams
from tests.api.harness import MODEL, events, output_text, serve, user
from tests.api.test_errors import check

COMPLETIONS = "/v1/completions"


async def ask(http, **body):
    answer = await http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_repetition_ends_the_output():
    detection = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}
    limits = {"max_tokens": 99, "repetition_detection": detection}
    body = {"prompt": "yzxyzxyzxyz", "return_token_ids": True, **limits}
    async with serve(script="ab" + "xyz" * 5) as served:
        (choice,) = (await ask(served.http, **body))["choices"]
        ended = choice["text"], choice["finish_reason"], len(choice["token_ids"])
        assert ended == ("abxyzxyzxyz", "repetition", 11)
        (choice,) = (await ask(served.http, **body, min_tokens=14))["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab" + "xyz" * 4, "repetition")
        chat = {"messages": user("hi"), **limits}
        stream = {**chat, "n": 2, "stream": True}
        answer = await served.http.post("/v1/chat/completions", json=stream)
        reasons = [c["finish_reason"] for chunk in events(answer.text) for c in chunk["choices"]]
        assert [reason for reason in reasons if reason] == ["repetition"] * 2
        message = await served.http.post("/v1/messages", json=chat)
        assert message.json()["stop_reason"] == "max_tokens"
        body = {"input": "hi", "repetition_detection": detection}
        response = (await served.http.post("/v1/responses", json=body)).json()
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        metrics = (await served.http.get("/metrics")).text
        assert re.search(r'vllm:request_success_total{.*"repetition".*} 6.0', metrics)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": 257, "min_count": 2},
        {"max_pattern_size": -1},
        {"max_pattern_size": 3},
        {"max_pattern_size": 3, "min_count": 1},
        {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
        {"max_pattern_size": 3.5, "min_count": 2},
        {"size": 3},
        5,
    ],
    ids=str,
)
async def test_bounds_of_repetition_detection(http, fields):
    body = {"prompt": "a", "repetition_detection": fields}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("repetition_detection")


async def test_tokens_are_named_by_id_and_the_prompt_is_sent_on_demand(http):
    body = {"prompt": [[104, 105], [106]], "max_tokens": 3, "logprobs": 1, "echo": True}
    body["return_token_ids"] = True
    answer = (
        await http.post(
            "/v1/completions",
            json={**body, "return_tokens_as_token_ids": True, "return_prompt_text": True},
        )
    ).json()
    assert [choice["prompt_text"] for choice in answer["choices"]] == ["hi", "j"]
    plain = (await http.post("/v1/completions", json=body)).json()
    for choice, other in zip(answer["choices"], plain["choices"], strict=True):
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
        for token_id, likely in list(zip(ids, choice["logprobs"]["top_logprobs"], strict=True))[1:]:
            assert likely.keys() == {f"token_id:{token_id}"}
        assert choice["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]
        assert "prompt_text" not in other


async def test_the_whole_answer(http):
    answer = await ask(http, prompt="Once")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["id"].startswith("cmpl-") and answer["system_fingerprint"] and answer["created"]
    text = output_text("Once", 16)  # OpenAI's default length
    ended = {"finish_reason": "length", "stop_reason": None, "logprobs": None}
    assert answer["choices"] == [{"index": 0, "text": text, **ended}]
    used = {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}
    assert answer["usage"] == used | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_choices(http, as_ids, stream):
    texts = ["one", "two", "three"]
    prompt = [list(text.encode()) for text in texts] if as_ids else texts
    body = {"prompt": prompt, "n": 2, "max_tokens": 5, "echo": True}
    got = [""] * 6
    if stream:
        answer = await http.post(COMPLETIONS, json={**body, "stream": True})
        finished = []
        for chunk in events(answer.text):
            (choice,) = chunk["choices"]
            got[choice["index"]] += choice["text"]
            finished += [choice["index"]] if choice["finish_reason"] else []
        assert sorted(finished) == list(range(6))
    else:
        answer = await ask(http, **body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        got = [choice["text"] for choice in answer["choices"]]
        assert answer["usage"]["prompt_tokens"] == 11 and answer["usage"]["completion_tokens"] == 30
    assert got == [text + output_text(text, 5) for text in texts for _ in range(2)]


def score(token_ids):
    return [TokenLogprobs([i, ord("x")], [-1.0, -2.0], 1) for i in token_ids]


@given(st.text())
def test_tokens_and_their_offsets_are_the_text(text):
    tokenizer = Tokenizer.bytes()
    texts = TokenTexts(tokenizer, frozenset({256}))
    logprobs = texts.completion_logprobs(score([256, *text.encode(), 256]))
    special = tokenizer.token_string(256)
    assert "".join(logprobs.tokens) == special + text + special
    expected = [i for i, char in enumerate(text) for _ in char.encode()]
    assert logprobs.text_offset == [0, *expected, len(text)]


EMOJI = [*"a\U0001f642".encode()]
NAMES = ["a", "", "", "", "\U0001f642"]


def test_a_character_of_several_tokens_is_named_by_its_last_token():
    """As in vLLM, in both formats; the bytes of chats are of each token alone, as at OpenAI."""
    logprobs = TokenTexts(Tokenizer.bytes()).completion_logprobs(score(EMOJI))
    assert logprobs.tokens == NAMES
    assert [[*msgspec.json.decode(top)] for top in logprobs.top_logprobs] == [
        [name, "x"] for name in NAMES
    ]
    chat = msgspec.json.decode(
        msgspec.json.encode(TokenTexts(Tokenizer.bytes()).chat_logprobs(score(EMOJI)))
    )
    assert [token["token"] for token in chat["content"]] == NAMES
    assert [token["bytes"] for token in chat["content"]] == [[byte] for byte in EMOJI]
    ids = TokenTexts(Tokenizer.bytes(), shows_ids=True).completion_logprobs(score(EMOJI))
    assert ids.tokens == [f"token_id:{byte}" for byte in EMOJI]
    assert ids.text_offset == logprobs.text_offset == [0, 1, 1, 1, 1]


async def test_a_scored_prompt_names_characters_alike(http):
    body = {
        "prompt": [EMOJI[1:]],
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 0,
        "max_tokens": 0,
    }
    (choice,) = (await ask(http, **body))["choices"]
    assert choice["logprobs"]["tokens"] == NAMES[1:]
    entries = [entry.values() for entry in choice["prompt_logprobs"][1:]]
    assert [entry["decoded_token"] for (entry,) in entries] == NAMES[2:]


async def test_usage_grows_with_every_chunk(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "bc"], "max_tokens": 8, "stream": True, "stream_options": options}
    usages = [chunk["usage"] for chunk in events((await http.post(COMPLETIONS, json=body)).text)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 16
    assert {usage["prompt_tokens"] for usage in usages} == {3}
    assert [usage["total_tokens"] for usage in usages] == [3 + count for count in counts]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_in_a_stream_unless_asked_for(http, options):
    body = {"prompt": "a", "stream": True, "stream_options": options}
    chunks = events((await http.post(COMPLETIONS, json=body)).text)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_usage_in_every_stream_where_the_server_says_so():
    async with serve(enable_force_include_usage=True) as served:
        body = {"prompt": "abc", "stream": True, "max_tokens": 4}
        *chunks, last = events((await served.http.post(COMPLETIONS, json=body)).text)
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)
        assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_choices_share_the_prompt(served, temperature):
    prompt = "x" * 160
    answer = await ask(served.http, prompt=prompt, n=5, temperature=temperature, max_tokens=3)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [output_text(prompt, 3)] * 5  # the fake has one answer
    assert answer["usage"]["prompt_tokens"] == 160 and answer["usage"]["completion_tokens"] == 15
    # The first choice computes the prompt; the others compute its last block, which yields their
    # first token.
    stats = served.async_llm.metrics.render()[0].decode()
    name = "vllm:prefix_cache_hits_total"
    (hits,) = [line.split()[-1] for line in stats.splitlines() if line.startswith(name)]
    assert float(hits) == 4 * 144


# ---- `suffix`: the prompt that each family of code models was trained with ----

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
    fim = FillInMiddle.choose(tokenizer)
    prompt = f"{begin}a{{suffix}}{hole}b{{prefix}}{end}"
    assert fim and fim.prompt("a{suffix}", "b{prefix}") == prompt
    assert fim.end_token_ids == [tokenizer.token_id(word) for word in words[3:]]
    token_ids = tokenizer.encode(fim.prompt("a", "b"))
    parts = (begin, "a", hole, "b", end)
    assert token_ids == [tokenizer.token_id(p) if p in words else ord(p) for p in parts]


def test_codestral_has_the_suffix_first():
    fim = FillInMiddle.choose(tokenizer_with("[SUFFIX]", "[PREFIX]"))
    assert fim and fim.prompt("a", "b") == "[SUFFIX]b[PREFIX]a"


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
    prompt = Prompt(content="a", suffix="b")
    params = SamplingParams(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS - 1))
    prepared = processor.process_inputs("r", prompt, params)
    assert prepared.params.stop_token_ids[-1] == tokenizer.token_id("<|endoftext|>")
    with pytest.raises(InvalidRequest) as refusal:
        processor.process_inputs(
            "r", prompt, SamplingParams(stop_token_ids=[1] * MAX_STOP_TOKEN_IDS)
        )
    assert refusal.value.param == "stop_token_ids"


async def test_completions():
    async with serve(fim_template="P{prefix}S{suffix}M") as served:
        body = {"prompt": ["def f(", "x"], "suffix": "return", "max_tokens": 5}
        whole = (await served.http.post(COMPLETIONS, json=body)).json()
        texts = [output_text(f"P{prefix}SreturnM", 5) for prefix in body["prompt"]]
        assert [choice["text"] for choice in whole["choices"]] == texts
        assert whole["usage"]["prompt_tokens"] == len("Pdef f(SreturnM" + "PxSreturnM")
        for more in ({"echo": True}, {"prompt": [65, 66]}):
            check(await served.http.post(COMPLETIONS, json={**body, **more}), 400, "suffix")
        plain = (await served.http.post(COMPLETIONS, json={**body, "suffix": ""})).json()
        assert plain["choices"][1]["text"] == output_text("x", 5)


async def test_a_model_without_such_tokens(http):
    answer = await http.post(COMPLETIONS, json={"prompt": "a", "suffix": "b"})
    assert "--fim-template" in check(answer, 400, "suffix")
