"""StepCost: what a step takes, by its tokens and the drafts in it, learned while serving."""

from __future__ import annotations

MEMORY = 0.995  # share of the past that each step keeps
# Before anything is known, a token more costs 1/128 of a step, and drafting nothing else.
TOKENS_PER_STEP = 128
LEAST_SHARE = 1 / 500  # share of a step: noise may make a token look free
# A step counts at most so many times the median of late, over what was expected: on a busy machine
# others run for longer than any step takes, in the midst of some. It is followed in such strides.
LONGEST, STRIDE, LEAST_MEDIAN = 1.5, 1.1, 0.6
# How much that belief weighs, in steps with a token or a draft more for each row, or that draft at
# all. Where steps do not tell these apart, as while all of them draft as much, the last is taken to
# be what it is.
BELIEF = (1.0, 1.0, 0.02)
NUM_STEPS_PER_FIT = 4

Vector = tuple[float, float, float]


class StepCost:
    """Seconds of a step as a linear function of its tokens, the drafts that are asked for in it,
    and whether it drafts at all: half of that is to verify any, half to ask for any. Least squares,
    exponentially weighted.
    """

    def __init__(self) -> None:
        self.forget()
        self._sizes: set[int] = set()

    def forget(self) -> None:
        self.weight = self.mean = 0.0  # of the seconds
        self.means: Vector = (0.0, 0.0, 0.0)  # of the three
        self.num_rows = 0  # of the last step
        self.median = 1.0  # of steps over what was expected
        # Sums of products of what is left without means.
        self.xx = [0.0] * 6  # 00, 01, 02, 11, 12, 22
        self.xy = [0.0] * 3
        self.slopes: Vector = (0.0, 0.0, 0.0)
        self._num_unfitted = 0

    def count(
        self, num_rows: int, num_tokens: int, num_asked: int, drafting: float, seconds: float
    ) -> None:
        """Take in a step, unless it is the first of its size: it may have recorded a program."""
        if num_tokens not in self._sizes:
            self._sizes.add(num_tokens)
            return
        if self.weight:
            expected = max(self._seconds(num_tokens, num_asked, drafting), self.mean / 4)
            self.median *= STRIDE if seconds > self.median * expected else 1 / STRIDE
            if self.median < LEAST_MEDIAN:  # what was expected is of such steps
                self.forget()
            else:
                seconds = min(seconds, LONGEST * self.median * expected)
        self.num_rows, self.weight = num_rows, self.weight * MEMORY + 1
        share = 1 / self.weight
        (m0, m1, m2), y = self.means, seconds - self.mean
        x0, x1, x2 = num_tokens - m0, num_asked - m1, drafting - m2
        self.means = m0 + share * x0, m1 + share * x1, m2 + share * x2
        self.mean += share * y
        rest = 1 - share
        products = x0 * x0, x0 * x1, x0 * x2, x1 * x1, x1 * x2, x2 * x2
        self.xx = [MEMORY * a + rest * b for a, b in zip(self.xx, products, strict=True)]
        self.xy = [MEMORY * a + rest * b * y for a, b in zip(self.xy, (x0, x1, x2), strict=True)]
        self._num_unfitted += 1
        if self._num_unfitted >= NUM_STEPS_PER_FIT or self.weight < 2 * NUM_STEPS_PER_FIT:
            self._num_unfitted = 0
            self.slopes = self._fit()

    def _fit(self) -> Vector:
        """Seconds of one token, of asking for one draft, and of drafting at all."""
        a, b, c, d, e, f = self.xx
        belief = BELIEF[0] * self.num_rows**2
        a, d, f = a + belief, d + BELIEF[1] * self.num_rows**2, f + BELIEF[2]
        x, y, z = self.xy
        x += belief * self.mean / TOKENS_PER_STEP
        # Cramer's rule for [[a, b, c], [b, d, e], [c, e, f]].
        first, second, third = d * f - e * e, c * e - b * f, b * e - c * d
        determinant = a * first + b * second + c * third
        return (
            (x * first + y * second + z * third) / determinant,
            (x * second + y * (a * f - c * c) + z * (b * c - a * e)) / determinant,
            (x * third + y * (b * c - a * e) + z * (a * d - b * b)) / determinant,
        )

    def _seconds(self, num_tokens: float, num_asked: float, drafting: float) -> float:
        (m0, m1, m2), (s0, s1, s2) = self.means, self.slopes
        return self.mean + s0 * (num_tokens - m0) + s1 * (num_asked - m1) + s2 * (drafting - m2)

    def shares(self, num_tokens: int) -> Vector:
        """Seconds of one token more, of one draft more to ask for, and of drafting at all, over
        those of a step with so many tokens that drafts nothing.
        """
        if not self.weight:
            return 1 / TOKENS_PER_STEP, 0.0, 0.0
        seconds = max(self._seconds(num_tokens, 0, 0), 1e-9)
        token, draft, drafting = self.slopes
        return (
            min(max(token / seconds, LEAST_SHARE), 1.0),
            max(draft / seconds, 0.0),
            max(drafting / seconds, 0.0),
        )
