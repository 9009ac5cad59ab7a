"""Costs: the duration of a step by its contents, fitted to the steps of a recording."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from servd.simulate.traces import RequestLine, StepLine

FEW = 16  # tokens of a step beyond which each may cost more: weights were read for fewer
MANY = 128
SWEEPS = 3000  # of the fit
LEAST_STEPS = 50  # to fit
FIRST_STEPS = 16  # of an engine, which are slower than later steps
SLACK_NS = 1000  # times of a recording are rounded

Array = np.ndarray[Any, np.dtype[Any]]


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs in nanoseconds, all at least 0, so that a larger step never takes less time."""

    step: float
    row: float = 0.0  # a request in the step
    token: float = 0.0
    token_beyond_16: float = 0.0
    token_beyond_128: float = 0.0
    context: float = 0.0  # a token in the KV cache that a decoded token attends to
    pair: float = 0.0  # of a prompt's token and a token before it
    idle: float = 0.0  # a step before which nothing ran: caches are cold, API servers busy
    idle_token: float = 0.0  # a token of such a step
    before: float = 0.0  # from a request's arrival until the engine has it
    before_token: float = 0.0  # a token of the request's prompt
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
        """Return the time from a prompt's arrival until the engine has the prompt."""
        return round(self.before + self.before_token * tokens)


class SimulatedMachine(msgspec.Struct):
    """A typical machine with a model."""

    about: str
    num_blocks: int  # of the KV cache
    costs: Costs


MACHINES = msgspec.toml.decode(
    Path(__file__).with_name("machines.toml").read_bytes(), type=dict[str, SimulatedMachine]
)
FITTED = Costs.__struct_fields__[:9]  # in the order of the columns of `_observe`


def fit(steps: Iterable[StepLine], requests: Sequence[RequestLine]) -> Costs | None:
    """Return costs that explain recorded steps; None if there are too few steps.

    The fit is least squares without negative costs, weighted so that the sum of all steps is right.
    The time between two steps of a busy engine belongs to the second step.
    """
    by_engine: dict[int, dict[int, StepLine]] = {}
    for record in steps:  # every API server has recorded the steps
        by_engine.setdefault(record.engine, {})[record.started_ns] = record
    done = [request for request in requests if request.finished]
    observed = [
        _observe([records[at] for at in sorted(records)], [r for r in done if r.engine == engine])
        for engine, records in by_engine.items()
    ]
    if sum(len(took) for _, took in observed) < LEAST_STEPS:
        return None
    features = np.concatenate([rows for rows, _ in observed])
    took = np.concatenate([durations for _, durations in observed])
    costs = _least_squares(features, took, 1 / took)
    costs = _least_squares(features, took, 1 / np.maximum(features @ costs, 1.0))
    sent = [request for request in requests if request.sent]
    before = np.zeros(2)
    if sent:
        arrivals = np.array([(1.0, request.input_length) for request in sent])
        sent_ns = np.array([1e6 * request.sent for request in sent])
        before = _least_squares(arrivals, sent_ns, np.ones(len(sent)))
    return Costs(
        **dict(zip(FITTED, costs.tolist(), strict=True)),
        before=float(before[0]),
        before_token=float(before[1]),
        after=1e6 * sum(line.returned - line.finished for line in done) / max(len(done), 1),
    )


def _observe(steps: Sequence[StepLine], requests: Sequence[RequestLine]) -> tuple[Array, Array]:
    """Return the contents of each step of an engine, [steps, FITTED], and its duration. The context
    of a request's rows follows from the times of its tokens.
    """
    size = len(steps)
    number = np.arange(size)
    started = np.array([step.started_ns for step in steps])
    ends = np.array([step.collected_ns for step in steps])
    length = np.array([request.input_length for request in requests])
    cached = np.array([request.cached for request in requests])

    def find_steps(name: str, slack_ns: int, side: Any) -> Array:
        at = [1e6 * (request.timestamp + getattr(request, name)) for request in requests]
        return np.searchsorted(ends, np.rint(at).astype(np.int64) - slack_ns, side)

    def sum_up(first: Array, end: Array, value: Any) -> Array:
        """Return a sum for each step. Each value counts from step `first` to before `end`."""
        changes = np.zeros(size + 1)
        np.add.at(changes, first, value)
        np.add.at(changes, np.minimum(end, size), -value)
        return np.cumsum(changes)[:size]

    begin = find_steps("scheduled", 0, "right")  # the step of its first tokens
    first = find_steps("first_token", SLACK_NS, "left")
    last = find_steps("finished", SLACK_NS, "left")
    running = sum_up(begin, last, np.ones(len(requests)))
    # Token i of the answer is computed in step first + i, and looks at all before it.
    decodes = (last > first) & (first < size)
    decoding = sum_up(first[decodes] + 1, last[decodes] + 1, np.ones(decodes.sum()))
    offset = (length - first)[decodes].astype(float)
    context = sum_up(first[decodes] + 1, last[decodes] + 1, offset) + decoding * number
    each_pairs = (length**2 - cached**2) / 2 / np.maximum(first - begin + 1, 1)
    pairs = sum_up(begin, np.maximum(first + 1, begin), each_pairs)
    was_idle = np.append(True, running[:-1] == 0)
    since = np.where(was_idle, started, np.append(0, ends[:-1]))
    tokens = np.array([step.num_tokens for step in steps])
    rows = np.array([step.num_requests for step in steps])
    columns = [number * 0 + 1, rows, tokens, np.maximum(tokens - FEW, 0)]
    columns += [np.maximum(tokens - MANY, 0), context, pairs, was_idle, was_idle * tokens]
    kept = (number >= FIRST_STEPS) & (ends > since)
    return np.stack(columns, axis=1).astype(float)[kept], (ends - since)[kept].astype(float)


def _least_squares(features: Array, took: Array, weights: Array) -> Array:
    """Return the solution of the normal equations by coordinate descent, each coordinate >= 0."""
    scale = features.max(axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale
    weighted = (scaled * weights[:, None]).T
    matrix = weighted @ scaled
    right = weighted @ took
    solution = np.zeros(len(scale))
    for _ in range(SWEEPS):
        for i in np.flatnonzero(matrix.diagonal()):
            residual = matrix[i] @ solution - matrix[i, i] * solution[i]
            solution[i] = max((right[i] - residual) / matrix[i, i], 0.0)
    return solution / scale
