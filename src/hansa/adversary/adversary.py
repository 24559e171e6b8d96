"""What every attack promises. Attacks are functions on samples, or on updates as the rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hansa.core import rng
from hansa.core.errors import ConfigError
from hansa.core.registry import Part


@dataclass(frozen=True)
class Scene:
    """What attackers know of an exchange beside the updates.

    `parties` are those whose rows they hold and `weights` how much each of these counts in the server's mean (its
    samples, or 1 where the server weighs all alike); `honest_weights` are the same for the honest rows, `total` is that
    of all replies. `asked` is how many parties were asked. `rate` is the server's learning rate, where it is known;
    `model` the global parameter vector that was sent. `key` names the random numbers of this exchange, `root` those
    drawn once in a run.
    """

    parties: tuple[int, ...]
    weights: tuple[int, ...]
    total: int
    asked: int
    round: int
    key: int
    root: int
    honest_weights: tuple[int, ...] = ()
    rate: float | None = None
    model: Tensor | None = None

    def keys(self, device: torch.device) -> list[Tensor]:
        """A random key for each row, named by its party: who else is there does not change it."""
        return list(rng.fold(torch.tensor(self.key), torch.tensor(self.parties, dtype=torch.int64)).to(device))

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers in float64, as many as `like` has, a row for each party."""
        return torch.stack([rng.normal(key, like.shape[1:]) for key in self.keys(like.device)])


@dataclass(frozen=True)
class Adversary(Part):
    """Base of adversaries: a group of parties that attack together.

    The group is the share `fraction` of all parties (0.2 unless said otherwise, rounded down), drawn by the run's
    seed, or the `parties` named by name or number. Its members know what the others of the group would have sent.
    Subclasses are frozen dataclasses and override `poison`, `forge` or `corrupt`; they keep nothing between calls.
    """

    fraction: float | None = None
    parties: tuple[str | int, ...] = ()
    kind: ClassVar[str] = "adversary"
    usual: ClassVar[float] = 0.2  # the fraction where neither it nor parties are given
    poisons: ClassVar[bool] = False  # whether it changes its members' samples

    def __post_init__(self) -> None:
        if self.parties and self.fraction is not None:
            raise ConfigError("give fraction or parties, not both: a group is drawn or named")
        if not self.parties and self.fraction is None:
            object.__setattr__(self, "fraction", self.usual)
        if self.fraction is not None and not 0.0 <= self.fraction <= 1.0:
            raise ConfigError(f"fraction is a share of the parties in 0..1, got {self.fraction}")

    @property
    def forges(self) -> bool:
        """Whether its members send something else than they computed."""
        return type(self).forge is not Adversary.forge

    @property
    def corrupts(self) -> bool:
        """Whether values of any party are changed on their way; such an attack has no members."""
        return False

    @property
    def sees(self) -> Literal["own", "honest"]:
        """Whether it needs only what its members would have sent, or also what everybody else sends."""
        return "own"

    @property
    def needs_rate(self) -> bool:
        """Whether it needs to know the server's learning rate and whose updates are averaged together."""
        return False

    def check(self, shape: tuple[int, ...], classes: int | None) -> None:
        """Refuse, with the reason, samples of a shape or classes that it cannot poison."""

    def learn(self, samples: list[Tensor]) -> Adversary:
        """The attack with what its members find out from their own samples, party by party, before the run."""
        return self

    def poison(self, x: Tensor, y: Tensor, classes: int, stream: np.random.Generator) -> tuple[Tensor, Tensor]:
        """One party's training samples as the attack wants them. The arguments are not changed."""
        return x, y

    def probe(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Test samples, with the classes that the attack wants the model to give them."""
        return None

    def forge(self, own: Tensor, honest: Tensor, scene: Scene) -> Tensor:
        """What the members send, [m, d], given what they would have sent and what honest parties send, [h, d]."""
        return own

    def corrupt(self, rows: Tensor, scene: Scene) -> Tensor:
        """What arrives of the updates [n, d] that all parties have sent."""
        return rows

    def __call__(self, updates: Tensor, attackers: Sequence[int] = (), *, seed: int = 0, round: int = 0,
                 weights: Sequence[int] | None = None, rate: float = 1.0) -> Tensor:  # fmt: skip
        """The updates [K, d] with the rows of `attackers` as they send them, in a new tensor of the same type.

        The server's mean weighs rows by `weights`, by default all alike, and the server steps with `rate`.
        """
        every = tuple(range(len(updates)))
        shares = tuple(weights) if weights is not None else (1,) * len(updates)
        hostile = tuple(sorted(set(attackers)))
        unknown = [row for row in hostile if row not in every]
        if unknown or len(shares) != len(updates):
            raise ConfigError(
                f"attackers are rows 0..{len(updates) - 1} and weights one a row, got {unknown or shares}"
            )
        honest = tuple(row for row in every if row not in hostile)

        def scene(rows: tuple[int, ...]) -> Scene:
            return Scene(rows, tuple(shares[row] for row in rows), sum(shares), len(every), round,
                         rng.key(seed, "attack", round), rng.key(seed, "attack"),
                         tuple(shares[row] for row in honest), rate)  # fmt: skip

        out = updates.clone()
        if hostile and self.forges and (len(honest) or self.sees == "own"):
            out[list(hostile)] = self.forge(updates[list(hostile)], updates[list(honest)], scene(hostile))
        return self.corrupt(out, scene(every)) if self.corrupts else out


def some(n: int, share: float, stream: np.random.Generator) -> Tensor:
    """Row numbers of that share of n samples, rounded down, in rising order."""
    return torch.from_numpy(np.sort(stream.permutation(n)[: int(share * n + 1e-9)]))


def check_share(share: float) -> None:
    """The check of the share of samples that an attack changes."""
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"share is a part of the samples in 0..1, got {share}")


def check_class(name: str, value: int, classes: int | None) -> None:
    """The check of a class that an attack names; `classes` is None where targets are no classes."""
    if classes is None:
        raise ConfigError("this attack changes classes, and the targets of this task are not one class number a sample")
    if not 0 <= value < classes:
        raise ConfigError(f"{name} is a class in 0..{classes - 1}, got {value}")
