"""The geometric median (Weiszfeld 1937; as a robust aggregate, Pillutla, Kakade and Harchaoui 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.core.errors import ConfigError
from hansa.core.federation import Gathered
from hansa.core.registry import register
from hansa.core.rows import Rows, total
from hansa.fusion.coordinate import Median
from hansa.fusion.distances import WIDE, combination
from hansa.fusion.fusion import Fused, Robust


@register("geometric-median")
@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The point with the least sum of distances to all updates. Weiszfeld's iteration, smoothed: Pillutla et al. 2022.

    z <- sum_i b_i v_i / sum_i b_i with b_i = w_i / max(nu, ||z - v_i||), until z moves by less than `tolerance` of the
    median distance (not of their sum, which one far update fills) or `iterations` are done. Stands while the hostile
    have less than half of the weight; faults spread over the coordinates of all parties get by it. Parties count
    alike; `weighted` counts samples, as Pillutla et al. do, and then a party that claims most of them decides. It
    begins at the coordinate-wise median: from the mean, which one update can put anywhere, the way back may take
    hundreds of iterations.
    """

    nu: float = 1e-6
    iterations: int = 100
    tolerance: float = 1e-6
    weighted: bool = False

    def __post_init__(self) -> None:
        if not self.nu > 0:
            raise ConfigError(f"nu must be positive, got {self.nu}")
        if self.iterations < 1:
            raise ConfigError(f"iterations must be at least 1, got {self.iterations}")
        if not self.tolerance >= 0:
            raise ConfigError(f"tolerance must not be negative, got {self.tolerance}")

    def weighs(self, answer: Gathered) -> Tensor | None:
        return answer.weights.double() if self.weighted else None

    def fuse(self, rows: Rows, weights: Tensor | None, watch: bool = True, **known: Any) -> Fused:
        w = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights
        w = w.to(rows.device)
        wide = Median().fuse(rows, None, watch=False).w.double()
        apart = distances_to(rows, wide)
        for _ in range(self.iterations):
            b = w / apart.clamp(min=self.nu)
            b = b / b.sum()
            apart, moved = self._move(rows, b, wide)
            if moved <= self.tolerance * float(apart.median()):
                break
        return Fused(combination(rows, b), b.tolist())

    def _move(self, rows: Rows, b: Tensor, z: Tensor) -> tuple[Tensor, float]:
        """Set z to the combination of the rows and give their distances to it, and how far it went, in one pass."""

        def work(at: int, end: int, block: Tensor) -> Tensor:
            new = b @ block
            step = (new - z[at:end]).square().sum()
            z[at:end] = new
            return torch.cat([block.sub_(new).square_().sum(1), step[None]])

        found = total(rows.map(work, WIDE, torch.float64)).sqrt()
        return found[:-1], float(found[-1])


def distances_to(rows: Rows, point: Tensor) -> Tensor:
    """The distance of each row to a point, in float64."""

    def work(at: int, end: int, block: Tensor) -> Tensor:
        return block.sub_(point[at:end]).square_().sum(1)

    squares: Tensor = total(rows.map(work, WIDE, torch.float64))
    return squares.sqrt()
