"""FedProx: FedAvg with a proximal term (Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.algorithms.fedavg import FedAvg
from hansa.core.registry import register
from hansa.local import LocalSolver, Proximal


@register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """Parties minimise F_k(w) + mu/2 ||w - w_t||^2; partial work still counts. Li et al. 2020.

    The cohort is drawn uniformly, and replies are weighted by samples, as in the authors' code. Their theory draws
    parties in proportion to their samples and gives them equal weights: `run.select = "weighted"`. Stragglers are
    settings of the run (`run.devices.stragglers`, `run.late`).
    """

    local: LocalSolver = Proximal()
