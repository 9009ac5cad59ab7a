"""What tests of proposers share."""

from __future__ import annotations

import pytest

from servd.core.lookahead import Lookahead, StepCost


@pytest.fixture
def counts(monkeypatch) -> list[tuple[int, int]]:
    """Drafts of each row of each step, and how many of them were kept; every draft pays."""
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(StepCost, "share", lambda *_: 1e-9)
    count = Lookahead.count

    def spy(self, acceptance, num_drafts, num_kept):
        counted.append((num_drafts, num_kept))
        count(self, acceptance, num_drafts, num_kept)

    monkeypatch.setattr(Lookahead, "count", spy)
    return counted
