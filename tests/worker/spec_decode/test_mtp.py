"""The layer behind a model's own drafts what that of transformers does."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from servd.base.errors import ConfigError
from tests.parity.families import CASES, make_checkpoint, reference
from tests.worker.driver import Driver, config_for

DEEPSEEK = CASES["deepseek_v3"]["renormalized"] | {"num_mtp_layers": 1}
NUM_STEPS = 8


def add_layer(folder: Path) -> torch.nn.Module:
    """Write one of transformers' into the checkpoint, under DeepSeek's names."""
    from transformers.modeling_layers import MtpModel

    main = reference(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = MtpModel(main, 1).eval()
        for parameter in model.layers.parameters():
            mean = 1 if parameter.dim() == 1 else 0
            parameter.data = torch.randn_like(parameter) * 0.2 + mean
    prefix = f"model.layers.{main.config.num_hidden_layers}"
    tensors = {}
    for name, tensor in model.layers[0].state_dict().items():
        name = name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        if name == "mlp.experts.gate_up_proj":
            for number, expert in enumerate(tensor):
                for part, of_expert in zip(("gate", "up"), expert.chunk(2), strict=True):
                    tensors[f"{prefix}.mlp.experts.{number}.{part}_proj.weight"] = of_expert
        elif name == "mlp.experts.down_proj":
            for number, expert in enumerate(tensor):
                tensors[f"{prefix}.mlp.experts.{number}.down_proj.weight"] = expert
        else:
            tensors[f"{prefix}.{name}"] = tensor
    file = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(load_file(file) | tensors, file)
    return model


@torch.inference_mode()
def drafted(folder: Path, model: torch.nn.Module, tokens: list[int]) -> int:
    """The token after these, by the layer."""
    ids = torch.tensor([tokens])
    hidden = reference(folder)(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    places = torch.arange(1, len(tokens)).unsqueeze(0)
    drafts, *_ = model(
        input_ids=ids[:, 1:],
        last_hidden_states=hidden,
        attention_mask=None,
        position_ids=places,
        mtp_cache=None,
        full_input_ids=ids,
    )
    return int(drafts[0, 0])


def test_drafts_are_those_of_transformers(tmp_path: Path):
    folder = make_checkpoint(tmp_path, "deepseek_v3", DEEPSEEK)
    model = add_layer(folder)
    keys = {"method": "mtp", "num_speculative_tokens": 1}
    driver = Driver(config_for(folder, speculative_config=keys))
    draw = random.Random(3)
    slots = [driver.add([draw.randrange(199) for _ in range(n)]) for n in (17, 5)]
    drafts = set()
    for _ in range(NUM_STEPS):
        driver.step(
            {slot: driver.num_left(slot) for slot in slots}, max_new_drafts=dict.fromkeys(slots, 1)
        )
        for slot in slots:
            assert driver.drafts[slot] == [drafted(folder, model, driver.tokens[slot])]
            drafts.update(driver.drafts[slot])
    assert len(drafts) > 3


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("deepseek_v2", "has no MTP layer .number 3."), ("gpt2", "does not support method mtp")],
)
def test_a_model_without_it_is_told(tmp_path: Path, model_type: str, why: str):
    folder = make_checkpoint(tmp_path, model_type, next(iter(CASES[model_type].values())))
    with pytest.raises(ConfigError, match=why):
        Driver(config_for(folder, speculative_config={"method": "mtp"}))
