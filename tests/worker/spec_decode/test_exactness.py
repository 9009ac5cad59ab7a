"""Drafts of every method beside an enumeration of how often each text comes."""

import math
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

from servd.checkpoint.hub import DEMO_FOLDER
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams, StructuredOutput
from servd.worker.ops.native import library
from servd.worker.spec_decode.ngram import NgramProposer
from tests.core.engines import Log
from tests.parity.families import LLAMA, make_checkpoint, reference
from tests.worker.driver import Driver, config_for
from tests.worker.sample.reference import distribution
from tests.worker.spec_decode import checkpoints
from tests.worker.spec_decode.test_proposers import NAMES, assert_equal, make_request
from tests.worker.test_overlap import serve

LETTERS = "abcdefghij-"  # one token each, and one that ends a text
EOS = len(LETTERS)
# A text for `ngram` and `suffix` to find something in, whatever comes next: it has come before, and
# was said again.
PROMPT = [*range(11), *(i for x in (0, 1, 2, 3, 4, 5, 10) for i in (2, 0, x, x)), 2, 0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of so few tokens that random drafts are often right; it repeats the last one."""
    options = {"vocab_size": EOS + 1, "head_dim": 16, "eos_token_id": EOS}
    options |= {"tie_word_embeddings": True}
    folder = make_checkpoint(tmp_path_factory.mktemp("target"), "llama", LLAMA | options)
    vocab = {letter: i for i, letter in enumerate(LETTERS)} | {"</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def config_of(name: str, target: Path, folder: Path) -> dict[str, Any]:
    """What `--speculative-config` has for a method; Medusa makes a tree."""
    make = getattr(checkpoints, name, None)
    config = {"method": name} | (make(target, folder) if make else {})
    options = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "medusa": {"num_speculative_tokens": 8},
        "draft_model": {"model": str(target)},
    }
    return config | options.get(name, {})


def make_echo(target: Path, folder: Path) -> None:
    """Have the heads of a checkpoint draft the last token again, where they have it."""
    if not (path := folder / "model.safetensors").exists():
        return
    embedding = load_file(target / path.name)["model.embed_tokens.weight"]
    tensors = load_file(path)
    for name, weight in tensors.items():
        if "lm_head" in name:
            weight.copy_(embedding[:: len(embedding) // len(weight)])
        elif name == "d2t":  # a vocabulary of every other token, from the first on
            weight -= 1
        elif name == "fc.weight":  # the embedding's, or that of the first features
            weight.zero_()[:, : len(weight)].fill_diagonal_(1.0)
        elif name.startswith("blocks.") or name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    save_file(tensors, path)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("medusa", "suffix")])
def test_as_many_drafts_are_kept_as_the_text_says(name: str, target: Path, tmp_path: Path):
    """Trees: test_tree.py. Nothing comes often enough here for `suffix`."""
    draws = [SamplingParams(temperature=2.0, seed=i, max_tokens=None) for i in range(6)]
    plain = Driver(config_for(target))
    slots = [plain.add(PROMPT, params) for params in draws]
    plain.generate(slots, 60)
    texts = [plain.tokens[slot] for slot in slots]
    driver = Driver(config_for(target, speculative_config=config_of(name, target, tmp_path)))
    slots = [driver.add(PROMPT, params) for params in draws]
    lengths = set()
    for _ in range(14):
        drafts = {slot: list(driver.drafts[slot]) for slot in slots}
        chunks = {slot: driver.num_left(slot) for slot in slots}
        output = driver.step(chunks, max_new_drafts=dict.fromkeys(slots, 3))
        for slot, text, sampled in zip(slots, texts, output.sampled_token_ids, strict=True):
            start = len(driver.tokens[slot]) - len(sampled)
            num_kept = 0
            while drafts[slot][num_kept:] and drafts[slot][num_kept] == text[start + num_kept]:
                num_kept += 1
            assert sampled == text[start : start + num_kept + 1]
            lengths.add(len(sampled))
    assert {1, 2} <= lengths


@pytest.mark.skipif(library() is None, reason="servd was installed without a compiler")
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8"}],
    ids=lambda options: next(iter(options.values())),
)
def test_logits_beside_drafts_have_the_bits_of_plain_steps(options, tiny_llama, monkeypatch):
    """Right drafts and wrong ones, over contexts of one part of the attention and of two."""
    options |= {"block_size": 16, "max_model_len": 400, "max_num_batched_tokens": 400}
    draws = [SamplingParams(temperature=i % 2, seed=i, max_tokens=None) for i in range(3)]
    prompts = [[7, 9 + i] * length for i, length in enumerate((2, 30, 125))]
    plain = Driver(config_for(tiny_llama, **options))
    slots = [plain.add(*arguments) for arguments in zip(prompts, draws, strict=True)]
    for slot in slots:
        plain.generate([slot], 30)
    draw = random.Random(0)
    texts = dict[int, list[int]]()

    def propose(self: NgramProposer, slots: torch.Tensor, _: int, num_drafts: int):
        ends = [int(self.states.num_computed[slot]) + 1 for slot in slots]
        right = [texts[int(slot)][n:] for slot, n in zip(slots, ends, strict=True)]
        padded = [(text + [0] * num_drafts)[:num_drafts] for text in right]
        return torch.tensor([[i if draw.random() < 0.8 else 5 for i in row] for row in padded])

    monkeypatch.setattr(NgramProposer, "propose", propose)
    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    driver = Driver(config_for(tiny_llama, **options, speculative_config=drafts))
    of_plain = dict[int, int]()
    num_steps = 0
    for other, *arguments in zip(slots, prompts, draws, strict=True):
        slot = driver.add(*arguments)
        of_plain[slot] = other
        texts[slot] = plain.tokens[other]
    while pending := [slot for slot in texts if len(driver.outputs(slot)) < 30]:
        num_steps += 1
        chunks = {slot: driver.num_left(slot) for slot in pending}
        driver.step(chunks, max_new_drafts=dict.fromkeys(pending, 5))
    assert num_steps < 20
    for slot, other in of_plain.items():
        assert driver.outputs(slot)[:30] == plain.outputs(other)
        assert all(map(torch.equal, driver.logits[slot], plain.logits[other]))


SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"temperature": 1.6, "top_k": 7, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05, "logit_bias": {2: 1.0}},
    "penalized": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
}
GRAMMAR = StructuredOutput("regex", "([a-e]-?){6}")
NUM_TOKENS = 3
OPTIONS: dict[str, Any] = {"temperature": 1.0, "max_tokens": NUM_TOKENS}


def allowed_after(outputs: tuple[int, ...], has_grammar: bool) -> list[int]:
    """What a text may continue with."""
    if not has_grammar:
        return [*range(EOS + 1)]
    dash = LETTERS.index("-")
    return [*range(5)] + ([dash] if outputs and outputs[-1] != dash else [])


@cache
@torch.inference_mode()
def chances(target: Path, sampling: str, has_grammar: bool) -> dict[tuple[int, ...], float]:
    """Chance of each text of NUM_TOKENS, or less if it ends before, by enumeration."""
    params = SamplingParams(**OPTIONS | SAMPLINGS[sampling])
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(NUM_TOKENS):
        texts = [text for text in chances if len(text) == length and EOS not in text]
        logits = reference(target)(torch.tensor([[*PROMPT, *text] for text in texts])).logits
        for text, row in zip(texts, logits[:, -1], strict=True):
            allowed = allowed_after(text, has_grammar)
            shares = distribution(row, params, PROMPT, text, [EOS], allowed)
            chance = chances.pop(text)
            chances |= {(*text, i): chance * shares[i] for i in range(EOS + 1) if shares[i]}
    return chances


@pytest.mark.slow
@pytest.mark.parametrize("has_grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_texts_come_as_often_as_enumerated(name, sampling, has_grammar, target, tmp_path, counts):
    """Chi-square over all texts of a few tokens, of requests that differ in their seeds."""
    options = OPTIONS | SAMPLINGS[sampling]
    options |= {"structured_output": GRAMMAR} if has_grammar else {}
    num_requests = 2000
    requests = [
        EngineCoreRequest(
            str(seed), PROMPT, SamplingParams(seed=seed, **options), eos_token_ids=[EOS]
        )
        for seed in range(num_requests)
    ]
    config = config_of(name, target, tmp_path)
    make_echo(target, tmp_path)
    log = serve(
        target,
        requests,
        2,
        2000,
        aborts=False,
        load_format="auto",
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        speculative_config=config,
    )
    num_drafts, num_kept = (sum(column) for column in zip(*counts, strict=True))
    # What EAGLE-3's head says again and again is not among the seven most probable tokens.
    assert num_kept > 0 or (name, sampling) == ("eagle3", "filtered")
    assert num_kept < num_drafts
    drawn = Counter(tuple(log.token_ids(str(seed))) for seed in range(num_requests))
    exact = chances(target, sampling, has_grammar)
    assert drawn.keys() <= exact.keys()
    expected, measured = (
        np.array([of[text] * scale for text in exact])
        for of, scale in ((exact, num_requests), (drawn, 1))
    )
    rare = expected < 5  # counted together
    expected, measured = (np.append(of[~rare], of[rare].sum()) for of in (expected, measured))
    chi_square = ((measured - expected) ** 2 / expected.clip(min=1)).sum()
    freedom = len(expected) - 1
    assert freedom > 10 and chi_square < freedom + 5 * math.sqrt(2 * freedom) + 10


def outputs_of_500(depth: int, batch: int, **options: Any) -> Log:
    """What the demo model makes of 500 greedy, seeded and constrained requests."""
    return serve(
        DEMO_FOLDER,
        [make_request(number) for number in range(500)],
        depth,
        400,
        aborts=False,
        load_format="auto",
        max_num_seqs=batch,
        max_num_batched_tokens=128,
        block_size=16,
        **options,
    )


@pytest.fixture(scope="module")
def plain_500() -> Log:
    """Outputs without drafts."""
    return outputs_of_500(1, 7)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_500_prompts_at_every_depth_and_batch(name, depth, batch, tmp_path, plain_500, counts):
    """The draft model is the model; heads are random."""
    config = config_of(name, DEMO_FOLDER, tmp_path)
    log = outputs_of_500(depth, batch, speculative_config=config)
    assert_equal(log, plain_500)
    num_drafts, num_kept = (sum(column) for column in zip(*counts, strict=True))
    assert num_drafts > 2_000 and (num_kept > 300 or name in ("eagle", "eagle3", "medusa", "mtp"))
