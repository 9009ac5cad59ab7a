"""Every model file gives transformers' logits and tokens, however they are spread over steps."""

import random
from pathlib import Path

import pytest
import torch

from servd.base import plugins
from tests.parity import families
from tests.parity.families import CASES, ENCODERS, greedy, logits_of, make_checkpoint
from tests.worker.driver import Driver, config_for

FILES = plugins.names("servd.worker.models")
MODELS = [name for name in FILES if name.replace("_", "-") not in ENCODERS]
ALL = [(model_type, variant) for model_type, variants in CASES.items() for variant in variants]
CACHED = [name for name in MODELS if not families.keeps_state(name)]
PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
NUM_OUTPUTS = 10


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(199) for _ in range(length)] for length in lengths]


def check(driver: Driver, folder: Path, slot: int, prompt: list[int]) -> None:
    """The slot's outputs are transformers' greedy ones, drawn from transformers' logits."""
    tokens = driver.tokens[slot]
    assert tokens == greedy(folder, prompt, len(tokens) - len(prompt))
    expected = logits_of(folder, tokens)[len(prompt) - 1 : -1]
    got = torch.stack(driver.logits[slot])
    tolerance = families.tolerance_of(driver.spec.model_type)
    torch.testing.assert_close(got, expected[-len(got) :], atol=tolerance, rtol=0)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_model_file_has_a_case_and_a_line_of_documentation(model_type: str):
    assert model_type in CASES, f"add a tiny config of {model_type} to tests/parity/families.py"
    assert f"| `{model_type}` |" in PAGE.read_text().partition("## What is refused")[0]


@pytest.mark.parametrize(("model_type", "variant"), ALL)
def test_chunked_prefill_in_mixed_batches(checkpoints, model_type: str, variant: str):
    folder = checkpoints(model_type, variant)
    driver = Driver(config_for(folder))
    driver.gives_back = True
    long, short, single = prompts(37, 11, 1)
    first = driver.add(long)
    driver.step({first: 13})
    second = driver.add(short)
    driver.step({first: 5, second: 3})
    third = driver.add(single)
    driver.generate([second, first, third], NUM_OUTPUTS, chunk=7)
    for slot, prompt in ((first, long), (second, short), (third, single)):
        check(driver, folder, slot, prompt)


@pytest.mark.parametrize("model_type", CACHED)
def test_prefix_cache_hit(checkpoints, model_type: str):
    folder = checkpoints(model_type, next(iter(CASES[model_type])))
    driver = Driver(config_for(folder))
    shared, tail, other_tail = prompts(24, 6, 3)
    first = driver.add(shared + tail)
    driver.generate([first], 3)
    second = driver.add(shared + other_tail, cached_blocks=driver.first_blocks(first, 24))
    driver.generate([first, second], NUM_OUTPUTS)
    check(driver, folder, first, shared + tail)
    check(driver, folder, second, shared + other_tail)


# Of the others tests/parity/test_engine.py preempts requests.
@pytest.mark.parametrize("model_type", ["llama", *(name for name in MODELS if name not in CACHED)])
def test_preemption_by_recompute(checkpoints, model_type: str):
    folder = checkpoints(model_type, next(iter(CASES[model_type])))
    driver = Driver(config_for(folder))
    prompt, other = prompts(19, 30)
    victim = driver.add(prompt)
    stays = driver.add(other)
    driver.generate([victim, stays], 4, chunk=8)
    tokens = driver.free(victim)
    driver.generate([stays], 7)
    back = driver.add(tokens, num_prompt_tokens=len(prompt))
    assert back != victim
    driver.generate([back, stays], NUM_OUTPUTS, chunk=9)
    check(driver, folder, back, prompt)
    check(driver, folder, stays, other)


def test_requests_beyond_the_first_context_of_phi3(checkpoints):
    """transformers takes other factors over 128 tokens, servd where its limit is over 128."""
    folder = checkpoints("phi3", "long contexts")
    driver = Driver(config_for(folder, max_model_len=256))
    (prompt,) = prompts(140)
    slot = driver.add(prompt)
    driver.generate([slot], NUM_OUTPUTS, chunk=50)
    check(driver, folder, slot, prompt)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_full_size_gpt2(tmp_path: Path):
    folder = make_checkpoint(
        tmp_path, "gpt2", {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.05}
    )
    driver = Driver(
        config_for(str(folder), block_size=16, max_model_len=1024, kv_cache_memory=1 << 28)
    )
    longer, shorter = prompts(300, 40)
    slots = [driver.add(longer), driver.add(shorter)]
    driver.generate(slots, 24, chunk=129)
    # 12 layers of sums over 768 and 3072 float32 numbers, in another order: rounding is larger than
    # in tiny models.
    for slot, prompt in zip(slots, (longer, shorter), strict=True):
        tokens = driver.tokens[slot]
        assert tokens == greedy(folder, prompt, 24)
        expected = logits_of(folder, tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(driver.logits[slot]), expected, atol=5e-4, rtol=0)
