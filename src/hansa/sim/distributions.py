"""Distributions for simulated devices: seconds, factors, bytes per second.

A draw is a function of its key alone, so that a party's value depends neither on who else is drawn nor on how often.
"""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.quantities import Amount
from hansa.core.registry import Part, register
from hansa.numerics import rng
from hansa.plumbing.errors import ConfigError

Array = np.ndarray[Any, Any]
Mean = Annotated[float, Meta(gt=0)]


class Distribution(Part):
    """Base of distributions of numbers that are not negative."""

    kind: ClassVar[str] = "distribution"

    def draw(self, keys: Tensor, parties: Array) -> Array:
        """Draw one float64 number per key; keys are [parties] or [parties, draws]."""
        raise TypeError(f"the distribution {self.name!r} does not define draw()")

    def check(self, parties: int, positive: bool) -> None:
        """Raise ConfigError if the distribution does not fit; with `positive`, values must exceed 0."""


@register("constant")
@dataclass(frozen=True)
class Constant(Distribution):
    """Always the same value."""

    value: Amount

    def draw(self, keys: Tensor, parties: Array) -> Array:
        return np.full(tuple(keys.shape), self.value)

    def check(self, parties: int, positive: bool) -> None:
        if positive and self.value == 0:
            raise ConfigError("value must be positive, got 0")


@register("exponential")
@dataclass(frozen=True)
class Exponential(Distribution):
    """Exponential with the given mean. The run-time model of Wang and Joshi 2019 uses it for a step's time."""

    mean: Mean = 1.0

    def draw(self, keys: Tensor, parties: Array) -> Array:
        return -self.mean * np.log1p(-_uniform(keys))


@register("lognormal")
@dataclass(frozen=True)
class Lognormal(Distribution):
    """Log-normal with the given mean; `sigma` is the standard deviation of its logarithm."""

    mean: Mean = 1.0
    sigma: Amount = 1.0

    def draw(self, keys: Tensor, parties: Array) -> Array:
        # Box and Muller 1958, in numpy: torch's vectorised functions may round by an element's position in the tensor.
        radius = np.sqrt(-2.0 * np.log1p(-_uniform(rng.fold(keys, 0))))
        normal = radius * np.cos(2.0 * math.pi * _uniform(rng.fold(keys, 1)))
        return np.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * normal)


@register("trace")
@dataclass(frozen=True)
class Trace(Distribution):
    """Measured values: each draw picks one value of a CSV file.

    The column `seconds`, or the only one, holds the values. A column `party` with the parties' numbers, from 0, gives
    each party its own. The file is looked for from the working directory.
    """

    file: str

    @functools.cached_property
    def _values(self) -> tuple[Array, dict[int, Array] | None]:
        """All values, and the indices of each party's own values (None: shared by all parties)."""
        values, owners = read_trace(self.file)
        if owners is None:
            return values, None
        return values, {party: np.flatnonzero(owners == party) for party in set(owners.tolist())}

    def check(self, parties: int, positive: bool) -> None:
        values, own = self._values
        if positive and values.min() <= 0:
            raise ConfigError(f"the trace {self.file} must hold positive values, got {values.min():g}")
        without = next((party for party in range(parties) if own is not None and party not in own), None)
        if without is not None:
            raise ConfigError(f"the trace {self.file} has no value for party {without}; it needs one for each")

    def draw(self, keys: Tensor, parties: Array) -> Array:
        values, own = self._values
        chance = _uniform(keys)
        if own is None:
            return np.asarray(values[(chance * len(values)).astype(np.int64)])
        out = np.empty_like(chance)
        for k, party in enumerate(parties.tolist()):
            rows = own[party]
            out[k] = values[rows[(chance[k] * len(rows)).astype(np.int64)]]
        return out


def read_trace(file: str) -> tuple[Array, Array | None]:
    """The values of a trace and, if it has a column `party`, the party of each value."""
    try:
        with open(file, newline="", encoding="utf-8") as opened:
            lines = [(at, [cell.strip() for cell in row]) for at, row in enumerate(csv.reader(opened), 1) if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {file}: {error}") from None
    header = lines[0][1] if lines else []
    if len(header) == 1 and _number(header[0]) is not None:
        column, owner = 0, None
    else:
        lines = lines[1:]
        owner = header.index("party") if "party" in header else None
        others = [k for k in range(len(header)) if k != owner]
        if "seconds" not in header and len(others) != 1:
            raise ConfigError(f"the trace {file} needs a column 'seconds', or one column of values only")
        column = header.index("seconds") if "seconds" in header else others[0]
    values, owners = [], []
    for at, row in lines:
        value = _number(row[column]) if len(row) == len(header) else None
        if value is None:
            raise ConfigError(f"the trace {file}, line {at}: expected a number that is not negative, got {row}")
        values.append(value)
        if owner is not None:
            if not row[owner].isdecimal():
                raise ConfigError(f"the trace {file}, line {at}: a party is a whole number from 0, got {row[owner]!r}")
            owners.append(int(row[owner]))
    if not values:
        raise ConfigError(f"the trace {file} holds no values")
    return np.array(values), None if owner is None else np.array(owners)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def _uniform(keys: Tensor) -> Array:
    """Draw one uniform number in [0, 1) per key."""
    numbers: Array = rng.uniform(keys, ()).numpy()
    return numbers


def keys_of(seed: int, parties: Array, *name: int | str) -> Tensor:
    """One key per party, of the named stream."""
    return rng.fold(torch.tensor(rng.key(seed, *name)), torch.from_numpy(parties))
