"""Distances between updates, from a Gram matrix that is summed over blocks of columns."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hansa.core.sums import BLOCK
from hansa.fusion.ordered import NotFinite
from hansa.numerics.norms import SAFE, l2_norm
from hansa.numerics.rows import Rows
from hansa.replies.reply_checks import all_finite

COLUMNS = 2**18  # added at a time
PRODUCTS, WIDE = 2**18, 2**17  # numbers multiplied, or converted to float64, at a time: they fit into a core's cache
DIRECT = 2**22  # up to this many differences, all pairs are compared directly
SAMPLE = 256  # columns that are used to find a central row
# A squared distance below this share of the squared norms is mostly rounding error of products of that type.
CANCELS = {torch.float32: 0.02, torch.float64: 1e-6}


def squared_distances(rows: Rows) -> Tensor:
    """||v_i - v_j||^2 of all pairs, in float64; infinite if it is too large for float64.

    ||v_i - c||^2 + ||v_j - c||^2 - 2 <v_i - c, v_j - c>, with a central row c in place of the origin. An entry
    depends on its own two rows only, so a huge update does not spoil the distances between other updates. Where the
    difference cancels or overflows, it is computed again with products in float64, and then directly from the rows.
    """
    k = len(rows)
    result = torch.zeros(k, k, dtype=torch.float64)
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
            result = torch.where(sound, apart, result)
            wanted = wanted & ~sound
            if not bool(wanted.any()):
                break
    _compare(rows, wanted, result)
    _check_finite(rows, result.sum(1))
    return result


def _central(rows: Rows) -> int:
    """The row with the smallest median distance to the others, estimated from a sample of the columns."""
    sample = rows.sample(SAMPLE).double().cpu()
    apart = torch.stack([(sample - row).square().sum(1) for row in sample])
    return int(apart.median(1).values.nan_to_num(nan=torch.inf).argmin())


def _gram(rows: Rows, centre: Tensor, dtype: torch.dtype) -> Tensor:
    def work(at: int, end: int, block: Tensor, centre: Tensor) -> Tensor:
        around = block.sub_(centre.to(dtype))
        return (around @ around.t()).double()

    gram = rows.total(work, centre, numbers=max(PRODUCTS, len(rows) ** 2), dtype=dtype).cpu()
    return (gram + gram.t()) / 2


def _compare(rows: Rows, wanted: Tensor, result: Tensor) -> None:
    """Compute the wanted distances pair by pair and write them into `result`."""
    pairs = [(i, row.nonzero().flatten().to(rows.device)) for i, row in enumerate(wanted.triu()) if bool(row.any())]
    if not pairs:
        return

    def work(at: int, end: int, block: Tensor) -> Tensor:
        return torch.cat([(block[others] - block[i]).square_().sum(1) for i, others in pairs])

    apart = rows.total(work, numbers=WIDE, dtype=torch.float64).cpu()
    for i, others in pairs:
        js = others.cpu()
        result[i, js], apart = apart[: len(js)], apart[len(js) :]
        result[js, i] = result[i, js]


def norms(rows: Rows) -> Tensor:
    """The norm of each row, in float64; infinite only if it is too large for float64."""
    return layer_norms(rows, [rows.dim])[:, 0]


def layer_norms(rows: Rows, lengths: Sequence[int]) -> Tensor:
    """The norm of each layer of each row, [K, layers], as `norms`; a row is its layers, one after another."""
    ends = list(itertools.accumulate(lengths))
    layers = list(zip([0, *ends], ends, strict=False))

    def work(at: int, end: int, block: Tensor) -> Tensor:
        block.square_()
        sums = block.new_zeros(len(block), len(layers))
        for layer in range(bisect.bisect_right(ends, at), len(layers)):
            start, stop = layers[layer]
            if start >= end:
                break
            sums[:, layer] = block[:, max(start, at) - at : min(stop, end) - at].sum(1)
        return sums

    squares = rows.total(work, numbers=WIDE, dtype=torch.float64)
    _check_finite(rows, squares.sum(1))
    result = squares.sqrt()
    for k, layer in (~((result > SAFE[0]) & (result < SAFE[1]))).nonzero().tolist():
        result[k, layer] = l2_norm([rows.row(k)[slice(*layers[layer])]])
    return result


def _check_finite(rows: Rows, sums: Tensor) -> None:
    """Raise NotFinite if a row with an infinite or NaN sum has such values itself, and is not only too large."""
    for k in (~torch.isfinite(sums)).nonzero().flatten().tolist():
        if not all_finite(rows.row(k)):
            raise NotFinite


class Scratch(threading.local):
    """Memory of each thread, which is not sent along with a function that uses it."""

    wide: Tensor | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Scratch, ()


def combination(rows: Rows, shares: Tensor, divide: float = 1.0) -> Tensor:
    """sum_k shares_k v_k / divide, in the type of the rows.

    Like the sums of a federation, it is added in float64, in the order of the rows, in blocks of rows.
    """
    used = [(k, float(share)) for k, share in enumerate(shares.tolist()) if share]
    out = torch.empty(rows.dim, dtype=rows.dtype, device=rows.device)

    divide, scratch = float(divide), Scratch()

    def work(at: int, end: int, block: Tensor, out: Tensor) -> Tensor:
        if scratch.wide is None or scratch.wide.shape[1] < end - at:  # to allocate it for each row would take too long
            scratch.wide = torch.empty(3, end - at, dtype=torch.float64, device=block.device)
        row, part, sums = scratch.wide[:, : end - at]
        sums.zero_()
        for start in range(0, len(used), BLOCK):
            part.zero_()
            for k, share in used[start : start + BLOCK]:
                part.add_(row.copy_(block[k]), alpha=share)
            sums.add_(part)
        out[:] = sums.div_(divide)
        return torch.tensor(not all_finite(out), dtype=torch.int64)

    if int(rows.total(work, into=out, numbers=COLUMNS * len(rows), single=True)):
        raise NotFinite
    return out
