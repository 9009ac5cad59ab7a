"""Quantize a matrix such that its products with given inputs change least.

GPTQ (arXiv 2210.17323) rounds column by column, and adjusts the remaining columns to compensate for
the error. Two steps then reduce the rest of the error: least squares fits the scales to the codes,
and coordinate descent (as in QuantEase, arXiv 2309.01885) changes codes one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

DAMPING = 0.01  # share of the diagonal's mean added to it: other inputs will differ from these
RIDGES = (1, 10, 100)  # multiples of the damping that `correct_drift` tries
CHANCE = 0.1  # share of the halves' agreement that can be chance
BLOCK = 128  # columns whose errors are passed to later columns at once
ROWS = 1024  # rows of a matrix that are quantized at once
WIDTHS = [0.84, 0.88, 0.92, 0.96, 1.0]  # width of a grid, relative to a group's numbers
PASSES = 2  # of the improvement by scales and codes
SMALLEST = 1e-12  # smallest scale


def quantize(
    weight: Tensor, moments: Tensor, bits: int, group_size: int, drift: Tensor | None = None
) -> Codes:
    """Find codes that nearly minimize the sum of (weight - codes)^T moments (weight - codes).

    Args:
        weight: float32 [out, in]; `in` is a multiple of `group_size`.
        moments: float32 [2, in, in], sums of x^T x over the two halves of the inputs x.
        bits: bits of a code.
        group_size: columns that share a scale.
        drift: float32 [2, in, in], sums of (y - x)^T x, where y are the inputs of the original
            model. If given, products with x approximate the original products with y.
    """
    if drift is not None:
        weight = weight + correct_drift(weight, moments, drift)
    moments = _damped(moments.sum(0))
    # Important columns first: most other columns can still make up for their errors.
    order = moments.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    parts = []
    for rows in weight.split(ROWS):
        codes = Codes(rows, moments.diagonal(), bits, group_size)
        codes.round_in_order(rows, order, upper)
        for _ in range(PASSES):
            codes.fit_scales(rows, moments)
            codes.descend(rows, moments)
        parts.append(codes)
    whole = parts[0]
    whole.codes = torch.cat([part.codes for part in parts])
    whole.scale = torch.cat([part.scale for part in parts])
    return whole


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> Codes:
    """Round each number of `weight`, float32 [out, in], alone."""
    codes = Codes(weight, torch.ones(weight.shape[1]), bits, group_size)
    codes.round(weight)
    return codes


def correct_drift(weight: Tensor, moments: Tensor, drift: Tensor) -> Tensor:
    """Return a change of `weight` [out, in] that approximates the products with the original
    inputs.

    Least squares would overfit these inputs. So the change is damped, and scaled by its benefit on
    the other half of the inputs. Without a benefit, it is zero. Arguments are as in `quantize`.
    """
    best = 0.0
    change = torch.zeros_like(weight)
    targets = weight @ drift  # [2, out, in]
    for times in RIDGES:
        gain = 0.0  # summed over both directions, as is the cost: a half predicts the other
        cost = 0.0
        for half_index, other in ((0, 1), (1, 0)):
            half = _least_squares(moments[half_index], targets[half_index], times)
            gain += float((targets[other] * half).sum())
            cost += float((half @ moments[other] * half).sum())
        share = min(gain / max(cost, SMALLEST), 1.0)
        less = 2 * share * gain - share**2 * cost  # squares of errors
        if share > CHANCE and less > best:
            best = less
            change = share * _least_squares(moments.sum(0), targets.sum(0), times)
    return change


def _least_squares(moments: Tensor, targets: Tensor, times: float) -> Tensor:
    return torch.linalg.solve(_damped(moments, times), targets.t()).t()


def _damped(moments: Tensor, times: float = 1) -> Tensor:
    diagonal = moments.diagonal()
    return moments + torch.diag(times * DAMPING * diagonal.mean() + (diagonal == 0).float())


class Codes:
    """A quantized matrix: `(code - middle) * scale`. A new object has scales, and no codes yet.

    Args:
        weight: float32 [out, in], from which the scales are chosen.
        importance: float32 [in], weight of each column's error.
        bits: bits of a code.
        group_size: columns that share a scale.
    """

    def __init__(self, weight: Tensor, importance: Tensor, bits: int, group_size: int) -> None:
        self.bits = bits
        self.middle = 1 << bits - 1
        self.max_code = (1 << bits) - 1
        self.group_size = group_size
        self.codes = torch.empty_like(weight)  # [out, in], of whole numbers
        groups = self._grouped(weight)
        self.scale = self._best_scales(groups, self._grouped(importance[None]))  # [out, groups]

    def dequantize(self) -> Tensor:
        """Return the matrix as float32 [out, in]."""
        return (self._values() * self.scale[..., None]).flatten(1)

    def round(self, weight: Tensor) -> None:
        """Round each number of `weight` [out, in] alone."""
        for column, numbers in enumerate(weight.t()):
            self.codes[:, column], _ = self._nearest(numbers, column)

    def round_in_order(self, weight: Tensor, order: Tensor, upper: Tensor) -> None:
        """Round the columns in `order` by GPTQ. `weight`: [out, in]; `upper`: Cholesky factor of
        the inverse of the moments, in the same order.
        """
        remaining = weight[:, order]  # numbers to be rounded, as errors so far have changed them
        columns = order.tolist()
        for start in range(0, len(columns), BLOCK):
            end = min(start + BLOCK, len(columns))
            errors = torch.empty(len(weight), end - start)
            for i in range(start, end):
                self.codes[:, columns[i]], rounded = self._nearest(remaining[:, i], columns[i])
                error = (remaining[:, i] - rounded) / upper[i, i]
                remaining[:, i:end] -= torch.outer(error, upper[i, i:end])
                errors[:, i - start] = error
            remaining[:, end:] -= errors @ upper[start:end, end:]

    def fit_scales(self, weight: Tensor, moments: Tensor) -> None:
        """Fit all scales of a row at once, by least squares."""
        values = self._values()
        targets = (self._grouped(weight @ moments) * values).sum(2)
        parts = moments.split(self.group_size)
        products = [self._grouped(values[:, g] @ part) * values for g, part in enumerate(parts)]
        normal = torch.stack([product.sum(2) for product in products], dim=1)
        normal.diagonal(dim1=1, dim2=2).mul_(1.0001).add_(SMALLEST)  # groups of zeros
        self.scale = _storable(torch.linalg.solve(normal, targets))

    def descend(self, weight: Tensor, moments: Tensor) -> None:
        """Improve each column once: choose its best codes while all other columns stay."""
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

    def _values(self) -> Tensor:
        """Return the codes less `middle`, [out, groups, group_size]."""
        return self._grouped(self.codes) - self.middle

    def _grouped(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.group_size))

    def _best_scales(self, groups: Tensor, importance: Tensor) -> Tensor:
        """Return the scales [out, groups] with the least error among the candidates. If the largest
        number of a group is positive, its scale is negative: there is one more code below 0.
        """
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
        min_error = torch.full_like(largest, torch.inf)
        scale = largest
        for width in WIDTHS:
            tried = _storable(-largest * width / self.middle)
            near = (groups / tried[..., None] + self.middle).round_().clamp_(0, self.max_code)
            near = near.sub_(self.middle).mul_(tried[..., None])
            error = near.sub_(groups).square_().mul_(importance).sum(2)
            scale = torch.where(error < min_error, tried, scale)
            min_error = torch.minimum(min_error, error)
        return scale

    def _nearest(self, numbers: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """Return the codes nearest to a column's numbers [out], and the values of these codes."""
        scale = self.scale[:, column // self.group_size]
        codes = (numbers / scale + self.middle).round_().clamp_(0, self.max_code)
        return codes, (codes - self.middle) * scale


def _storable(scale: Tensor) -> Tensor:
    """Return the scale without zeros, rounded to the checkpoint's type."""
    return torch.where(scale.abs() > SMALLEST, scale, SMALLEST).bfloat16().float()
