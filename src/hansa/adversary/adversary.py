"""Base of adversaries. An attack is a function of samples, or of updates as the rows of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hansa.core.op import Op, Payload
from hansa.core.quantities import Fraction
from hansa.core.registry import Part
from hansa.numerics import rng
from hansa.numerics.rows import Rows
from hansa.plumbing.errors import ConfigError

Sight = Literal["own", "group", "honest"]
Arriving = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Scene:
    """What attackers know about an exchange, beside the updates.

    `parties` are the parties whose rows the attackers hold; `asked` is the number of parties that were asked. `key` is
    the key of the random numbers of this exchange, `root` of those drawn once per run. `rate` is the server's learning
    rate, if it is known; `model` is the global parameter vector that was sent. `weights` are the weights of the rows in
    the server's mean (the samples, or 1 for equal weights) and `total` is the weight of all replies. Both are set only
    for attacks that wait for the other replies.
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
        """A row of standard normal numbers in float64 for a party. It does not depend on the other parties."""
        return rng.normal(torch.tensor(rng.folded(self.key, party), device=rows.device), (rows.dim,))


@dataclass(frozen=True)
class Adversary(Part):
    """Base of adversaries: a group of parties that attack together.

    The group is the share `fraction` of all parties (by default 0.2, rounded down), drawn by the run's seed, or the
    `parties` listed by name or number. Members know the updates that the other members of the group would have sent.
    Subclasses are frozen dataclasses and override `poison`, `forge` or `corruption`; they keep no state between calls.
    """

    fraction: Fraction | None = None
    parties: tuple[str | int, ...] = ()
    kind: ClassVar[str] = "adversary"
    usual: ClassVar[float] = 0.2  # the fraction if neither fraction nor parties is given
    poisons: ClassVar[bool] = False  # whether the attack changes its members' samples

    def __post_init__(self) -> None:
        if self.parties and self.fraction is not None:
            raise ConfigError("give fraction or parties, not both")
        if not self.parties and self.fraction is None:
            object.__setattr__(self, "fraction", self.usual)

    @property
    def forges(self) -> bool:
        """Whether members send other updates than they computed."""
        return type(self).forge is not Adversary.forge

    @property
    def corrupts(self) -> bool:
        """Whether values of any party are changed in transit; such an attack has no members."""
        return False

    @property
    def sees(self) -> Sight:
        """The updates that a member needs to know.

        "own": its own update; "group": the updates of the whole group, and the weight of all replies; "honest": also
        the updates of honest parties. An attack that sees only its own update does not wait for the other replies.
        """
        return "own"

    @property
    def needs_rate(self) -> bool:
        """Whether the attack needs the server's learning rate and the weights of the server's mean."""
        return False

    @property
    def constrains(self) -> bool:
        """Whether members train another objective than the other parties (`training`)."""
        return False

    def training(self, op: Op, payload: Payload) -> tuple[Op, Payload]:
        """The op and the payload with which a member trains; by default those that it is asked.

        Raise ConfigError for an op that the attack cannot change.
        """
        return op, payload

    def check(self, shape: tuple[int, ...], classes: int | None) -> None:
        """Raise ConfigError if the attack cannot poison samples of this shape or these classes."""

    def learn(self, samples: list[Tensor]) -> Adversary:
        """The attack, completed with facts from its members' own samples, one tensor per party, before the run."""
        return self

    def poison(self, x: Tensor, y: Tensor, classes: int, stream: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return one party's poisoned training samples. The arguments are not changed."""
        return x, y

    def probe(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Test samples, with the classes that the attack wants the model to give them."""
        return None

    def forge(self, own: Rows, honest: Rows, scene: Scene) -> Iterable[Tensor]:
        """The updates that the members send, given their own updates [m, d] and those of honest parties [h, d].

        An attack that sees only its own update gets one row per call, and no honest rows.
        """
        return (own.row(k) for k in range(len(own)))

    def corruption(self, scene: Scene, like: Tensor) -> Arriving:
        """Return a function (party, update sent) -> update that arrives, for updates shaped like `like`.

        The function does not change its argument.
        """
        return lambda party, row: row

    def __call__(self, updates: Tensor, attackers: Sequence[int] = (), *, seed: int = 0, round: int = 0,
                 weights: Sequence[int] | None = None, rate: float = 1.0) -> Tensor:  # fmt: skip
        """Return the updates [K, d] with the attackers' rows replaced by the attack, in a new tensor of the same type.

        `weights` are the weights of the rows in the server's mean, by default equal; `rate` is the server's learning
        rate.
        """
        every = tuple(range(len(updates)))
        shares = tuple(weights) if weights is not None else (1,) * len(updates)
        hostile = tuple(sorted(set(attackers)))
        unknown = [row for row in hostile if row not in every]
        if unknown or len(shares) != len(updates):
            raise ConfigError(
                f"attackers must be rows 0..{len(updates) - 1} and weights one per row, got {unknown or shares}"
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
    """Apply a function to each row, computed in float64 and returned in the rows' type."""
    return (change(rows.row(k).to(torch.float64)).to(rows.dtype) for k in range(len(rows)))


def by_column(rows: Rows, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a rule to blocks of columns, computed in float64 and returned in the rows' type."""
    return torch.cat(list(rows.map(lambda at, end, block: rule(block).to(rows.dtype), dtype=torch.float64)))


def random_rows(n: int, share: float, stream: np.random.Generator) -> Tensor:
    """Draw the share `share` of n row numbers (rounded down), in rising order."""
    return torch.from_numpy(np.sort(stream.permutation(n)[: int(share * n + 1e-9)]))


def check_class(name: str, value: int, classes: int | None) -> None:
    """Refuse a class outside 0..classes - 1; `classes` is None if the targets are not classes."""
    if classes is None:
        raise ConfigError("this attack changes classes; it needs targets with one class number per sample")
    if not 0 <= value < classes:
        raise ConfigError(f"{name} must be a class in 0..{classes - 1}, got {value}")
