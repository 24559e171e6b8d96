"""FedProx: FedAvg with a proximal term (Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.algorithms.fedavg import FedAvg
from hansa.core.registry import register
from hansa.local import LocalSolver, Proximal


@register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """Parties minimise F_k(w) + mu/2 ||w - w_t||^2, and those that do part of the work still count. Li et al. 2020.

    Weights are the samples of those that replied and the cohort is drawn uniformly, as in the authors' code; their
    theory draws parties by their samples and weighs them alike: `run.select = "weighted"`. Stragglers belong to the run
    (`run.devices.stragglers`, `run.late`).
    """

    local: LocalSolver = Proximal()
