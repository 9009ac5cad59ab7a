"""Lookahead: how many drafted tokens a request's next step verifies, learned while serving.

A step that verifies drafts yields more tokens and takes longer, as does one that drafts. With `a`
the chance that the next draft of a request is kept, its draft number j is worth a ** j tokens. It
pays while that is more than what the whole step would yield in the same time: tokens of the step *
seconds that one more token takes / seconds of the step. What it takes to draft counts as often as
anything is found. Chances are counted for each request; the seconds are a plane through the steps
of late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from servd.messages import ScheduledRequest

MEMORY = 0.97  # weight that a sample of a request has left after another one
COST_MEMORY = 0.995  # share of the past that each step keeps
# Before anything is known, a token more costs 1/128 of a step, and every second draft is kept.
TOKENS_PER_STEP = 128
LEAST_SHARE = 1 / 500  # share of a step: noise may make a token look free
FIRST_GUESS, GUESS_WEIGHT = 0.6, 2.0
FIRST_TRIALS = 2  # per request, whatever became of others' drafts
LONGEST = 3.0  # a step counts at most so many times what was expected: others may have run
MARGIN = 1.15  # estimates are noisy, and too many drafts are worse than too few
# Costs change, and steps of one size teach nothing. At first, and now and then, some steps in a row
# draft nothing: one of them still verifies, and the first without drafts may record a program.
PAUSE_INTERVAL, PAUSE_STEPS = 96, 4
# And in one step a few requests try what seems not to pay, and forget what they knew; the more
# seldom the longer nothing has paid, as a try takes as long as two other steps. With one draft it
# would look too dear: some of what drafting costs is the same for one and for several.
TRY_INTERVAL, MAX_TRY_INTERVAL, TRY_MEMORY, TRY_DRAFTS = 32, 256, 0.5, 4
# While nothing is drafted, requests are asked in one step of so many, and its time counts: all this
# takes 5 us for each of them, and a step of a small model a millisecond.
IDLE_INTERVAL = 8


@dataclass(slots=True)
class Acceptance:
    """What has become of a request's drafts; what is old counts less."""

    num_kept: float = 0.0
    num_tried: float = 0.0
    num_found: float = 0.0  # steps whose workers had a draft
    num_asked: float = 0.0  # steps that wanted one

    def count(self, num_drafts: int, num_kept: int, num_asked: int, num_found: int) -> None:
        """Take in a step: its first `num_kept` drafts were kept, the next one was tried in vain;
        and how many drafts for the next step were asked for, and found.
        """
        self.forget(MEMORY)
        self.num_kept += num_kept
        self.num_tried += num_kept + (num_kept < num_drafts)
        self.num_found += num_found > 0
        self.num_asked += num_asked > 0

    def forget(self, memory: float) -> None:
        """Let what was counted weigh less."""
        self.num_kept *= memory
        self.num_tried *= memory
        self.num_found *= memory
        self.num_asked *= memory

    def chance(self, guess: float = FIRST_GUESS) -> float:
        """That a draft is kept if those before it are; a request that was tried, but not often, is
        like the others, by whom one may guess.
        """
        guess = guess if self.num_tried >= FIRST_TRIALS else FIRST_GUESS
        return (self.num_kept + guess * GUESS_WEIGHT) / (self.num_tried + GUESS_WEIGHT)

    def hit_rate(self, guess: float = FIRST_GUESS) -> float:
        """The chance that drafts are found; see `chance`."""
        guess = guess if self.num_asked >= FIRST_TRIALS else FIRST_GUESS
        return (self.num_found + guess * GUESS_WEIGHT) / (self.num_asked + GUESS_WEIGHT)


class StepCost:
    """Seconds of a step as a plane over its tokens and the drafts that are asked for in it: least
    squares, exponentially weighted.
    """

    def __init__(self) -> None:
        self.weight = self.y = 0.0
        self.x = self.xx = self.xy = 0.0  # tokens
        self.z = self.zz = self.zy = self.xz = 0.0  # drafts asked for
        self._sizes: set[int] = set()

    def count(self, num_tokens: int, num_asked: int, seconds: float) -> None:
        """Take in a step, unless it is the first of its size: it may have recorded a program."""
        if num_tokens not in self._sizes:
            self._sizes.add(num_tokens)
            return
        if self.weight:
            slope, slope_asked = self._slopes()
            mean = self.y + slope * (num_tokens * self.weight - self.x)
            mean += slope_asked * (num_asked * self.weight - self.z)
            seconds = min(seconds, LONGEST * max(mean, self.y) / self.weight)
        memory = COST_MEMORY
        self.weight = self.weight * memory + 1
        self.y = self.y * memory + seconds
        self.x = self.x * memory + num_tokens
        self.xx = self.xx * memory + num_tokens * num_tokens
        self.xy = self.xy * memory + num_tokens * seconds
        self.z = self.z * memory + num_asked
        self.zz = self.zz * memory + num_asked * num_asked
        self.zy = self.zy * memory + num_asked * seconds
        self.xz = self.xz * memory + num_asked * num_tokens

    def _slopes(self) -> tuple[float, float]:
        """Seconds of one token, and of asking for one draft."""
        mean_x, mean_y, mean_z = (each / self.weight for each in (self.x, self.y, self.z))
        # One sample's worth of belief: in TOKENS_PER_STEP, and that drafting costs nothing.
        xx, zz = self.xx - self.x * mean_x + 1, self.zz - self.z * mean_z + 1
        xz = self.xz - self.x * mean_z
        xy = self.xy - self.x * mean_y + mean_y / TOKENS_PER_STEP
        zy = self.zy - self.z * mean_y
        determinant = xx * zz - xz * xz
        return (xy * zz - zy * xz) / determinant, (zy * xx - xy * xz) / determinant

    def shares(self, num_tokens: int) -> tuple[float, float]:
        """Seconds of one token more, and of one draft more to ask for, over those of a step with so
        many tokens that asks for none.
        """
        if not self.weight:
            return 1 / TOKENS_PER_STEP, 0.0
        slope, slope_asked = self._slopes()
        seconds = (self.y + slope * (num_tokens * self.weight - self.x)) / self.weight
        seconds = max(seconds - slope_asked * self.z / self.weight, 1e-9)
        return min(max(slope / seconds, LEAST_SHARE), 1.0), max(slope_asked / seconds, 0.0)


class Lookahead:
    """Chooses the number of drafts for each request of each step.

    Args:
        max_drafts: of a request in a step; 0: none is ever drafted.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.cost = StepCost()
        self.overall = Acceptance()
        self.guess = self.guess_found = FIRST_GUESS
        # What verifying and making a draft costs in the step that is put together, in tokens.
        self.least_gain = self.least_gain_asked = 0.0
        self.num_requests = 0  # for which they were last weighed
        self.num_steps = 0
        self.num_idle = 0  # steps since a request was to be drafted for
        self.is_open = False  # whether any may be drafted for in this step
        self.try_interval = self.next_try = TRY_INTERVAL
        self.num_tries = 0  # left in this step

    def begin_step(self, num_requests: int) -> None:
        """A step of so many requests is put together."""
        if not self.max_drafts:
            return
        num_requests = max(num_requests, 1)
        if num_requests != self.num_requests or self._counts:
            shares, self.num_requests = self.cost.shares(num_requests), num_requests
            self.least_gain, self.least_gain_asked = (MARGIN * num_requests * x for x in shares)
            self.guess, self.guess_found = self.overall.chance(), self.overall.hit_rate()
        self.num_tries = 0
        if self.num_steps % PAUSE_INTERVAL < PAUSE_STEPS:
            self.is_open = False
            return
        if self.num_steps >= self.next_try:
            self.try_interval = min(2 * self.try_interval, MAX_TRY_INTERVAL)
            self.next_try = self.num_steps + self.try_interval
            self.num_tries = 1 + num_requests // 16
        self.is_open = self._counts or self.num_tries > 0

    def num_drafts(self, acceptance: Acceptance | None) -> int:
        """How many drafts of a request are worth their time in this step, if it wants any."""
        num_drafts = self._num_drafts(acceptance) if acceptance and self.is_open else 0
        if num_drafts:
            self.num_idle = 0
        return num_drafts

    def _num_drafts(self, acceptance: Acceptance) -> int:
        chance, least_gain = acceptance.chance(self.guess), self.least_gain
        if least_gain < chance and self.least_gain_asked:
            least_gain += self.least_gain_asked / acceptance.hit_rate(self.guess_found)
        if least_gain >= chance:
            if not self.num_tries:
                return 0
            self.num_tries -= 1
            acceptance.forget(TRY_MEMORY)
            return min(self.max_drafts, TRY_DRAFTS)
        if acceptance.num_tried >= FIRST_TRIALS:  # it pays, and is not only hoped to
            self.try_interval = TRY_INTERVAL
        if chance >= 1:
            return self.max_drafts
        return min(self.max_drafts, int(math.log(least_gain) / math.log(chance)))

    def count(self, acceptance: Acceptance | None, *counts: int) -> None:
        """A request's step is over; see `Acceptance.count`."""
        if acceptance is not None and any(counts):
            acceptance.count(*counts)
            self.overall.count(*counts)

    def time(
        self, scheduled: Sequence[ScheduledRequest], nanoseconds: int, num_others: int = 0
    ) -> None:
        """A step is over, so long after the one before; `num_others` of its rows decoded one token
        and drafted nothing. What one with prompts takes says nothing of drafts.
        """
        counts = self._counts
        self.num_steps += 1
        self.num_idle += 1
        if not counts:
            return
        num_tokens, num_asked = num_others, 0
        for item in scheduled:
            if not item.samples or item.num_tokens > item.num_drafts + 1:
                return
            num_tokens += item.num_tokens
            num_asked += item.max_new_drafts
        self.cost.count(num_tokens, num_asked, nanoseconds * 1e-9)

    @property
    def _counts(self) -> bool:
        """Whether a step is looked at that begins, or ends, now."""
        return self.num_idle < IDLE_INTERVAL or self.num_idle % IDLE_INTERVAL == 0
