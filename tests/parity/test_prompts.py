"""Logprobs and pooled vectors of prompts equal transformers', in whatever chunks."""

import random
import struct
from pathlib import Path

import pytest
import torch

from servd.messages.engine import ModelRunnerOutput, TokenLogprobs
from servd.messages.params import PoolingParams, SamplingParams
from tests.parity.families import CASES, logits_of, reference, tolerance_of
from tests.worker.driver import Driver, config_for

MODELS = list(CASES)
CHUNKS = [
    pytest.param([13, 1, 40], id="uneven"),
    pytest.param([40], id="whole", marks=pytest.mark.slow),
]
TOLERANCE = 1e-4


@pytest.fixture(params=MODELS)
def folder(request, checkpoints) -> Path:
    """A tiny checkpoint of every model file."""
    return checkpoints(request.param, next(iter(CASES[request.param])))


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(199) for _ in range(length)] for length in lengths]


def run(driver: Driver, slots: list[int], chunks: list[int]) -> list[ModelRunnerOutput]:
    """Compute all prompts by chunks; return the outputs, rows in the order of `slots`."""
    outputs = []
    for chunk in chunks:
        outputs.append(driver.step({slot: min(chunk, driver.num_left(slot)) for slot in slots}))
    return outputs


@torch.inference_mode()
def hidden_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Hidden states after the last norm [num_tokens, hidden] by transformers."""
    return reference(folder).base_model(torch.tensor([token_ids])).last_hidden_state[0]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_prompt_logprobs(folder: Path, chunks: list[int], request: pytest.FixtureRequest):
    model = request.node.callspec.params["folder"]
    tolerance = tolerance_of(model)
    # A slice of logits has at most max_num_seqs rows: 3 here, so every chunk needs several.
    driver = Driver(config_for(folder, max_num_seqs=3))
    first, also, other = prompts(31, 31, 31)
    params = SamplingParams(temperature=0.0, prompt_logprobs=4, max_tokens=5)
    slots = [
        driver.add(first, params),
        driver.add(other),
        driver.add(also, SamplingParams(temperature=0.0, prompt_logprobs=0)),
    ]
    outputs = run(driver, slots, chunks)
    for row, (prompt, k) in {0: (first, 4), 2: (also, 0)}.items():
        positions: list[TokenLogprobs] = []
        for output in outputs:
            part = output.prompt_logprobs[row]
            assert part.start == len(positions) + 1
            positions += part.positions
        assert [position.token_ids[0] for position in positions] == prompt[1:]
        expected = logits_of(folder, prompt).log_softmax(-1)
        for before, (position, row_expected) in enumerate(zip(positions, expected, strict=False)):
            token_id = prompt[before + 1]
            assert len(position.token_ids) == 1 + k
            got = torch.tensor(position.logprobs)
            torch.testing.assert_close(
                got, row_expected[position.token_ids], atol=tolerance, rtol=0
            )
            torch.testing.assert_close(got[1:], row_expected.topk(k).values, atol=tolerance, rtol=0)
            higher = (row_expected > row_expected[token_id] + tolerance).sum()
            not_lower = (row_expected > row_expected[token_id] - tolerance).sum()
            assert higher + 1 <= position.rank <= not_lower
    assert all(1 not in output.prompt_logprobs for output in outputs)
    # Once the prompt is known there is no more to say.
    assert driver.step(dict.fromkeys(slots, 1)).prompt_logprobs == {}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_pooled_vectors(folder: Path, chunks: list[int]):
    driver = Driver(config_for(folder))
    all_params = [
        PoolingParams(),
        PoolingParams(pooling="mean"),
        PoolingParams(pooling="mean", normalize=False),
        PoolingParams(normalize=False, dimensions=5),
        PoolingParams(pooling="mean", dimensions=7),
        PoolingParams(pooling="all", dimensions=6),
        PoolingParams(pooling="all", normalize=False),
    ]
    all_prompts = prompts(*[31] * len(all_params))
    slots = [
        driver.add(prompt, params) for prompt, params in zip(all_prompts, all_params, strict=True)
    ]
    text = driver.add(all_prompts[0])
    *before, last = run(driver, [*slots, text], chunks)
    assert all(not output.pooled for output in before)
    assert set(last.pooled) == set(range(len(all_params)))
    for row, (prompt, params) in enumerate(zip(all_prompts, all_params, strict=True)):
        hidden = hidden_of(folder, prompt)
        pooled = {"last": hidden[-1:], "mean": hidden.mean(0, keepdim=True), "all": hidden}[
            params.pooling or "last"
        ]
        expected = pooled[:, : params.dimensions]
        if params.normalize is not False:
            expected = expected / expected.norm(dim=1, keepdim=True)
        got = torch.tensor(struct.unpack(f"<{expected.numel()}f", last.pooled[row])).view(
            expected.shape
        )
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["mean", "all"])
def test_a_slot_forgets_who_had_it(folder: Path, pooling: str):
    driver = Driver(config_for(folder, max_num_seqs=1))
    first, second = prompts(9, 6)
    slot = driver.add(first, PoolingParams(pooling=pooling, normalize=False))
    driver.step({slot: 5})
    driver.free(slot)
    slot = driver.add(second, PoolingParams(pooling=pooling, normalize=False))
    pooled = driver.step({slot: 6}).pooled[0]
    hidden = hidden_of(folder, second)
    expected = hidden.mean(0) if pooling == "mean" else hidden.flatten()
    torch.testing.assert_close(
        torch.tensor(struct.unpack(f"<{len(expected)}f", pooled)),
        expected,
        atol=TOLERANCE,
        rtol=TOLERANCE,
    )
    driver.free(slot)
    slot = driver.add(first)
    output = driver.step({slot: 9})
    assert not output.pooled and not output.prompt_logprobs
