"""DraftLengthController: sets the number of drafts of a request by acceptance and step times."""

import math

from msgspec import Struct, field

from servd.messages.engine import ScheduledRequest

FIRST_CHANCE = 0.6  # that a draft is found, and accepted: optimistic, as trying is cheap
MEMORY = 0.98  # weight that a request's past keeps after a step: texts change, so 50 steps count
TIME_MEMORY = 0.995  # likewise for step times, which are noisier and change less
FIRST_TOKEN_COST = 1 / 128  # of a plain step, for one more token, until it is measured
MARGIN = 1.15  # estimates are noisy, and too many drafts cost more than too few
# of 100 steps, 4 draft nothing: drafts must beat their time
PAUSE_INTERVAL = 100
PAUSE_STEPS = 4
IDLE_INTERVAL = 8  # steps between looks at requests while nothing pays: a look takes CPU time
TRY_INTERVAL = 256  # steps between trials while nothing pays


class Acceptance(Struct):
    chance: float = FIRST_CHANCE  # that a draft is accepted if all drafts before it were
    num_tried: float = 2.0  # weight of the estimate: a guess counts for two drafts
    hit_rate: float = FIRST_CHANCE  # chance that the workers find drafts for it

    def count(self, num_drafts: int, num_kept: int, max_drafts: int, num_found: int) -> None:
        """Count a step that verified `num_drafts`, and looked for `max_drafts` new ones."""
        num_tried = min(num_kept + 1, num_drafts)  # after a rejected draft, no draft is tried
        self.num_tried = MEMORY * self.num_tried + num_tried
        self.chance += (num_kept - self.chance * num_tried) / max(self.num_tried, 1)
        if max_drafts:
            self.hit_rate += (min(num_found, 1) - self.hit_rate) / 10  # hits come in runs


class StepTime(Struct):
    """The mean size and time of one kind of step, exponentially weighted."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    latest: list[tuple[float, int]] = []  # seconds and tokens of three steps

    def add_step(self, seconds: float, tokens: int) -> None:
        """Add the median of the latest three steps: the others may be late, compile or wait."""
        self.latest = [*self.latest[-2:], (seconds, tokens)]
        if len(self.latest) < 3:
            return
        seconds, tokens = sorted(self.latest)[1]
        self.weight = TIME_MEMORY * self.weight + 1
        self.tokens += (tokens - self.tokens) / self.weight
        self.seconds += (seconds - self.seconds) / self.weight

    def expect(self, tokens: int, slope: float) -> float:
        return max(self.seconds + slope * (tokens - self.tokens), self.seconds / 4)


class DraftLengthController(Struct, dict=True):
    max_drafts: int  # of a request in a step; 0: none is ever drafted
    is_open: bool = False  # whether any request may get drafts in this step
    least_gain: float = 0.0  # tokens that a draft has to be worth
    least_worth: float = 0.0  # tokens beyond that, for all drafts of a request
    worth: float = 1.0  # what they are worth, mean of the requests that were asked last
    num_requests: int = 1
    is_trial: bool = False  # whether all requests draft in this step
    plain: StepTime = field(default_factory=StepTime)
    drafting: StepTime = field(default_factory=StepTime)
    last_kind: StepTime | None = None  # of the step before
    slope: float = 0.0  # seconds per token
    variance: float = 0.0  # of the tokens of a step, times their weight

    def begin_step(self, step: int, num_requests: int) -> None:
        if not self.max_drafts:
            return
        self.num_requests = max(num_requests, 1)
        token, overhead = self.relative_costs(self.num_requests)
        self.least_gain = MARGIN * self.num_requests * token
        self.least_worth = MARGIN * overhead
        pays = self.worth > self.least_worth
        self.is_trial = step % TRY_INTERVAL < 2  # in the first of two, a draft model catches up
        is_due = pays or self.is_trial or step % IDLE_INTERVAL == 0
        self.is_open = is_due and step % PAUSE_INTERVAL >= PAUSE_STEPS

    def relative_costs(self, num_requests: int) -> tuple[float, float]:
        """Return the costs of one more token and of drafting, as multiples of a plain step."""
        if not self.plain.weight:
            return FIRST_TOKEN_COST, 0.0
        first = FIRST_TOKEN_COST * self.plain.seconds
        self.slope = max(self.slope, first / 4) if self.slope else first
        plain = self.plain.expect(num_requests, self.slope)
        drafting = self.drafting.expect(num_requests, self.slope)
        return self.slope / plain, max(drafting / plain - 1, 0.0)

    def num_drafts(self, acceptance: Acceptance | None) -> int:
        """Return how many drafts pay off. Draft j is worth `acceptance.chance`**j tokens."""
        if acceptance is None or not self.is_open:
            return 0
        chance = min(max(acceptance.chance, 0.01), 0.99)
        num_drafts = min(max(int(math.log(self.least_gain, chance)), 0), self.max_drafts)
        gain = chance * (1 - chance**num_drafts) / (1 - chance)
        worth = acceptance.hit_rate * (gain - self.least_gain * num_drafts)
        pays = self.worth > self.least_worth and worth >= self.least_worth / 16  # finds some
        self.worth += (worth - self.worth) / self.num_requests
        if pays and num_drafts:
            return num_drafts
        if not self.is_trial:
            return 0
        acceptance.num_tried /= 2
        return (self.max_drafts + 1) // 2

    def time(self, scheduled: list[ScheduledRequest], seconds: float, num_others: int = 0) -> None:
        """Update the times from a step without prompts. `num_others`: rows not in `scheduled`."""
        num_tokens = num_others + sum(item.num_scheduled_tokens for item in scheduled)
        num_decoded = num_others + sum(1 + item.num_drafts for item in scheduled)
        kind = self.drafting if any(item.max_new_drafts for item in scheduled) else self.plain
        is_change = kind is not self.last_kind  # the step verifies what another kind drafted
        self.last_kind = kind
        if is_change or seconds <= 0 or not 0 < num_tokens == num_decoded:
            return
        kind.add_step(seconds, num_tokens)
        x = num_tokens - kind.tokens
        error = min(seconds, 1.5 * kind.seconds) - kind.seconds - self.slope * x
        self.variance = TIME_MEMORY * self.variance + x * x
        self.slope += x * error / (self.variance + self.num_requests**2)
