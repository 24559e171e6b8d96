"""Networks that parties train on their own, and two ways to use them together: their ensemble and their mean."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hansa.core import own_model
from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway
from hansa.local.solver import LocalSolver
from hansa.numerics.objective import Objective

Pair = tuple[Tensor, Tensor]


def trained(make: Callable[[], nn.Module], parties: Sequence[Pair], local: LocalSolver, seed: int,
            device: str) -> list[nn.Module]:  # fmt: skip
    """Each party's own network, from initial values of its own: what a party of `pfnm` and `fedma` trains first."""
    objective = Objective(make, "cross_entropy", seed, device)
    modules = []
    for number, (x, y) in enumerate(parties):
        party = Party(number, objective, SampleGateway((x.to(device), y.to(device))), seed)
        params = own_model.train(local, party, party.initial())
        modules.append(objective.spec.load(copy.deepcopy(objective.network()), params).eval())
    return modules


@torch.no_grad()
def scores(module: nn.Module, x: Tensor) -> Tensor:
    """Class probabilities, in pieces that fit a device's memory."""
    device = next(module.parameters()).device
    return torch.cat([module(piece.to(device)).softmax(-1).cpu() for piece in x.split(1000)])


def accuracy(probabilities: Tensor, y: Tensor) -> float:
    return float((probabilities.argmax(-1) == y).double().mean())


def ensemble(modules: Sequence[nn.Module], x: Tensor, y: Tensor) -> float:
    """The accuracy of the mean of all networks' probabilities."""
    total = scores(modules[0], x)
    for module in modules[1:]:
        total = total + scores(module, x)
    return accuracy(total, y)


def mean_network(modules: Sequence[nn.Module], sizes: Sequence[int]) -> nn.Module:
    """The network whose weights are the mean of all networks' weights by samples, place by place."""
    mean, whole = copy.deepcopy(modules[0]), sum(sizes)
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            parameter.copy_(
                sum(dict(m.named_parameters())[name] * (n / whole) for m, n in zip(modules, sizes, strict=True))
            )  # type: ignore[arg-type]
    return mean
