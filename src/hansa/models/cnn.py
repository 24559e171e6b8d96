"""The convolutional network of the first federated-learning paper."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hansa.core.registry import register
from hansa.models.model import Model


@register("cnn")
@dataclass(frozen=True)
class Cnn(Model):
    """Two 5 by 5 convolutions (32 and 64 channels) with 2 by 2 pooling, then 512 units: 1,663,370 parameters on MNIST.

    McMahan et al. 2017, "MNIST CNN"; the convolutions keep the image's size, which the parameter count implies.
    """

    inputs: tuple[int, ...] = (1, 28, 28)
    outputs: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_images(side=4)

    def __call__(self) -> nn.Module:
        channels, height, width = self.inputs
        return nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), 512),
            nn.ReLU(),
            nn.Linear(512, self.outputs),
        )
