"""Checkpoints to be quantized."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


@pytest.fixture(scope="session")
def tiny_qwen(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Qwen 2 checkpoint: one layer, biases, tied embeddings, sizes of 256 and 384."""
    folder = tmp_path_factory.mktemp("tiny-qwen")
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=3,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen2ForCausalLM(config)
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.data.normal_()
    model.save_pretrained(folder)
    for file in tiny_llama.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
