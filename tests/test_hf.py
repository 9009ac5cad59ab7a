"""Model files: config.json of both families, weight files, errors with a hint."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from transformers import GenerationConfig

from servd.base.errors import ConfigError, ModelNotFound, UnsupportedModel
from servd.checkpoint.generation_config import (
    GenerationDefaults,
    generation_accounts,
    read_generation_defaults,
)
from servd.checkpoint.hub import download_weights, find_model
from servd.checkpoint.model_spec import FAKE_SPEC, read_spec
from servd.checkpoint.pooling import num_positions
from servd.checkpoint.weight_files import check_regular, find_weight_files

# config.json of the hub's `gpt2`, without the keys that nobody reads.
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
# In the shape of Qwen/Qwen3-0.6B: head_dim is not hidden_size / num_attention_heads.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "eos_token_id": 151645,
}


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))
    return folder


def test_gpt2_names_become_the_common_ones(tmp_path):
    spec = read_spec(write(tmp_path, "config.json", GPT2))
    assert (spec.model_type, spec.architecture) == ("gpt2", "GPT2LMHeadModel")
    heads = (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    assert heads == (12, 12, 12, 64)
    assert (spec.hidden_size, spec.max_position_embeddings, spec.vocab_size) == (768, 1024, 50257)
    assert (spec.dtype, spec.eos_token_ids) == ("float32", [50256])
    assert spec.config == spec.config | GPT2
    assert spec.folder == str(tmp_path)


def test_llama_family_names(tmp_path):
    spec = read_spec(write(tmp_path, "config.json", QWEN3))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (16, 8, 128)
    assert spec.dtype == "bfloat16"
    # 28 layers * keys and values * 8 heads * 128 * 2 bytes: the 112 KiB per token that Qwen3-0.6B
    # is known for.
    assert spec.kv_bytes_per_token(2) == 112 * 1024


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_llama"])
def test_spec_equals_what_transformers_reads(name, request):
    from transformers import AutoConfig

    folder = request.getfixturevalue(name)
    spec, config = read_spec(folder), AutoConfig.from_pretrained(folder)
    assert spec.hidden_size == config.hidden_size
    assert spec.num_layers == config.num_hidden_layers
    assert spec.num_heads == config.num_attention_heads
    assert spec.num_kv_heads == getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert spec.head_dim == config.hidden_size // config.num_attention_heads
    assert spec.max_position_embeddings == config.max_position_embeddings
    assert spec.vocab_size == config.vocab_size
    assert spec.eos_token_ids == [config.eos_token_id]


def test_generation_config_decides_the_end_tokens(tmp_path):
    write(tmp_path, "config.json", QWEN3)
    ends = {"eos_token_id": [151645, 151643], "temperature": 0.6}
    write(tmp_path, "generation_config.json", ends)
    spec = read_spec(tmp_path)
    assert spec.eos_token_ids == [151645, 151643]
    assert spec.generation["temperature"] == 0.6


def test_a_model_without_an_end_token(tmp_path):
    spec = read_spec(write(tmp_path, "config.json", {**GPT2, "eos_token_id": None}))
    assert spec.eos_token_ids == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_head", 0), ("n_layer", "12"), ("n_embd", -1), ("n_layer", 10**12), ("architectures", 5)],
)
def test_nonsense_in_a_config_is_refused_by_its_key(tmp_path, key, value):
    write(tmp_path, "config.json", GPT2 | {key: value})
    names = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    with pytest.raises(UnsupportedModel, match=names.get(key, key.replace("n_embd", "hidden"))):
        read_spec(tmp_path)


def test_heads_share_the_hidden_size_unless_attention_is_latent(tmp_path):
    config = GPT2 | {"model_type": "glm4_moe_lite", "n_embd": 2048, "n_head": 20}
    with pytest.raises(UnsupportedModel, match="hidden_size 2048"):
        read_spec(write(tmp_path, "config.json", config))
    read_spec(write(tmp_path, "config.json", config | {"kv_lora_rank": 512}))  # GLM-4.7-Flash


@pytest.mark.parametrize(
    "key", ["model_type", "vocab_size", "n_embd", "n_layer", "n_head", "n_positions"]
)
def test_a_key_that_every_decoder_has_is_named_when_it_is_missing(tmp_path, key):
    write(tmp_path, "config.json", {k: v for k, v in GPT2.items() if k != key})
    with pytest.raises(UnsupportedModel, match=key) as error:
        read_spec(tmp_path)
    assert key in str(error.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "has no config.json"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_a_broken_config_json(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelNotFound, match=reason):
        read_spec(tmp_path)


@pytest.mark.parametrize("has_index", [True, False])
def test_weight_files_are_those_of_the_index_or_all(tmp_path, has_index):
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name in (*names, "consolidated.safetensors") if has_index else names:
        (tmp_path / name).touch()
    if has_index:
        weight_map = {"a": names[1], "b": names[0], "c": names[0]}
        write(tmp_path, "model.safetensors.index.json", {"weight_map": weight_map})
    assert [f.name for f in find_weight_files(tmp_path)] == names


@pytest.mark.parametrize("has_index", [True, False])
def test_all_missing_shards_are_named(tmp_path, has_index):
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    (tmp_path / names[1]).touch()
    if has_index:
        index = {"weight_map": dict(enumerate(names))}
        write(tmp_path, "model.safetensors.index.json", index)
    with pytest.raises(ModelNotFound, match=r"lacks 3 of 4 weight files: .*download") as error:
        find_weight_files(tmp_path)
    assert all((name in str(error.value)) == (name != names[1]) for name in names)


def test_pickled_weights_only_when_asked(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(ModelNotFound, match="use --load-format pt"):
        find_weight_files(tmp_path)
    assert find_weight_files(tmp_path, "pt") == [tmp_path / "pytorch_model.bin"]
    with pytest.raises(ModelNotFound, match=r"has no \.bin file"):
        (tmp_path / "pytorch_model.bin").unlink()
        find_weight_files(tmp_path, "pt")


def test_weights_in_another_format_get_a_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin.*convert it to safetensors"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("find", [find_model, download_weights])
def test_a_local_folder_is_the_model(tmp_path, find):
    assert find(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "1_Pooling/config.json"])
def test_a_named_pipe_in_a_folder_is_not_opened(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelNotFound, match=f"{name} is no regular file"):
        find_model(str(tmp_path))


def test_files_that_cannot_be_looked_at_do_not_matter(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "other").touch()  # such as a link into a folder of another user
    look = Path.stat

    def stat(path, **options):
        if path.name == "other":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    check_regular(tmp_path)


@pytest.mark.parametrize("model", ["./nothing", "/nothing/at/all", "~/nothing", "a/b/c"])
@pytest.mark.parametrize("find", [find_model, download_weights])
def test_a_path_is_never_looked_up_on_the_hub(model, find):
    with pytest.raises(ModelNotFound, match=f"the folder {model}"):
        find(model)


def test_an_unreachable_hub_is_said_with_the_remedy(tmp_path):
    with pytest.raises(
        ModelNotFound, match=r"'no-org/no-model'.*connect once, pass a folder or a GGUF file"
    ):
        find_model("no-org/no-model", download_dir=str(tmp_path))  # conftest sets HF_HUB_OFFLINE


def test_generation_defaults_by_source(tmp_path):
    write(tmp_path, "config.json", GPT2)
    defaults = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "pad_token_id": 1}
    write(tmp_path, "generation_config.json", defaults)
    spec = read_spec(tmp_path)
    expected = {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    assert read_generation_defaults(spec, "auto") == expected
    assert read_generation_defaults(spec, "vllm") == {}

    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match="--generation-config"):
        read_generation_defaults(spec, str(other))
    write(other, "generation_config.json", {"top_p": 0.5})
    assert read_generation_defaults(spec, str(other)) == {"top_p": 0.5}


@pytest.mark.parametrize(
    "keys",
    [
        {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[5]]},
        {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
        {"max_new_tokens": 5, "top_k": 7, "eos_token_id": 3},
    ],
)
def test_generation_defaults_in_config_json_count_without_the_other_file(tmp_path, keys):
    write(tmp_path, "config.json", GPT2 | keys)
    # As `from_pretrained` of a model reads it.
    reference = GenerationConfig.from_pretrained(tmp_path, config_file_name="config.json")
    usual = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
    expected = {
        key: value
        for key in keys
        if (value := getattr(reference, key)) is not None and value != usual.get(key)
    }
    spec = read_spec(tmp_path)
    expected = {"eos_token_id": GPT2["eos_token_id"]} | expected
    assert spec.generation | {"eos_token_id": spec.eos_token_ids[0]} == expected
    write(tmp_path, "generation_config.json", {"top_k": 3})
    assert read_spec(tmp_path).generation == {"top_k": 3}


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", [[2]], True, 2.0, -1, [2, None], {"a": 2}], ids=str)
def test_an_end_token_that_is_no_number_is_refused(tmp_path, where, value):
    write(tmp_path, "config.json", GPT2)
    write(tmp_path, where, (GPT2 if where == "config.json" else {}) | {"eos_token_id": value})
    with pytest.raises(UnsupportedModel, match="eos_token_id"):
        read_spec(tmp_path)


def test_an_end_token_beyond_the_vocabulary_is_dropped(tmp_path, caplog):
    write(tmp_path, "config.json", GPT2)
    beyond = [GPT2["vocab_size"], 4_000_000]
    write(tmp_path, "generation_config.json", {"eos_token_id": [2, *beyond]})
    assert read_spec(tmp_path).eos_token_ids == [2]
    assert str(beyond) in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", [0.9]),
        ("top_k", 2.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("do_sample", "false"),
        ("max_new_tokens", 0),
    ],
)
def test_a_default_that_no_request_could_have_is_refused(tmp_path, key, value):
    write(tmp_path, "config.json", GPT2)
    write(tmp_path, "generation_config.json", {key: value})
    spec = read_spec(tmp_path)
    with pytest.raises(ConfigError, match=key):
        read_generation_defaults(spec, "auto")
    assert read_generation_defaults(spec, "vllm") == {}


def test_greedy_models_are_greedy(tmp_path):
    write(tmp_path, "config.json", GPT2)
    defaults = {"do_sample": False, "temperature": 0.6, "top_p": None}
    write(tmp_path, "generation_config.json", defaults)
    spec = read_spec(tmp_path)
    assert read_generation_defaults(spec, "auto") == {"temperature": 0.0}
    override = GenerationDefaults(temperature=0.3)
    assert read_generation_defaults(spec, "auto", override) == {"temperature": 0.3}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [1]),
        ("no_repeat_ngram_size", 3),
        ("min_new_tokens", 5),
        ("min_length", 2),
        ("num_beams", 4),
        ("bad_words_ids", [[3]]),
        ("typical_p", 0.9),
        ("guidance_scale", 1.5),
        ("forced_eos_token_id", 2),
        ("stop_strings", ["x"]),
        ("temprature", 1),
    ],
)
def test_a_key_that_changes_tokens_is_not_understood(tmp_path, key, value):
    spec = msgspec.structs.replace(FAKE_SPEC, generation={key: value})
    (account,) = generation_accounts(spec, "auto")
    assert [*account.unknown] == [key]
    assert not [*generation_accounts(spec, "vllm")]


def test_the_defaults_that_older_files_write_out_are_understood():
    """The values with which transformers wrote whole configurations."""
    defaults = {
        **{"max_length": 20, "min_length": 0, "do_sample": False, "use_cache": True},
        **{"early_stopping": False, "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
        **{"typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "min_p": None},
        **{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None},
        **{"num_return_sequences": 1, "output_scores": False, "return_dict_in_generate": False},
        **{"forced_bos_token_id": None, "remove_invalid_values": False, "epsilon_cutoff": 0.0},
        **{"eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0, "num_assistant_tokens": 20},
        **{"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4},
        **{"assistant_lookbehind": 10, "target_lookbehind": 10, "num_beam_groups": 1},
        **{"diversity_penalty": 0.0, "_from_model_config": True, "pad_token_id": 0},
        **{"transformers_version": "5.24.0", "eos_token_id": [2], "bos_token_id": 1},
    }
    spec = msgspec.structs.replace(FAKE_SPEC, generation=defaults)
    (account,) = generation_accounts(spec, "auto")
    assert not account.unknown


def test_mamba_2_has_no_heads_and_its_length_is_a_choice(tmp_path):
    config = {"model_type": "mamba2", "vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2}
    spec = read_spec(write(tmp_path, "config.json", config))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (0, 0, 0)
    assert spec.keeps_state and spec.kv_bytes_per_token(4) == 0
    assert spec.max_position_embeddings == 32768 < 1 << 20 < num_positions(spec)


def test_layers_with_a_state_have_no_kv_cache(tmp_path):
    """The keys of the first LFM2 and of Qwen 3.5, which transformers reads as layer_types."""
    common = {"vocab_size": 99, "hidden_size": 48, "num_attention_heads": 4}
    common |= {"num_hidden_layers": 6, "max_position_embeddings": 64}
    for keys in (
        {"model_type": "lfm2", "full_attn_idxs": [2, 5]},
        {"model_type": "qwen3_5_text", "full_attention_interval": 3},
    ):
        spec = read_spec(write(tmp_path, "config.json", common | keys))
        assert spec.layers_with_cache == [2, 5]
        assert spec.keeps_state
    spec = read_spec(write(tmp_path, "config.json", common | {"model_type": "lfm2"}))
    assert not spec.keeps_state
