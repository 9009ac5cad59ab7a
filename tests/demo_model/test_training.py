"""The training code: its model is Qwen3, its loss counts answers, an interrupted run goes on as if
never stopped.
"""

import random
from itertools import islice

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tools.demo_model.corpus import Corpus
from tools.demo_model.model import ModelConfig, Qwen3
from tools.demo_model.tokenizer import END, Renderer
from tools.demo_model.train import (
    Trainer,
    encode,
    evaluate,
    export,
    losses,
    make_batches,
    make_tokenizer,
    origin_of,
    parse,
    steps,
)

TINY = ModelConfig(
    vocab_size=700,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    head_dim=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(seed=0, vocab_size=TINY.vocab_size, num_examples=300)


@pytest.fixture(scope="module")
def batches(tokenizer):
    sequences = encode(islice(Corpus(0), 60), tokenizer, TINY.max_position_embeddings)
    return make_batches(sequences, 1024, random.Random(0))


def new_trainer():
    torch.manual_seed(0)
    return Trainer(Qwen3(TINY), num_examples=4000, learning_rate=2e-2, device=CPU)


def test_exported_model_is_qwen3_to_transformers(tmp_path, tokenizer):
    torch.manual_seed(0)
    model = Qwen3(TINY)
    for parameter in model.parameters():  # large enough that every part shows in the logits
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    export(model, tokenizer, tmp_path)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model.load_state_dict(
        {name: weight.float() for name, weight in load_file(tmp_path / "model.safetensors").items()}
    )
    ids = torch.randint(0, TINY.vocab_size, (2, 40))
    with torch.no_grad():
        ours = model(ids, torch.ones_like(ids, dtype=torch.bool)).view(2, 40, -1)
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_loss_counts_answers_only(tokenizer):
    example = {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "One and two?"},
            {"role": "assistant", "content": "1 + 2 = 3."},
            {"role": "user", "content": "Thanks"},
            {
                "role": "assistant",
                "reasoning_content": "I am polite.",
                "content": "You are welcome!",
            },
        ],
        "tools": None,
    }
    [sequence] = encode([example], tokenizer, 256)
    assert tokenizer.decode(sequence.ids, skip_special_tokens=False) == Renderer()(example)
    counted = tokenizer.decode(
        [t for t, flag in zip(sequence.ids, sequence.counted, strict=True) if flag], False
    )
    assert counted == f"1 + 2 = 3.{END}<think>\nI am polite.\n</think>\n\nYou are welcome!{END}"


def test_batches_hold_every_sequence_once(tokenizer):
    sequences = encode(islice(Corpus(0), 60), tokenizer, 256)
    batches = make_batches(sequences, 1024, random.Random(0))

    losses = [
        ids[examples == number].tolist()
        for batch in batches
        for ids, examples in zip(batch.ids, batch.examples, strict=True)
        for number in range(1, int(examples.max()) + 1)
    ]
    assert sorted(losses) == sorted(sequence.ids for sequence in sequences)
    assert all(batch.ids.numel() <= 1024 for batch in batches)
    assert any(int(batch.examples.max()) > 1 for batch in batches)


def test_examples_in_a_row_do_not_see_each_other(tokenizer):
    sequences = [
        sequence
        for sequence in encode(islice(Corpus(0), 40), tokenizer, 256)
        if len(sequence) < 100
    ]
    torch.manual_seed(0)
    model = Qwen3(TINY)

    def losses_of(batches):
        return sorted(value for batch in batches for value in losses(model, batch, CPU)[0].tolist())

    together = losses_of(make_batches(sequences, 1024, random.Random(0)))
    alone = losses_of(make_batches([sequence], 1024, random.Random(0))[0] for sequence in sequences)
    assert together == pytest.approx(alone, abs=1e-4)


def test_training_reduces_the_loss(batches):
    trainer = new_trainer()
    before = evaluate(trainer.model, batches, CPU)
    for step in range(30):
        trainer.update(batches[step % len(batches)])
    assert evaluate(trainer.model, batches, CPU) < before - 0.5


def test_a_resumed_training_equals_an_uninterrupted_one(batches, tmp_path):
    whole = new_trainer()
    expected = [whole.update(batches[step]) for step in range(6)]

    first = new_trainer()
    for step in range(3):
        first.update(batches[step])
    first.save(tmp_path / "checkpoint.pt")
    second = new_trainer()
    second.load(tmp_path / "checkpoint.pt")
    assert second.step == 3
    assert [second.update(batches[step]) for step in range(3, 6)] == expected[3:]


def test_a_checkpoint_from_a_different_training_is_refused(tmp_path):
    """Its weights would be exported with a tokenizer that they do not know."""
    torch.manual_seed(0)
    first, second = (
        Trainer(Qwen3(TINY), 4000, 2e-2, CPU, origin) for origin in ("text", "other text")
    )
    first.save(tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match=r"checkpoint\.pt is of another training.*--work"):
        second.load(tmp_path / "checkpoint.pt")


def test_a_training_is_identified_by_its_text_and_options():
    assert origin_of(parse([])) == origin_of(parse(["--threads", "9", "--out", "x", "--work", "y"]))
    assert origin_of(parse([])) != origin_of(parse(["--seed", "4"]))


def test_a_longer_training_starts_with_the_same_steps(tokenizer):
    def first_step(num_examples):
        args = parse(["--examples", str(num_examples)])
        return next(steps(Corpus(0), tokenizer, args, 256))

    short, long = first_step(2000), first_step(2001)
    assert torch.equal(short.ids, long.ids) and torch.equal(short.weights, long.weights)
