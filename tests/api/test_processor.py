"""Processor: what is validated, filled in and split."""

import json
from pathlib import Path

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from servd.api.engine.processor import MAX_CHARS, NO_OPTIONS, Processor
from servd.api.text.prompt import Chat, Prompt
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ContextTooLong, InvalidRequest
from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec
from servd.checkpoint.pooling import PoolingSpec
from servd.config import Config
from servd.messages.engine import RequestOptions
from servd.messages.params import INT64_MAX, MAX_LOGPROBS, PoolingParams, SamplingParams


def make(
    max_model_len: int = 100, spec: ModelSpec = FAKE_SPEC, client: int = 0, **options
) -> Processor:
    config = Config().replace(**options)
    return Processor(config, spec, Tokenizer.bytes(), max_model_len, client)


def prompt_of(content: str | list[int] | Chat, **fields) -> Prompt:
    return Prompt(content=content, **fields)


def with_generation(**generation) -> ModelSpec:
    return msgspec.structs.replace(FAKE_SPEC, generation=generation)


def test_eos_of_the_tokenizer_counts_too():
    spec = msgspec.structs.replace(FAKE_SPEC, eos_token_ids=[7])
    request = make(spec=spec).process_inputs("r", prompt_of("hi"), SamplingParams()).request
    assert sorted(request.eos_token_ids) == [7, 256]
    spec = msgspec.structs.replace(FAKE_SPEC, eos_token_ids=[7], vocab_size=200)
    assert make(spec=spec).process_inputs(
        "r", prompt_of([1]), SamplingParams()
    ).request.eos_token_ids == [7]


@pytest.mark.parametrize(
    ("max_tokens", "default", "expected"),
    [(None, None, 97), (5, None, 5), (97, None, 97), (None, 20, 20), (None, 500, 97), (30, 20, 30)],
)
def test_max_tokens(max_tokens: int | None, default: int | None, expected: int):
    spec = with_generation(**{"max_new_tokens": default} if default else {})
    processor = make(100, spec)
    assert "max_tokens" not in processor.default_params
    prepared = processor.process_inputs(
        "r", prompt_of([1, 2, 3]), SamplingParams(max_tokens=max_tokens)
    )
    assert prepared.params.max_tokens == prepared.request.params.max_tokens == expected


def test_defaults_come_from_the_generation_config(tmp_path: Path):
    spec = with_generation(temperature=0.6, top_k=20, transformers_version="5")
    assert make(spec=spec).default_params == {"temperature": 0.6, "top_k": 20}
    assert make(spec=spec, generation_config="vllm").default_params == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9}))
    assert make(spec=spec, generation_config=str(tmp_path)).default_params == {"top_p": 0.9}


def test_a_text_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch):
    processor = make(100)
    longest = processor.tokenizer.longest_token
    # As many characters as 100 of the longest tokens: only the tokenizer can tell.
    with pytest.raises(ContextTooLong, match="you requested"):
        processor.process_inputs("r", prompt_of("x" * 100 * longest), SamplingParams(max_tokens=1))
    monkeypatch.setattr(processor.tokenizer, "encode", None)
    with pytest.raises(ContextTooLong, match="characters") as error:
        processor.process_inputs(
            "r", prompt_of("x" * (100 * longest + 1)), SamplingParams(max_tokens=1)
        )
    assert error.value.code == "context_length_exceeded"


def test_max_logprobs_does_not_limit_the_server_itself():
    make().process_inputs("r", prompt_of("a"), SamplingParams(logprobs=MAX_LOGPROBS))
    with pytest.raises(InvalidRequest, match=f"logprobs must be at most {MAX_LOGPROBS}"):
        make().process_inputs("r", prompt_of("a"), SamplingParams(logprobs=MAX_LOGPROBS + 1))
    for limit, allowed in ((5, 5), (50, 50), (-1, 512)):
        processor = make(max_logprobs=limit)
        for name in ("logprobs", "prompt_logprobs"):
            processor.process_inputs("r", prompt_of("a"), SamplingParams(**{name: allowed}))
            with pytest.raises(InvalidRequest, match=f"^{name} must be .* {allowed}[, ]"):
                processor.process_inputs("r", prompt_of("a"), SamplingParams(**{name: allowed + 1}))


def test_not_even_a_text_that_need_not_fit_is_tokenised_at_any_length(monkeypatch):
    processor = make(100)
    monkeypatch.setattr(processor.tokenizer, "encode", None)
    prompt, options = prompt_of("x" * (MAX_CHARS + 1)), RequestOptions(truncate_prompt_tokens=1)
    for tokenise in (
        lambda: processor.tokenize(prompt),
        lambda: processor.process_inputs("r", prompt, SamplingParams(max_tokens=1), options),
    ):
        with pytest.raises(InvalidRequest, match=f"the most per request is {MAX_CHARS}"):
            tokenise()


@pytest.mark.parametrize(("num_prompt", "fits"), [(99, True), (100, False), (500, False)])
def test_a_prompt_leaves_room_for_one_token(num_prompt: int, fits: bool):
    params = SamplingParams(max_tokens=None)
    if fits:
        prepared = make(100).process_inputs("r", prompt_of([1] * num_prompt), params)
        assert prepared.params.max_tokens == 100 - num_prompt
    else:
        with pytest.raises(ContextTooLong):
            make(100).process_inputs("r", prompt_of([1] * num_prompt), params)


def test_a_prompt_without_output_may_fill_the_context():
    params = SamplingParams(max_tokens=0)
    inputs = make(100).process_inputs("r", prompt_of([1] * 100), params)
    assert len(inputs.request.prompt_token_ids) == 100
    options = RequestOptions(truncate_prompt_tokens=-1)
    prepared = make(100).process_inputs("r", prompt_of([1] * 300), params, options)
    assert len(prepared.request.prompt_token_ids) == 100
    assert (
        len(
            make(100)
            .process_inputs("r", prompt_of([1] * 100), PoolingParams())
            .request.prompt_token_ids
        )
        == 100
    )
    with pytest.raises(ContextTooLong, match=r"the prompt has 101\. Shorten it, or set trunc"):
        make(100).process_inputs("r", prompt_of([1] * 101), params)


@given(n=st.integers(2, 8), seed=st.integers(-INT64_MAX - 1, INT64_MAX))
def test_choices_have_successive_seeds_and_nothing_about_text(n: int, seed: int):
    about_text = {"stop": ["x"], "include_stop_str_in_output": True, "skip_special_tokens": False}
    params = SamplingParams(n=n, seed=seed, top_k=5, **about_text)
    prepared = make().process_inputs("r", prompt_of("hi"), params)
    assert prepared.request.choice_ids == [f"r_{i}" for i in range(n)]
    choices = prepared.request.choices()
    assert [request.request_id for request in choices] == prepared.request.choice_ids
    for index, request in enumerate(choices):
        expected = SamplingParams(top_k=5, seed=request.params.seed)
        assert request.params == expected
        assert request.params.seed is not None and -(2**63) <= request.params.seed < 2**63
        assert (request.params.seed - seed - index) % 2**64 == 0


def test_seeds_differ_by_request_and_server_and_repeat_over_runs():
    def seeds(client: int, **options) -> list[int | None]:
        processor = make(client=client, **options)
        return [
            processor.process_inputs("r", prompt_of("hi"), SamplingParams()).params.seed
            for _ in range(50)
        ]

    assert seeds(0) == seeds(0)
    all_seeds = seeds(0) + seeds(1) + seeds(0, seed=1)
    assert None not in all_seeds and len(set(all_seeds)) == 150


def test_greedy_needs_no_seed():
    params = SamplingParams(temperature=0)
    assert make().process_inputs("r", prompt_of("hi"), params).params.seed is None


def test_a_text_for_an_encoder_is_cut_between_its_special_tokens():
    vocab = {token: i for i, token in enumerate(["[CLS]", "[SEP]", *"abcdef"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[SEP]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    processor = make()
    processor.tokenizer = Tokenizer(backend, {}, "")
    processor.pooling = PoolingSpec(task="embed", is_causal=False, size=processor.spec.hidden_size)

    def kept(options: RequestOptions = NO_OPTIONS, **fields) -> str:
        prompt = prompt_of("a b c d e f", **fields)
        token_ids = processor.process_inputs(
            "r", prompt, PoolingParams(), options
        ).request.prompt_token_ids
        return "".join(backend.id_to_token(i) for i in token_ids)

    assert kept() == "[CLS]abcdef[SEP]"
    assert kept(RequestOptions(truncate_prompt_tokens=4)) == "[CLS]ab[SEP]"
    assert kept(keep_first=5) == "[CLS]abc[SEP]"
    assert kept(keep_last=5) == "[CLS]def[SEP]"
    first = RequestOptions(truncate_prompt_tokens=2, truncation_side="right")
    prepared = processor.process_inputs("r", prompt_of([2, 3, 1, 1]), PoolingParams(), first)
    assert prepared.request.prompt_token_ids == [2, 3]  # token ids are cut as they are
    processor.pooling = PoolingSpec(size=processor.spec.hidden_size)
    assert kept(RequestOptions(truncate_prompt_tokens=4)) == "def[SEP]"


@pytest.mark.parametrize(("side", "expected"), [("left", "def"), ("right", "abc"), (None, "def")])
@pytest.mark.parametrize("content", ["abcdef", list(b"abcdef")], ids=["text", "ids"])
def test_the_side_of_truncation(content, side, expected):
    options = RequestOptions(truncate_prompt_tokens=3, truncation_side=side)
    for params in (PoolingParams(), SamplingParams(max_tokens=2)):
        prepared = make().process_inputs("r", prompt_of(content), params, options)
        assert bytes(prepared.request.prompt_token_ids).decode() == expected
        assert prepared.request.options == NO_OPTIONS


@given(
    st.one_of(
        st.text(max_size=80),
        st.lists(st.integers(0, 255), min_size=1, max_size=80),
        st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=80)}
            ),
            min_size=1,
            max_size=3,
        ).map(lambda messages: Chat(messages=messages)),
    ),
    st.sampled_from([None, -1, 1, 7]),
    st.sampled_from([None, 3]),
    st.sampled_from([None, 5]),
)
def test_the_tokens_of_a_prompt_are_not_overestimated(content, keep, keep_first, keep_last):
    processor = make(1000)
    prompt = prompt_of(content, keep_first=keep_first, keep_last=keep_last)
    fewest = processor.fewest_tokens([prompt], keep)
    try:
        options = RequestOptions(truncate_prompt_tokens=keep)
        prepared = processor.process_inputs("r", prompt, PoolingParams(), options)
    except InvalidRequest:  # empty, or not Unicode
        return
    assert fewest <= len(prepared.request.prompt_token_ids)


def test_a_word_that_a_vocabulary_lacks_counts_as_no_token():
    models, splits = tokenizers.models, tokenizers.pre_tokenizers
    backend = tokenizers.Tokenizer(models.WordPiece({"?": 0, "a": 1}, unk_token="?"))
    backend.pre_tokenizer = splits.BertPreTokenizer()
    processor = make(1000)
    processor.tokenizer = Tokenizer(backend, {}, "")
    for text in ("a" * 5000, "a" + " " * 5000):
        prompt = prompt_of(text)
        assert (
            len(processor.process_inputs("r", prompt, PoolingParams()).request.prompt_token_ids)
            == 1
        )
        assert processor.fewest_tokens([prompt], None) <= 1


def test_what_the_context_cannot_have_counts_no_more_than_what_it_can():
    assert make(100).fewest_tokens([prompt_of([1] * 5000)], None) == 100
    assert make(100).fewest_tokens([prompt_of("x" * 50_000)], None) == 100


@pytest.mark.parametrize("breakers", [None, ["a", "\n"], []])
def test_breakers_of_dry_are_tokens_with_their_text(breakers: list[str] | None):
    fields = {} if breakers is None else {"dry_sequence_breakers": breakers}
    params = SamplingParams(dry_multiplier=0.8, **fields)
    texts = params.dry_sequence_breakers
    request = make().process_inputs("r", prompt_of("hi"), params).request
    assert request.params.dry_breaker_token_ids == sorted(map(ord, texts))
    assert request.params.dry_sequence_breakers == SamplingParams().dry_sequence_breakers
    idle = make().process_inputs("r", prompt_of("hi"), SamplingParams()).request
    assert idle.params.dry_breaker_token_ids == []


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Needs a user, and shows reasoning only after its last message, as that of Qwen 3.5.
REASONING = """{% set ns = namespace(last=-1) %}
{% for m in messages %}
{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% if ns.last < 0 %}{{ raise_exception("No user") }}{% endif %}
{% for m in messages %}<{{ m.role }}>
{% if m.reasoning and loop.index0 > ns.last %}{{ m.reasoning }}{% endif %}
{{ m.content }}{% endfor %}
"""
SYSTEM = {"role": "system", "content": "Be brief. " * 9}
ANSWER = {"role": "assistant", "content": "Paris.", "reasoning": "France has one capital."}
ASKED = [SYSTEM, {"role": "user", "content": "The capital?"}, ANSWER]
RESULT = {"role": "tool", "content": "A long result. " * 20}


@pytest.mark.parametrize("template", [CHATML, REASONING])
@pytest.mark.parametrize("before", [[], [SYSTEM], ASKED, ASKED[1:]])
@pytest.mark.parametrize("after", [[], [ANSWER, RESULT]])
def test_where_the_last_turn_of_a_chat_begins(template, before, after):
    """Two chats that differ in their last user message have the same tokens up to there."""
    spec = msgspec.structs.replace(FAKE_SPEC, config={"layer_types": ["linear_attention"]})
    processor = make(2000, spec, chat_template=template)
    requests = []
    for content in ("Why?", [{"type": "text", "text": "And Rome?"}]):
        chat = Chat(messages=[*before, {"role": "user", "content": content}, *after])
        inputs = processor.process_inputs("r", prompt_of(chat), SamplingParams())
        requests.append(inputs.request)
    pairs = zip(*(request.prompt_token_ids for request in requests), strict=False)
    shared = next(i for i, (first, second) in enumerate(pairs) if first != second)
    assert [request.options.turn_start for request in requests] == [shared] * 2


def test_chats_without_a_turn_to_keep():
    spec = msgspec.structs.replace(FAKE_SPEC, config={"layer_types": ["linear_attention"]})
    chat = prompt_of(Chat(messages=[*ASKED, {"role": "user", "content": "Why?"}]))

    def turn_start(prompt: Prompt, spec: ModelSpec, template: str, **options) -> int:
        processor = make(2000, spec, chat_template=template)
        params = SamplingParams(max_tokens=1)
        inputs = processor.process_inputs("r", prompt, params, RequestOptions(**options))
        return inputs.request.options.turn_start

    assert turn_start(chat, spec, CHATML)
    assert not turn_start(chat, FAKE_SPEC, CHATML)  # no states
    assert not turn_start(chat, spec, CHATML, truncate_prompt_tokens=20)
    assert not turn_start(chat, spec, "{{ messages | length }}{{ messages[0].content }}")
    assert not turn_start(prompt_of(Chat(messages=[SYSTEM])), spec, CHATML)
    assert not turn_start(prompt_of("Hello"), spec, CHATML)
