"""Distances between updates, from a Gram matrix that is added up over blocks of columns."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from hansa.core.norms import SAFE, l2_norm
from hansa.core.reply_checks import all_finite
from hansa.core.rows import Rows, total
from hansa.core.sums import BLOCK
from hansa.fusion.ordered import NotFinite

COLUMNS = 2**18  # that are added at once
PRODUCTS, WIDE = 2**18, 2**17  # numbers that are multiplied, or made float64, at once: they stay in a core's cache
DIRECT = 2**22  # differences that take no time: all pairs of small matrices are compared as they are
SAMPLE = 256  # columns that are looked at to find a row in the middle
# Below these shares of the squared norms a squared distance is what cancels when products of that type are subtracted.
CANCELS = {torch.float32: 0.02, torch.float64: 1e-6}


def squared_distances(rows: Rows) -> Tensor:
    """||v_i - v_j||^2 of all pairs, in float64; infinite where it is larger than float64 can hold.

    ||v_i - c||^2 + ||v_j - c||^2 - 2 <v_i - c, v_j - c>, with a row c in the midst of the others in place of the
    origin: an entry depends on its own two rows only, so that a huge update spoils no distance between others. Where
    the difference cancels or overflows it is taken again with products in float64, and then from the rows as they are.
    """
    k = len(rows)
    found = torch.zeros(k, k, dtype=torch.float64)
    wanted = ~torch.eye(k, dtype=torch.bool)
    if k * k * rows.dim > DIRECT:
        centre = rows.row(_central(rows))
        narrow = rows.dtype != torch.float64 and rows.device.type == "cpu"
        for dtype in (torch.float32, torch.float64) if narrow else (torch.float64,):
            gram = _gram(rows, centre, dtype)
            norms = gram.diagonal()
            sums = norms[:, None] + norms[None, :]
            apart = sums - 2 * gram
            sound = wanted & torch.isfinite(apart) & (apart >= CANCELS[dtype] * sums)
            found = torch.where(sound, apart, found)
            wanted = wanted & ~sound
            if not bool(wanted.any()):
                break
    _compare(rows, wanted, found)
    _look(rows, found.sum(1))
    return found


def _central(rows: Rows) -> int:
    """The row whose median distance to the others is smallest, by some of the columns."""
    sample = rows.sample(SAMPLE).double().cpu()
    apart = torch.stack([(sample - row).square().sum(1) for row in sample])
    return int(apart.median(1).values.nan_to_num(nan=torch.inf).argmin())


def _gram(rows: Rows, centre: Tensor, dtype: torch.dtype) -> Tensor:
    def work(at: int, end: int, block: Tensor) -> Tensor:
        around = block.sub_(centre[at:end].to(dtype))
        return (around @ around.t()).double()

    gram: Tensor = total(rows.map(work, max(PRODUCTS, len(rows) ** 2), dtype)).cpu()
    return (gram + gram.t()) / 2


def _compare(rows: Rows, wanted: Tensor, found: Tensor) -> None:
    """Set the distances that are wanted, pair by pair."""
    pairs = [(i, row.nonzero().flatten().to(rows.device)) for i, row in enumerate(wanted.triu()) if bool(row.any())]
    if not pairs:
        return

    def work(at: int, end: int, block: Tensor) -> Tensor:
        return torch.cat([(block[others] - block[i]).square_().sum(1) for i, others in pairs])

    apart = total(rows.map(work, WIDE, torch.float64)).cpu()
    for i, others in pairs:
        js = others.cpu()
        found[i, js], apart = apart[: len(js)], apart[len(js) :]
        found[js, i] = found[i, js]


def norms(rows: Rows) -> Tensor:
    """The norm of each row, in float64, infinite only where it is larger than float64 can hold."""
    squares: Tensor = total(rows.map(lambda at, end, block: block.square_().sum(1), WIDE, torch.float64))
    _look(rows, squares)
    found = squares.sqrt()
    for k in (~((found > SAFE[0]) & (found < SAFE[1]))).nonzero().flatten().tolist():
        found[k] = l2_norm([rows.row(k)])
    return found


def _look(rows: Rows, sums: Tensor) -> None:
    """Where a row's sum is not finite, find out whether the row itself is not, or only too large to be squared."""
    for k in (~torch.isfinite(sums)).nonzero().flatten().tolist():
        if not all_finite(rows.row(k)):
            raise NotFinite


def combination(rows: Rows, shares: Tensor, divide: float = 1.0) -> Tensor:
    """sum_k shares_k v_k / divide, in the type of the rows: added in float64, in their order, in blocks of rows, as the
    sums of a federation are."""
    used = [(k, float(share)) for k, share in enumerate(shares.tolist()) if share]
    out = torch.empty(rows.dim, dtype=rows.dtype, device=rows.device)

    place = threading.local()

    def work(at: int, end: int, block: Tensor) -> bool:
        if not hasattr(place, "wide"):  # new memory for each row would cost more than adding it
            place.wide = torch.empty(3, end - at, dtype=torch.float64, device=rows.device)
        row, part, sums = place.wide[:, : end - at]
        sums.zero_()
        for start in range(0, len(used), BLOCK):
            part.zero_()
            for k, share in used[start : start + BLOCK]:
                part.add_(row.copy_(block[k]), alpha=share)
            sums.add_(part)
        out[at:end] = sums.div_(divide)
        return all_finite(out[at:end])

    if not all(list(rows.map(work, numbers=COLUMNS * len(rows)))):
        raise NotFinite
    return out
