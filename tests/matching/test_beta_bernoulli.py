"""The matcher: closed forms of the cards, permutations, limits of gamma, an objective that never falls."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hansa.matching.beta_bernoulli import Hyper, Matcher, Process, gains, hyper_update, match
from hansa.plumbing.errors import ConfigError


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def permuted(atoms: Tensor, parties: int) -> tuple[list[Tensor], list[Tensor]]:
    orders = [torch.from_numpy(np.random.default_rng(k).permutation(len(atoms))) for k in range(parties)]
    return [atoms[order] for order in orders], orders


def plain_gain(v: Tensor, share: Tensor, members: list[tuple[Tensor, Tensor]], mu: float, s0: float, s: float) -> float:
    """The quadratic part of the card's gain, coordinate by coordinate."""
    gain = 0.0
    for d in range(len(v)):
        p = float(share[d]) / s
        a = mu / s0 + sum(float(r[d]) / s * float(w[d]) for w, r in members)
        b = 1 / s0 + sum(float(r[d]) / s for _, r in members)
        gain += (a + p * float(v[d])) ** 2 / (b + p) - a**2 / b
    return gain


@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize("wide", [False, True])
def test_gains_are_those_of_the_card(wide: bool, mu: float) -> None:
    rows, members = drawn(0, 3, 4), drawn(1, 2, 5, 4)  # two atoms with five members each
    share = torch.tensor([0.2, 1.0, 0.0, 0.7], dtype=torch.float64) if wide else torch.ones(1, dtype=torch.float64)
    other = torch.tensor([0.9, 0.1, 0.5, 0.0], dtype=torch.float64) if wide else torch.ones(1, dtype=torch.float64)
    hyper = Hyper(*(torch.tensor([x], dtype=torch.float64) for x in (mu, 2.0, 0.5)))
    sums, weights = (members * other).sum(1), (5 * other).expand(2, -1)
    found = gains(rows, share, sums, weights, hyper)
    for row, atom in itertools.product(range(3), range(2)):
        known = [(member, other.expand(4)) for member in members[atom]]
        expected = plain_gain(rows[row], share.expand(4), known, mu, 2.0, 0.5)
        assert float(found[row, atom]) == pytest.approx(expected, abs=1e-10)
    new = gains(rows, share, torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64), hyper)
    assert float(new[1, 0]) == pytest.approx(plain_gain(rows[1], share.expand(4), [], mu, 2.0, 0.5), abs=1e-12)


def test_the_marginal_gain_is_twice_the_change_of_the_log_marginal_likelihood() -> None:
    mu, s0, s, members, v = 0.3, 2.0, 0.5, drawn(3, 4, 3), drawn(4, 3)

    def log_marginal(atoms: Tensor) -> float:
        n = len(atoms)
        cov = torch.full((n, n), s0, dtype=torch.float64) + s * torch.eye(n, dtype=torch.float64)
        normal = torch.distributions.MultivariateNormal(torch.full((n,), mu, dtype=torch.float64), cov)
        return float(normal.log_prob(atoms.T).sum())

    hyper = Hyper(*(torch.tensor([x], dtype=torch.float64) for x in (mu, s0, s)))
    found = float(gains(v[None], torch.ones(1, dtype=torch.float64), members.sum(0)[None],
                        torch.full((1, 1), 4.0, dtype=torch.float64), hyper, marginal=True))  # fmt: skip
    alone = -0.5 * float(((v * v) / s + math.log(2 * math.pi * s)).sum())  # of v at a known atom 0
    change = log_marginal(torch.cat([members, v[None]])) - log_marginal(members)
    assert found == pytest.approx(2 * (change - alone), abs=1e-10)

    def score(n: int, total: Tensor) -> float:
        quadratic = (s0 / s * total**2 + 2 * mu * total - n * mu**2) / (n * s0 + s)
        return float((quadratic - math.log(n * s0 + s) + math.log(s)).sum())

    assert found == pytest.approx(score(5, members.sum(0) + v) - score(4, members.sum(0)), abs=1e-10)


@pytest.mark.parametrize("parties", [2, 5, 20])
@pytest.mark.parametrize("marginal", [False, True])
def test_permuted_copies_are_matched_exactly_and_shrunk_by_the_closed_form(parties: int, marginal: bool) -> None:
    atoms = drawn(0, 30, 12)
    groups, orders = permuted(atoms, parties)
    found = match(groups, Process(marginal=marginal))
    assert len(found.atoms) == 30 and found.owners.tolist() == [parties] * 30
    first = torch.argsort(orders[0])  # where the first party, which names the atoms, has each original one
    for order, place in zip(orders, found.places, strict=True):
        assert torch.equal(found.places[0][first[order]], place)
    if not marginal:
        assert torch.allclose(
            found.atoms, parties / (parties + 1) * groups[0][torch.argsort(found.places[0])], atol=1e-12
        )
        wide = match(groups, Process(sigma0=1e6))
        assert torch.allclose(wide.atoms[wide.places[0]], groups[0], atol=1e-5)
    else:
        assert torch.allclose(found.atoms[found.places[0]], groups[0], atol=1e-6)  # the noise that it learned is none


def test_one_party_alone_gets_its_own_atoms_shrunk() -> None:
    atoms = drawn(1, 6, 3)
    found = match([atoms], Process(sigma=1.0, sigma0=3.0))
    assert torch.equal(found.places[0], torch.arange(6))
    assert torch.allclose(found.atoms, atoms * 3 / 4)


def test_the_estimate_is_the_formula_of_the_card_with_unequal_shares() -> None:
    a, b = torch.tensor([[2.0, 4.0]]), torch.tensor([[3.0, 1.0]])
    shares = [torch.tensor([1.0, 0.25]), torch.tensor([1.0, 0.0])]
    found = match([a, b], Process(sigma=0.5, sigma0=2.0, gamma=1e-9), shares=shares)
    assert found.places[1].tolist() == [0]
    assert torch.allclose(found.atoms, torch.tensor([[(2 + 3) / 0.5 / (0.5 + 4.0), 0.25 * 4 / 0.5 / (0.5 + 0.5)]]))
    nobody = match([a], Process(), shares=[torch.tensor([1.0, 0.0])])
    assert nobody.atoms.tolist() == [[1.0, 0.0]]  # no precision at all: the prior


def test_a_small_gamma_forbids_new_atoms_and_a_large_one_makes_all_new() -> None:
    groups = [drawn(0, 8, 5), drawn(1, 6, 5), drawn(2, 8, 5)]
    assert len(match(groups, Process(gamma=1e-300)).atoms) == 8
    assert len(match(groups, Process(gamma=1e300)).atoms) == 22


def test_the_cap_limits_atoms_and_a_party_above_it_is_an_error() -> None:
    groups = [drawn(0, 8, 5), drawn(1, 6, 5), drawn(2, 8, 5)]
    found = match(groups, Process(gamma=1e300), most=11)
    assert len(found.atoms) == 11
    assert all(len(set(place.tolist())) == len(place) for place in found.places)
    with pytest.raises(ConfigError, match=r"has 8 atoms, and there may be at most 7"):
        match(groups, most=7)


def test_arrays_are_refused_with_the_way_to_convert_them() -> None:
    with pytest.raises(ConfigError, match="atoms must be torch tensors; convert arrays"):
        match([drawn(0, 8, 5).numpy()])  # type: ignore[list-item]


def test_relabelling_parties_of_distinct_sizes_does_not_change_the_clusters() -> None:
    groups = [drawn(0, 9, 4), drawn(1, 7, 4), drawn(2, 5, 4), drawn(3, 3, 4)]
    first = match(groups, Process(sweeps=0))
    for order in itertools.permutations(range(4)):
        other = match([groups[k] for k in order], Process(sweeps=0))
        for to, k in enumerate(order):
            assert torch.equal(first.places[k], other.places[to])


def conditional(matcher: Matcher, party: int) -> float:
    """Twice the log joint of a matching as a function of one party's assignment: what its Hungarian step maximises."""
    process, total = matcher.process, len(matcher.groups)
    mean, prior, noise = (float(value[0]) for value in matcher.hyper)
    a, p = mean / prior + matcher.sums / noise, 1 / prior + matcher.weights / noise
    value = float((a * a / p).sum()) - len(a) * a.shape[1] * mean**2 / prior
    for m in matcher.owners.tolist():
        value += 2 * (math.lgamma(m) + math.lgamma(total - m + 1) - math.lgamma(total + 1) + math.log(process.gamma))
    alone = int((matcher.owners[matcher.places[party]] == 1).sum())  # type: ignore[index]
    return value - 2 * math.lgamma(alone + 1)


@pytest.mark.parametrize("seed", range(5))
def test_no_step_of_a_party_lowers_the_objective(seed: int) -> None:
    base = drawn(seed, 7, 4)
    groups = []
    for k in range(4):
        chosen = torch.randperm(7, generator=torch.Generator().manual_seed(k))[: 4 + k]
        groups.append(base[chosen] + 0.8 * drawn(9 + k, 4 + k, 4))
    matcher = Matcher(groups, Process(sigma=0.5), None, None)
    for party in range(4):
        matcher.place(party)
    rising = 0
    for party in [3, 0, 2, 1] * 4:
        before = conditional(matcher, party)
        matcher.remove(party)
        matcher.place(party)
        after = conditional(matcher, party)
        assert after >= before - 1e-9
        rising += after > before + 1e-9
    assert seed or rising  # some start is not optimal, so that the test can fail


def clusters(places: list[Tensor]) -> set[frozenset[tuple[int, int]]]:
    """The members of each atom, as pairs of a party and a position."""
    members: dict[int, set[tuple[int, int]]] = {}
    for party, place in enumerate(places):
        for position, atom in enumerate(place.tolist()):
            members.setdefault(atom, set()).add((party, position))
    return {frozenset(each) for each in members.values()}


def test_the_sweeps_end_early_only_where_further_ones_change_nothing() -> None:
    process, early = Process(sigma=0.5, sweeps=12), 0
    for seed in range(40):
        sizes = np.random.default_rng(seed).integers(1, 6, 5).tolist()
        groups = [drawn(0, 6, 2)[:size] + 0.6 * drawn(9 * seed + k + 1, size, 2) for k, size in enumerate(sizes)]
        matcher, draws = Matcher(groups, process, None, None), np.random.default_rng(seed)
        for party in sorted(range(5), key=lambda k: (-sizes[k], k)):
            matcher.place(party)
        for _ in range(process.sweeps):
            for party in draws.permutation(5).tolist():
                matcher.remove(party)
                matcher.place(party)
        own = np.random.default_rng(seed)
        assert clusters(match(groups, process, order=own).places) == clusters(matcher.places)  # type: ignore[arg-type]
        early += own.bit_generator.state != draws.bit_generator.state
    assert early > 10


def test_hyper_parameters_are_the_estimators_of_an_analysis_of_variance() -> None:
    draws, counts = np.random.default_rng(0), torch.tensor([3, 5, 1, 2, 4])
    clusters = [torch.from_numpy(draws.normal(size=(int(n), 2)) + draws.normal(size=2) * 3) for n in counts]
    sums = torch.stack([cluster.sum(0) for cluster in clusters])
    squares = torch.cat(clusters).square().sum(0)
    mean, between, within = hyper_update(sums, counts.double()[:, None], squares, torch.ones(1, dtype=torch.float64))
    residual = sum(((cluster - cluster.mean(0)) ** 2).sum(0) for cluster in clusters)
    assert torch.allclose(within, residual / (15 - 5))
    means = torch.stack([cluster.mean(0) for cluster in clusters])
    assert torch.allclose(mean, means.mean(0))
    spread = ((means - means.mean(0)) ** 2).mean(0) - within * (1 / counts.double()).mean()
    assert torch.allclose(between, spread)
    single = hyper_update(means, torch.ones(5, 1, dtype=torch.float64), means.square().sum(0), within * 7)
    assert torch.equal(single.noise, within * 7)  # one member each: nothing is known about the noise
    copies = hyper_update(2 * means, torch.full((5, 1), 2.0, dtype=torch.float64), 2 * means.square().sum(0), within)
    assert bool((copies.noise > 0).all()) and bool((copies.noise < 1e-9).all())


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_the_number_of_atoms_is_found_and_they_are_close(noise: float) -> None:
    draws = np.random.default_rng(1)
    true = torch.from_numpy(draws.normal(size=(20, 10))) * 3
    groups = []
    for _ in range(8):
        chosen = draws.permutation(20)[: int(draws.integers(10, 21))]
        groups.append(true[chosen] + noise * torch.from_numpy(draws.normal(size=(len(chosen), 10))))
    found = match(groups, Process(marginal=True, sweeps=10))
    apart = torch.cdist(found.atoms, true)
    assert len(found.atoms) == 20
    assert float(torch.maximum(apart.min(0).values.max(), apart.min(1).values.max())) < noise * 4
    assert torch.allclose(found.hyper.noise, torch.full((10,), noise**2, dtype=torch.float64), rtol=0.6)


def test_equal_arguments_give_equal_bits_and_empty_parties_take_no_part() -> None:
    groups = [drawn(k, 5, 3) for k in range(4)]
    first, again = match(groups), match(groups)
    assert torch.equal(first.atoms, again.atoms)
    assert all(torch.equal(a, b) for a, b in zip(first.places, again.places, strict=True))
    found = match([groups[0][:0], groups[1]])
    assert found.places[0].numel() == 0 and len(found.atoms) == 5
    assert match([groups[0][:0]]).atoms.shape == (0, 3)
    ties = match([torch.zeros(4, 2, dtype=torch.float64)] * 3)
    assert [place.tolist() for place in ties.places] == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("name", ["sigma", "sigma0", "gamma"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_a_variance_or_gamma_that_is_not_positive_is_one_sentence(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; it must be positive"):
        Process(**{name: value})


def test_atoms_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="equal coordinates"):
        match([drawn(0, 2, 3), drawn(0, 2, 4)])
    with pytest.raises(ConfigError, match="not finite"):
        match([torch.full((2, 2), torch.nan)])
