"""medusa against a plain implementation of both published layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import read_spec
from tests.parity.families import CASES, make_checkpoint, reference
from tests.worker.driver import Driver, config_for
from tests.worker.spec_decode import checkpoints
from tests.worker.spec_decode.checkpoints import NUM_HEADS, draw, write
from tests.worker.spec_decode.drafting import drafts_of, make_echo


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = CASES[request.param]["tied" if request.param == "gpt2" else "untied"]
    return make_checkpoint(tmp_path_factory.mktemp("target"), request.param, options)


def of_vllm(target: Path, folder: Path) -> tuple[dict[str, Any], Any]:
    config = checkpoints.medusa(target, folder)
    weights = load_file(folder / "model.safetensors")

    def head(x: Tensor, number: int) -> Tensor:
        for layer in range(2):
            x = x + F.silu(x @ weights[f"blocks.{number}.layers.{layer}.weight"].T)
        return (x @ weights[f"lm_heads.{number}.weight"].T).argmax()

    return config, head


def of_frequent_tokens(target: Path, folder: Path) -> tuple[dict[str, Any], Any]:
    """One output head for all, over some tokens only."""
    size = read_spec(target).hidden_size
    tensors = {f"blocks.{i}.layers.0.weight": draw(size, size, seed=i) for i in range(NUM_HEADS)}
    tensors |= {f"blocks.{i}.layers.0.bias": draw(size, seed=i) for i in range(NUM_HEADS)}
    tensors["lm_heads.0.weight"] = draw(50, size)
    tensors["token_map"] = torch.arange(100, 150)
    config = {"original_lm_head": True, "truncated_vocab_size": 50, "medusa_fc_bias": True}

    def head(x: Tensor, number: int) -> Tensor:
        weight, bias = (tensors[f"blocks.{number}.layers.0.{leaf}"] for leaf in ("weight", "bias"))
        x = x + F.silu(x @ weight.T + bias)
        return 100 + (x @ tensors["lm_heads.0.weight"].T).argmax()

    return write(folder, config, tensors), head


def of_fasterdecoding(target: Path, folder: Path) -> tuple[dict[str, Any], Any]:
    spec = read_spec(target)
    size = spec.hidden_size
    tensors = {}
    for i in range(NUM_HEADS):
        for j in range(2):
            tensors[f"medusa_heads.{i}.{j}.linear.weight"] = draw(size, size, seed=9 * i + j)
            tensors[f"medusa_heads.{i}.{j}.linear.bias"] = draw(size, seed=9 * i + j)
        tensors[f"medusa_heads.{i}.2.weight"] = draw(spec.vocab_size, size, seed=i)
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 2}

    def head(x: Tensor, number: int) -> Tensor:
        for j in range(2):
            name = f"medusa_heads.{number}.{j}.linear"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        return (x @ tensors[f"medusa_heads.{number}.2.weight"].T).argmax()

    return write(folder, config, tensors), head


@torch.inference_mode()
@pytest.mark.parametrize("layout", [of_vllm, of_frequent_tokens, of_fasterdecoding])
def test_drafts_are_those_of_a_plain_implementation(target: Path, tmp_path: Path, layout):
    config, head = layout(target, tmp_path)
    config |= {"method": "medusa", "num_speculative_tokens": NUM_HEADS}
    for tokens, drafts, _ in drafts_of(target, config, NUM_HEADS):
        # The newest token is not computed yet.
        hidden = reference(target).base_model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
        assert drafts == [int(head(hidden, number)) for number in range(len(drafts))]


def test_heads_of_zeros_say_the_last_token_again(target: Path, tmp_path: Path):
    """What the model itself says after the last computed token: the newest one."""
    size = read_spec(target).hidden_size
    tensors = {f"blocks.{i}.layers.0.weight": torch.zeros(size, size) for i in range(NUM_HEADS)}
    config = write(tmp_path, {}, tensors) | {"method": "medusa", "num_speculative_tokens": 3}
    for tokens, drafts, _ in drafts_of(target, config, NUM_HEADS):
        assert drafts == [tokens[-1]] * len(drafts)


def test_drafts_of_an_echo_are_all_kept(tmp_path: Path):
    target = make_echo(tmp_path / "echo")
    size = read_spec(target).hidden_size
    tensors = {f"{i}.0.linear.weight": torch.zeros(size, size) for i in range(NUM_HEADS)}
    config = write(tmp_path / "heads", {}, tensors) | {"method": "medusa"}
    config |= {"num_speculative_tokens": NUM_HEADS}
    driver = Driver(config_for(target, speculative_config=config))
    slot = driver.add([7, 8, 9])
    for num_sampled in (1, 1 + NUM_HEADS, 1 + NUM_HEADS):
        output = driver.step({slot: driver.num_left(slot)}, max_new_drafts={slot: NUM_HEADS})
        assert output.sampled_token_ids == [[9] * num_sampled]


def test_heads_of_another_model(target: Path, tmp_path: Path):
    write(tmp_path, {}, {"blocks.0.layers.0.weight": draw(8, 8)})
    config = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 1}
    with pytest.raises(ConfigError, match="no Medusa heads for the model's hidden size "):
        Driver(config_for(target, speculative_config=config))


def test_a_token_map_that_leaves_the_vocabulary_of_the_model(target: Path, tmp_path: Path):
    vocab_size = read_spec(target).vocab_size
    config = {"method": "medusa"} | of_frequent_tokens(target, tmp_path)[0]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["token_map"][-1] = vocab_size
    write(tmp_path, {}, tensors)
    message = f"drafts token {vocab_size}, but the model has tokens 0 to {vocab_size - 1}"
    with pytest.raises(ConfigError, match=message):
        Driver(config_for(target, speculative_config=config))


def test_an_output_head_of_more_tokens_than_the_model_has(target: Path, tmp_path: Path):
    config = {"method": "medusa"} | checkpoints.medusa(target, tmp_path)
    spec = read_spec(target)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_heads.1.weight"] = draw(spec.vocab_size + 1, spec.hidden_size)
    write(tmp_path, {}, tensors)
    with pytest.raises(ConfigError, match=f"drafts token {spec.vocab_size}, but the model has"):
        Driver(config_for(target, speculative_config=config))
