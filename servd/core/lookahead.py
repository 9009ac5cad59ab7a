"""Lookahead: how many drafted tokens a request's next step verifies, learned while serving.

With `a` the chance that the next draft of a request is kept, its draft number j is worth a ** j
tokens. It pays while that is more than what the whole step would yield in the same time, and all
drafts of a step together have to be worth what it takes to draft and verify at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from servd.core.step_cost import StepCost
from servd.messages import ScheduledRequest

MEMORY = 0.97  # weight that a sample of a request has left after another one
# Before anything is known, every second draft is kept.
FIRST_GUESS, GUESS_WEIGHT = 0.6, 2.0
FIRST_TRIALS = 2  # per request, whatever became of others' drafts
MARGIN = 1.15  # estimates are noisy, and too many drafts are worse than too few
# Costs change, and steps of one size teach nothing. At first, and now and then, some steps in a row
# draft nothing, and after them some draft half as much: one of each still verifies what was drafted
# before, and the first of its size may record a program.
PAUSE_INTERVAL, PAUSE_STEPS, HALF_STEPS = 96, 4, 4
# And in a few steps a few requests try what seems not to pay, and forget what they knew; the more
# seldom the longer nothing has paid, and so seldom that it takes a small share of the time. The
# first of these steps is not counted where a draft has to catch up with what was computed without
# it.
TRY_INTERVAL, MAX_TRY_INTERVAL, TRY_STEPS, TRY_MEMORY, TRY_DRAFTS = 32, 256, 2, 0.5, 4
TRY_SHARE, MAX_WAIT = 0.015, 1024
MOST_BEHIND = 4  # steps without drafts after which a request's next ones are a beginning
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
    asked_in: int = -PAUSE_INTERVAL  # number of the last step that did

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


class Wishes:
    """What the drafts would gain and take that the requests of a step want, whether or not they get
    them.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.gain = self.price = 0.0  # sums
        self._means = 0.0, 0.0  # of a request, when last asked

    def add(
        self, num_drafts: int, chance: float, hit_rate: float, token: float, draft: float
    ) -> None:
        """A request wants so many; `token` and `draft` are what `StepCost.shares` says."""
        self.num_requests += 1
        if chance < 1:
            self.gain += hit_rate * chance * (1 - chance**num_drafts) / (1 - chance)
        else:
            self.gain += hit_rate * num_drafts
        self.price += (hit_rate * token + draft) * num_drafts

    def take(self, num_requests: int) -> tuple[float, float]:
        """Tokens that drafts would gain so many requests, and what they would take, over what a
        plain step does; then others are asked.
        """
        if self.num_requests:
            self._means = self.gain / self.num_requests, self.price / self.num_requests
            self.num_requests, self.gain, self.price = 0, 0.0, 0.0
        gain, price = self._means
        return num_requests * gain, num_requests * price


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
        self.step = 0  # the one that is put together
        # What verifying and making a draft costs in it, over what a plain one takes, and how many
        # tokens each has to be worth.
        self.shares = (0.0, 0.0)
        self.least_gain = self.least_gain_asked = 0.0
        self.pays = True  # whether drafts are worth what drafting at all costs
        self.wishes = Wishes()  # of the requests of this step
        self.num_requests = 0  # for which they were last weighed
        self.num_steps = 0
        self.num_idle = 0  # steps since a request was to be drafted for
        self.is_open = False  # whether any may be drafted for in this step
        self.try_interval = self.next_try = TRY_INTERVAL
        self.tries_until = self.num_tries = 0  # the step in which they end; left in this one
        self.try_drafts = 1  # in the latest
        self.beginnings: set[int] = set()  # steps in flight in which a request begins to draft

    def begin_step(self, step: int, num_requests: int) -> None:
        """A step of so many requests is put together; its number comes again if none was."""
        if not self.max_drafts:
            return
        self.step, num_requests = step, max(num_requests, 1)
        self.beginnings.discard(step)
        if num_requests != self.num_requests or self._counts:
            self.num_requests = num_requests
            self._weigh()
        self.num_tries = 0
        if self.num_steps % PAUSE_INTERVAL < PAUSE_STEPS:
            self.is_open = False
            return
        if self.num_steps >= self.next_try:
            self.try_interval = min(2 * self.try_interval, MAX_TRY_INTERVAL)
            self.tries_until = self.num_steps + TRY_STEPS
            # In turns, to tell what drafting costs from what a draft does.
            self.try_drafts = 1 if self.try_drafts > 1 else min(TRY_DRAFTS, self.max_drafts)
            token, draft, drafting = self.cost.shares(num_requests)
            num_drafts = (1 + num_requests // 16) * self.try_drafts
            takes = TRY_STEPS * (drafting + num_drafts * (token + draft))  # over plain steps
            self.next_try = self.num_steps + max(
                self.try_interval, min(int(takes / TRY_SHARE), MAX_WAIT)
            )
        if self.num_steps < self.tries_until:
            self.num_tries = 1 + num_requests // 16
        self.is_open = self._counts or self.num_tries > 0

    def _weigh(self) -> None:
        """What drafts cost in this step, and whether those of the step before are worth it."""
        num_requests = self.num_requests
        token, draft, drafting = self.cost.shares(num_requests)
        gain, price = self.wishes.take(num_requests)
        rate = MARGIN * num_requests  # tokens of a plain step
        self.pays = gain >= rate * (drafting + price)
        if self.pays:  # then a draft more has to be worth more than in a plain step
            rate = max(rate, (num_requests + gain) / (1 + drafting + price))
        self.shares = token, draft
        self.least_gain, self.least_gain_asked = rate * token, rate * draft
        self.guess, self.guess_found = self.overall.chance(), self.overall.hit_rate()

    def num_drafts(self, acceptance: Acceptance | None) -> int:
        """How many drafts of a request are worth their time in this step, if it wants any."""
        if not acceptance or not self.is_open:
            return 0
        num_drafts = self._num_drafts(acceptance)
        if num_drafts:
            self.num_idle = 0
            if acceptance.asked_in < self.step - MOST_BEHIND:
                self.beginnings.add(self.step)
            acceptance.asked_in = self.step
        return num_drafts

    def _num_drafts(self, acceptance: Acceptance) -> int:
        chance, hit_rate = acceptance.chance(self.guess), acceptance.hit_rate(self.guess_found)
        least_gain, num_drafts = self.least_gain + self.least_gain_asked / hit_rate, 0
        if least_gain < chance:
            most = math.log(least_gain) / math.log(chance) if chance < 1 else self.max_drafts
            num_drafts = min(self.max_drafts, int(most))
        self.wishes.add(num_drafts, chance, hit_rate, *self.shares)
        if num_drafts and self.pays:
            if acceptance.num_tried >= FIRST_TRIALS:  # it pays, and is not only hoped to
                self.try_interval = TRY_INTERVAL
            is_half = self.num_steps % PAUSE_INTERVAL < PAUSE_STEPS + HALF_STEPS
            return (num_drafts + 1) // 2 if is_half else num_drafts
        if not self.num_tries:
            return 0
        self.num_tries -= 1
        if self.num_steps == self.tries_until - TRY_STEPS:
            acceptance.forget(TRY_MEMORY)
        return self.try_drafts

    def count(self, acceptance: Acceptance | None, *counts: int) -> None:
        """A request's step is over; see `Acceptance.count`."""
        if acceptance is not None and any(counts):
            acceptance.count(*counts)
            self.overall.count(*counts)

    def time(
        self,
        step: int,
        scheduled: Sequence[ScheduledRequest],
        nanoseconds: int,
        num_others: int = 0,
    ) -> None:
        """A step is over, so long after the one before; `num_others` of its rows decoded one token
        and drafted nothing. What one with prompts takes says nothing of drafts, nor one in which a
        draft caught up with what was computed without it, nor one of copies alone.
        """
        counts, num_rows = self._counts, len(scheduled) + num_others
        self.num_steps += 1
        self.num_idle += 1
        is_beginning = step in self.beginnings
        self.beginnings.discard(step)
        if not counts or is_beginning or not num_rows:
            return
        num_tokens, num_drafts, num_asked = num_others, 0, 0
        for item in scheduled:
            if not item.samples or item.num_tokens > item.num_drafts + 1:
                return
            num_tokens += item.num_tokens
            num_drafts += item.num_drafts
            num_asked += item.max_new_drafts
        drafting = ((num_drafts > 0) + (num_asked > 0)) / 2
        self.cost.count(num_rows, num_tokens, num_asked, drafting, nanoseconds * 1e-9)

    @property
    def _counts(self) -> bool:
        """Whether a step is looked at that begins, or ends, now."""
        return self.num_idle < IDLE_INTERVAL or self.num_idle % IDLE_INTERVAL == 0
