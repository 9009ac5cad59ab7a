"""--hf-overrides: keys of config.json, and positions that follow a scaling."""

import json
from pathlib import Path

import pytest

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import read_spec
from servd.checkpoint.overrides import override
from servd.config import Config
from servd.launch import find_and_resolve

# In the shape of Qwen/Qwen3-8B: more positions than the length before YaRN, for the answer.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 199,
}
# As its page says.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def write(folder: Path, config: object = QWEN3) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_max_model_len_follows_yarn(tmp_path: Path):
    options = {"model": str(write(tmp_path)), "hf_overrides": json.dumps({"rope_scaling": YARN})}
    config, spec, _ = find_and_resolve(Config.load(options | {"device": "cpu"}))
    assert config.model.max_model_len == spec.max_position_embeddings == 131072
    assert spec.config["rope_scaling"]["factor"] == 4.0
    plain = read_spec(tmp_path)
    assert plain.max_position_embeddings == 40960
    assert plain.config == plain.config | QWEN3


def test_max_model_len_follows_yarn_that_config_json_states(tmp_path: Path):
    """As Qwen 2.5's page says to write it; vLLM gives it 131,072 positions, too."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = QWEN3 | {"max_position_embeddings": 32768, "rope_scaling": scaling}
    assert read_spec(write(tmp_path, config)).max_position_embeddings == 131072
    longer = config | {"max_position_embeddings": 163840}
    assert read_spec(write(tmp_path, longer)).max_position_embeddings == 163840


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"max_position_embeddings": 65536}, 65536),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, 81920),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 3}}, 122880),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, 81920),
        ({"rope_scaling": YARN, "max_position_embeddings": 100_000}, 100_000),
        ({"rope_theta": 5e6}, 40960),
    ],
)
def test_positions_follow(changes: dict[str, object], length: int):
    assert override(QWEN3, changes)["max_position_embeddings"] == length


def test_a_dynamic_scaling_begins_at_the_length_of_config_json():
    """Which does not count what the scaling adds, as transformers computes it."""
    config = QWEN3 | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    changed = override(config, {"rope_scaling": {"factor": 4.0}})
    assert changed["max_position_embeddings"] == 4 * 40960


def test_a_scaling_keeps_the_rotation_of_either_form_of_config_json():
    """A new form that is there would win over an old one beside it."""
    base = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25}
    config = QWEN3 | {"rope_parameters": base}
    changed = override(config, {"rope_scaling": YARN, "rope_theta": 2e6})
    assert changed["rope_parameters"] == base | YARN | {"rope_theta": 2e6}
    assert not changed.get("rope_scaling")
    again = override(changed, {"rope_scaling": {"factor": 8.0}})
    assert again["rope_parameters"]["factor"] == 8.0
    assert again["max_position_embeddings"] == 262144
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    other = override(config | {"rope_parameters": base | llama3}, {"rope_parameters": None})
    assert other["rope_parameters"] == base


def test_a_scaling_is_for_the_layers_without_a_window():
    layers = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = QWEN3 | {"rope_parameters": layers}
    flat = override(config, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0}}
    by_layer = override(config, {"rope_parameters": nested})
    assert flat["rope_parameters"] == by_layer["rope_parameters"]
    assert flat["rope_parameters"]["full_attention"]["factor"] == 8.0
    assert flat["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert flat["rope_parameters"]["sliding_attention"] == layers["sliding_attention"]
    with pytest.raises(ConfigError, match="sliding_attention: 3 must be a JSON object"):
        override(config, {"rope_parameters": nested | {"sliding_attention": 3}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scalling": YARN}, "rope_scalling: config.json has none.*did you mean rope_scaling"),
        ({"colour": 1}, "colour: config.json has none, and no model reads it$"),
        ({"rope_scaling": "yarn"}, "rope_scaling: 'yarn' must be a JSON object"),
        ({"rope_scaling": {"factor": 4}}, "factor needs a rope_type"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs factor"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "factor '4' must be a number of 1 or more"),
        ({"rope_scaling": YARN | {"factr": 4}}, "factr: rotary.*did you mean factor"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 4}}, "no rope_type 'yarm'; there are: l"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "needs low_freq_factor, high_fr"),
        ({"tie_word_embeddings": "false"}, "'false' has another type than True"),
        (
            {"quantization_config": {}},
            "quantization_config: options cannot change the format of the weights",
        ),
        ({"dtype": "float16"}, "use --dtype"),
    ],
)
def test_wrong_keys_are_named(changes: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=f"^--hf-overrides:? ?.*{message}"):
        override(QWEN3, changes)


def test_an_object_in_place_of_a_number_is_refused(tmp_path: Path):
    folder = write(tmp_path, QWEN3 | {"eos_token_id": 2})
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_spec(folder, {"eos_token_id": {"a": 1}})


def test_learned_positions_cannot_be_scaled():
    with pytest.raises(ConfigError, match="no rotary positions"):
        override({"model_type": "gpt2", "n_positions": 1024}, {"rope_scaling": YARN})


def test_it_is_a_json_object():
    with pytest.raises(ConfigError, match="--hf-overrides yarn: must be a JSON object"):
        Config.load({"hf_overrides": "yarn"})
    with pytest.raises(ConfigError, match=r"--hf-overrides '\{\"rope_scaling\""):
        Config.load({"rope_scaling": "{}"})
