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
# steps between trials soon after drafts paid, and later
TRY_INTERVAL = 128
MAX_TRY_INTERVAL = 256


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
    is_short: bool = False  # whether the last step took less than half of what was expected

    def expect(self, tokens: int, slope: float) -> float:
        return max(self.seconds + slope * (tokens - self.tokens), self.seconds / 4)


class DraftLengthController(Struct, dict=True):
    max_drafts: int  # of a request in a step; 0: none is ever drafted
    is_open: bool = False  # whether any request may get drafts in this step
    least_gain: float = 0.0  # tokens that a draft has to be worth
    least_worth: float = 0.0  # tokens beyond that, for all drafts of a request
    worth: float = 1.0  # what they are worth, mean of the requests that were asked last
    num_requests: int = 1
    num_trials: int = 0  # left in this step
    try_interval: int = TRY_INTERVAL
    plain: StepTime = field(default_factory=StepTime)
    drafting: StepTime = field(default_factory=StepTime)
    last_kind: StepTime | None = None  # of the step before
    slope: float = 0.0  # seconds per token
    variance: float = 0.0  # of the tokens of a step, times their weight
    sizes: set[int] = set()  # of steps: the first of a size may compile

    def begin_step(self, step: int, num_requests: int) -> None:
        if not self.max_drafts:
            return
        self.num_requests = max(num_requests, 1)
        token, overhead = self.relative_costs(self.num_requests)
        self.least_gain = MARGIN * self.num_requests * token
        self.least_worth = MARGIN * overhead
        pays = self.worth > self.least_worth
        if step % PAUSE_INTERVAL == 0:
            self.try_interval = TRY_INTERVAL if pays else MAX_TRY_INTERVAL
        is_trial = step % self.try_interval < 2  # in the first of two, a draft model catches up
        self.num_trials = 1 + num_requests // 16 if is_trial else 0
        is_due = pays or is_trial or step % IDLE_INTERVAL == 0
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
        if (pays and num_drafts) or not self.num_trials:
            return num_drafts if pays else 0
        self.num_trials -= 1
        acceptance.num_tried /= 2
        return (self.max_drafts + 1) // 2

    def time(self, scheduled: list[ScheduledRequest], seconds: float, num_others: int = 0) -> None:
        """Update the times from a step without prompts. `num_others`: rows not in `scheduled`."""
        num_tokens = num_others + sum(item.num_scheduled_tokens for item in scheduled)
        num_decoded = num_others + sum(1 + item.num_drafts for item in scheduled)
        kind = self.drafting if any(item.max_new_drafts for item in scheduled) else self.plain
        is_known = num_tokens in self.sizes and kind is self.last_kind
        self.last_kind = kind
        if not 0 < num_tokens == num_decoded:
            return
        self.sizes.add(num_tokens)
        if not is_known or not seconds > 0:
            return
        expected = kind.expect(num_tokens, self.slope)
        was_short = kind.is_short
        kind.is_short = seconds <= expected / 2
        if kind.is_short and kind.weight > 1 and not was_short:
            return  # the step before was collected late
        weight = 0.0 if kind.is_short else kind.weight  # others interrupted the mean
        seconds = min(seconds, 1.5 * expected) if weight else seconds  # or this step
        kind.weight = TIME_MEMORY * weight + 1
        kind.tokens += (num_tokens - kind.tokens) / kind.weight
        kind.seconds += (seconds - kind.seconds) / kind.weight
        x = num_tokens - kind.tokens
        error = seconds - kind.seconds - self.slope * x
        self.variance = TIME_MEMORY * self.variance + x * x
        self.slope += x * error / (self.variance + self.num_requests**2)
