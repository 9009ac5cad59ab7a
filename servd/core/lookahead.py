"""Lookahead: how many drafted tokens a request's next step verifies, learned while serving.

A step that verifies drafts yields more tokens and takes longer. With `a` the chance that the next
draft of a request is kept, its draft number j is worth a ** j tokens. It pays while that is more
than what the whole step would yield in the same time: tokens of the step * seconds that one more
token takes / seconds of the step. The chance is counted for each request; the seconds are a line
through the steps of late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from servd.messages import ScheduledRequest

MEMORY = 0.97  # weight that a sample has left after another one
IDLE_MEMORY = 0.995  # weight that chances have left after a step without drafts
# Before anything is known, a token more costs 1/64 of a step, and every second draft is kept.
TOKENS_PER_STEP = 64
LEAST_SHARE = 1 / 500  # whatever noise says
FIRST_GUESS, GUESS_WEIGHT = 0.6, 2.0
MARGIN = 1.15  # estimates are noisy, and too many drafts are worse than too few
# What seems not to pay is tried now and then, with few drafts: costs and chances change.
PROBE_STEPS, PROBE_GAIN = 100, 0.5


@dataclass(slots=True)
class Acceptance:
    """What has become of a request's drafts; what is old counts less."""

    num_kept: float = 0.0
    num_tried: float = 0.0

    def count(self, num_drafts: int, num_kept: int) -> None:
        """Take in a step: its first `num_kept` drafts were kept, the next one was tried in vain."""
        memory = MEMORY if num_drafts else IDLE_MEMORY
        self.num_kept = self.num_kept * memory + num_kept
        self.num_tried = self.num_tried * memory + num_kept + (num_kept < num_drafts)

    def chance(self, guess: float) -> float:
        """That a draft is kept if those before it are; `guess` as long as little is known."""
        return (self.num_kept + guess * GUESS_WEIGHT) / (self.num_tried + GUESS_WEIGHT)


class StepCost:
    """Seconds of a step as a line over its tokens: least squares, exponentially weighted."""

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def count(self, num_tokens: int, seconds: float) -> None:
        """Take in a step."""
        self.weight = self.weight * MEMORY + 1
        self.x = self.x * MEMORY + num_tokens
        self.y = self.y * MEMORY + seconds
        self.xx = self.xx * MEMORY + num_tokens * num_tokens
        self.xy = self.xy * MEMORY + num_tokens * seconds

    def share(self, num_tokens: int) -> float:
        """Seconds of one token more over those of a step with so many tokens."""
        if not self.weight:
            return 1 / TOKENS_PER_STEP
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx - self.x * mean_x
        # One sample's worth of belief in TOKENS_PER_STEP, where all steps had the same size.
        slope = (self.xy - self.x * mean_y + mean_y / TOKENS_PER_STEP) / (spread + 1)
        seconds = mean_y + slope * (num_tokens - mean_x)
        return min(max(slope / max(seconds, 1e-9), LEAST_SHARE), 1.0)


class Lookahead:
    """Chooses the number of drafts for each request of each step.

    Args:
        max_drafts: of a request in a step; 0: none is ever drafted.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.cost = StepCost()
        self.overall = Acceptance()
        self.least_gain = 0.0  # of a draft in the step that is put together, in tokens
        self.num_steps = 0

    def begin_step(self, num_requests: int) -> None:
        """A step of so many requests is put together."""
        if not self.max_drafts:
            return
        num_requests = max(num_requests, 1)
        self.least_gain = MARGIN * num_requests * self.cost.share(num_requests)
        self.num_steps += 1
        if self.num_steps % PROBE_STEPS == 0:
            self.least_gain = min(self.least_gain, PROBE_GAIN)

    def num_drafts(self, acceptance: Acceptance | None) -> int:
        """How many drafts of a request are worth their time in this step; None: of one that wants
        none.
        """
        if acceptance is None or not self.max_drafts:
            return 0
        chance = acceptance.chance(self.overall.chance(FIRST_GUESS))
        if self.least_gain >= chance:
            return 0
        if chance >= 1:
            return self.max_drafts
        return min(self.max_drafts, int(math.log(self.least_gain) / math.log(chance)))

    def count(self, acceptance: Acceptance | None, num_drafts: int, num_kept: int) -> None:
        """A request's step is over: so many of its drafts were verified, so many kept."""
        if acceptance is not None and self.max_drafts:
            acceptance.count(num_drafts, num_kept)
            self.overall.count(num_drafts, num_kept)

    def time(self, scheduled: Sequence[ScheduledRequest], nanoseconds: int) -> None:
        """A step is over; without others', it took so long. Those with prompts say nothing here."""
        if self.max_drafts and all(
            item.samples and item.num_tokens == item.num_drafts + 1 for item in scheduled
        ):
            num_tokens = sum(item.num_tokens for item in scheduled)
            self.cost.count(num_tokens, nanoseconds * 1e-9)
