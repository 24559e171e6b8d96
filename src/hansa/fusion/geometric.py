"""The geometric median (Weiszfeld 1937, Vardi and Zhang 2000; as a robust aggregate, Pillutla, Kakade and Harchaoui
2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hansa.core.ask import Gathered
from hansa.core.quantities import Iterations, Tolerance
from hansa.core.registry import register
from hansa.fusion.coordinate import Median
from hansa.fusion.distances import WIDE, combination
from hansa.fusion.fusion import Fused, Robust
from hansa.fusion.ordered import NotFinite
from hansa.numerics.rows import Rows

ROUNDING = 1e-15  # a step shorter than this share of the point's norm is rounding error


@register("geometric-median")
@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The point with the least sum of distances to all updates. Weiszfeld 1937, Vardi and Zhang 2000.

    Every update pulls the point z toward itself, with a force as large as its weight w_i. A step of Weiszfeld is
    z <- sum_i b_i v_i / sum_i b_i with b_i = w_i / ||z - v_i||, over the updates that are not at z; together they pull
    with r = ||sum_i b_i (v_i - z)||. Updates at z hold it with their weight eta: if eta >= r, z is the median,
    otherwise z takes 1 - eta / r of the step. The search stops when r - eta is at most `tolerance` of the whole weight
    (the sum of distances is then within about that share of its least value) or after `iterations`. It begins at the
    coordinate-wise median: one update can put the mean so far away that the way back takes hundreds of iterations.

    Holds while hostile parties have less than half of the weight, but not against faults that are spread over the
    coordinates of all parties. Parties have equal weights; `weighted` weights them by samples (Pillutla et al. 2022),
    and then a party that claims most of the samples decides. The share reported for an update is w_i / ||z - v_i||;
    updates nearer than the median distance get the share of the median distance, because the nearest update does not
    decide alone.
    """

    iterations: Iterations = 300
    tolerance: Tolerance = 1e-6
    weighted: bool = False

    def weighs(self, answer: Gathered) -> Tensor | None:
        return answer.weights.double() if self.weighted else None

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        w = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights
        factors, apart = self._search(rows, w.to(rows.device))
        return Fused(combination(rows, factors), _shares(w.cpu(), apart.cpu()), weights=weights)

    def _search(self, rows: Rows, w: Tensor) -> tuple[Tensor, Tensor]:
        """The median as a combination of the rows, and the distance of each row to it."""
        slack = self.tolerance * float(w.sum())
        z = Median().fuse(rows, None, watch=False).w.double()
        apart = distances_to(rows, z)
        tested: set[int] = set()
        for step in range(self.iterations):
            pulls = _pulls(w, apart)
            factors = pulls / pulls.sum()
            nearest = int(torch.where(w > 0, apart, torch.inf).argmin())
            at_row = float(apart[nearest]) == 0
            if not at_row and not float(pulls.sum()) > 0:  # no distance is finite
                raise NotFinite
            # Toward a median that is a row, steps get ever shorter: a row that outweighs the others is tested itself.
            outweighs = float(factors[apart == apart[nearest]].sum()) > 0.5
            if at_row or (step and outweighs and nearest not in tested):
                tested.add(nearest)
                row = rows.row(nearest)
                there = apart if at_row else distances_to(rows, row)
                pull, held = _resultant(rows, _pulls(w, there), row), float(w[there == 0].sum())
                only = one_hot(torch.tensor(nearest), len(rows)).to(w)
                if pull <= held + slack:
                    return only, there
                if at_row:
                    factors = (1 - held / pull) * factors + held / pull * only
            apart, moved, norm = _move(rows, factors, z)
            if moved <= ROUNDING * norm or (not at_row and float(pulls.sum()) * moved <= slack):
                break
        return factors, apart


def _pulls(w: Tensor, apart: Tensor) -> Tensor:
    """w_i / ||z - v_i||, and 0 for the rows at z."""
    return torch.where(apart > 0, w / apart, 0.0)


def _shares(w: Tensor, apart: Tensor) -> list[float]:
    """The rows' shares in the median: inverse distances, limited by the inverse of the median distance."""
    middle = apart.sort().values[len(apart) // 2]
    parts = w / apart.clamp(min=middle) if middle > 0 else torch.where(apart > 0, 0.0, w)
    return (parts / parts.sum()).tolist()


def _move(rows: Rows, factors: Tensor, z: Tensor) -> tuple[Tensor, float, float]:
    """Set z to a combination of the rows; return the rows' distances to z, the length of the step and the norm of z."""

    def work(at: int, end: int, block: Tensor, z: Tensor) -> Tensor:
        new = factors @ block
        ends = torch.stack([(new - z).square().sum(), new.square().sum()])
        z[:] = new
        return torch.cat([block.sub_(new).square_().sum(1), ends])

    lengths = rows.total(work, into=z, numbers=WIDE, dtype=torch.float64).sqrt()
    return lengths[:-2], float(lengths[-2]), float(lengths[-1])


def _resultant(rows: Rows, pulls: Tensor, point: Tensor) -> float:
    """||sum_i pulls_i (v_i - point)||."""

    def work(at: int, end: int, block: Tensor, point: Tensor) -> Tensor:
        return (pulls @ block.sub_(point)).square().sum()

    return float(rows.total(work, point, numbers=WIDE, dtype=torch.float64).sqrt())


def distances_to(rows: Rows, point: Tensor) -> Tensor:
    """The distance of each row to a point, in float64."""

    def work(at: int, end: int, block: Tensor, point: Tensor) -> Tensor:
        return block.sub_(point).square_().sum(1)

    return rows.total(work, point, numbers=WIDE, dtype=torch.float64).sqrt()
