"""What ops read from their payloads is what they state: all ops run on payloads that record the names asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import hostile_asks
import numpy as np
import pytest
import torch
from hostile_asks import FEATURES, TASK, HostileAsk, Seed, _quiet, _same_digest, _samples, answered

from every_op import exercise
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.private import PrivateHistograms
from hansa.classical.trees.table import TreeTable
from hansa.core.ask import op_config, op_of
from hansa.core.entries import Nested, refuses_payload, sizes_of
from hansa.core.op import Memory, Op, Party, Payload, Reply, perform
from hansa.core.registry import register, registered
from hansa.core.route_op import ROUTE, RouteOp
from hansa.core.wrapper import unwrap
from hansa.local import DPSGD, SGD
from hansa.plumbing import codec
from hansa.sim.engine import Outcome


class Recorded(Mapping[str, Any]):
    """A table that notes which names it was asked for, also those that it does not have."""

    def __init__(self, payload: Payload) -> None:
        self._payload, self.names = payload, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return self._payload[name]

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return name in self._payload

    def __iter__(self) -> Iterator[str]:
        return iter(self._payload)

    def __len__(self) -> int:
        return len(self._payload)


@pytest.mark.slow
def test_every_op_reads_the_entries_that_it_states() -> None:
    faults, known = dict[str, Any](), set[str]()

    def watch(op: Op, party: Party, payload: Payload, memory: Memory) -> Outcome:
        layers, inner = unwrap(op)
        name = "/".join(part.name for part in (*layers, inner))
        asked = Recorded(payload)
        for read in (op.expects, op.expects_maxima, op.beside):
            if not isinstance(op, RouteOp):
                read(asked)
        op.demands(party.n, asked)
        outcome = perform(op, party, asked, memory)
        stated, own = op.entries, {key: value for key, value in payload.items() if key != ROUTE}
        fault = refuses_payload(op, own, sizes_of(party.objective.spec, party.data, {}))
        unstated = asked.names - set(stated or ()) - {ROUTE}
        if fault is not None or unstated:
            faults[name] = fault or sorted(unstated)
        known.update(name.split("/"))
        return outcome

    exercise(watch)
    assert not faults
    assert len(known) > 85


def test_an_entry_that_is_not_stated_is_noticed() -> None:
    asked = Recorded({"a": 1})
    assert asked.get("b") is None and "c" not in asked and {**asked} == {"a": 1}
    assert asked.names == {"a", "b", "c"}


@pytest.mark.slow
def test_a_worker_refuses_an_entry_more_in_every_valid_ask() -> None:
    def answer(seed: Seed, **more: Any) -> Reply | str:
        message = {"op": seed.op, "payload": {**codec.decode(seed.payload), **more}, "round": 0}
        ask = HostileAsk("open", message, {"task": dict(TASK), "preparations": []}, 0)
        with _quiet(), _same_digest():
            return answered(ask, _samples()[0]).answer

    replies = [seed for seed in hostile_asks.seeds() if isinstance(answer(seed), Reply)]
    assert len(replies) > 30
    for seed in replies:
        refused = answer(seed, unheard=1)
        assert isinstance(refused, str) and "'unheard' is not read" in refused, (seed.op, refused)
        for name, entry in (op_of(seed.op, where="seed").entries or {}).items():
            if not isinstance(entry, Nested) and name in codec.decode(seed.payload):
                assert "malformed ask" in str(answer(seed, **{name: {"x": "y"}})), (seed.op, name)


def test_a_private_histogram_of_surrogates_is_refused() -> None:
    """The points of surrogates depend on all samples: one record would move all counts."""
    tree = TreeTable(1)
    tree.add_root(0, 0, np.zeros(1))
    payload = {
        "bins": Bins.of_features([[0.0]] * FEATURES, ()).payload(), "trees": tree.arrays().payload(),
        "slots": torch.tensor([[0, 0]]), "features": torch.arange(FEATURES), "base": torch.zeros(1).double(),
    }  # fmt: skip
    op = op_config(PrivateHistograms(bits=20))

    def answer(**more: int) -> Reply | str:
        message = {"op": op, "payload": {**payload, **more}, "round": 0}
        ask = HostileAsk("private", message, {"task": dict(TASK), "preparations": []}, 0)
        with _quiet(), _same_digest():
            return answered(ask, _samples()[0]).answer

    assert isinstance(answer(), Reply)
    refused = answer(points=4)
    assert isinstance(refused, str) and "'points' is not read" in refused


MODEL = {"w": torch.zeros(62).double(), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
ROUTED = {"route": {"sender": 0, "receivers": [1]}}
MISFITS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("class-counts", {"classes": 5}, {}, "asks about 5 classes, and the party's task has 2"),
    ("class-moments", {}, {"centre": torch.zeros(1, FEATURES)}, "centre must be"),
    ("column-moments", {}, {"centre": torch.zeros(1, FEATURES)}, "centre must be"),
    ("convex-sums", {}, {"w": torch.zeros(3, FEATURES + 1)}, "rows for 3 classes, and the party's task has 2"),
    ("convex-sums", {}, {"w": torch.zeros(1, 3)}, "weights for another number of features"),
    ("value-profile", {"features": 3}, {}, "asks about 3 features"),
    ("rank-counts", {"features": (FEATURES,)}, {"edges": torch.zeros(1, 2)}, "other columns than those of the samples"),
    ("quantile-summary", {"features": (FEATURES,)}, {"points": 3}, "other columns than those of the samples"),
    ("spahm-means", {"features": FEATURES, "classes": 3}, {}, "asks about 3 classes"),
    ("beyond-edges", {}, {"low": torch.zeros(1, 2), "high": torch.zeros(1, 2)}, "low must be"),
    ("evaluate", {}, {"model": MODEL, "work": {}}, "'work' is not read"),
    ("evaluate", {"predictor": "finetuned"}, {"inner": "network", "payload": {"model": 3}}, "payload.model must be"),
    ("evaluate", {"predictor": "id3"}, {"classes": 2, "feature": torch.tensor([0])}, "without one it has classes"),
    ("sgd", {}, {"model": {**MODEL, "w": torch.zeros(61).double()}}, "model.w must be"),
    ("sgd", {}, {"model": {**MODEL, "w": torch.full((62,), math.nan)}}, "model.w must be a tensor of finite"),
    ("scaffold", {}, {"model": MODEL}, "c is missing"),
    ("link-key", {}, ROUTED, "the ask does not seal them"),
    ("gossip", {}, {"model": MODEL}, "the ask does not seal them"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "payload", "words"), MISFITS, ids=[f"{m[0]}-{m[3][:20]}" for m in MISFITS])
def test_a_request_that_does_not_fit_the_task_is_refused_before_a_sample_is_read(
    name: str, fields: dict[str, Any], payload: dict[str, Any], words: str
) -> None:
    kind = "op" if name in registered("op") else "local"
    message = {"op": {"kind": kind, "name": name, **fields}, "payload": payload, "round": 0}
    ask = HostileAsk("open", message, {"task": dict(TASK), "preparations": []}, 0)
    with _quiet(), _same_digest():
        both = [answered(ask, samples) for samples in _samples()]
    assert both[0].answer == both[1].answer and words in str(both[0].answer)
    assert not both[0].readings and not both[1].readings


@pytest.mark.parametrize(("name", "payload", "words"), [
    ("apply-standardise", {"mean": torch.zeros(FEATURES)}, "std is missing"),
    ("apply-standardise", {"mean": torch.zeros(2), "std": torch.ones(2)}, "mean must be"),
    ("weigh-classes", {"weights": torch.ones(3)}, "weights must be"),
    ("keep-features", {"mean": torch.zeros(FEATURES)}, "'mean' is not read"),
])  # fmt: skip
def test_a_preparation_that_does_not_fit_the_task_is_refused(name: str, payload: dict[str, Any], words: str) -> None:
    steps = [{"op": {"kind": "op", "name": name}, "payload": payload}]
    message = {"op": op_config(SGD(steps=1)), "payload": {"model": MODEL}, "round": 0}
    ask = HostileAsk("open", message, {"task": dict(TASK), "preparations": steps}, 0)
    with _quiet(), _same_digest():
        refused = answered(ask, _samples()[0]).answer
    assert isinstance(refused, str) and words in refused


def test_a_party_with_a_floor_refuses_an_op_that_does_not_state_its_entries() -> None:
    @register("test-unstated")
    @dataclass(frozen=True)
    class Unstated(DPSGD):
        def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
            return super().run(party, payload, memory)

    def answer(policy: str) -> Reply | str:
        message = {"op": op_config(Unstated(steps=1, sigma=1.0)), "payload": {"model": MODEL}, "round": 0}
        with _quiet(), _same_digest():
            return answered(
                HostileAsk(policy, message, {"task": dict(TASK), "preparations": []}, 0), _samples()[0]
            ).answer

    assert isinstance(answer("open"), Reply)
    assert "does not state what it reads from a payload" in str(answer("private"))
