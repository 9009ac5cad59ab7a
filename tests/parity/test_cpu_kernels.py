"""Whole models on a CPU by every instruction set, and by torch alone: transformers' logits and
tokens, and equal bits.

The other parity tests have blocks of four tokens, which the compiled attention does not take.
"""

import random
from collections.abc import Iterator

import pytest
import torch

from servd.worker.ops import native
from tests.parity.families import CASES, STATES, greedy, logits_of, tolerance_of
from tests.worker.cpu_kernels import forced
from tests.worker.driver import Driver, config_for

SWITCHES = [*native.CAPABILITIES, "off"]
FAMILIES = [
    ("deepseek_v2", "groups, short queries"),
    ("deepseek_v3", "renormalized"),
    ("gemma2", "caps"),
    ("gemma3_text", "layer types"),
    ("gpt2", "tied"),
    ("gpt_oss", "sinks"),
    ("granite", "factors"),
    ("granitemoehybrid", "dense, positions, groups"),
    ("granitemoehybrid", "experts, no positions"),
    ("lfm2", "untied, biases, a size"),
    ("lfm2_moe", "plain router"),
    ("lfm3", "norms and gates"),
    ("llama", "llama3 rope"),
    ("mamba2", "groups"),
    ("mamba2", "one group, biases, tied"),
    ("mistral", "no window"),
    ("mistral", "window"),
    ("mixtral", "window"),
    ("olmo2", "of heads"),
    ("phi3", "window"),
    ("qwen3_5_moe_text", "experts"),
    ("qwen3_5_text", "of four layers"),
    ("qwen3_moe", "renormalized"),
    ("qwen3_next", "some layers dense"),
    ("smollm3", "window"),
]


# Each family by what servd takes on this machine; every instruction set by what differs most.
VARIED = ["gpt_oss", "granitemoehybrid", "qwen3_5_moe_text"]
BY_FAMILY = [("", *family) for family in FAMILIES] + [
    (switch, *family) for switch in SWITCHES for family in FAMILIES if family[0] in VARIED
]


@pytest.fixture(params=SWITCHES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from forced(request.param, monkeypatch)


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(199) for _ in range(length)] for length in lengths]


def test_each_family_has_a_case():
    assert {family for family, _ in FAMILIES} | {"qwen2", "qwen3"} == set(CASES), (
        "qwen2 is llama with biases, qwen3 is in qwen3_moe"
    )


@pytest.mark.parametrize(("kernels", "model_type", "variant"), BY_FAMILY, indirect=["kernels"])
def test_tokens_and_logits_equal_transformers(checkpoints, kernels, model_type, variant):
    folder = checkpoints(model_type, variant)
    driver = Driver(config_for(folder, block_size=16))
    assert driver.worker.runner.backend_name == ("torch_sdpa" if kernels == "off" else "native")
    slots = [driver.add(prompt) for prompt in prompts(45, 17, 1)]
    driver.generate(slots, num_outputs=20, chunk=19)
    for slot in slots:
        tokens = driver.tokens[slot]
        num_prompt = driver.num_prompt[slot]
        assert tokens == greedy(folder, tokens[:num_prompt], len(tokens) - num_prompt)
        expected = logits_of(folder, tokens)[num_prompt - 1 : -1]
        torch.testing.assert_close(
            torch.stack(driver.logits[slot]), expected, atol=tolerance_of(model_type), rtol=0
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model_type", ["gpt2", "granitemoehybrid", "qwen3_5_moe_text", "qwen3_moe"]
)
def test_a_request_gets_the_same_bits_alone_and_among_31_others(
    checkpoints, kernels, model_type, dtype
):
    if kernels == "off":
        pytest.skip("torch's products differ in the last bits with the number of rows")
    folder = checkpoints(model_type, next(iter(CASES[model_type])))
    options = {"block_size": 16, "max_num_seqs": 32, "dtype": dtype}
    lengths = random.Random(3).choices(range(1, 60), k=32)

    together = Driver(config_for(folder, **options))
    slots = [together.add(prompt) for prompt in prompts(*lengths)]
    together.generate(slots, num_outputs=8)
    for number in (0, 13, 31):
        alone = Driver(config_for(folder, **options))
        slot = alone.add(prompts(*lengths)[number])
        alone.generate([slot], num_outputs=8, chunk=23)
        assert alone.tokens[slot] == together.tokens[slots[number]]
        assert torch.equal(
            torch.stack(alone.logits[slot]), torch.stack(together.logits[slots[number]])
        )


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3_moe"])
def test_int8_weights_give_nearly_the_same_distribution(checkpoints, kernels: str, model_type: str):
    folder = checkpoints(model_type, next(iter(CASES[model_type])))
    [prompt] = prompts(40)
    driver = Driver(config_for(folder, block_size=16, quantization="int8"))
    slot = driver.add(prompt)
    driver.generate([slot], num_outputs=1)
    exact = logits_of(folder, prompt)[-1].log_softmax(-1)
    got = driver.logits[slot][0].log_softmax(-1)
    assert 0 < torch.nn.functional.kl_div(got, exact, log_target=True, reduction="sum") < 1e-3


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("model_type", STATES)
def test_layers_with_states_multiply_weights_of_few_bits(checkpoints, model_type, quantization):
    folder = checkpoints(model_type, next(iter(CASES[model_type])))
    [prompt] = prompts(40)
    logits = []
    for chunk in (40, 7):
        driver = Driver(config_for(folder, block_size=16, quantization=quantization))
        slot = driver.add(prompt)
        driver.generate([slot], num_outputs=3, chunk=chunk)
        logits.append(torch.stack(driver.logits[slot]))
    assert torch.equal(*logits)
    exact = logits_of(folder, prompt)[-1].log_softmax(-1)
    got = logits[0][0].log_softmax(-1)
    error = torch.nn.functional.kl_div(got, exact, log_target=True, reduction="sum")
    assert 0 < error < {"int8": 0.15, "int4": 1.0}[quantization]
