"""What a method of speculative decoding needs besides its name, for a tiny target model.

A function with the name of its file in `servd/worker/spec_decode` makes the checkpoint, seeded, and
returns the rest of `--speculative-config`; a method without one needs nothing.

    def eagle(target: Path, folder: Path) -> dict[str, Any]:
        write_head(folder, read_spec(target).hidden_size)  # `folder` is empty
        return {"model": str(folder)}
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from servd.checkpoint.model_spec import read_spec
from tests.parity.families import GPT2, make_checkpoint

NUM_HEADS = 3


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A checkpoint; returns the key that names it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return {"model": str(folder)}


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that make a matrix keep about the size of what it is multiplied with."""
    generator = torch.Generator().manual_seed(1000 * seed + len(shape) + sum(shape))
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def medusa(target: Path, folder: Path, num_layers: int = 2) -> dict[str, Any]:
    """vLLM's layout."""
    spec = read_spec(target)
    size = spec.hidden_size
    vocab_size = spec.vocab_size
    config = {
        "model_type": "medusa",
        "num_heads": NUM_HEADS,
        "num_hidden_layers": num_layers,
        "hidden_size": size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size,
        "medusa_fc_bias": False,
    }
    tensors = {}
    for head in range(NUM_HEADS):
        for layer in range(num_layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = draw(
                size, size, seed=head * 9 + layer
            )
        tensors[f"lm_heads.{head}.weight"] = draw(vocab_size, size, seed=head)
    return {"num_speculative_tokens": NUM_HEADS} | write(folder, config, tensors)


HEADS = 4  # for the layers below
KV_HEADS = 2
HEAD_DIM = 16
INNER = 72


def layer(prefix: str, size: int, inputs: int) -> dict[str, Tensor]:
    """A decoder layer of hidden states of `size`, whose queries, keys and values read `inputs`."""
    rows = {
        "q_proj": HEADS * HEAD_DIM,
        "k_proj": KV_HEADS * HEAD_DIM,
        "v_proj": KV_HEADS * HEAD_DIM,
    }
    tensors = {
        f"self_attn.{name}": draw(n, inputs, seed=i) for i, (name, n) in enumerate(rows.items())
    }
    tensors["self_attn.o_proj"] = draw(size, HEADS * HEAD_DIM)
    tensors |= {"mlp.gate_proj": draw(INNER, size), "mlp.up_proj": draw(INNER, size, seed=1)}
    tensors |= {"mlp.down_proj": draw(size, INNER), "post_attention_layernorm": 1 + draw(size)}
    return {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}


def decoder(target: Path) -> dict[str, Any]:
    """config.json of a head for the target."""
    spec = read_spec(target)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": spec.hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
    }


def eagle(target: Path, folder: Path) -> dict[str, Any]:
    """With the target's embedding and output head."""
    size = read_spec(target).hidden_size
    tensors = layer("layers.0", size, size) | {"fc.weight": draw(size, 2 * size)}
    return write(folder, decoder(target), tensors)


def eagle3(target: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """With a vocabulary of every other token. Further keys of config.json as `options`."""
    spec = read_spec(target)
    size = spec.hidden_size
    draft_vocab = spec.vocab_size // 2
    tensors = layer("midlayer", size, 2 * size) | {
        "fc.weight": draw(size, 3 * size),
        "midlayer.input_layernorm.weight": 1 + draw(size, seed=1),
        "midlayer.hidden_norm.weight": 1 + draw(size, seed=2),
        "norm.weight": 1 + draw(size, seed=3),
        "lm_head.weight": draw(draft_vocab, size),
        "d2t": torch.arange(draft_vocab) + 1,
        "t2d": torch.arange(spec.vocab_size) % 2 == 1,
    }
    config = decoder(target) | {"draft_vocab_size": draft_vocab}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 1, spec.num_layers - 1]}
    return write(folder, config | options, tensors)


def mtp(target: Path, folder: Path) -> dict[str, Any]:
    """One layer more than the target has, with what stands before and behind it."""
    config = json.loads((target / "config.json").read_text())
    number = config["num_hidden_layers"]
    kept = config.keys() - {"model_type", "architectures", "transformers_version", "dtype"}
    options = {key: config[key] for key in kept} | {"num_hidden_layers": number + 1}
    make_checkpoint(folder, config["model_type"], options)
    (folder / "config.json").write_text(json.dumps(config))
    size = config["hidden_size"]
    prefix = f"model.layers.{number}"
    tensors = {
        f"{prefix}.eh_proj.weight": draw(size, 2 * size),
        f"{prefix}.shared_head.head.weight": draw(3, size),
    }
    for seed, norm in enumerate(("enorm", "hnorm", "shared_head.norm")):
        tensors[f"{prefix}.{norm}.weight"] = 1 + draw(size, seed=seed)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    return {"model": str(folder)}


def draft_model(target: Path, folder: Path) -> dict[str, Any]:
    """A smaller model of another family, with the same vocabulary."""
    options = {"vocab_size": read_spec(target).vocab_size, "n_layer": 1}
    return {"model": str(make_checkpoint(folder, "gpt2", GPT2 | options))}
