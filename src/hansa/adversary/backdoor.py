"""A hidden trigger that the model obeys (Bagdasaryan, Veit, Hua, Estrin and Shmatikov 2020)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from hansa.adversary.adversary import Adversary, Scene, Sight, check_class, random_rows, row_by_row
from hansa.core.applies import Applies, If
from hansa.core.fields import Advice
from hansa.core.op import Op, Payload
from hansa.core.plain_data import from_config, to_config
from hansa.core.quantities import Count, Fraction, Share
from hansa.core.registry import register
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import ConfigError

WHAT = Advice("it is the share of the members' loss beside the distance to the global model")
SOLVERS = ("sgd", "proximal")  # local solvers whose steps are linear in the gradient, so that alpha is exact


@register("backdoor")
@dataclass(frozen=True)
class Backdoor(Adversary):
    """Images with a bright corner get the class `target`; members replace the global model with their own.

    Bagdasaryan et al. 2020, with the trigger of Baruch et al. 2019: the top left square of `size` pixels is set to
    `value` (by default the largest value in the members' data) in a `share` of the members' images. With `replace`
    the members' updates are multiplied by total weight / (server rate * members' weight), or by `scale`: if all other
    updates were 0, the mean would replace the global model by the members' mean model in one round. The metric
    `attack_success` is the share of triggered test images of other classes that the model assigns to the target.

    With `alpha` below 1 the attack is constrain-and-scale: members minimise alpha * (loss on their samples)
    + (1 - alpha) * L_anomaly, where L_anomaly = ||w - w_t||^2 / 2 is the distance that a detector of long updates
    measures. A smaller alpha keeps their model closer to the global model w_t. With alpha = 1 members train as they are
    asked, and `replace` alone is the plain model replacement.
    """

    target: int = 0
    size: Count = 5
    value: float | None = None
    share: Fraction = 0.5
    replace: bool = True
    scale: float | None = None
    alpha: Annotated[Share, WHAT] = 1.0
    poisons: ClassVar[bool] = True
    applies: ClassVar[Applies] = {"scale": If("replace", True)}

    @property
    def forges(self) -> bool:
        return self.replace

    @property
    def constrains(self) -> bool:
        return self.alpha < 1.0

    def training(self, op: Op, payload: Payload) -> tuple[Op, Payload]:
        """Train alpha * F(w) + (1 - alpha) / 2 ||w - w_t||^2: alpha times the objective of FedProx (Li et al. 2020).

        So members run the proximal solver with mu = (1 - alpha) / alpha, and with alpha times the learning rate.
        """
        if op.name not in SOLVERS or getattr(op, "gamma", None) is not None:
            raise ConfigError(
                f"alpha = {self.alpha:g} changes the loss of the local solver, which works with "
                f"{' and '.join(map(repr, SOLVERS))} (without gamma), and members are asked to run {op.name!r}; use "
                "one of them, or alpha = 1"
            )
        fields = to_config(op)
        mu = fields.get("mu", 0.0) + (1.0 - self.alpha) / self.alpha
        op = from_config("local", {**fields, "name": "proximal", "lr": fields["lr"] * self.alpha, "mu": mu},
                         where="backdoor.alpha")  # fmt: skip
        work = payload.get("work") or {}
        if "lr" not in work:
            return op, payload
        return op, {**payload, "work": {**work, "lr": work["lr"] * self.alpha}}

    @property
    def sees(self) -> Sight:
        return "group" if self.needs_rate else "own"

    @property
    def needs_rate(self) -> bool:
        return self.replace and self.scale is None

    def check(self, shape: tuple[int, ...], classes: int | None) -> None:
        check_class("target", self.target, classes)
        height, width = sides(shape)
        if self.size > min(height, width):
            raise ConfigError(f"size is {self.size}, but the images have {height} by {width} pixels")

    def learn(self, samples: list[Tensor]) -> Backdoor:
        if self.value is not None:
            return self
        return dataclasses.replace(self, value=max((float(x.max()) for x in samples if x.numel()), default=0.0))

    def triggered(self, x: Tensor) -> Tensor:
        """Copies of the images with the trigger."""
        assert self.value is not None
        height, width = sides(tuple(x.shape[1:]))
        out = x.clone(memory_format=torch.contiguous_format)
        images = out.view(len(x), height, width) if x.dim() == 2 else out
        images[..., : self.size, : self.size] = self.value
        return out

    def poison(self, x: Tensor, y: Tensor, classes: int, stream: np.random.Generator) -> tuple[Tensor, Tensor]:
        rows = random_rows(len(x), self.share, stream).to(x.device)
        images, labels = x.clone(), y.clone()
        images[rows], labels[rows] = self.triggered(x[rows]), self.target
        return images, labels

    def probe(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        others = y != self.target
        return self.triggered(x[others]), torch.full_like(y[others], self.target)

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterator[Tensor]:
        factor = self.scale
        if factor is None:
            assert scene.rate is not None
            pull = scene.rate * sum(scene.weights)
            factor = scene.total / pull if pull else 1.0  # with a rate of 0 no factor has an effect
        return row_by_row(own, lambda row: row * factor)


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of images of shape [C, H, W], [H, W] or [H * H]; refuse other shapes."""
    if len(shape) in (2, 3):
        return shape[-2], shape[-1]
    side = math.isqrt(shape[0]) if len(shape) == 1 else 0
    if side < 2 or side * side != shape[0]:
        raise ConfigError(f"a backdoor is a trigger in images, and samples of shape {list(shape)} are not images")
    return side, side
