"""What tests of proposers share."""

import pytest

from servd.core import draft_length
from servd.core.draft_length import Acceptance, DraftLengthController


@pytest.fixture
def counts(monkeypatch) -> list[tuple[int, int]]:
    """Drafts of each row of each step, and how many were kept; every draft pays."""
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(DraftLengthController, "relative_costs", lambda *_: (1e-9, 0.0))
    monkeypatch.setattr(draft_length, "PAUSE_STEPS", 0)
    count = Acceptance.count

    def spy(self, num_drafts, num_kept, *arguments):
        counted.append((num_drafts, num_kept))
        count(self, num_drafts, num_kept, *arguments)

    monkeypatch.setattr(Acceptance, "count", spy)
    return counted
