"""What every attack promises. Attacks are functions on samples, or on updates as the rows of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hansa.core import rng
from hansa.core.errors import ConfigError
from hansa.core.registry import Part
from hansa.core.rows import Rows

Sight = Literal["own", "group", "honest"]
Arriving = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Scene:
    """What attackers know of an exchange beside the updates.

    `parties` are those whose rows they hold; `asked` is how many were asked. `key` names the random numbers of this
    exchange, `root` those drawn once in a run. `rate` is the server's learning rate, where it is known; `model` the
    global parameter vector that was sent. `weights` says how much each of the rows counts in the server's mean (its
    samples, or 1 where the server weighs all alike) and `total` how much all replies do: both are known to attacks that
    wait for the others.
    """

    parties: tuple[int, ...]
    asked: int
    round: int
    key: int
    root: int
    rate: float | None = None
    model: Tensor | None = None
    weights: tuple[int, ...] = ()
    total: int = 0

    def normal(self, party: int, rows: Rows) -> Tensor:
        """A row of standard normal numbers in float64 for a party: who else is there does not change them."""
        return rng.normal(torch.tensor(rng.folded(self.key, party), device=rows.device), (rows.dim,))


@dataclass(frozen=True)
class Adversary(Part):
    """Base of adversaries: a group of parties that attack together.

    The group is the share `fraction` of all parties (0.2 unless said otherwise, rounded down), drawn by the run's
    seed, or the `parties` named by name or number. Its members know what the others of the group would have sent.
    Subclasses are frozen dataclasses and override `poison`, `forge` or `corruption`; they keep nothing between calls.
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
    def sees(self) -> Sight:
        """Whether a member needs only what it would have sent itself, or what the whole group would have sent (and how
        much all replies count), or also what everybody else sends. What sees its own need not wait for the others."""
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

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterable[Tensor]:
        """What each member sends, given what they would have sent [m, d] and what honest parties send [h, d].

        An attack that sees its own update alone is given one row at a time, and nothing of the others.
        """
        return (own.row(k) for k in range(len(own)))

    def corruption(self, scene: Scene, like: Tensor) -> Arriving:
        """What happens to updates such as `like` on their way: a function of a party of the scene and what it sent,
        which stays as it is, that gives what arrives."""
        return lambda party, row: row

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
            return Scene(rows, len(every), round, rng.key(seed, "attack", round), rng.key(seed, "attack"), rate,
                         weights=tuple(shares[row] for row in rows), total=sum(shares))  # fmt: skip

        out, rows = updates.clone(), Rows(updates)
        if hostile and self.forges and (honest or self.sees != "honest"):
            for row, sent in zip(hostile, self.forge(rows.take(hostile), rows.take(honest), scene(hostile)),
                                 strict=True):  # fmt: skip
                out[row] = sent
        if self.corrupts and every:
            arrives = self.corruption(scene(every), out[0])
            out = torch.stack([arrives(row, out[row]) for row in every])
        return out


def row_by_row(rows: Rows, change: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Each row changed, reckoned in float64, in the rows' type."""
    return (change(rows.row(k).to(torch.float64)).to(rows.dtype) for k in range(len(rows)))


def by_column(rows: Rows, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """What a rule makes of a matrix, column by column: reckoned in float64, a block at a time, in the rows' type."""
    return torch.cat(list(rows.map(lambda at, end, block: rule(block).to(rows.dtype), dtype=torch.float64)))


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
