"""Training of heads: what is trained is served, and an interrupted training continues."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from servd import LLM
from servd.messages.params import SamplingParams
from tests.parity.families import CASES, make_checkpoint
from tests.worker.spec_decode.drafting import drafts_of
from tools.train_speculator import __main__ as command
from tools.train_speculator import train as training
from tools.train_speculator.data import read_examples
from tools.train_speculator.heads import Batch
from tools.train_speculator.teacher import Teacher
from tools.train_speculator.train import Trainer, export

CPU = torch.device("cpu")
METHODS = ("eagle3", "medusa")
NUM_DRAFTS = 3


@pytest.fixture(scope="module", params={"gpt2": "tied", "llama": "llama3 rope"}.items())
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, case = request.param
    return make_checkpoint(tmp_path_factory.mktemp("target"), family, CASES[family][case])


@pytest.mark.parametrize("method", METHODS)
def test_drafts_in_training_are_those_that_are_served(target: Path, tmp_path: Path, method: str):
    options = f"{target} --out {tmp_path} --method {method} --draft-vocab-size 40"
    args = command.parse([*options.split(), "--num-drafts", str(NUM_DRAFTS)])
    head = command.make_head(args, target, [])
    for weight in head.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.2)
    head.bfloat16().float()
    export(head, tmp_path)
    teacher = Teacher(target, torch.float32, CPU, head.aux_layers)
    config = {"method": method, "model": str(tmp_path), "num_speculative_tokens": NUM_DRAFTS}
    served = drafts_of(target, config, NUM_DRAFTS)
    # In training a head sees every token.
    compared = [step for step in served if method == "medusa" or not step[2]]
    assert len(compared) > 10
    for tokens, drafts, _ in compared:
        ids = torch.tensor([[*tokens, *drafts]])
        is_output = torch.arange(ids.shape[1])[None] >= len(tokens)
        with torch.no_grad():
            batch = Batch(ids, is_output, *teacher(ids))
            places = head.places(batch, teacher)
        made = [
            int(head.tokens(place.logits)[place.positions == len(tokens) - 2])
            for place in places[: len(drafts)]
        ]
        assert made == drafts


OPTIONS = (
    "--num-examples 12 --max-tokens 16 --temperature 0 --epochs 4 --batch-tokens 256 "
    "--draft-vocab-size 300 --dtype float32 --num-drafts 3 --learning-rate 0.02"
).split()


@pytest.mark.parametrize("method", ["medusa", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_an_interrupted_training_ends_as_if_it_never_stopped(
    tiny_llama, tmp_path, method, monkeypatch
):
    losses: list[float] = []
    update = Trainer.update

    def spy(self, *args):
        losses.append(update(self, *args)[0])
        if len(losses) == interrupted_after:
            raise KeyboardInterrupt
        return losses[-1], 1.0

    monkeypatch.setattr(Trainer, "update", spy)
    monkeypatch.setattr(training, "SAVE_EVERY_S", -1)
    interrupted_after = -1
    work, whole = tmp_path / "work", tmp_path / "whole"
    run = [str(tiny_llama), "--method", method, *OPTIONS]
    command.main([*run, "--work", str(work), "--out", str(whole)])
    assert losses[-1] < 0.7 * losses[0]

    [text] = work.glob("text-*.jsonl")
    examples = read_examples(text)
    [checkpoint] = work.glob("*.pt")
    checkpoint.unlink()
    text.write_bytes(text.read_bytes()[:-300])
    interrupted_after, num_steps = len(losses) + 3, len(losses)
    resumed = tmp_path / "resumed"
    with pytest.raises(KeyboardInterrupt):
        command.main([*run, "--work", str(work), "--out", str(resumed)])
    assert read_examples(text) == examples
    command.main([*run, "--work", str(work), "--out", str(resumed)])
    assert len(losses) in (2 * num_steps, 2 * num_steps + 1)  # one may not have been saved
    assert_same(whole, resumed)
    assert_served(tiny_llama, whole, method)


def assert_same(first: Path, second: Path) -> None:
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def assert_served(target: Path, head: Path, method: str) -> None:
    """Outputs are those of the model alone."""
    prompts, params = ["the licence", "you may"], SamplingParams(temperature=0, max_tokens=24)
    plain = LLM(str(target), device="cpu", use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    plain.close()
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    llm = LLM(str(target), device="cpu", use_tqdm=False, speculative_config=speculative)
    made = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    llm.close()
    assert made == expected
