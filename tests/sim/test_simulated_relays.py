"""Trees of relays in the simulation: any tree equals the flat federation (card: hierarchical aggregation)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hansa
from hansa.core.plain_data import from_config
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError
from hansa.replies.partial_sums import PartialSum
from hansa.replies.replies import ReplyCombiner
from hansa.sim.devices import Devices
from hansa.sim.relays import Relays

PARTIES = 7


def task() -> hansa.Task:
    draw = torch.Generator().manual_seed(4)
    data = []
    for party in range(PARTIES):
        x = torch.randn(3 + 2 * party, 2, generator=draw) * (1 + party)
        data.append((x, (x[:, 0] > 0).long()))
    return hansa.Task(lambda: torch.nn.Linear(2, 2), "cross_entropy", data, classes=2)


def run(relays: Relays | None, algorithm: Any = "fedavg", **given: Any) -> Any:
    made = from_config("algorithm", algorithm, where="algorithm")
    devices = given.pop("devices", {})
    settings = {"rounds": 2, "engine": "reference", "sums": "exact", "eval_parties": False, **given}
    return hansa.simulate(made, task(), devices=Devices(relays=relays, **devices), **settings)


def bits(result: Any) -> bytes:
    return codec.encode(result.saved_model())


@st.composite
def trees(draw: st.DrawFn) -> tuple[Any, ...]:
    """Any tree over some of the parties, in any order: lists within lists."""
    parts: list[Any] = list(draw(st.permutations(range(PARTIES))))[: draw(st.integers(1, PARTIES))]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(parts) - 1))
        stop = draw(st.integers(start + 1, len(parts)))
        parts[start:stop] = [parts[start:stop]]
    return tuple(parts)


FLAT = bits(run(None))
ABSENT = {0, 2, 3}
THINNED = bits(run(None, absent=lambda party, round: party in ABSENT))


@settings(max_examples=12, deadline=None)
@given(trees())
def test_any_tree_equals_the_flat_federation(groups: tuple[Any, ...]) -> None:
    assert bits(run(Relays(groups=groups))) == FLAT


def test_the_root_adds_one_sum_per_relay_next_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[tuple[int, ...]] = []
    add = ReplyCombiner.add_partial

    def noted(combiner: ReplyCombiner, partial: PartialSum) -> None:
        sums.append(partial.parties)
        add(combiner, partial)

    monkeypatch.setattr(ReplyCombiner, "add_partial", noted)
    assert bits(run(Relays(groups=((0, [2, [1]], 3), (6,))))) == FLAT
    assert sums == [(0, 1, 2, 3), (6,)] * 2


def test_a_relay_without_replies_is_ignored() -> None:
    groups = ([0, 2], [[3], 1], [4, 5])
    assert bits(run(Relays(groups=groups), absent=lambda party, round: party in ABSENT)) == THINNED


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("scaffold", {}),
        ({"name": "fedavg", "fusion": "median"}, {"sums": "ordered"}),
        ("fedavg", {"max_norm": 0.05}),
        ("fedavg", {"compress": "int8"}),
        ("fedavg", {"over_select": 0.5, "cohort": 0.5}),
        ("fedbuff", {"cohort_size": 3, "sums": "ordered"}),
        ("fedavg", {"privacy": {"dp": {"name": "central", "clip": 0.5, "sigma": 1.0}}}),
        ("fedavg", {"sums": "ordered", "privacy": {"secure": {"name": "masking", "active": False}}}),
    ],
    ids=["memory", "median", "limited norm", "packed", "first replies", "asynchronous", "dp", "masks"],
)
def test_a_tree_equals_the_flat_federation_with_every_kind_of_reply(algorithm: Any, given: dict[str, Any]) -> None:
    flat, tree = run(None, algorithm, **given), run(Relays(groups=((0, 1, [2, 3]), (4, 5))), algorithm, **given)
    assert bits(flat) == bits(tree)
    counted = [
        {name: line.get(name) for name in ("asked", "replies", "rejected", "train_loss")} for line in flat.history
    ]
    assert counted == [{name: line.get(name) for name in counted[0]} for line in tree.history]


def test_every_level_adds_its_latency() -> None:
    relays = Relays(groups=((0, [1, 2]), 3), latency=(0.5, 0.25))
    assert relays.seconds(4).tolist() == [0.5, 0.75, 0.75, 0.0]
    flat, tree = run(None), run(Relays(counts=(2, 2), latency=(0.5, 0.25)))
    seconds = [[line["simulated_seconds"] for line in result.history] for result in (flat, tree)]
    assert [b - a for a, b in zip(*seconds, strict=True)] == pytest.approx([0.75, 1.5])


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, "give either counts"),
        ({"counts": (2,), "groups": ((0,),)}, "give either counts"),
        ({"counts": (0,)}, "counts.* must be at least 1"),
        ({"counts": (4, 4)}, "16 relays, more than the 7 parties"),
        ({"groups": ((0, 1), (1, 2))}, "party 1 is behind two relays"),
        ({"groups": ((0, 9),)}, "9 is not the number of a party, 0 to 6"),
        ({"groups": ((0, "x"),)}, "'x' is not the number of a party"),
        ({"groups": ((0,), ())}, "no party is behind one of the relays"),
        ({"groups": ((0,),), "latency": (1.0, 1.0)}, "latency has 2 levels, and the tree has 1"),
        ({"counts": (2,), "latency": (-1.0,)}, "latency.* must be at least 0"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_in_one_sentence(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        run(Relays(**fields))


def test_parties_that_send_each_other_messages_cannot_be_behind_relays() -> None:
    with pytest.raises(ConfigError, match="certificates of different authorities"):
        run(Relays(counts=(2,)), "d-psgd", sums="ordered")
    with pytest.raises(ConfigError, match="set active = false"):
        run(Relays(counts=(2,)), sums="ordered", privacy={"secure": "masking"})
