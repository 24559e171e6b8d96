"""FedAvg with another server optimiser: FedAvgM (Hsu, Qi and Brown 2019), FedAdagrad, FedAdam and FedYogi (Reddi,
Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan 2021).

Each is FedAvg with another default of `server`; any server optimiser can be used instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from hansa.algorithms.fedavg import FedAvg
from hansa.core.registry import register
from hansa.server import Adagrad, Momentum, ServerAdam, ServerOptimizer, Yogi


@register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server, against parties whose classes differ. Hsu et al. 2019."""

    server: ServerOptimizer = Momentum()


@register("fedadagrad")
@dataclass(frozen=True)
class FedAdagrad(FedAvg):
    """FedAvg with Adagrad at the server, for sparse updates. Reddi et al. 2021, Algorithm 2."""

    server: ServerOptimizer = Adagrad()


@register("fedadam")
@dataclass(frozen=True)
class FedAdam(FedAvg):
    """FedAvg with Adam at the server. Reddi et al. 2021, Algorithm 2."""

    server: ServerOptimizer = ServerAdam()


@register("fedyogi")
@dataclass(frozen=True)
class FedYogi(FedAvg):
    """FedAvg with Yogi at the server. Reddi et al. 2021, Algorithm 2."""

    server: ServerOptimizer = Yogi()
