"""Costs: how long a step takes, by what is in it; fitted to the steps of a recording."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from servd.api.recorder import RequestLine, StepLine

FEW, MANY = 16, 128  # tokens of a step beyond which each may cost more: weights were read for fewer
SWEEPS = 3000  # of the fit: 0.2 seconds
LEAST_STEPS = 50  # to fit
FIRST_STEPS = 16  # of an engine, which are slower than later ones


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nanoseconds; none is negative, so that a step with more in it never takes less."""

    step: float
    row: float = 0.0  # a request in the step
    token: float = 0.0
    token_beyond_16: float = 0.0
    token_beyond_128: float = 0.0
    context: float = 0.0  # a token in the KV cache that a request's one token looks at
    pair: float = 0.0  # of a prompt's token and one before it
    idle: float = 0.0  # a step before which nothing ran: caches are cold, API servers busy
    idle_token: float = 0.0  # of such a step
    before: float = 0.0  # of a request: from its arrival until the engine has it
    before_token: float = 0.0  # of its prompt
    after: float = 0.0  # from a token until the client has it
    copied_byte: float = 0.2  # between host memory and device

    def of_step(
        self, tokens: float, rows: float, context: float, pairs: float, was_idle: bool = False
    ) -> float:
        took = self.step + self.row * rows + self.token * tokens
        if was_idle:
            took += self.idle + self.idle_token * tokens
        if tokens > FEW:
            took += self.token_beyond_16 * (tokens - FEW)
        if tokens > MANY:
            took += self.token_beyond_128 * (tokens - MANY)
        return took + self.context * context + self.pair * pairs

    def of_arrival(self, tokens: int) -> int:
        """From a prompt's arrival until the engine has it."""
        return round(self.before + self.before_token * tokens)

    def of_decoding(self, rows: int, context: int) -> tuple[float, float]:
        """Of the same requests with a token each: the first step, and what each takes more than the
        one before.
        """
        return self.of_step(rows, rows, context, 0), self.context * rows


FITTED = Costs.__struct_fields__[:9]


def features(
    tokens: float, rows: float, context: float, pairs: float, was_idle: bool
) -> tuple[float, ...]:
    """What the fitted costs of a step are multiplied with."""
    beyond = max(tokens - FEW, 0), max(tokens - MANY, 0)
    return 1, rows, tokens, *beyond, context, pairs, was_idle, was_idle * tokens


def fit(steps: Iterable[StepLine], requests: Sequence[RequestLine]) -> Costs | None:
    """Costs that explain recorded steps; None if there are too few of them.

    Least squares without negative costs, weighted so that the sum of all steps comes out right. The
    time between two steps of a busy engine belongs to the second.
    """
    rows: list[tuple[tuple[float, ...], float]] = []
    by_engine: dict[int, dict[int, StepLine]] = {}
    for each in steps:  # every API server has recorded them
        by_engine.setdefault(each.engine, {})[each.started_ns] = each
    for engine, found in by_engine.items():
        own = [each for each in requests if each.engine == engine and each.finished]
        rows += _observations([found[at] for at in sorted(found)], own)
    if len(rows) < LEAST_STEPS:
        return None
    costs = _least_squares(rows, [1 / took for _, took in rows])
    expected = [sum(c * x for c, x in zip(costs, values, strict=True)) for values, _ in rows]
    costs = _least_squares(rows, [1 / max(each, 1.0) for each in expected])
    begun = [each for each in requests if each.sent]
    done = [each for each in requests if each.finished]
    arrivals = [((1.0, float(each.input_length)), 1e6 * each.sent) for each in begun]
    before = _least_squares(arrivals, [1.0] * len(begun)) if begun else [0.0, 0.0]
    return Costs(
        **dict(zip(FITTED, costs, strict=True)),
        before=before[0],
        before_token=before[1],
        after=1e6 * sum(each.returned - each.finished for each in done) / max(len(done), 1),
    )


def _observations(
    steps: Sequence[StepLine], requests: Sequence[RequestLine]
) -> list[tuple[tuple[float, ...], float]]:
    """Features of each step of an engine, and its nanoseconds. What a request's rows look at is
    known from when it had which token.
    """
    ends = [each.harvested_ns for each in steps]
    size = len(steps) + 1
    active, begins, slopes, pairs = ([0.0] * size for _ in range(4))
    for each in requests:
        scheduled, first_token, finished = (
            round(1e6 * (each.timestamp + at))
            for at in (each.scheduled, each.first_token, each.finished)
        )
        begin = bisect_right(ends, scheduled)  # the step of its first tokens
        first = bisect_left(ends, first_token - 1000)
        last = bisect_left(ends, finished - 1000)
        active[begin] += 1
        active[min(last, size - 1)] -= 1
        # Token i of the answer is computed in step first + i, and looks at all before it.
        if last > first < size - 1:
            for at, sign in ((first + 1, 1), (min(last + 1, size - 1), -1)):
                slopes[at] += sign
                begins[at] += sign * (each.input_length - first)
        computed = (each.input_length**2 - each.cached**2) / 2 / max(first - begin + 1, 1)
        for at in range(begin, min(first + 1, size - 1)):
            pairs[at] += computed
    rows: list[tuple[tuple[float, ...], float]] = []
    running = decoding = sum_of_begins = 0.0
    for i, step in enumerate(steps):
        was_idle = not (i and running)
        since = step.started_ns if was_idle else ends[i - 1]
        running += active[i]
        decoding += slopes[i]
        sum_of_begins += begins[i]
        context = sum_of_begins + decoding * i
        if i >= FIRST_STEPS and step.harvested_ns > since:
            values = features(step.num_tokens, step.num_requests, context, pairs[i], was_idle)
            rows.append((values, float(step.harvested_ns - since)))
    return rows


def _least_squares(
    rows: Sequence[tuple[tuple[float, ...], float]], weights: Sequence[float]
) -> list[float]:
    """Coordinate descent on the normal equations, each coordinate kept at 0 or above."""
    size = len(rows[0][0])
    scale = [max(values[i] for values, _ in rows) or 1.0 for i in range(size)]
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for (values, took), weight in zip(rows, weights, strict=True):
        scaled = [x / by for x, by in zip(values, scale, strict=True)]
        for i, x in enumerate(scaled):
            right[i] += weight * x * took
            for j, y in enumerate(scaled):
                matrix[i][j] += weight * x * y
    found = [0.0] * size
    for _ in range(SWEEPS):
        for i in range(size):
            if matrix[i][i] > 0:
                rest = sum(matrix[i][j] * found[j] for j in range(size) if j != i)
                found[i] = max((right[i] - rest) / matrix[i][i], 0.0)
    return [x / by for x, by in zip(found, scale, strict=True)]
