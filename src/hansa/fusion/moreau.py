"""Centres of the Fed+ family: minimisers of mean Moreau envelopes (Yu, Kundu, Wynter and Lim 2021).

The centre of vectors w_k minimises the mean of the Moreau envelopes of w_k - w over w (`core.prox`). For a large rho it
is the mean; for a small rho it is the geometric median (L2 norm) or the coordinate-wise median (L1 norm).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hansa.core.prox import Norm, prox
from hansa.core.rows import Rows
from hansa.fusion.coordinate import Median
from hansa.fusion.distances import WIDE, combination
from hansa.fusion.geometric import distances_to
from hansa.fusion.ordered import in_order, middle_of


def centre(norm: Norm, rows: Rows, rho: float, tolerance: float, iterations: int) -> Tensor:
    """The centre of the rows, by w <- mean(w_k - prox(w_k - w)): gradient descent on the mean envelope with step rho.

    It ends when no coordinate (for the L2 norm: the vector) moves by more than `tolerance`, or after `iterations`. The
    mean is the centre if all rows lie within rho of it. Else the descent begins at the coordinate-wise median, not at
    the mean as in the paper: one row could put the mean so far away that the way back takes any number of iterations.
    """
    mean = combination(rows, torch.ones(len(rows), dtype=torch.float64), len(rows))
    if norm == "squared" or math.isinf(rho):
        return mean
    find = _by_vector if norm == "l2" else _by_coordinate
    return find(rows, mean, rho, tolerance, iterations)


def _by_coordinate(rows: Rows, mean: Tensor, rho: float, tolerance: float, iterations: int) -> Tensor:
    """The centre for the L1 norm. Coordinates that have come to rest are left out of later iterations."""

    def work(at: int, end: int, block: Tensor, w: Tensor) -> Tensor:
        done = torch.zeros((), dtype=torch.int64)
        moving = ((block - w).abs().amax(0) > rho).nonzero().flatten()
        if not len(moving):
            return done
        block = block[:, moving]
        now = middle_of(block, in_order(block))[0]
        for _ in range(iterations):
            u = block - now
            change = (u - prox("l1", u, rho)).mean(0)
            now = now + change
            w[moving] = now.to(w.dtype)
            still = change.abs() > tolerance
            moving, block, now = moving[still], block[:, still], now[still]
            if not len(moving):
                break
        return done

    rows.total(work, into=mean, numbers=WIDE, dtype=torch.float64)
    return mean


def _by_vector(rows: Rows, mean: Tensor, rho: float, tolerance: float, iterations: int) -> Tensor:
    """The centre for the L2 norm; each iteration reads the rows once."""
    if float(distances_to(rows, mean).max()) <= rho:
        return mean
    w = Median().fuse(rows, None, watch=False).w.double()
    apart = distances_to(rows, w)
    for _ in range(iterations):
        # w_k - w - prox(w_k - w) = min(1, rho / ||w_k - w||) (w_k - w)
        pulls = (rho / apart.clamp(min=torch.finfo(apart.dtype).tiny)).clamp(max=1.0) / len(rows)

        def move(at: int, end: int, block: Tensor, w: Tensor, pulls: Tensor = pulls) -> Tensor:
            around = block.sub_(w)
            change = pulls @ around
            w += change
            return torch.cat([around.sub_(change).square_().sum(1), change.square().sum()[None]])

        lengths = rows.total(move, into=w, numbers=WIDE, dtype=torch.float64).sqrt()
        apart = lengths[:-1]
        if float(lengths[-1]) <= tolerance:
            break
    return w.to(rows.dtype)
