"""Record linkage by Bloom filters: what is matched, and what is refused."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import hansa
from hansa import Linkage
from hansa.core.entries import refuses_payload
from hansa.core.op import Party
from hansa.core.vault import Vault
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.vertical import bloom
from hansa.vertical.linkage import LinkFilters, LinkRows

FIRST = ["ann", "bob", "carla", "david", "emma", "frank", "greta", "henry", "irene", "jakob"]
LAST = ["smith", "meyer", "garcia", "novak", "okafor", "rossi", "tanaka", "ivanova", "lindqvist", "oconnor"]


def people(count: int) -> list[str]:
    draw = np.random.default_rng(1)
    days = draw.integers(0, 20_000, count)
    return [
        f"{FIRST[k % 10]} {LAST[(k // 10) % 10]}|{np.datetime64('1950-01-01') + np.timedelta64(int(days[k]), 'D')}"
        for k in range(count)
    ]


def misspelt(record: str, at: int) -> str:
    """A record without one letter of the name."""
    at %= record.index("|")
    return (record[:at] + record[at + 1 :]).title()


def task(*ids: list[str]) -> hansa.Task:
    pairs = [(torch.zeros(len(own), 2), torch.arange(len(own)) % 2 if k == 0 else None) for k, own in enumerate(ids)]
    return hansa.Task(None, "cross_entropy", pairs, classes=2, ids=list(ids))


def test_people_with_misspelt_names_are_matched_and_others_are_not() -> None:
    everybody = people(100)
    first, second, third = everybody[:60], [misspelt(r, 3 * k) for k, r in enumerate(everybody)][20:80], everybody[30:]
    draw = np.random.default_rng(0)
    sets = [[own[row] for row in draw.permutation(len(own))] for own in (first, second, third)]
    result = hansa.simulate(Linkage(threshold=0.75), task(*sets), rounds=2)
    rows = [result.memories[k]["rows"].tolist() for k in range(3)]
    assert {sets[0][row] for row in rows[0]} == set(everybody[30:60]) and result.history[0]["common"] == 30.0
    originals = {misspelt(record, 3 * k): record for k, record in enumerate(everybody)}
    for a, b, c in zip(*rows, strict=True):
        assert sets[0][a] == originals[sets[1][b]] == sets[2][c]
    assert len(result.history) == 1 and all("psi.key" not in memory for memory in result.memories.values())
    exact = hansa.simulate(Linkage(threshold=1.0), task(*sets[::2]), rounds=1)
    assert exact.history[0]["common"] == 30.0


def test_filters_depend_on_the_key_and_compare_texts() -> None:
    key, other = b"k" * 32, b"o" * 32
    one, two = (bloom.filters(["ann smith|1980-02-01", "an smith|1980-02-01", "joe doe|2001-09-30"], k, 20)
                for k in (key, other))  # fmt: skip
    assert not torch.equal(one, two)
    assert bloom.alike(one, one, 1.0) == [(0, 0), (1, 1), (2, 2)]
    assert bloom.alike(one[:1], one[1:], 0.8) == [(0, 0)] and bloom.alike(one[:1], one[2:], 0.5) == []
    assert bloom.alike(one[:1], two[:1], 0.6) == []
    assert bloom.alike(one[:0], one, 0.5) == bloom.alike(one, one[:0], 0.5) == []
    bits = np.unpackbits(one.numpy(), axis=1).astype(int)
    dice = 2 * (bits[0] & bits[1]).sum() / (bits[0].sum() + bits[1].sum())
    assert bloom.alike(one[:1], one[1:2], dice - 1e-6) and not bloom.alike(one[:1], one[1:2], dice + 1e-6)


def test_the_most_alike_pair_wins_and_nobody_is_matched_twice() -> None:
    rows = bloom.filters(["ann smith", "ann smyth", "ann smithe"], b"k" * 32, 20)
    assert bloom.alike(rows[:2], rows[[0, 2]], 0.3) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("settings", [{"threshold": 0.0}, {"threshold": 1.5}, {"hashes": 0}, {"hashes": 33}])
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Linkage(**settings)


def party() -> Party:
    rows = TableRows(torch.zeros(3, 2), None, np.array(["a", "b", "c"]))
    return Party(0, Objective(None, "cross_entropy", 2), SampleGateway(rows), 0)


MEMORY = {"psi.train": torch.tensor([2, 0, 1]), "psi.test": torch.tensor([], dtype=torch.int64)}
NONE = torch.tensor([], dtype=torch.int64)


@pytest.mark.parametrize(
    "places", [torch.tensor([0, 3]), torch.tensor([-1]), torch.tensor([1, 1]), torch.tensor([0.0]), 7, None]
)
def test_a_party_checks_the_places_that_it_is_sent(places: Any) -> None:
    payload = {"train": places, "test": NONE}
    refused = refuses_payload(LinkRows(), payload)
    assert refused is None or "malformed ask" in refused
    if refused is None:
        with pytest.raises(PartyError, match="rows that it does not have"):
            LinkRows().run(party(), payload, dict(MEMORY))
    _, memory = LinkRows().run(party(), {"train": torch.tensor([2, 0]), "test": NONE}, dict(MEMORY))
    assert memory["rows"].tolist() == [1, 2]


def test_a_party_accepts_one_set_of_people_per_job_and_as_many_as_its_owner_requires() -> None:
    """The aggregator chooses the rows: two sets that differ by one person would reveal the rows of this person."""

    class Once(Vault):
        answered: ClassVar[dict[str, str]] = {}

        def once(self, name: str, digest: str) -> None:
            if self.answered.setdefault(name, digest) != digest:
                raise PartyError(f"answered {name} before")

    one = party()
    one.vault, one.min_matches = Once(), 2
    for _ in range(2):
        LinkRows().run(one, {"train": torch.tensor([2, 0]), "test": NONE}, dict(MEMORY))
    with pytest.raises(PartyError, match="answered the matching of its rows before"):
        LinkRows().run(one, {"train": torch.tensor([2, 0, 1]), "test": NONE}, dict(MEMORY))
    with pytest.raises(PartyError, match="fewer people are common than its policy requires"):
        LinkRows().run(one, {"train": torch.tensor([2]), "test": NONE}, dict(MEMORY))


def test_filters_need_a_key_of_this_matching() -> None:
    with pytest.raises(PartyError, match="knows nothing of this matching"):
        LinkFilters().run(party(), {"sizes": {"train": 3, "test": 0}}, {})
