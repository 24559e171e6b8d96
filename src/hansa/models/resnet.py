"""A small residual network with GroupNorm.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2 (the CIFAR family);
GroupNorm instead of BatchNorm after Hsieh, Phanishayee, Mutlu and Gibbons, "The Non-IID Data Quagmire of Decentralized
Machine Learning", ICML 2020: statistics of a batch mislead when parties' data differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn

from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.models.model import Model
from hansa.plumbing.errors import ConfigError

DEEPEST = 1202  # layers of the deepest network that He et al. 2016 trained


@register("resnet-gn")
@dataclass(frozen=True)
class ResNetGn(Model):
    """A residual network for small images, with GroupNorm: ResNet-8 has 78,042 parameters on CIFAR-10.

    He et al. 2016 and Hsieh et al. 2020. Three stages of `width`, 2 `width` and 4 `width` channels with (depth - 2) / 6
    blocks each; depth is 8, 14, 20 and so on. `groups` is the number of groups of each GroupNorm.
    """

    inputs: tuple[int, ...] = (3, 32, 32)
    outputs: int = 10
    depth: Annotated[int, Meta(ge=8, le=DEEPEST)] = 8
    width: Count = 16
    groups: Count = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_images(side=4)
        if self.depth % 6 != 2:
            raise ConfigError(f"depth is {self.depth}; it must be 6 n + 2: 8, 14, 20, 26 and so on, up to {DEEPEST}")
        if self.width % self.groups:
            raise ConfigError(f"width {self.width} cannot be divided into {self.groups} groups; choose a multiple")

    def __call__(self) -> nn.Module:
        channels = self.width
        layers: list[nn.Module] = [
            nn.Conv2d(self.inputs[0], channels, 3, padding=1, bias=False),
            nn.GroupNorm(self.groups, channels),
            nn.ReLU(),
        ]
        for stage in range(3):
            for block in range((self.depth - 2) // 6):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(ResidualBlock(channels, self.width * 2**stage, stride, self.groups))
                channels = self.width * 2**stage
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.outputs))


class ResidualBlock(nn.Module):
    """Two 3 by 3 convolutions beside a shortcut, which is a 1 by 1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(groups, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(groups, channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False),
                nn.GroupNorm(groups, channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))
