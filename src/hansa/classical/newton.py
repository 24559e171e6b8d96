"""The aggregator's side of linear models: Newton's method on summed gradients and Hessians, with penalties.

The objective is the mean loss over all samples, plus ridge/2 ||w||^2, plus l1 ||w||_1. A round asks the parties at one
point. If the objective fell enough there, the point is accepted and the next step is computed; if not, the step is
halved. The step minimises the quadratic model of the loss plus the penalties (proximal Newton; Lee, Sun and Saunders
2014), exactly without l1 and by coordinate descent with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ALIASED = 1e-14  # a column whose part outside those before it is smaller (squared, relative) depends on them; as in R
ROUNDING = 1e-12  # a column that deviates from its mean by a smaller part of it is constant, up to rounding
FAR = 10.0  # deviations from zero, beyond which a column is taken about its mean
ARMIJO = 1e-4
SWEEPS = 10_000
PRECISE = 1e-13  # the largest change of a sweep, in units in which the Hessian has the diagonal 1, that ends it


@dataclass(frozen=True)
class Penalty:
    """The penalties of each entry of W, [rows, width]: 0 for an intercept that is not penalised."""

    ridge: Tensor
    l1: Tensor

    def value(self, w: Tensor) -> float:
        return float((self.ridge * w**2).sum() / 2 + (self.l1 * w.abs()).sum())


def whole_hessian(blocks: Tensor, rows: int) -> Tensor:
    """The Hessian over all entries of W (row by row) from the blocks that the parties sum."""
    count, width, _ = blocks.shape
    if count == rows**2:
        return blocks.view(rows, rows, width, width).permute(0, 2, 1, 3).reshape(rows * width, rows * width)
    whole = blocks.new_zeros(rows, width, rows, width)
    for row in range(rows):
        whole[row, :, row] = blocks[0 if count == 1 else row]
    return whole.view(rows * width, rows * width)


def of_common_shift(hessian: Tensor, rows: int) -> Tensor:
    """Curvature along the directions in which all rows of W move alike.

    They change no probability of a multinomial model, so its own Hessian is singular there, and gradient and step are
    0: the curvature makes the step unique and changes nothing else.
    """
    curve = hessian.diagonal().view(rows, -1).mean(0)
    return torch.kron(torch.full((rows, rows), 1 / rows, dtype=curve.dtype), torch.diag(curve))


def far_centre(gram: Tensor) -> Tensor:
    """The mean of each column that is far from zero, 0 for others, from scalar products with an intercept in front.

    Squares about zero would lose the deviations of such a column.
    """
    mean = gram[0] / gram[0, 0].clamp(min=torch.finfo(gram.dtype).tiny)
    variance = gram.diagonal() / gram[0, 0].clamp(min=torch.finfo(gram.dtype).tiny) - mean**2
    far = mean**2 > FAR**2 * variance
    far[0] = False
    return torch.where(far, mean, 0.0)


def about_zero(w: Tensor, centre: Tensor) -> Tensor:
    """The weights for features about zero that give the scores of W for features about a centre."""
    return torch.cat([w[:, :1] - (w @ centre)[:, None], w[:, 1:]], 1)


def aliased(gram: Tensor, centre: Tensor) -> Tensor:
    """Which columns are combinations of the columns before them, from the scalar products of columns about a centre.

    As in R's `lm`, such a column gets the coefficient 0. A constant column depends on the intercept.
    """
    left = gram.clone()
    before = gram.diagonal().clone()
    least = torch.maximum(max(ALIASED, len(gram) * torch.finfo(gram.dtype).eps) * before,
                          (ROUNDING * centre) ** 2 * gram[0, 0])  # fmt: skip
    found = before <= 0
    for column in range(len(gram)):
        pivot = left[column, column]
        if found[column] or pivot <= least[column]:
            found[column] = True
            left[column, :] = left[:, column] = 0
            continue
        share = left[:, column] / pivot
        left -= torch.outer(share, left[column])
    return found


def step(w: Tensor, gradient: Tensor, hessian: Tensor, penalty: Penalty, free: Tensor) -> Tensor:
    """The step from W that minimises the quadratic model plus penalties, over the entries of W that are `free`.

    `gradient` ([rows, width]) and `hessian` (over all entries) are those of the mean loss.
    """
    at = free.flatten().nonzero().flatten()
    h = hessian[at][:, at] + torch.diag(penalty.ridge.flatten()[at])
    g = (gradient + penalty.ridge * w).flatten()[at]
    l1 = penalty.l1.flatten()[at]
    taken = torch.zeros_like(w).flatten()
    found = _solve(h, -g) if not bool(l1.any()) else _descend(h, g, w.flatten()[at], l1)
    return taken.index_copy(0, at, found).view_as(w)


def _solve(h: Tensor, b: Tensor) -> Tensor:
    """The solution of h x = b for a positive definite h, scaled to a unit diagonal; of least norm if it is singular."""
    scale = h.diagonal().clamp(min=torch.finfo(h.dtype).tiny).rsqrt()
    scaled = h * scale[:, None] * scale
    factor, failed = torch.linalg.cholesky_ex(scaled)
    right = (b * scale)[:, None]
    found = torch.cholesky_solve(right, factor) if int(failed) == 0 else torch.linalg.pinv(scaled) @ right
    return found[:, 0] * scale


def _descend(h: Tensor, g: Tensor, w: Tensor, l1: Tensor) -> Tensor:
    """The step d that minimises g.d + d.h d / 2 + l1 |w + d|, by coordinate descent with soft thresholds."""
    rows, threshold = h.numpy(), l1.numpy()
    curve = rows.diagonal().clip(min=np.finfo(rows.dtype).tiny)
    values, slopes = w.numpy().copy(), g.numpy().copy()  # slopes: g + h d
    for _ in range(SWEEPS):
        largest = 0.0
        for j in range(len(values)):
            wanted = values[j] - slopes[j] / curve[j]
            new = np.sign(wanted) * max(abs(wanted) - threshold[j] / curve[j], 0.0)
            moved = new - values[j]
            if moved != 0:
                slopes += moved * rows[j]
                values[j] = new
                largest = max(largest, abs(moved) * curve[j] ** 0.5)
        if largest <= PRECISE:
            break
    return torch.from_numpy(values) - w


def slope(w: Tensor, moved: Tensor, gradient: Tensor, penalty: Penalty) -> float:
    """The bound on the change of the objective along a step, for the test of sufficient decrease."""
    smooth = float(((gradient + penalty.ridge * w) * moved).sum())
    return smooth + float((penalty.l1 * ((w + moved).abs() - w.abs())).sum())
