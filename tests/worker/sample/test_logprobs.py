import numpy as np
import pytest
import torch

from servd.messages.params import SamplingParams
from servd.worker.sample.sampler import Sampler
from tests.worker.sample.reference import distribution, processed_logits

VOCAB = 200


def run(params: list[SamplingParams], logits: torch.Tensor, mode="raw_logprobs"):
    sampler = Sampler(VOCAB, len(params), torch.device("cpu"), mode)
    for slot, p in enumerate(params):
        sampler.add(slot, p, [1, 2, 3], [], [0])
    slots = list(range(len(params)))
    output = sampler(
        logits.clone(),
        sampler.make_metadata(torch.tensor(slots), slots, torch.full((len(params),), 3)),
    )
    lists = output.logprobs.to_host().to_lists() if output.logprobs is not None else None
    return output.token_ids.tolist(), lists


def test_values_and_ranks_are_those_of_the_raw_logits():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    params = [
        SamplingParams(temperature=0, logprobs=5),
        SamplingParams(temperature=0),
        SamplingParams(temperature=3, seed=1, logprobs=0),
        # Everything that changes the logits is on; the values must not show it.
        SamplingParams(
            temperature=2, seed=2, logprobs=20, logit_bias={9: 100.0}, repetition_penalty=2, top_k=4
        ),
    ]
    token_ids, lists = run(params, logits)
    assert lists[1] is None
    assert token_ids[3] == 9
    for row, k in ((0, 5), (2, 0), (3, 20)):
        exact = logits[row].double().numpy()
        exact = exact - np.log(np.exp(exact).sum())
        got = lists[row]
        best = np.argsort(-exact)[:k].tolist()
        assert got.token_ids == [token_ids[row], *best]
        np.testing.assert_allclose(got.logprobs, exact[got.token_ids], atol=1e-5)
        assert got.rank == 1 + int((exact > exact[token_ids[row]]).sum())


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logits"])
def test_modes(mode):
    """A row's values are those of what it was drawn from, whatever the others ask for."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    params = [
        SamplingParams(temperature=0, logprobs=5),
        SamplingParams(temperature=2, seed=3, top_k=9),
        SamplingParams(temperature=0, logprobs=20, logit_bias={9: 100.0}, repetition_penalty=2),
        SamplingParams(
            temperature=1.5,
            seed=1,
            logprobs=20,
            logit_bias={9: 3.0},
            repetition_penalty=2,
            top_k=8,
            top_p=0.9,
            logprob_token_ids=[9, 4],
        ),
        SamplingParams(temperature=0.5, seed=2, logprobs=3),
    ]
    token_ids, lists = run(params, logits, mode)
    assert token_ids == run(params, logits)[0] and lists[1] is None
    for row in (0, 2, 3, 4):
        exact = logits[row].double().numpy()
        if mode != "raw_logits":
            exact = processed_logits(exact.copy(), params[row], [1, 2, 3], [], [0])
            if not params[row].is_greedy:
                exact = exact / params[row].temperature
                kept = distribution(logits[row].double().numpy(), params[row], [1, 2, 3], [], [0])
                exact = np.where(kept > 0, exact, -np.inf)
        if mode == "processed_logprobs":
            exact = exact - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
        got = lists[row]
        assert got.token_ids[0] == token_ids[row]
        np.testing.assert_allclose(got.logprobs, exact[got.token_ids], atol=1e-4)
        num_finite = int(np.isfinite(exact).sum())
        best = np.argsort(-exact)[: min(params[row].logprobs, num_finite)].tolist()
        assert got.token_ids[1 : 1 + len(best)] == best


def test_nothing_is_computed_when_no_row_asks():
    assert run([SamplingParams(temperature=0)] * 2, torch.randn(2, VOCAB))[1] is None


def test_no_more_alternatives_than_tokens():
    sampler = Sampler(4, 1, torch.device("cpu"))
    sampler.add(0, SamplingParams(temperature=0, logprobs=20), [1], [], [])
    output = sampler(
        torch.tensor([[1.0, 3.0, 2.0, 0.0]]),
        sampler.make_metadata(torch.tensor([0]), [0], torch.tensor([1])),
    )
    assert output.logprobs is not None
    assert output.logprobs.to_lists()[0].token_ids == [1, 1, 2, 0, 3]


def test_named_tokens_come_after_the_most_likely():
    sampler = Sampler(VOCAB, 4, torch.device("cpu"))
    requested = {0: [3, 9], 1: [], 3: [7]}
    for slot, ids in requested.items():
        sampler.add(
            slot, SamplingParams(temperature=0.0, logprobs=slot, logprob_token_ids=ids), [1], [], []
        )
    sampler.add(2, SamplingParams(temperature=0.0), [1], [], [])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = logits.double().log_softmax(-1)
    output = sampler(
        logits,
        sampler.make_metadata(torch.arange(4), list(range(4)), torch.ones(4, dtype=torch.int64)),
    )
    rows = output.logprobs.to_lists()
    assert rows[2] is None
    for slot, ids in requested.items():
        assert rows[slot].token_ids[1 + slot :] == ids and len(
            rows[slot].token_ids
        ) == 1 + slot + len(ids)
        picked = expected[slot][rows[slot].token_ids]
        torch.testing.assert_close(
            torch.tensor(rows[slot].logprobs, dtype=torch.float64), picked, atol=1e-5, rtol=0
        )
