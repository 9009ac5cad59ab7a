"""Drafts that are models: found before any process starts, with what their folders say of them."""

import json

import pytest

from servd.base.errors import ConfigError, ModelNotFound
from servd.checkpoint.hub import DEMO_FOLDER
from servd.config import Config
from servd.launch import find_and_resolve


def make_draft(folder, target, **config):
    """The config.json of a draft in *speculators* format."""
    verifier = {"name_or_path": str(target)}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    form = {"proposal_methods": methods, "verifier": verifier}
    folder.mkdir()
    text = json.dumps({"speculators_config": form, "speculators_model_type": "eagle3"} | config)
    (folder / "config.json").write_text(text)
    return str(folder)


def resolved(**options):
    return find_and_resolve(Config.load(options | {"device": "cpu"}))[:2]


def test_a_draft_in_place_of_the_model_names_model_method_and_depth(tmp_path):
    draft = make_draft(tmp_path / "draft", DEMO_FOLDER)
    config, spec = resolved(model=draft)
    assert config.model.model == spec.folder == str(DEMO_FOLDER)
    made = config.model.speculative_config
    assert (made.method, made.model, made.num_speculative_tokens) == ("eagle3", draft, 3)


def test_a_plan_names_the_model_that_is_drafted_for(tmp_path, monkeypatch):
    from servd.cli import plan
    from servd.worker.runner import dry_run

    def plan_target(config, spec, card):
        return plan_of(config.replace(speculative_config=None), spec, card)

    plan_of = dry_run.plan
    monkeypatch.setattr(dry_run, "plan", plan_target)
    options = {"model": make_draft(tmp_path / "draft", DEMO_FOLDER), "device": "cpu"}
    assert plan.make_report(Config.load(options)).facts([16])["model"] == str(DEMO_FOLDER)


def test_the_folder_of_a_draft_says_its_method_unless_that_is_given(tmp_path):
    draft = make_draft(tmp_path / "draft", DEMO_FOLDER)
    assert resolved(spec_model=draft)[0].model.speculative_config.method == "eagle3"
    config, _ = resolved(spec_model=draft, spec_method="eagle")
    assert config.model.speculative_config.method == "eagle"


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ({"model": "./nowhere"}, ModelNotFound, "the folder ./nowhere does not exist"),
        ({"model": "no/where.gguf"}, ModelNotFound, r"the file no/where\.gguf does not exist"),
        ({"method": "ngrm"}, ConfigError, "there are: .*ngram"),
        (
            {"method": "eagle3", "model": "demo", "draft_tensor_parallel_size": 2},
            ConfigError,
            "the model's 1 devices; leave it out",
        ),
        (
            {"method": "ngram", "draft_tensor_parallel_size": 1},
            ConfigError,
            'method ngram does not read "draft_tensor_parallel_size"',
        ),
        ("suffix-", ConfigError, "there are: .*suffix"),
        ("eagle3", ConfigError, 'needs "model"'),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(keys, error, text):
    with pytest.raises(error, match=text):
        resolved(speculative_config=keys)


@pytest.mark.parametrize(
    ("keys", "num_tokens", "num_drafts"),
    [
        ({"num_heads": 3}, None, 3),
        ({"medusa_num_heads": 2}, None, 2),
        ({"num_heads": 3}, 7, 7),
        ({}, None, 5),
    ],
)
def test_medusa_drafts_a_chain_of_all_its_heads(tmp_path, keys, num_tokens, num_drafts):
    (tmp_path / "config.json").write_text(json.dumps(keys))
    options = {"spec_method": "medusa", "spec_model": str(tmp_path), "spec_tokens": num_tokens}
    for executor in ("uniproc", "fake"):
        made = resolved(model="demo", executor=executor, **options)[0].model.speculative_config
        expected = num_drafts if executor == "uniproc" else num_tokens or 5  # it reads no draft
        assert made.num_speculative_tokens == expected


def test_a_bare_word_is_a_method():
    made = resolved(speculative_config="ngram")[0].model.speculative_config
    assert (made.method, made.num_speculative_tokens) == ("ngram", 5)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("LlamaForCausalLMEagle3", "eagle3"), ("EagleLlamaModel", "eagle"), ("MedusaModel", "medusa")],
)
def test_a_head_in_place_of_the_model(tmp_path, architecture, method):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ConfigError, match=f"is a draft head.*{method}"):
        resolved(model=str(tmp_path))


def test_the_fake_executor_says_that_it_runs_no_method(caplog):
    resolved(executor="fake", spec_method="suffix")
    assert "--executor fake makes its own drafts: method suffix does not run" in caplog.text
