"""Shared fixtures: small checkpoints with a real tokenizer, made once per session and imported
lazily.

Tests of the api and core rooms that do not ask for a checkpoint never import torch.
"""

import json
import os
import shutil
from pathlib import Path

import hypothesis
import pytest

# A busy machine says nothing of an example's time.
hypothesis.settings.register_profile(
    "servd", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("servd")

# Set before anything imports torch, triton or the hub; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Clients read 0.06 s worth of certificates for each connection to a server without TLS.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)  # it has none
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, in numpy

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 512
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(
    folder: Path, special: list[str], bos: str | None, eos: str, chat_template: str | None
) -> None:
    """Train a byte-level BPE on text of this repository and write a Hugging Face tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (ROOT / "LICENSE").read_text(encoding="utf8").splitlines(), trainer
    )
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    if bos is not None:
        settings["bos_token"] = bos
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf8")


@pytest.fixture(scope="session")
def tiny_gpt2_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a GPT-2-style tokenizer (no chat template, one special token) alone."""
    folder = tmp_path_factory.mktemp("tiny-gpt2-tokenizer")
    write_tokenizer(folder, ["<|endoftext|>"], None, "<|endoftext|>", None)
    return folder


@pytest.fixture(scope="session")
def tiny_llama_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds `<s>`, has a ChatML template, and ends a turn with `<|im_end|>`."""
    folder = tmp_path_factory.mktemp("tiny-llama-tokenizer")
    write_tokenizer(
        folder, ["<s>", "</s>", "<|im_start|>", "<|im_end|>"], "<s>", "<|im_end|>", CHATML
    )
    return folder


@pytest.fixture(scope="session")
def tiny_gpt2(tiny_gpt2_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded GPT-2 checkpoint: 2 layers, hidden 64, 256 positions, tied, with its tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
    )
    return _checkpoint(
        "tiny-gpt2", GPT2LMHeadModel, config, torch, tiny_gpt2_tokenizer, tmp_path_factory
    )


@pytest.fixture(scope="session")
def tiny_llama(tiny_llama_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Llama checkpoint: 2 layers, hidden 64, 4 and 2 heads, 512 positions, template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=3,
        initializer_range=0.1,
    )
    return _checkpoint(
        "tiny-llama", LlamaForCausalLM, config, torch, tiny_llama_tokenizer, tmp_path_factory
    )


def _checkpoint(name, model_class, config, torch, tokenizer: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # The initial range is above the usual 0.02 so that the most likely token leads by far more
        # than rounding.
        model = model_class(config).eval()
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def may_always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are asked in every step: drafting never pauses, however little drafts paid."""
    monkeypatch.setattr("servd.core.draft_length.PAUSE_STEPS", 0)
    monkeypatch.setattr("servd.core.draft_length.IDLE_INTERVAL", 1)
