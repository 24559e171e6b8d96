"""Networks without convolutions: logistic regression and the two-layer perceptron."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.models.model import Model


@register("logistic")
@dataclass(frozen=True)
class Logistic(Model):
    """One linear layer: multinomial logistic regression, or linear regression with one output.

    Li et al. 2020 (FedProx) use it for MNIST and the synthetic data.
    """

    inputs: tuple[int, ...] = (1, 28, 28)
    outputs: int = 10

    def __call__(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(self.width_in, self.outputs))


@register("2nn")
@dataclass(frozen=True)
class TwoNN(Model):
    """A perceptron with two hidden layers of 200 ReLU units: 199,210 parameters on MNIST.

    McMahan et al. 2017, "MNIST 2NN".
    """

    inputs: tuple[int, ...] = (1, 28, 28)
    outputs: int = 10
    hidden: Count = 200

    def __call__(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(self.width_in, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.outputs),
        )
