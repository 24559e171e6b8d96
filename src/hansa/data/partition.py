"""How the rows of one data set are divided among simulated parties.

The kinds of skew are those of Kairouz et al., "Advances and Open Problems in Federated Learning", 2021, section 3.1;
the recipes are those of McMahan et al. 2017 and of NIID-Bench (Li, Diao, Chen and He, "Federated Learning on Non-IID
Data Silos: An Experimental Study", ICDE 2022). Label skew is in `label_skew`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.quantities import Amount, AnyCount, Parties
from hansa.core.registry import Part, register
from hansa.data.dataset import Data
from hansa.plumbing.errors import ConfigError, DataError

Concentration = Annotated[float, Meta(gt=0, description="of a Dirichlet distribution")]
DRAWS = 100  # how often a random split is drawn again until every party has its minimum


class Partition(Part):
    """Base of partitions: every row goes to exactly one party; the same seed gives the same split.

    The partition `columns` is the exception: it divides columns (`data`).
    """

    kind: ClassVar[str] = "partition"
    data: ClassVar[str] = "rows"
    changes: ClassVar[bool] = False  # whether `features` changes numbers, which the codes of texts do not allow

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        """Row indices into the training samples, ascending, one array per party."""
        raise TypeError(f"the {self.kind} {self.name!r} does not define split()")

    def features(self, x: Tensor, party: int, seed: int) -> Tensor:
        """The features as this party sees them; unchanged unless the partition skews features."""
        return x


@register("iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Shuffle the rows and deal them out evenly: every party sees the same distribution.

    McMahan et al. 2017, the IID split. Sizes differ by one at most.
    """

    parties: Parties = 10

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        check_rows(len(data.y), self.parties, 1)
        order = generator(seed).permutation(len(data.y))
        return [np.sort(rows) for rows in np.array_split(order, self.parties)]


@register("noise")
@dataclass(frozen=True)
class Noise(Partition):
    """Feature skew: an IID split, then Gaussian noise that grows from party to party.

    Li et al. 2022 (NIID-Bench), noise-based feature imbalance: of N parties the i-th, counted from 1, adds noise with
    the standard deviation sigma * i / N. The paper calls that a variance; its code uses it as a deviation, as we do.
    """

    parties: Parties = 10
    sigma: Amount = 0.1
    changes: ClassVar[bool] = True

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        return Iid(self.parties).split(data, seed)

    def features(self, x: Tensor, party: int, seed: int) -> Tensor:
        if not x.is_floating_point():
            raise DataError("the partition 'noise' adds noise to numbers, and the samples of this data set are codes")
        if not 0 <= party < self.parties:
            raise ConfigError(f"there is no party {party}; the partition has the parties 0 to {self.parties - 1}")
        level = self.sigma * (party + 1) / self.parties
        noise = generator(seed, party + 1).normal(0.0, level, tuple(x.shape))
        return x + torch.from_numpy(noise).to(x)


@register("quantity")
@dataclass(frozen=True)
class Quantity(Partition):
    """Quantity skew: random rows, but the share of each party is drawn from a Dirichlet distribution.

    Li et al. 2022 (NIID-Bench), quantity skew. A small alpha gives few large parties and many small ones. Sizes are
    drawn again until each party has `min_size` rows; if that does not happen within 100 draws, the largest parties
    give rows to those that lack them. Only min_size = 0 allows empty parties.
    """

    parties: Parties = 10
    alpha: Concentration = 0.5
    min_size: AnyCount = 1

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        check_rows(len(data.y), self.parties, self.min_size)
        rng = generator(seed)
        order = rng.permutation(len(data.y))
        concentration = np.full(self.parties, self.alpha)

        def draw() -> list[np.ndarray]:
            return cut(order, rng.dirichlet(concentration))

        return draw_until(draw, self.min_size)


@register("natural")
@dataclass(frozen=True)
class Natural(Partition):
    """The parties of the data set itself: hospitals, speakers, devices.

    Only for data sets with a natural partition (heart, shakespeare, synthetic). Rows that the data set gives to no
    party are left out.
    """

    def split(self, data: Data, seed: int) -> list[np.ndarray]:
        if data.parties is None:
            raise DataError("this data set has no natural parties; choose a partition such as 'iid' or 'dirichlet'")
        return [np.sort(rows) for rows in data.parties]


def generator(seed: int, *stream: int) -> np.random.Generator:
    """A counter-based generator for a seed and the numbers of a stream."""
    if seed < 0:
        raise ConfigError(f"the seed is {seed}; a seed is 0 or more")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *stream])))


def cut(rows: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
    """Cut rows into consecutive pieces whose lengths follow the shares, which sum to 1."""
    return np.split(rows, np.round(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64).clip(0, len(rows)))


def draw_until(draw: Callable[[], list[np.ndarray]], min_size: int) -> list[np.ndarray]:
    """Draw splits until every part has `min_size` rows; after 100 draws let the largest parts fill the others up."""
    parts = draw()
    for _ in range(DRAWS - 1):
        if min(len(part) for part in parts) >= min_size:
            break
        parts = draw()
    sizes = np.array([len(part) for part in parts])
    while sizes.min() < min_size:
        poor, rich = int(sizes.argmin()), int(sizes.argmax())
        moved = min(min_size - sizes[poor], sizes[rich] - min_size)
        parts[poor] = np.concatenate([parts[poor], parts[rich][:moved]])
        parts[rich] = parts[rich][moved:]
        sizes[poor] += moved
        sizes[rich] -= moved
    return [np.sort(part) for part in parts]


def check_rows(rows: int, parties: int, min_size: int) -> None:
    """Refuse a data set that is too small for the parties asked for."""
    if rows < parties * min_size:
        raise DataError(
            f"{rows} rows are too few for {parties} parties with at least {min_size} row(s) each; "
            f"at most {rows // min_size} parties are possible"
        )
