"""Verified drafts have the distribution of the target, whatever was drafted."""

from __future__ import annotations

import math

import pytest
import torch

from servd.worker.sample.ops import reference
from servd.worker.sample.rejection import verify_drafts

VOCAB, DRAFTS, ROWS = 8, 3, 20_000


def fits(tokens: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Chi-square within five deviations."""
    counts, expected = torch.bincount(tokens, minlength=VOCAB).double(), probabilities * len(tokens)
    possible = expected > 0
    assert not counts[~possible].any()
    freedom = int(possible.sum()) - 1
    chi_square = ((counts - expected)[possible].square() / expected[possible]).sum().item()
    return chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5


def verify(
    target_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    lowest: float = 0.0,
):
    """Of ROWS requests whose target is the same."""
    peaks, ones = target_logits.amax(-1), torch.ones(DRAFTS + 1)
    weights = reference.to_weights(target_logits, peaks, ones)
    return verify_drafts(
        reference,
        weights.expand(ROWS, -1, -1),
        torch.full((ROWS, DRAFTS + 1), lowest),
        draft_ids,
        draft_probs,
        torch.arange(ROWS),
        torch.full((ROWS,), 17),
    )


@pytest.mark.parametrize("similar", [0.0, 0.9], ids=["unlike", "alike"])
def test_every_token_has_the_distribution_of_the_target(similar: float):
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(DRAFTS + 1, VOCAB, generator=generator)
    draft = similar * target[:DRAFTS] + (1 - similar) * torch.randn(
        DRAFTS, VOCAB, generator=generator
    )
    probs = draft.softmax(-1)
    draft_ids = (
        torch.multinomial(probs, ROWS, replacement=True, generator=generator).t().contiguous()
    )
    tokens, counts = verify(target, draft_ids, probs.expand(ROWS, -1, -1))
    exact = target.double().softmax(-1)
    for i in range(DRAFTS + 1):
        assert fits(tokens[counts > i, i], exact[i])
    # As many are kept as can be: the two distributions' overlap.
    overlap = torch.minimum(exact[0], probs[0].double()).sum().item()
    assert abs((counts > 1).double().mean().item() - overlap) < 5 * math.sqrt(0.25 / ROWS)


def test_drafts_that_were_not_drawn_are_kept_as_often_as_the_target_has_them():
    target = torch.randn(DRAFTS + 1, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens, counts = verify(target, torch.tensor([[3, 1, 0]]).expand(ROWS, -1), None)
    exact = target.double().softmax(-1)
    for i in range(DRAFTS + 1):
        assert fits(tokens[counts > i, i], exact[i])


def test_a_draft_equal_to_the_target_is_always_kept():
    target = torch.randn(DRAFTS + 1, VOCAB, generator=torch.Generator().manual_seed(3))
    probs = target[:DRAFTS].softmax(-1)
    draft_ids = torch.multinomial(probs, ROWS, replacement=True).t().contiguous()
    tokens, counts = verify(target, draft_ids, probs.expand(ROWS, -1, -1))
    assert (counts == DRAFTS + 1).double().mean() > 0.999
    assert torch.equal(tokens[counts == DRAFTS + 1, :DRAFTS], draft_ids[counts == DRAFTS + 1])


def test_greedy_keeps_what_the_target_would_have_said():
    target = torch.zeros(DRAFTS + 1, VOCAB)
    target[[0, 1, 2, 3], [4, 5, 6, 7]] = 1000.0  # nothing else has any weight
    tokens, counts = verify(target, torch.tensor([[4, 5, 0]]).expand(ROWS, -1), None)
    assert counts.unique().tolist() == [3]
    assert tokens[:, :3].unique(dim=0).tolist() == [[4, 5, 6]]


def test_what_top_p_excluded_is_never_kept():
    target = torch.tensor([[3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]).repeat(DRAFTS + 1, 1)
    tokens, counts = verify(
        target, torch.tensor([[2, 2, 2]]).expand(ROWS, -1), None, lowest=2.0**41
    )
    assert counts.unique().tolist() == [1]
    assert tokens[:, 0].unique().tolist() == [0, 1]
