"""Config: conversion, bounds, errors that name the flag, files."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.base.errors import ConfigError
from servd.base.sizes import format_bytes, parse_bytes
from servd.config import Config, descriptions
from servd.terminal.engine_flags import read_config_file

SECTIONS = {f.name: f.type for f in msgspec.structs.fields(Config)}
OPTIONS = [(section, f) for section, kind in SECTIONS.items() for f in msgspec.structs.fields(kind)]


def test_every_option_has_a_description():
    for _, field in OPTIONS:
        assert descriptions()[field.name].endswith("."), field.name


def test_defaults_pass_their_own_bounds():
    # Defaults are not checked by the constructor; decoding what they encode to does check them.
    assert msgspec.convert(msgspec.to_builtins(Config()), Config) == Config()


def spec(**keys) -> dict:
    return {"speculative_config": keys}


def ngram(**keys) -> dict:
    return spec(method="ngram", **keys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block-size": 0}, "--block-size 0.*>= 1"),
        ({"block_size": "many"}, "--block-size many.*must be a whole number"),
        ({"port": 65536}, "--port 65536.*65535"),
        ({"dtype": "int8"}, "--dtype int8.*must be one of: auto, float32, bfloat16, float16"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization 1.5"),
        ({"api_key": ["a", 3]}, "--api-key"),
        ({"shutdown_timeout": "inf"}, "--shutdown-timeout inf"),
        ({"kv_cache_memory": "lots"}, "--kv-cache-memory.*lots.*2GiB"),
        ({"max_num_sequences": 1}, "did you mean --max-num-seqs"),
        ({"api_key": ""}, "--api-key: must not be empty"),
        ({"speculative_config": "{'method'}"}, "--speculative-config.*not JSON"),
        ({"speculative_config": "[]"}, "must be a JSON object"),
        ({"spec_tokens": 3}, 'needs "method", or a "model"'),
        ({"spec_method": "eagle"}, 'method eagle needs "model"'),
        ({"spec_method": "ngram", "spec_tokens": 0}, "num_speculative_tokens 0"),
        ({"spec_method": "ngram"} | ngram(), "--spec-method ngram.*give it once"),
        (spec(metod="ngram"), 'did you mean "method"'),
        (spec(model="d", draft_sample_method="best"), "draft_sample_method best.*greedy"),
        (spec(model="d", fly_window_size=6), 'no "fly_window_size"'),
        (ngram(prompt_lookup_max=3, prompt_lookup_min=7), "prompt_lookup_min 7 is above"),
        ({"override_generation_config": '{"temperature": -1}'}, "temperature -1"),
        ({"override_generation_config": '{"do_sample": true}'}, "do_sample"),
        ({"default_chat_template_kwargs": "[1]"}, "must be a JSON object"),
        (spec(model="d", prompt_lookup_max=3), 'does not read "prompt_lookup_max"'),
        (ngram(suffix_decoding_min_token_prob=0), 'not read "suffix_decoding_min_token_prob"'),
        ({"spec_method": "suffix", "spec_model": "a-draft"}, 'suffix does not read "model"'),
        (ngram(rejection_sample_method="synthetic"), "needs one of synthetic_acceptance"),
        (ngram(synthetic_acceptance_length=2), "needs one of synthetic_acceptance"),
        (
            ngram(
                num_speculative_tokens=2,
                rejection_sample_method="synthetic",
                synthetic_acceptance_rates=[0.5, 0.6],
            ),
            "must be 2 numbers.*none larger than the one before",
        ),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_rule(options, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(options)


def test_a_bad_api_key_is_not_shown():
    with pytest.raises(ConfigError, match="--api-key") as error:
        Config.load({"api_key": {"secret": 1}})
    assert "secret" not in str(error.value)


def test_one_text_is_a_list_of_one():
    assert Config.load({"api_key": "secret"}).access.api_key == ["secret"]
    assert Config.load({"served_model_name": "a"}).model.served_model_name == ["a"]


def speculative(keys):
    return Config.load({"speculative_config": keys}).model.speculative_config


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("yuhuili/EAGLE-llama2-chat-7B", "eagle"),
        ("abhigoyal/vllm-medusa-llama-68m-random", "medusa"),
        ("[ngram]", "ngram"),
        ("HuggingFaceTB/SmolLM2-135M", "draft_model"),
    ],
)
def test_the_name_of_the_draft_says_the_method_unless_it_is_given(model, method):
    assert speculative({"model": model}).method == method
    assert speculative({"model": model, "method": "mine:Proposer"}).method == "mine:Proposer"


@pytest.mark.parametrize(
    ("lengths", "expected"), [({}, (5, 5)), ({"min": 2}, (2, 2)), ({"max": 4}, (4, 4))]
)
def test_lengths_of_ngrams_are_filled_in(lengths, expected):
    keys = {f"prompt_lookup_{end}": length for end, length in lengths.items()}
    config = speculative(keys | {"method": "ngram"})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected


def test_the_flat_flags_of_speculative_decoding_are_keys_of_its_json():
    flat = {"spec_method": "draft_model", "spec_model": "gpt2", "spec_tokens": "3"}
    keys = {"method": "draft_model", "model": "gpt2", "num_speculative_tokens": 3}
    assert Config.load(flat) == Config.load({"speculative_config": json.dumps(keys)})
    assert Config.load(flat).model.speculative_config.num_speculative_tokens == 3


def test_what_is_filled_in_survives_the_trip_to_another_process():
    config = Config.load({"speculative_config": {"method": "suffix"}})
    assert config.model.speculative_config.num_speculative_tokens == 24
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


@given(st.integers(0, 2**50))
def test_a_size_that_is_shown_can_be_read_and_is_not_too_small(size):
    assert size <= parse_bytes(format_bytes(size), "--kv-cache-memory") <= 1.01 * size + 1


PATH_OPTIONS = ["model", "chat_template", "generation_config", "models_dir", "lora_dir"]


def test_a_path_stays_the_same_when_the_working_folder_changes(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    options = dict.fromkeys(PATH_OPTIONS, "there")
    draft = spec(method="eagle3", model="there")
    config = Config.load(options | draft).with_absolute_paths()
    sections = [getattr(config, section) for section in SECTIONS]
    for name in PATH_OPTIONS:
        (value,) = [getattr(section, name) for section in sections if hasattr(section, name)]
        assert value == str(tmp_path / "there"), name
    assert config.model.speculative_config.model == str(tmp_path / "there")


def test_the_path_of_a_file_that_will_be_written_stays_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config.load({"record_trace": "trace.jsonl"}).with_absolute_paths()
    assert config.observability.record_trace == str(tmp_path / "trace.jsonl")


def test_what_is_no_path_stays_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.chdir(tmp_path)
    options = {"model": "org/model", "generation_config": "vllm"}
    config = Config.load(options | spec(method="eagle3", model="org/draft"))
    assert config.with_absolute_paths() == config


def test_a_relative_path_in_a_folder_that_was_removed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="--lora-dir adapters"):
        Config.load({"lora_dir": "adapters"}).with_absolute_paths()


def test_replace_changes_only_what_is_named_and_not_the_original():
    config = Config.load({"model": "gpt2", "seed": 7})
    changed = config.replace(max_num_seqs=4, seed=8)
    assert (changed.scheduler.max_num_seqs, changed.model.seed) == (4, 8)
    assert changed.model.model == "gpt2"
    assert (config.scheduler.max_num_seqs, config.model.seed) == (None, 7)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("2 gib", 2 << 30), ("1.5 GB", 1_500_000_000), ("3k", 3 << 10)]
)
def test_parse_bytes(text, size):
    assert parse_bytes(text, "--kv-cache-memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 GiBs", "1 2", "0x10"])
def test_parse_bytes_refuses_the_rest(text):
    with pytest.raises(ConfigError, match="as a size"):
        parse_bytes(text, "--kv-cache-memory")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'model = "gpt2"\nmax-num-seqs = 8\n'),
        ("c.yaml", "model: gpt2\nmax-num-seqs: 8\n"),
        ("c.yml", "model: gpt2\nmax-num-seqs: 8\n"),
        ("c.json", '{"model": "gpt2", "max-num-seqs": 8}'),
    ],
)
def test_config_file_formats_say_the_same(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = Config.load(read_config_file(str(tmp_path / name)))
    assert config == Config.load({"model": "gpt2", "max_num_seqs": 8})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.toml", "model = ", "c.toml"),
        ("c.json", "{", "c.json"),
        ("c.yaml", "a: [", "c.yaml"),
        ("c.json", "[1]", "table"),
        ("c.ini", "a=1", r"\.toml, \.yaml or \.json"),
        ("c.toml", None, "No such file"),
        ("c.toml", "a = " + "[" * 100_000, "nested too deeply"),
        ("c.json", "[" * 100_000, "nested too deeply"),
        ("c.yaml", "a: " + "[" * 3000, "nesting depth"),
        ("c.yaml", "a: &a [*a]", "Circular reference"),
    ],
)
def test_a_config_file_that_cannot_be_used_is_named_with_the_reason(tmp_path, name, text, reason):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=reason) as error:
        read_config_file(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_list_of_lists_is_no_value_of_another_programs_option():
    with pytest.raises(ConfigError, match="allowed"):
        Config.load({"allowed_origins": [["x"]]})
