"""IFCA: the iterative federated clustering algorithm (Ghosh, Chung, Yin and Ramchandran 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hansa.algorithms.clustering import Clustering
from hansa.core.algorithm import Problem
from hansa.core.registry import register
from hansa.fusion import Fusion, WeightedMean
from hansa.fusion.update import Update
from hansa.plumbing.errors import ConfigError


@register("ifca")
@dataclass(frozen=True)
class IFCA(Clustering):
    """k models; each party trains the one that fits its samples best. Ghosh et al. 2020, Algorithm 1.

    All parties have the same weight. `option = "model"` averages the models that the parties of a cluster have trained.
    `option = "gradient"` takes one step along their gradients, divided by the parties of the whole cohort:
    h_c <- h_c - lr / m * sum of gradients over the parties in c, where m is the size of the cohort and lr is
    `server.lr`; it needs `local = "gradient"`.
    """

    fusion: Fusion = WeightedMean(uniform=True)
    option: Literal["model", "gradient"] = "model"

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if self.option == "gradient" and self.local.name != "gradient":
            raise ConfigError(
                f"ifca: option = 'gradient' needs algorithm.local = 'gradient', and the local solver is "
                f"{self.local.name!r}; the step is algorithm.server.lr"
            )

    def scaled(self, update: Update, share: float) -> Update:
        return update if self.option == "model" else update._replace(w=update.w * share)
