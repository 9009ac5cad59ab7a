"""Codes of a matrix that keep its products with given inputs.

GPTQ (arXiv 2210.17323) rounds column by column, and columns that are not rounded yet make up for
the error so far. What it leaves is then improved: scales by least squares for the codes, and codes
one by one for the scales (coordinate descent, as in QuantEase, arXiv 2309.01885).
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01  # of the diagonal's mean, added to it: inputs will not be quite as those seen
RIDGES = (1, 10, 100)  # of what is made up for: that many times the damping
CHANCE = 0.1  # of what halves say, as much is the same without a rule
BLOCK = 128  # columns whose errors are passed on to the others at once
ROWS = 1024  # of a matrix at once
WIDTHS = [0.84, 0.88, 0.92, 0.96, 1.0]  # of a grid, over the width of a group's numbers
PASSES = 2  # of the improvement
SMALLEST = 1e-12  # scale


def quantize(
    weight: Tensor,
    moments: Tensor,
    bits: int,
    group_size: int,
    drift: Tensor | None = None,
    is_symmetric: bool = True,
) -> Codes:
    """The codes for which the sum of (weight - codes)^T moments (weight - codes) is least, nearly.

    Args:
        weight: float32 [out, in]; the columns are whole groups.
        moments: float32 [2, in, in], the sums of x^T x over the halves of inputs x.
        bits: of a code.
        group_size: columns that share a scale.
        drift: float32 [2, in, in], the sums of (y - x)^T x, where y are the inputs that the weight
            was made for: products with x are to be those that it has with y. None: they are x.
        is_symmetric: see `Codes`.
    """
    if drift is not None:
        weight = weight + made_up(weight, moments, drift)
    moments = _damped(moments.sum(0))
    order, upper = _in_order(moments)
    parts = []
    for rows in weight.split(ROWS):
        codes = Codes(rows, moments.diagonal(), bits, group_size, is_symmetric)
        codes.round_in_order(rows, order, upper)
        for _ in range(PASSES):
            codes.fit_scales(rows, moments)
            codes.descend(rows, moments)
        parts.append(codes)
    return Codes.of(parts)


def made_up(weight: Tensor, moments: Tensor, drift: Tensor) -> Tensor:
    """What to add to the weight [out, in], so that its products are those with inputs as they were.

    Least squares would take what is so for these inputs alone for a rule, and be worse for others
    than nothing. So it is damped, and taken in part, as what either half says is of use for the
    other; not at all where it is of none.

    Args:
        weight: see `quantize`.
        moments: see there, too.
        drift: as these.
    """
    best, ridge, part = 0.0, 0.0, 0.0
    wanted = weight @ drift  # [2, out, in]
    for times in RIDGES:
        gain = cost = 0.0  # of all that one half says, for the other
        for one, other in ((0, 1), (1, 0)):
            change = _least_squares(moments[one], wanted[one], times)
            gain += float((wanted[other] * change).sum())
            cost += float((change @ moments[other] * change).sum())
        share = min(gain / max(cost, SMALLEST), 1.0)
        # Squares of errors become less by that much.
        if share > CHANCE and (less := 2 * share * gain - share**2 * cost) > best:
            best, ridge, part = less, times, share
    if not best:
        return torch.zeros_like(weight)
    return part * _least_squares(moments.sum(0), wanted.sum(0), ridge)


def _least_squares(moments: Tensor, wanted: Tensor, times: float) -> Tensor:
    return torch.linalg.solve(_damped(moments, times), wanted.t()).t()


def expected_errors(weight: Tensor, moments: Tensor, bits: int, group_size: int) -> Tensor:
    """[out], about what GPTQ leaves of the sum that `quantize` makes small, row by row: a column's
    rounding is evenly distributed over a step, and counts as far as those after it cannot make up.
    """
    moments = _damped(moments)
    order, upper = _in_order(moments)
    left = torch.empty(len(moments)).index_copy_(0, order, upper.diagonal() ** -2)
    steps = torch.cat([
        Codes(rows, moments.diagonal(), bits, group_size).scale for rows in weight.split(ROWS)
    ])  # fmt: skip
    return steps.square() @ left.unflatten(0, (-1, group_size)).sum(1) / 12


def _damped(moments: Tensor, times: float = 1) -> Tensor:
    diagonal = moments.diagonal()
    return moments + torch.diag(times * DAMPING * diagonal.mean() + (diagonal == 0).float())


def _in_order(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The order of columns, and the Cholesky factor of the inverse of the moments in it."""
    order = moments.diagonal().argsort(descending=True)  # what matters most has most to follow
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments[order][:, order]))
    return order, torch.linalg.cholesky(inverse, upper=True)


def bits_each(bits: int, group_size: int, is_symmetric: bool) -> float:
    return bits + (16 if is_symmetric else 16 + bits) / group_size


class Codes:
    """A matrix `(code - zero) * scale`, at first without codes.

    Args:
        weight: float32 [out, in], whose numbers decide on scales.
        importance: float32 [in], of errors of the columns.
        bits: of a code.
        group_size: columns that share a scale.
        is_symmetric: the zero is the code in the middle, else one of the group's own.
    """

    def __init__(
        self,
        weight: Tensor,
        importance: Tensor,
        bits: int,
        group_size: int,
        is_symmetric: bool = True,
    ) -> None:
        self.bits, self.most, self.group_size = bits, (1 << bits) - 1, group_size
        self.is_symmetric = is_symmetric
        self.codes = torch.empty_like(weight)  # [out, in], of whole numbers
        # [out, groups]
        self.scale, self.zero = self._fit(self._grouped(weight), self._grouped(importance[None]))

    @classmethod
    def of(cls, parts: list[Codes]) -> Codes:
        """Matrices one below the other."""
        first = parts[0]
        first.codes = torch.cat([part.codes for part in parts])
        first.scale = torch.cat([part.scale for part in parts])
        first.zero = torch.cat([part.zero for part in parts])
        return first

    @property
    def bits_each(self) -> float:
        """Of a number, with its share of scale and zero."""
        return bits_each(self.bits, self.group_size, self.is_symmetric)

    def dequantize(self) -> Tensor:
        """float32 [out, in]"""
        return (self._values() * self.scale[..., None]).flatten(1)

    def _values(self) -> Tensor:
        """[out, groups, group_size]"""
        return self._grouped(self.codes) - self.zero[..., None]

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.group_size))

    def _fit(self, groups: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zeros [out, groups] of least error, of those that are tried. With the zero in
        the middle, a scale is negative where the largest number is positive: there is a code more
        for it below 0.
        """
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
        low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
        best, scale = torch.full_like(largest, torch.inf), largest
        middle = zero = torch.full_like(largest, (self.most + 1) / 2)
        for width in WIDTHS:
            if self.is_symmetric:
                tried, at = self._kept(-largest * width / middle), middle
            else:
                tried = self._kept((high - low) * width / self.most)
                at = (self.most / 2 - (low + high) / 2 / tried).round_().clamp_(0, self.most)
            near = (groups / tried[..., None] + at[..., None]).round_().clamp_(0, self.most)
            near = near.sub_(at[..., None]).mul_(tried[..., None])
            error = near.sub_(groups).square_().mul_(importance).sum(2)
            scale, zero = (
                torch.where(error < best, new, old) for new, old in ((tried, scale), (at, zero))
            )
            best = torch.minimum(best, error)
        return scale, zero

    def _kept(self, scale: Tensor) -> Tensor:
        """In the type that the checkpoint has, and not 0. With zeros of their own, of 7 bits, so
        that their products with a zero are exact in 16 bits.
        """
        scale = torch.where(scale.abs() > SMALLEST, scale, SMALLEST)
        if self.is_symmetric:
            return scale.bfloat16().float()
        half = scale.clamp(min=2.0**-17).half().view(torch.int16)
        return ((half + 8) & ~15).view(torch.float16).float()

    def _nearest(self, numbers: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """[out] of a column -> codes, and the numbers that they stand for."""
        group = column // self.group_size
        scale, zero = self.scale[:, group], self.zero[:, group]
        codes = (numbers / scale + zero).round_().clamp_(0, self.most)
        return codes, (codes - zero) * scale

    def round_in_order(self, weight: Tensor, order: Tensor, upper: Tensor) -> None:
        """GPTQ.

        Args:
            weight: [out, in].
            order: of its columns.
            upper: Cholesky factor of the inverse of the moments, in this order.
        """
        left = weight[:, order]  # numbers to be rounded, as errors so far have changed them
        columns = order.tolist()
        for start in range(0, len(columns), BLOCK):
            end = min(start + BLOCK, len(columns))
            errors = torch.empty(len(weight), end - start)
            for i in range(start, end):
                self.codes[:, columns[i]], rounded = self._nearest(left[:, i], columns[i])
                error = (left[:, i] - rounded) / upper[i, i]
                left[:, i:end] -= torch.outer(error, upper[i, i:end])
                errors[:, i - start] = error
            left[:, end:] -= errors @ upper[start:end, end:]

    def fit_scales(self, weight: Tensor, moments: Tensor) -> None:
        """Least squares, all scales of a row at once."""
        values = self._values()
        wanted = (self._grouped(weight @ moments) * values).sum(2)
        parts = moments.split(self.group_size)
        products = [self._grouped(values[:, g] @ part) * values for g, part in enumerate(parts)]
        normal = torch.stack([product.sum(2) for product in products], dim=1)
        normal.diagonal(dim1=1, dim2=2).mul_(1.0001).add_(SMALLEST)  # groups of zeros
        fitted = torch.linalg.solve(normal, wanted)
        if not self.is_symmetric:  # a negative one would have no code for much of its group
            fitted = torch.where(fitted > 0, fitted, self.scale)
        self.scale = self._kept(fitted)

    def descend(self, weight: Tensor, moments: Tensor) -> None:
        """Each column once: the codes that are best as the other columns are."""
        rounded = self.dequantize()
        slope = (weight - rounded) @ moments
        for start in range(0, len(moments), BLOCK):
            end = min(start + BLOCK, len(moments))
            changes = torch.empty(len(weight), end - start)
            for i in range(start, end):
                best = rounded[:, i] + slope[:, i] / moments[i, i]
                self.codes[:, i], number = self._nearest(best, i)
                change = number - rounded[:, i]
                slope[:, i:end] -= torch.outer(change, moments[i, i:end])
                changes[:, i - start] = change
            slope[:, end:] -= changes @ moments[start:end, end:]
