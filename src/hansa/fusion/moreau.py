"""Centres of the Fed+ family: minimisers of mean Moreau envelopes (Yu, Kundu, Wynter and Lim 2021).

The centre of vectors w_k minimises the mean of the Moreau envelopes of w_k - w over w (`prox`). For a large rho it
is the mean; for a small rho it is the geometric median (L2 norm) or the coordinate-wise median (L1 norm).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hansa.fusion.coordinate import Median
from hansa.fusion.distances import WIDE, combination
from hansa.fusion.geometric import ROUNDING, distances_to
from hansa.fusion.ordered import in_order, middle_of
from hansa.numerics.prox import Norm
from hansa.numerics.rows import Rows

LEAST = 1e-150  # stands for a rho of 0
NEWTON = 512  # rows up to which a step of Newton's method, with a matrix of all pairs, costs little beside a reading


class Centre(NamedTuple):
    """A centre, and whether the search ended within its tolerance or at rounding errors."""

    w: Tensor
    found: bool


def centre(norm: Norm, rows: Rows, rho: float, tolerance: float, iterations: int) -> Centre:
    """The centre of the rows.

    A row pulls w with the force min(1, |w_k - w| / rho) toward w_k (for the L1 norm in each coordinate); at the centre
    the mean of the pulls is 0. The search ends when the length of the mean (for the L1 norm its size in every
    coordinate) is at most `tolerance`, when steps are rounding errors, or after `iterations`. The mean is the centre if
    all rows lie within rho of it. Else the search begins at the coordinate-wise median: one row could put the mean so
    far away that the way back takes any number of iterations. The paper's iteration w <- mean(w_k - prox(w_k - w))
    moves w by at most rho, so it needs the more steps the smaller rho is; the methods here do not.
    """
    mean = combination(rows, torch.ones(len(rows), dtype=torch.float64), len(rows))
    if norm == "squared" or math.isinf(rho):
        return Centre(mean, True)
    find = _by_vector if norm == "l2" else _by_coordinate
    return find(rows, mean, rho, tolerance, iterations)


def _by_coordinate(rows: Rows, mean: Tensor, rho: float, tolerance: float, iterations: int) -> Centre:
    """The centre for the L1 norm, by Newton's method within a bracket that is halved where Newton leaves it.

    The sum of the pulls falls in pieces of straight lines, so a Newton step that stays on its piece is exact.
    """

    def work(at: int, end: int, block: Tensor, w: Tensor) -> Tensor:
        left = torch.zeros(1, dtype=torch.float64)
        moving = ((block - w).abs().amax(0) > rho).nonzero().flatten()
        if not len(moving):
            return left
        block = block[:, moving]
        ordered = in_order(block)
        now, low, high = middle_of(block, ordered)[0], ordered[:, 0].double(), ordered[:, -1].double()
        for _ in range(iterations):
            apart = block - now
            pull = apart.clamp(-rho, rho).sum(0)  # times rho
            low, high = torch.where(pull > 0, now, low), torch.where(pull < 0, now, high)
            step = now + pull / (apart.abs() < rho).sum(0)
            halfway = low / 2 + high / 2
            new = torch.where((step > low) & (step < high), step, halfway)  # also where no row is within rho
            size = pull.abs() / (rho * len(block))
            rests = (pull == 0) | (size <= tolerance)
            w[moving] = torch.where(rests, now, new).to(w.dtype)
            on = ~rests & (new != now)
            moving, block, now, low, high = moving[on], block[:, on], new[on], low[on], high[on]
            if not len(moving):
                return left
        return left.fill_(len(moving))

    unfinished = rows.total(work, into=mean, numbers=WIDE, dtype=torch.float64)
    return Centre(mean, not bool(unfinished.any()))


def _by_vector(rows: Rows, mean: Tensor, rho: float, tolerance: float, iterations: int) -> Centre:
    """The centre for the L2 norm, by Newton's method; where that does not descend, or for many rows, by Weiszfeld's.

    Weiszfeld's step is the mean of the rows with the weights min(1, rho / |w_k - w|). It always descends.
    """
    if float(distances_to(rows, mean).max()) <= rho:
        return Centre(mean, True)
    w = Median().fuse(rows, None, watch=False).w.double()
    apart, size = distances_to(rows, w), float(w.norm())
    tested: set[int] = set()
    for _ in range(iterations):
        least = max(rho, ROUNDING * size, LEAST)
        pulls = 1 / apart.clamp(min=least) / len(rows)
        pull, gram = _pull(rows, w, pulls)
        if pull <= tolerance:
            return Centre(w.to(rows.dtype), True)
        weiszfeld = pulls / pulls.sum()
        factors = weiszfeld if gram is None else _newton(gram, pulls, apart, least)
        moved, before = _moved(rows, w, factors), _envelope(apart, least)
        if factors is not weiszfeld and not _envelope(moved.apart, least) < before:
            moved = _moved(rows, w, weiszfeld)
        # Toward a centre near a row, steps get ever shorter: a row that outweighs the others is tested itself.
        nearest = int(apart.argmin())
        if float(apart[nearest]) > least and nearest not in tested and float(weiszfeld[nearest]) > 1 / 3:
            tested.add(nearest)
            there = _moved(rows, w, one_hot(torch.tensor(nearest), len(rows)).to(pulls))
            moved = there if _envelope(there.apart, least) < _envelope(moved.apart, least) else moved
        w, apart, size = moved.w, moved.apart, moved.size
        if moved.step <= ROUNDING * size:
            return Centre(w.to(rows.dtype), True)
    return Centre(w.to(rows.dtype), False)


def _envelope(apart: Tensor, rho: float) -> float:
    """The sum of the Moreau envelopes of vectors of these lengths."""
    return float(torch.where(apart > rho, apart - rho / 2, apart.square() / (2 * rho)).sum())


def _pull(rows: Rows, w: Tensor, pulls: Tensor) -> tuple[float, Tensor | None]:
    """||sum_k pulls_k (w_k - w)||, and the Gram matrix of the w_k - w if there are few rows."""
    few = len(rows) <= NEWTON

    def work(at: int, end: int, block: Tensor, w: Tensor) -> Tensor:
        around = block.sub_(w)
        pull = (pulls @ around).square().sum()[None]
        parts = [pull, (around @ around.t()).flatten()] if few else [pull]
        return torch.cat(parts)

    sums = rows.total(work, w, numbers=WIDE, dtype=torch.float64)
    return float(sums[0].sqrt()), sums[1:].view(len(rows), len(rows)) if few else None


def _newton(gram: Tensor, pulls: Tensor, apart: Tensor, rho: float) -> Tensor:
    """The Newton step on the mean envelope as factors of the w_k - w; not finite where the matrix is singular.

    The Hessian is a multiple of the identity, sum_k pulls_k, minus one matrix of rank 1 per row further away than rho.
    It is inverted by the identity of Woodbury.
    """
    total = pulls.sum()
    scale = torch.where((apart > rho) & gram.diagonal().isfinite(), (pulls / apart.square()).sqrt(), 0.0)
    inner = torch.where(scale * scale[:, None] > 0, gram * scale * scale[:, None], 0.0) / total
    right = scale * (torch.where(pulls > 0, gram * pulls, 0.0).sum(1)) / total
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solved, _ = torch.linalg.solve_ex(identity - inner, right)
    factors: Tensor = (pulls + scale * solved) / total
    return factors


class _Moved(NamedTuple):
    """A point after a step: the rows' distances to it, the length of the step, and its norm."""

    w: Tensor
    apart: Tensor
    step: float
    size: float


def _moved(rows: Rows, w: Tensor, factors: Tensor) -> _Moved:
    """Move w by sum_k factors_k (w_k - w)."""

    def work(at: int, end: int, block: Tensor, w: Tensor) -> Tensor:
        around = block.sub_(w)
        step = factors @ around
        w += step
        ends = torch.stack([step.square().sum(), w.square().sum()])
        return torch.cat([around.sub_(step).square_().sum(1), ends])

    new = w.clone()
    lengths = rows.total(work, into=new, numbers=WIDE, dtype=torch.float64).sqrt()
    return _Moved(new, lengths[:-2], float(lengths[-2]), float(lengths[-1]))
