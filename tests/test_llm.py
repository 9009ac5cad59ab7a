"""LLM.embed, with the engine in this process and in its own, and failing requests."""

import asyncio
import base64
import contextlib
import io
import math
import os
import re
import struct
import subprocess
import sys
from typing import Any

import pytest
from PIL import Image

from servd import LLM, BeamSearchParams, LoRARequest, PoolingParams, SamplingParams
from servd.api.engine import media_loader
from servd.api.request.request_output import RequestOutput
from servd.base.errors import EngineDeadError, EngineError, InvalidRequest
from servd.checkpoint.pooling import PoolingSpec
from servd.core.executor.fake import next_state, vector
from servd.core.structured_output import manager
from servd.core.structured_output.grammar import GrammarError
from servd.messages.engine import FinishReason
from servd.messages.params import CLASSIFY, StructuredOutput
from tests import vision_models
from tests.adapters import write_adapter
from tests.api.test_vision import png
from tests.fake_tokens import expected_tokens
from tests.limits import WAIT_SECONDS


def expected(text: str, params: PoolingParams) -> list[float]:
    """The fake model's vector of a text."""
    state = 0
    for byte in text.encode():
        state = next_state(state, byte)
    data = vector(state, params, 16)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


@pytest.fixture
def make_llm():
    """Makes LLMs over the fake executor, which are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(**options) -> LLM:
            llm = LLM(executor="fake", use_tqdm=False, **options)
            stack.callback(llm.close)
            return llm

        yield make


def conversation(*pictures: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": f"data:;base64,{p}"}} for p in pictures]
    return [{"role": "user", "content": parts}]


def test_pictures_beside_an_event_loop(make_llm, tmp_path):
    vision_models.make("smolvlm", tmp_path)
    llm = make_llm(model=str(tmp_path))

    async def chat(*pictures: str) -> RequestOutput:  # as in a notebook
        return llm.chat(conversation(*pictures), SamplingParams(max_tokens=3))[0]

    file = io.BytesIO()
    Image.effect_noise((1500, 1500), 50).save(file, "PNG")
    picture = base64.b64encode(file.getvalue()).decode()
    for _ in range(3):  # while the first is still processed
        with pytest.raises(InvalidRequest, match="picture 2"):
            asyncio.run(chat(picture, "broken"))
    assert len(asyncio.run(chat(picture)).outputs[0].token_ids) == 3


def test_pictures_that_have_no_room_together(make_llm, tmp_path, monkeypatch):
    vision_models.make("smolvlm", tmp_path)
    monkeypatch.setattr(media_loader, "MAX_FILES", 1)
    llm = make_llm(model=str(tmp_path), mm_processor_cache_gb=0)
    conversations = [conversation(png(colour)) for colour in ("red", "green", "blue")]
    outputs = llm.chat(conversations, SamplingParams(max_tokens=3))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]


@pytest.mark.parametrize("separate_process", [False, True])
def test_embed(separate_process, make_llm):
    llm = make_llm(separate_process=separate_process)
    texts = [f"text {i} " * (1 + i) for i in range(20)]
    vectors = [output.outputs.embedding for output in llm.embed(texts)]
    assert vectors == [expected(text, PoolingParams()) for text in texts]
    params = [PoolingParams(dimensions=4), PoolingParams(pooling="mean", normalize=False)]
    first, second = llm.embed(["a", [98, 99]], params)
    assert first.outputs.embedding == expected("a", params[0])
    assert second.outputs.embedding == expected("bc", params[1])
    assert second.prompt_token_ids == [98, 99] and second.finished
    with pytest.raises(InvalidRequest, match="dimensions"):
        llm.embed("a", PoolingParams(dimensions=17))
    (output,) = llm.generate("a", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.outputs[0].text == "" and output.prompt_logprobs == [None]
    (output,) = llm.generate("abc", SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert [list(position) for position in output.prompt_logprobs[1:]] == [[98], [99]]


@pytest.mark.parametrize("separate_process", [False, True])
def test_requests_with_adapters(tmp_path, separate_process, make_llm):
    adapters = [
        LoRARequest(f"a{seed}", seed, str(write_adapter(tmp_path / str(seed), seed=seed)))
        for seed in (1, 2)
    ]
    llm = make_llm(enable_lora=True, separate_process=separate_process)
    params = SamplingParams(max_tokens=8)
    outputs = llm.generate([[7, 8, 9]] * 3, params, lora_request=[*adapters, None])
    assert llm.engine.adapters is not None
    by_name = llm.engine.adapters.read_adapters()
    digests = [by_name[adapter.lora_name].digest for adapter in adapters] + ["0"]
    for output, digest in zip(outputs, digests, strict=True):
        assert output.outputs[0].token_ids == expected_tokens([7, 8, 9], 8, 257, digest)
    (again,) = llm.generate([7, 8, 9], params, lora_request=adapters[1])
    assert again.outputs[0].token_ids == outputs[1].outputs[0].token_ids
    abcd = re.compile("[a-d]{12}")
    params = SamplingParams(
        max_tokens=12, structured_output=StructuredOutput("regex", abcd.pattern)
    )
    outputs = llm.generate(["a"] * 3, params, lora_request=[*adapters, None])
    texts = [output.outputs[0].text for output in outputs]
    assert len({*texts}) == 3 and all(map(abcd.fullmatch, texts))
    broken = LoRARequest("broken", 3, str(write_adapter(tmp_path / "3", use_dora=True)))
    with pytest.raises(InvalidRequest, match="use_dora"):
        llm.generate("a", params, lora_request=broken)
    with pytest.raises(InvalidRequest, match="2 prompts but 1 lora_requests"):
        llm.generate(["a", "b"], params, lora_request=adapters[:1])
    llm.close()
    assert not llm.engine.adapters.folder.exists()


def test_a_request_whose_grammar_fails_ends_alone(monkeypatch, make_llm):
    masks = iter(range(4))
    bitmask = manager.Matcher.bitmask

    def fail(self: manager.Matcher) -> bytes:
        if next(masks, None) is None:
            raise GrammarError("too many states")
        return bitmask(self)

    monkeypatch.setattr(manager.Matcher, "bitmask", fail)
    digits = SamplingParams(max_tokens=20, structured_output=StructuredOutput("regex", "[0-9]{9}"))
    llm = make_llm()
    llm.engine.add_request("bad", "a", digits)
    llm.engine.add_request("good", "a", SamplingParams(max_tokens=30))
    finished = {}
    for _ in range(100):
        finished |= {
            output.request_id: output.outputs[0] for output in llm.engine.step() if output.finished
        }
    assert not llm.engine.has_unfinished_requests()
    assert finished["bad"].finish_reason is FinishReason.LENGTH
    assert "too many states" in finished["bad"].stop_reason
    assert len(finished["bad"].token_ids) == 4
    assert len(finished["good"].token_ids) == 30
    cut, whole = llm.generate(["b", "c"], [digits, SamplingParams(max_tokens=30)])
    assert "too many states" in cut.outputs[0].stop_reason
    assert len(whole.outputs[0].token_ids) == 30
    assert not llm.engine.has_unfinished_requests()


def test_prompts_and_keywords_of_vllm(make_llm):
    llm = make_llm()
    params = SamplingParams(max_tokens=5)
    plain = llm.generate(["abc", [97, 98]], params)
    as_dicts = [{"prompt": "abc"}, {"prompt_token_ids": [97, 98]}]
    outputs = llm.generate(as_dicts, sampling_params=params)
    assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    assert llm.generate({"prompt": "abc"}, params)[0].outputs == plain[0].outputs
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        llm.generate([{"text": "abc"}])


def test_the_id_of_a_choice_is_no_other_request_s(make_llm):
    """In the engine every choice is a request: `a` with n = 2 is `a_0` and `a_1`."""
    llm = make_llm(separate_process=False)
    add = llm.engine.add_request
    add("a", "text", SamplingParams(n=2, max_tokens=3))
    add("b_1", "text", SamplingParams(max_tokens=3))
    for used_name, n in (("a", 1), ("a_0", 1), ("b", 2)):
        with pytest.raises(InvalidRequest, match="unfinished"):
            add(used_name, "text", SamplingParams(n=n, max_tokens=3))
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += [output for output in llm.engine.step() if output.finished]
    assert sorted(output.request_id for output in outputs) == ["a", "b_1"]
    add("a_0", "text", SamplingParams(max_tokens=3))


def test_generate_raises_what_the_engine_cannot_do(monkeypatch, make_llm):
    def fail(*args: object) -> None:
        raise GrammarError("too many items")

    llm = make_llm()
    digits = SamplingParams(structured_output=StructuredOutput("regex", "[0-9]{9}"))
    llm.generate("a", digits)  # the vocabulary is there
    monkeypatch.setattr(manager, "Grammar", fail)
    letters = SamplingParams(structured_output=StructuredOutput("regex", "[a-z]{9}"))
    with pytest.raises(EngineError, match="too many items"):
        llm.generate(["b", "c"], [letters, SamplingParams()])
    assert not llm.engine.has_unfinished_requests()


def test_a_step_that_fails_ends_the_engine(monkeypatch, make_llm):
    def fail(*args: object) -> None:
        raise KeyError("a kernel")

    llm = make_llm(separate_process=False)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.engine_core.engine.executor, "execute_model", fail)
        with pytest.raises(KeyError, match="a kernel"):
            llm.generate("a")
    with pytest.raises(EngineDeadError, match="make a new LLM"):
        llm.generate("a")
    llm.close()  # waits for no step


def test_a_script_need_not_close_its_engine():
    script = """
from servd import LLM, SamplingParams
llm = LLM(executor="fake", separate_process=True, use_tqdm=False)
[output] = llm.generate("a", SamplingParams(max_tokens=3))
print(len(output.outputs[0].token_ids), llm.engine.engine_core.child.process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=True,
    )
    num_tokens, pid = done.stdout.split()
    assert num_tokens == "3" and "ERROR" not in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_without_params_the_model_says_how_long_an_output_may_be(tmp_path, make_llm):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 5}')
    llm = make_llm(generation_config=str(tmp_path))
    [output] = llm.generate("hello")
    assert len(output.outputs[0].token_ids) == 5
    [output] = llm.generate("hello", SamplingParams(max_tokens=7))
    assert len(output.outputs[0].token_ids) == 7


def test_chat_gives_its_options_to_the_template(make_llm):
    template = (
        "{{ tools[0].name }} {{ messages[0].content }} {{ style }} {{ add_generation_prompt }}"
    )
    llm = make_llm(chat_template=template)
    (output,) = llm.chat(
        [{"role": "user", "content": "hi"}],
        SamplingParams(max_tokens=1),
        tools=[{"name": "look"}],
        chat_template_kwargs={"style": "brief"},
        add_generation_prompt=False,
    )
    assert bytes(output.prompt_token_ids) == b"look hi brief False"


def test_chat_answers_what_the_model_says_to_its_prompt(make_llm):
    llm = make_llm(tool_call_parser="hermes", reasoning_parser="qwen3")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    params = [
        SamplingParams(max_tokens=40, structured_output=StructuredOutput("regex", "[a-f]+")),
        SamplingParams(max_tokens=40, stop=["a"]),
    ]
    messages = [{"role": "user", "content": "hi"}]
    for p in params:
        [chat] = llm.chat(messages, p, tools=[tool])
        [same] = llm.generate([chat.prompt_token_ids], p)
        assert chat.outputs[0].text == same.outputs[0].text


def test_scores_are_cosines_where_the_model_has_no_head(make_llm):
    llm = make_llm()

    def cosine(first: str, second: str) -> float:
        vectors = (expected(text, PoolingParams()) for text in (first, second))
        return sum(a * b for a, b in zip(*vectors, strict=True))

    def scores(*texts: str | list[str]) -> list[float]:
        return [output.outputs.score for output in llm.score(*texts)]

    assert scores("a", ["b", "cc"]) == pytest.approx([cosine("a", "b"), cosine("a", "cc")])
    assert next(llm.request_ids) == 3  # the one text is computed once
    assert scores(["a", "b"], ["cc", "d"]) == pytest.approx([cosine("a", "cc"), cosine("b", "d")])
    with pytest.raises(InvalidRequest, match="2 texts do not pair with 3"):
        llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(InvalidRequest, match="no classification head"):
        llm.classify("a")


def test_classes_and_scores_of_a_head(make_llm):
    llm = make_llm()
    processor = llm.engine.processor
    processor.pooling = PoolingSpec(task="classify", labels=["x", "y", "z"], size=16)
    numbers = expected("ab", CLASSIFY)
    whole = sum(map(math.exp, numbers))
    probs = llm.classify(["ab"])[0].outputs.probs
    assert probs == pytest.approx([math.exp(n) / whole for n in numbers])
    with pytest.raises(InvalidRequest, match="3 classes, and cannot score pairs"):
        llm.score("a", "b")


@pytest.mark.parametrize("separate_process", [False, True])
def test_an_engine_sleeps_wakes_and_forgets_prefixes(separate_process, make_llm):
    llm = make_llm(separate_process=separate_process)
    params, prompt = SamplingParams(max_tokens=3), "x" * 100

    def num_cached() -> int:
        (output,) = llm.generate(prompt, params)
        assert output.outputs[0].token_ids == first.outputs[0].token_ids
        return output.outputs[0].num_cached_tokens

    (first,) = llm.generate(prompt, params)
    assert num_cached() == 96
    llm.reset_prefix_cache()
    assert num_cached() == 0
    llm.sleep(level=2)
    llm.sleep()
    llm.wake_up()
    assert num_cached() == 0 and num_cached() == 96
    llm.sleep()
    assert num_cached() == 0  # a request wakes it, too
    assert llm.collective_rpc("start_profile") == [None]
    with pytest.raises(InvalidRequest, match="no method 'exec', only: sleep, start_profile"):
        llm.collective_rpc("exec", ["rm"])
    with pytest.raises(InvalidRequest, match="are no files"):
        llm.collective_rpc("update_weights", ["/nowhere"])
    assert num_cached() == 96
    llm.engine.add_request("a", "b", params)
    with pytest.raises(InvalidRequest, match="1 requests are unfinished"):
        llm.sleep()


def test_beam_search(make_llm):
    """The fake model gives 1/2, 1/4, 1/8 ... to the likely tokens, its favourite first."""
    llm = make_llm()
    prompts = ["Once upon a time", {"prompt": "there was"}]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=4))
    for prompt, output in zip(["Once upon a time", "there was"], outputs, strict=True):
        greedy = expected_tokens(list(prompt.encode()), 4, llm.engine.processor.spec.vocab_size)
        assert output.prompt == prompt and output.finished
        assert output.outputs[0].token_ids == greedy
        assert len({tuple(beam.token_ids) for beam in output.outputs}) == 3
        assert {len(beam.token_ids) for beam in output.outputs} == {4}
    for early in (True, "never"):
        params = BeamSearchParams(beam_width=2, max_tokens=3, early_stopping=early)
        assert len(llm.beam_search("a", params)[0].outputs) == 2
    for wrong, sentence in {
        "beam_width": "at least 1, got 0",
        "max_tokens": "at least 1, got 0",
        "length_penalty": "10",
        "early_stopping": "got 0",
    }.items():
        fields = {"beam_width": 2, "max_tokens": 4, wrong: 11.5 if "pen" in wrong else 0}
        with pytest.raises(InvalidRequest, match=f"{wrong}.*{sentence}"):
            llm.beam_search("a", BeamSearchParams(**fields))


@pytest.mark.parametrize("separate_process", [False, True])
def test_metrics(separate_process, make_llm):
    llm = make_llm(separate_process=separate_process)
    llm.generate(["ab", "c"], SamplingParams(n=2, max_tokens=5))
    llm.beam_search(["a"], BeamSearchParams(beam_width=2, max_tokens=3))
    metrics_by_key = {
        (metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()
    }
    metrics_by_name = {name: metric for (name, *_), metric in metrics_by_key.items()}
    assert metrics_by_name["vllm:generation_tokens"].value == 2 * 2 * 5
    assert metrics_by_name["vllm:prompt_tokens"].value == 2 * (2 + 1)
    ended = [metric for metric in metrics_by_key.values() if metric.name == "vllm:request_success"]
    assert {metric.labels["finished_reason"]: metric.value for metric in ended}["length"] == 4
    latency = metrics_by_name["vllm:e2e_request_latency_seconds"]
    assert latency.count == latency.buckets["+Inf"] == 4 and latency.sum > 0
    assert type(metrics_by_name["vllm:kv_cache_usage_perc"]).__name__ == "Gauge"
