"""What tests of proposers share."""

from __future__ import annotations

import pytest

from servd.core import lookahead
from servd.core.lookahead import Lookahead
from servd.core.step_cost import StepCost


@pytest.fixture
def counts(monkeypatch) -> list[tuple[int, int]]:
    """Drafts of each row of each step, and how many of them were kept; every draft pays, and no
    step does without.
    """
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(StepCost, "shares", lambda *_: (1e-9, 0.0, 0.0))
    monkeypatch.setattr(lookahead, "PAUSE_STEPS", 0)
    count = Lookahead.count

    def spy(self, acceptance, num_drafts, num_kept, *asked):
        counted.append((num_drafts, num_kept))
        count(self, acceptance, num_drafts, num_kept, *asked)

    monkeypatch.setattr(Lookahead, "count", spy)
    return counted
