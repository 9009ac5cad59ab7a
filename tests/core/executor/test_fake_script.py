"""Answers of --fake-script: which request gets which, also over preemptions and restarts."""

import json

import pytest

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.core.executor.fake import FakeExecutor
from servd.launch import find_and_resolve
from servd.messages.engine import FinishReason, NewRequest
from servd.messages.params import SamplingParams, StructuredOutput
from tests.core.engines import AuditedExecutor, Log, generate, make_engine, make_request
from tests.core.test_overlap import with_grammars

EOS = FAKE_SPEC.eos_token_ids[0]


@pytest.fixture
def script(tmp_path):
    """Writes a script; returns its path."""

    def script(*lines) -> str:
        path = tmp_path / "script.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return script


def run(engine, *requests) -> list[str]:
    """The texts of requests, without the end of sequence."""
    log = generate(engine, *requests)
    tokens = [log.token_ids(request.request_id) for request in requests]
    return [bytes(token for token in ids if token != EOS).decode() for ids in tokens]


def ask(request_id: str, prompt: str, max_tokens: int = 50):
    return make_request(request_id, [*prompt.encode()], max_tokens)


def test_requests_get_the_answers_in_order_and_then_a_notice(script):
    path = script({"text": "one"}, {"text": "zwölf"})
    engine = make_engine(fake_script=path)
    texts = [run(engine, ask(str(i), f"question {i}"))[0] for i in range(3)]
    assert texts[:2] == ["one", "zwölf"]
    assert "no more answers" in texts[2]


def test_an_answer_may_have_any_character(tmp_path):
    path = tmp_path / "script.jsonl"
    text = "a\u2028b\x85c\x0cd"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf8")
    assert run(make_engine(fake_script=str(path)), ask("a", "go")) == [text]


def test_a_match_answers_its_prompts_and_uses_no_answer(script):
    path = script({"text": "one"}, {"text": "a title", "match": "title"}, {"text": "two"})
    engine = make_engine(fake_script=path)
    prompts = ["give a title", "first", "title, again", "second"]
    texts = [run(engine, ask(str(i), prompt))[0] for i, prompt in enumerate(prompts)]
    assert texts == ["a title", "one", "a title", "two"]


def test_a_cut_answer_ends_at_the_limit(script):
    engine = make_engine(fake_script=script({"text": "begun", "cut": True}))
    request = ask("a", "go", max_tokens=9)
    log = generate(engine, request)
    assert bytes(log.token_ids("a")) == b"begunnnnn"
    assert log.outputs["a"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("text", "breaks"), [("aab", False), ("axx", True)])
def test_an_answer_that_breaks_the_form_is_a_warning(script, caplog, text, breaks):
    engine = make_engine(fake_script=script({"text": text}))
    form = StructuredOutput("regex", "a+b")
    request = make_request("a", [1], 20, structured_output=form)
    settle = with_grammars(engine)
    engine.handle(request)
    settle()
    token_ids = Log().run(engine).token_ids("a")
    assert (bytes(token_ids[:3]) != text.encode()) == breaks
    assert len([record for record in caplog.records if "form" in record.message]) == breaks


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_preempted_requests_continue_their_answers(script, depth, drafts):
    texts = [letter * 30 for letter in "abcd"]
    engine = make_engine(
        num_blocks=16,
        depth=depth,
        speculative_config=drafts,
        fake_script=script(*({"text": text} for text in texts)),
    )
    requests = [ask(text[0], f"question {text[0]}") for text in texts]
    assert sorted(run(engine, *requests)) == texts
    executor = engine.executor
    assert isinstance(executor, AuditedExecutor)
    num_starts = sum(len(step.new_requests) for step in executor.steps)
    assert num_starts > len(texts), "nothing was preempted"


def test_a_restarted_engine_continues_an_answer_and_skips_those_before(script):
    path = script({"text": "first"}, {"text": "second"}, {"text": "third"})
    engine = make_engine(fake_script=path)
    resumed = ask("a", "go")
    resumed.output_token_ids = {0: [*b"sec"]}
    log = generate(engine, resumed)
    assert bytes(log.token_ids("a")[:-1]) == b"ond"
    assert run(engine, ask("b", "next")) == ["third"]


def test_requests_without_an_answer_use_none(script):
    engine = make_engine(fake_script=script({"text": "one"}))
    generate(engine, ask("a", "warm the cache", max_tokens=0))
    assert run(engine, ask("b", "go")) == ["one"]


def test_a_model_gives_its_tokens_and_any_context(script):
    text = 'so\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    options = {"model": "demo", "executor": "fake", "max_model_len": 300_000}
    path = script({"text": text}, {"text": "Titel", "match": "name it"})
    config, spec, _ = find_and_resolve(Config.load(options | {"fake_script": path}))
    executor = FakeExecutor(config, spec, lambda phase, fraction: None)
    assert executor.script is not None and executor.script.tokenizer is not None
    tokenizer = executor.script.tokenizer
    assert executor.start().num_blocks * config.cache.block_size >= 300_000
    answers = []
    for prompt in ("please name it", "go"):
        token_ids = tokenizer.encode(prompt).ids
        request = NewRequest(0, token_ids, len(token_ids), 0, [], SamplingParams())
        answers.append(executor.script.begin(request))
    assert all(ids[-1] == spec.eos_token_ids[0] for ids in answers)
    texts = [tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in answers]
    assert texts == ["Titel", text]


@pytest.mark.parametrize("line", ["{", '{"txt": "a"}', "{}"])
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "script.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(ConfigError, match=f"{path}, line 2"):
        make_engine(fake_script=str(path))


def test_a_script_needs_the_fake(script):
    with pytest.raises(ConfigError, match="--executor fake"):
        find_and_resolve(Config.load({"fake_script": script({"text": "a"})}))
