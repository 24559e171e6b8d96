"""A linear model over the columns of several parties: roles, loss functions, fixed point.

The score of a person is z = the sum over parties of x_k . w_k; the label holder also has an intercept. All losses have
a residual that is linear in z, so that encrypted scores can be turned into encrypted residuals (Hardy et al. 2017):

- linear: half the squared error; the residual is z - y;
- logistic: log(1 + exp(-y z)) is replaced by its Taylor polynomial log 2 - y z / 2 + z^2 / 8, for labels -1 and 1; the
  residual is z / 4 - y / 2;
- svm: the least-squares support vector machine (Suykens and Vandewalle 1999), half of (1 - y z)^2; as y^2 is 1, the
  residual is z - y.

The gradient of w_k is the mean of residual times x_k, plus l2 times w_k (not for the intercept).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hansa.core.entries import FLOAT64, Several, Shaped, stated
from hansa.core.op import Memory, Party, Payload
from hansa.holdings.stored_rows import whole
from hansa.numerics import rng
from hansa.plumbing.errors import PartyError
from hansa.secure.encoding import Numbers
from hansa.vertical.split_ops import COUNT, PARTY, whole_numbers
from hansa.vertical.split_ops import common_rows as common_rows

log = logging.getLogger("hansa")
Loss = Literal["linear", "logistic", "svm"]
WEIGHTS = "linear/w"  # in a party's memory: its part of the model; at the label holder the intercept comes last
PLACES = "linear/places"  # in a party's memory: who has the labels, and which parties have columns
FEATURES = 1024.0  # the largest absolute value of a feature
LINEAR_ROLES = stated(widths=Several(of=COUNT, fewest=2, keys="party ids"), holder=PARTY, helper=PARTY, rows=PARTY)
W = Shaped(types=FLOAT64, shape=(None,))  # a party's weights


@dataclass(frozen=True)
class LinearRoles:
    """The columns of each party, who has the labels, who helps (coordinator or key authority), and the rows."""

    widths: Mapping[int, int]
    holder: int
    helper: int
    rows: int

    @classmethod
    def of(cls, payload: Payload) -> LinearRoles:
        """The roles that a payload names; a PartyError if it is malformed."""
        tree, counts = payload.get("widths"), [payload.get(name) for name in ("holder", "helper", "rows")]
        widths = list(tree.items()) if isinstance(tree, Mapping) else []
        valid = whole_numbers([width for _, width in widths]) and all(str(party).isdecimal() for party, _ in widths)
        if not valid or not whole_numbers(counts, 0):
            raise PartyError("malformed ask: expected widths, holder, helper and rows")
        ordered = {int(party): width for party, width in sorted(widths, key=lambda at: int(at[0]))}
        holder, helper, rows = counts
        if holder not in ordered or helper in ordered or len(ordered) < 2:
            raise PartyError(
                "malformed ask: the label holder and at least one other party have columns, and the helper has none"
            )
        return cls(ordered, holder, helper, rows)  # type: ignore[arg-type]

    def tree(self) -> dict[str, Any]:
        """The roles as a payload."""
        widths = {str(party): width for party, width in self.widths.items()}
        return {"widths": widths, "holder": self.holder, "helper": self.helper, "rows": self.rows}

    @property
    def others(self) -> list[int]:
        """The parties with columns and without labels."""
        return [party for party in self.widths if party != self.holder]

    def length(self, party: int) -> int:
        """The number of a party's weights."""
        return self.widths[party] + (party == self.holder)

    @property
    def places(self) -> Tensor:
        """Who has the labels, then all parties with columns."""
        return torch.tensor([self.holder, *self.widths])


@dataclass(frozen=True)
class Residual:
    """residual = slope * (z - step * y): an integer multiple of y is subtracted from z, and the result is scaled."""

    slope: float
    step: int
    classes: bool  # whether y is -1 or 1

    KINDS: ClassVar[dict[str, Residual]]


Residual.KINDS = {
    "linear": Residual(1.0, 1, False),
    "logistic": Residual(0.25, 2, True),
    "svm": Residual(1.0, 1, True),
}


def targets_of(y: Tensor, residual: Residual) -> Tensor:
    """Targets as numbers; -1 and 1 for classes, of which there are two. A PartyError if targets are not classes."""
    if not residual.classes:
        return y.reshape(-1).to(torch.float64).cpu()
    if y.is_floating_point() or y.dim() != 1:
        raise PartyError("this model is for two classes, and its targets are numbers")
    return (2 * y.clamp(0, 1) - 1).to(torch.float64).cpu()


def clamped(values: Tensor, most: float, where: str) -> Tensor:
    """Values as the fixed point can hold them: between -most and most, and 0 for missing ones.

    The party's log says so. A refusal would tell the others that a value is over a limit, which the job chooses.
    """
    if values.numel() and not bool((values.abs() <= most).all()):
        _warn(f"{where} has values over {most:g}, the largest that the fixed point allows; they are clamped")
    return values.nan_to_num(0.0).clamp(-most, most)


@functools.lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Log a text, once."""
    log.warning(text)


def features_of(party: Party, roles: LinearRoles, x: Any) -> Tensor:
    """A party's columns in float64, with a column of ones for the intercept at the label holder.

    A PartyError if there are other columns than announced. Values that the fixed point cannot hold are clamped.
    """
    samples = whole(x)
    if tuple(samples.shape[1:]) != (roles.widths[party.id],):
        raise PartyError(
            f"its samples have the shape {tuple(samples.shape[1:])}, and this ask names {roles.widths[party.id]} "
            "columns"
        )
    samples = clamped(samples.to(torch.float64).cpu(), FEATURES, f"a column of party {party.id}")
    ones = [torch.ones(len(samples), 1, dtype=torch.float64)] if party.id == roles.holder else []
    return torch.cat([samples, *ones], 1)


def steps_of(values: Tensor, bits: int) -> Numbers:
    """Numbers as multiples of 2^-bits, rounded to the nearest."""
    return np.rint(values.numpy() * 2.0**bits).astype(np.int64)


def score_steps(party: Party, values: Tensor, range: float, bits: int) -> Numbers:
    """Scores or targets as multiples of 2^-bits; those over `range` are clamped."""
    return steps_of(clamped(values, range, f"a score or target of party {party.id}"), bits)


def own_weights(memory: Memory, roles: LinearRoles, party: int) -> Tensor:
    """The party's part of the model; zeros before the first step."""
    w = memory.get(WEIGHTS)
    if w is None:
        return torch.zeros(roles.length(party), dtype=torch.float64)
    if tuple(w.shape) != (roles.length(party),):
        raise PartyError("it remembers another model than this ask has")
    return w


def regularised(w: Tensor, gradient: Tensor, lr: float, l2: float, intercept: bool) -> Tensor:
    """The weights after one step of gradient descent."""
    decay = l2 * w
    if intercept:
        decay[-1] = 0.0
    return w - lr * (gradient + decay)


def batch_places(party: Party, rows: int, batch: int, epochs: int) -> list[Tensor]:
    """The places of each batch among the common rows: the same at all parties."""
    places = list[Tensor]()
    for epoch in range(epochs):
        order = torch.from_numpy(rng.shuffled(rng.key(party.seed, "linear", party.round, epoch), rows))
        places += torch.split(order, batch_rows(rows, batch))
    return places


def batch_count(rows: int, batch: int) -> int:
    """The number of batches of an epoch. Each has at least `batch` rows, unless there are fewer rows in all.

    The last rows are spread over all batches: a short batch would reveal more about its rows.
    """
    return max(1, rows // batch)


def batch_rows(rows: int, batch: int) -> list[int]:
    """The number of rows of each batch of an epoch."""
    count = batch_count(rows, batch)
    return [rows // count + (at < rows % count) for at in range(count)]
