"""Match atoms of several parties under a Beta-Bernoulli process: gains, assignments, sweeps.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang and Khazaeni, "Bayesian Nonparametric Federated Learning of Neural
Networks", ICML 2019 (PFNM); Yurochkin, Agarwal, Ghosh, Greenewald and Hoang, "Statistical Model Aggregation via
Parameter Matching", NeurIPS 2019 (SPAHM).

An atom is a vector: the weights of a neuron, the mean of a mixture's component. Each atom of a party is a noisy copy of
one global atom, and no two atoms of a party are copies of the same one. With variances s of the noise and s0 of the
prior N(mu0, s0), atom i with members v has the sums A = mu0/s0 + sum v/s and P = 1/s0 + sum 1/s, and its best estimate
is A/P. The gain of a new member is the change of ||A||^2/P (PFNM), minus the change of log P where the atom is
integrated out (SPAHM). The prior adds 2 log(m/(J - m)) for an atom that m other parties of J have, and
2 log(gamma/J) - 2 log t for the t-th atom that no other party has. A party's members are assigned by the Hungarian
method. Gains are matrix products; there is no loop over atoms.

Against the printed equations: variances are squared in the numerators, sums are over the other parties, the prior's
logarithms have the factor 2, and the number of parties that have an atom is not cut off at 10 as in the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hansa.plumbing.errors import ConfigError
from hansa.replies.reply_checks import all_finite

LEAST = 1e-10  # of a learned variance: exact copies have none
BLOCK = 2**22  # numbers of a temporary matrix


@dataclass(frozen=True)
class Process:
    """Settings of the Beta-Bernoulli process. Variances are of each coordinate; `gamma` sets how soon atoms are new.

    `marginal` integrates the global atoms out (SPAHM) and learns the prior mean and both variances from the matching;
    `sigma` and `sigma0` are then their first values. Otherwise the prior mean is 0 and the atoms are estimated (PFNM).
    """

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 1.0
    sweeps: int = 5
    marginal: bool = False

    def __post_init__(self) -> None:
        for name in ("sigma", "sigma0", "gamma"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive and finite. Try {name} = 1.0.")
        if self.sweeps < 0:
            raise ConfigError(f"sweeps is {self.sweeps}; it must not be negative. Try sweeps = 5.")


PLAIN = Process()


class Hyper(NamedTuple):
    """Prior mean, prior variance and variance of the noise: each for all coordinates [1], or for each one [D]."""

    mean: Tensor
    prior: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Matching:
    """Global atoms [L, D]; for each party, which of them its own atoms are; and how many parties have each."""

    atoms: Tensor
    places: list[Tensor]
    owners: Tensor
    hyper: Hyper


def match(groups: Sequence[Tensor], process: Process = PLAIN, *, shares: Sequence[Tensor] | None = None,
          most: int | None = None, order: np.random.Generator | None = None) -> Matching:  # fmt: skip
    """Match the atoms [L_j, D] of several parties.

    `shares` scale the precision of each party's noise, for each coordinate [D] or for all [1]; they are 1 by default.
    There are at most `most` global atoms. `order` draws the order of parties in each sweep. The result depends on the
    arguments alone: parties are first placed by decreasing number of atoms, then by position, and atoms of one party
    that nobody else has keep their order.
    """
    width = _checked(groups, shares, most)
    if process.marginal and shares is not None:
        raise ConfigError("a marginal matching learns one variance for all parties, so it takes no shares")
    matcher = Matcher(groups, process, shares, most)
    for party in sorted(range(len(groups)), key=lambda k: (-len(groups[k]), k)):
        matcher.place(party)
    matcher.learn()
    draws, unchanged = order or np.random.default_rng(0), 0
    for _ in range(process.sweeps):
        changed = False
        for party in draws.permutation(len(groups)).tolist():
            before = matcher.shared(party)
            matcher.remove(party)
            matcher.place(party)
            changed |= matcher.shared(party) != before  # a later party may undo the change, and the sweep still had one
        unchanged = 0 if changed else unchanged + 1
        if unchanged > process.marginal:  # another sweep would change nothing
            break
        matcher.learn()
    places = [place for place in matcher.places if place is not None]
    return Matching(matcher.estimate(width), places, matcher.owners.clone(), matcher.hyper)


def _checked(groups: Sequence[Tensor], shares: Sequence[Tensor] | None, most: int | None) -> int:
    """Check the arguments of `match`; the number of coordinates."""
    if not all(isinstance(group, Tensor) for group in groups):
        raise ConfigError("match: atoms must be torch tensors; convert arrays with torch.as_tensor")
    if not groups or any(group.dim() != 2 or group.shape[1] != groups[0].shape[1] for group in groups):
        raise ConfigError("match: give each party's atoms as a matrix [atoms, coordinates] with equal coordinates")
    if not all(all_finite(group) for group in groups):
        raise ConfigError("match: the atoms have values that are not finite")
    if shares is not None and len(shares) != len(groups):
        raise ConfigError(f"match: {len(groups)} parties need as many shares, got {len(shares)}")
    widest = max(len(group) for group in groups)
    if most is not None and most < widest:
        raise ConfigError(f"match: a party has {widest} atoms, and there may be at most {most}; raise the cap")
    return groups[0].shape[1]


class Matcher:
    """The global atoms during a matching: sums and weights of their members, and how many parties have each.

    `ids` names atoms for good, where their positions change as atoms vanish.
    """

    def __init__(self, groups: Sequence[Tensor], process: Process, shares: Sequence[Tensor] | None,
                 most: int | None) -> None:  # fmt: skip
        first = groups[0]
        self.groups, self.process, self.most = groups, process, most
        self.dtype = first.dtype if first.dtype == torch.float32 else torch.float64
        one = torch.ones(1, dtype=self.dtype)
        self.shares = [one] * len(groups) if shares is None else [share.to(self.dtype) for share in shares]
        dim, width = first.shape[1], max(len(share) for share in self.shares)
        self.sums, self.weights = torch.zeros(0, dim, dtype=self.dtype), torch.zeros(0, width, dtype=self.dtype)
        self.owners = self.ids = torch.zeros(0, dtype=torch.int64)
        self.fresh = 0  # the next id
        self.places: list[Tensor | None] = [None] * len(groups)
        total = max(1, sum(len(group) for group in groups))
        squares = torch.zeros(dim, dtype=torch.float64)
        for group in groups if process.marginal else ():
            squares += group.double().square().sum(0)
        self.squares = squares if process.marginal else None
        mean = torch.stack([group.double().sum(0) for group in groups]).sum(0) / total if process.marginal else one * 0
        self.hyper = Hyper(*(t.to(self.dtype) for t in (mean, one * process.sigma0, one * process.sigma)))

    def place(self, party: int) -> None:
        """Assign the atoms of a party that has none yet."""
        rows, share, parties = self.groups[party].to(self.dtype), self.shares[party], len(self.groups)
        count, known = len(rows), len(self.sums)
        room = count if self.most is None else min(count, self.most - known)
        empty = gains(rows, share, self.sums[:0].new_zeros(1, rows.shape[1]), self.weights.new_zeros(1, 1),
                      self.hyper, self.process.marginal)  # fmt: skip
        turns = torch.arange(1, room + 1, dtype=torch.float64)
        new = empty.double() + 2 * math.log(self.process.gamma / parties) - 2 * turns.log()
        joined = gains(rows, share, self.sums, self.weights, self.hyper, self.process.marginal).double()
        others = self.owners.double()
        place = assign(joined.add_(2 * (others / (parties - others)).log()), new)
        fresh = place >= known
        place[fresh] = known + torch.arange(int(fresh.sum()))  # the order of new atoms is that of the party's own
        self._grow(int(fresh.sum()))
        self.places[party] = place
        self._add(party, 1)

    def remove(self, party: int) -> None:
        """Take a party's atoms out; atoms that nobody else has vanish."""
        self._add(party, -1)
        self.places[party] = None
        left = self.owners > 0
        if not bool(left.all()):
            moved = left.long().cumsum(0) - 1
            self.sums, self.weights = self.sums[left], self.weights[left]
            self.owners, self.ids = self.owners[left], self.ids[left]
            self.places = [None if place is None else moved[place] for place in self.places]

    def shared(self, party: int) -> list[int]:
        """The id of the atom of each of a party's members, or -1 where no other party has the atom."""
        place = self.places[party]
        assert place is not None
        shared: list[int] = self.ids.where(self.owners > 1, -1)[place].tolist()
        return shared

    def _add(self, party: int, sign: int) -> None:
        place, share = self.places[party], self.shares[party]
        assert place is not None
        rows = self.groups[party].to(self.dtype)
        self.sums.index_add_(0, place, rows * share if len(share) > 1 or float(share) != 1 else rows, alpha=sign)
        self.weights.index_add_(0, place, share.expand(len(place), self.weights.shape[1]), alpha=sign)
        self.owners = self.owners.index_add(0, place, torch.full_like(place, sign))

    def _grow(self, count: int) -> None:
        self.sums = torch.cat([self.sums, self.sums.new_zeros(count, self.sums.shape[1])])
        self.weights = torch.cat([self.weights, self.weights.new_zeros(count, self.weights.shape[1])])
        self.owners = torch.cat([self.owners, self.owners.new_zeros(count)])
        self.ids = torch.cat([self.ids, torch.arange(self.fresh, self.fresh + count)])
        self.fresh += count

    def learn(self) -> None:
        """Estimate prior mean and variances from the matching, as in an analysis of variance; marginal form only."""
        if self.squares is not None and len(self.sums):
            sums, counts = self.sums.double(), self.owners.double()[:, None]
            learned = hyper_update(sums, counts, self.squares, self.hyper.noise.double())
            self.hyper = Hyper(*(value.to(self.dtype) for value in learned))

    def estimate(self, dim: int) -> Tensor:
        """The best estimates of the atoms, summed afresh in float64 in the order of the parties."""
        sums = torch.zeros(len(self.sums), dim, dtype=torch.float64)
        weights = torch.zeros_like(self.weights, dtype=torch.float64)
        for rows, share, place in zip(self.groups, self.shares, self.places, strict=True):
            assert place is not None
            sums.index_add_(0, place, rows.double().mul_(share))
            weights.index_add_(0, place, share.double().expand(len(place), weights.shape[1]))
        mean, prior, noise = (value.double() for value in self.hyper)
        best = sums.div_(noise).add_(mean / prior).div_(1 / prior + weights / noise)  # in place: layers are large
        return best.to(self.groups[0].dtype)


def gains(rows: Tensor, share: Tensor, sums: Tensor, weights: Tensor, hyper: Hyper, marginal: bool = False) -> Tensor:
    """The gain [rows, atoms] of each row as a new member of each atom.

    `sums` [L, D] and `weights` [L, D or 1] are those of the members so far: each row times its share, and the shares.
    """
    out = torch.empty(len(rows), len(sums), dtype=rows.dtype)
    step = max(1, BLOCK // max(1, sums.shape[1]))
    for at in range(0, len(sums), step):
        here = slice(at, at + step)
        out[:, here] = _gains(rows, share, sums[here], weights[here], hyper, marginal)
    return out


def _gains(rows: Tensor, share: Tensor, sums: Tensor, weights: Tensor, hyper: Hyper, marginal: bool) -> Tensor:
    mean, prior, noise = hyper
    precision = share / noise
    before = 1 / prior + weights / noise
    after = before + precision
    gain = (precision / after).expand(len(sums), -1)
    change = (1 / after - 1 / before).expand(len(sums), -1)
    square = (precision * precision / after).expand(len(sums), -1)
    if after.shape[1] == 1 and not bool(mean.any()):  # equal precisions factor out of the products
        linear = (rows @ sums.t()) * (2 * gain / noise).t() + _squares(rows)[:, None] @ square.t()
        fixed = _squares(sums) * (change / noise**2)[:, 0]
    else:
        around = mean / prior + sums / noise
        squares = rows.square() if after.shape[1] > 1 else _squares(rows)[:, None]
        linear = rows @ (2 * gain * around).t() + squares @ square.t()
        fixed = (around.square() * change).sum(1)
    if marginal:
        fixed = fixed - (after / before).log().expand_as(sums).sum(1)
    return linear.add_(fixed)


def _squares(rows: Tensor) -> Tensor:
    """The squared length of each row, without a matrix of squares."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths.square_()


def hyper_update(sums: Tensor, counts: Tensor, squares: Tensor, noise: Tensor) -> Hyper:
    """Prior mean, prior variance and noise variance, by coordinate, of atoms with these sums [L, D] and counts [L, 1].

    The noise variance is the mean square within atoms, and the prior variance is that between atoms: the estimators of
    a one-way analysis of variance. `squares` [D] sums the squares of all members. If every atom has a single member,
    the noise cannot be seen, and stays as it is.
    """
    means = sums / counts
    mean, free = means.mean(0), float(counts.sum()) - len(sums)
    if free > 0:
        noise = ((squares - (sums.square() / counts).sum(0)) / free).clamp(min=LEAST)
    between = (means - mean).square().mean(0) - noise * (1 / counts).mean()
    return Hyper(mean, between.clamp(min=LEAST), noise)


def assign(old: Tensor, new: Tensor) -> Tensor:
    """The column of each row in the assignment of the largest total gain, the same for equal gains.

    `old` [rows, L] are the gains of joining atoms, `new` [rows, T] those of the t-th new atom, which fall with t. Where
    each row can have a new atom, atoms that no row prefers to its last new one are left out: another free column is
    always at least as good. That matters where little matches, and the Hungarian method is slow.
    """
    from scipy.optimize import linear_sum_assignment  # the machine with the GPU may have no scipy

    atoms = torch.arange(old.shape[1])
    if new.shape[1] == len(old) and len(old):
        atoms = atoms[(old > new[:, -1:]).any(0)]
    table = torch.cat([old[:, atoms], new], 1).numpy()
    _, columns = linear_sum_assignment(table, maximize=True)
    return torch.cat([atoms, old.shape[1] + torch.arange(new.shape[1])])[torch.from_numpy(columns)]
