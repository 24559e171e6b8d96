"""Statements of payload entries: each type accepts what it states, and refuses the rest with one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hansa
from hansa.core.entries import (
    BYTES,
    WHOLE,
    Flag,
    FreeForm,
    Nested,
    Number,
    PayloadEntry,
    Several,
    Shaped,
    Text,
    extended,
    optional,
    refuses_payload,
    stated,
)
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.predictor import NetworkPredictor
from hansa.core.registry import registered
from hansa.core.wrapper import Wrapper
from hansa.local import SGD
from hansa.local.normalise import Normalise
from hansa.plumbing.errors import AlgorithmError, PartyError

VECTOR = torch.tensor([1.0, 2.0])


@dataclass(frozen=True)
class Asked(Op):
    """Reads two entries, of which one may be left out."""

    name = "asked"
    entries = stated(centre=Shaped(shape=("features",)), count=Number(whole=True, least=1, most=9, optional=True))

    def check_ask(self, payload: Payload, sizes: dict[str, Any]) -> None:
        if payload.get("count") == 7:
            raise PartyError("seven is not answered")

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True)
class Unstated(Asked):
    """States nothing."""

    name = "unstated"
    entries = None


FITS: list[tuple[PayloadEntry, list[Any], list[Any]]] = [
    (Number(), [0, 1.5, -(10**40)], [10**400, math.nan, math.inf, True, "1", None, VECTOR]),
    (Number(whole=True, least=0, most=5), [0, 5], [-1, 6, 1.0, False]),
    (Number(above=0, none=True), [None, 1e-9], [0, -1]),
    (Number(whole=True, size="dim"), [3], [2, 4]),
    (Flag(), [True, False], [0, "true", None]),
    (Text(longest=3), ["a", "abc"], ["", "abcd", 3, b"a"]),
    (Text(among=("full", "diagonal")), ["full"], ["", "other"]),
    (Shaped(shape=("dim",)), [torch.zeros(3)], [torch.zeros(2), torch.zeros(3, 1), torch.zeros(3).long(), [0.0] * 3]),
    (Shaped(shape=(None, 2), least=0, most=1), [torch.zeros(0, 2), torch.ones(4, 2)],
     [torch.full((1, 2), 1.5), torch.full((1, 2), -0.5), torch.tensor([[0.0, math.nan]])]),
    (Shaped(types=WHOLE, shape=(None,), rising=True), [torch.tensor([-1, 4])], [torch.tensor([1, 1]), VECTOR]),
    (Shaped(types=BYTES, shape=(None, 4)), [torch.zeros(2, 4, dtype=torch.uint8)], [torch.zeros(2, 4)]),
    (Shaped(shape="sample"), [torch.zeros(2, 5)], [torch.zeros(10), torch.zeros(5, 2)]),
    (Several(of=Number(), longest=2), [[], [1, 2.0]], [[1, 2, 3], ["a"], {"0": 1}, (1, 2)]),
    (Several(of=Number(), keys="ids"), [{}, {"4": 1}], [[1], {"4": "x"}]),
    (Nested(entries=stated(a=Number(), b=Flag(optional=True))),
     [{"a": 1}, {"a": 1, "b": True}], [{}, {"a": 1, "c": 2}, 1]),
    (FreeForm(form=list), [[]], [{}]),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "good", "bad"), FITS, ids=lambda value: getattr(value, "words", "")[:50])
def test_an_entry_accepts_what_it_states(entry: PayloadEntry, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert entry.fault(value, "it", {"dim": 3, "sample": (2, 5)}, True) is None, value
    for value in bad:
        fault = entry.fault(value, "it", {"dim": 3, "sample": (2, 5)}, True)
        assert fault is not None and fault.startswith("it"), value
    assert entry.words


def test_sizes_of_one_name_agree() -> None:
    pair = stated(ids=Shaped(types=WHOLE, shape=("n",)), weights=Shaped(shape=("n",)))
    op = type("Pair", (Asked,), {"entries": pair, "name": "pair"})()
    assert refuses_payload(op, {"ids": torch.arange(2), "weights": VECTOR}) is None
    assert "weights must be" in str(refuses_payload(op, {"ids": torch.arange(3), "weights": VECTOR}))


def test_a_payload_is_refused_by_name() -> None:
    good = {"centre": VECTOR}
    assert refuses_payload(Asked(), good, {"features": 2}) is None
    for payload, words in (
        ({**good, "points": 3}, "the payload of 'asked': 'points' is not read; expected centre, count"),
        ({}, "centre is missing; it must be a tensor of finite real numbers of the shape [features]"),
        ({**good, "count": 10}, "count must be a whole number, at least 1, at most 9"),
        ({**good, "count": 7}, "seven is not answered"),
        ({"centre": torch.zeros(3)}, "centre must be"),
        ([], "its payload is not a table"),
        ({**good, "x" * 10_000: 3}, "is not read"),
    ):
        refused = refuses_payload(Asked(), payload, {"features": 2})  # type: ignore[arg-type]
        assert refused is not None and words in refused and len(refused) <= 1000


def test_numbers_in_tensors_are_only_looked_at_where_they_are_wanted() -> None:
    broken = {"centre": torch.tensor([math.nan, 0.0])}
    assert refuses_payload(Asked(), broken, values=False) is None
    assert refuses_payload(Asked(), broken) is not None


def test_an_op_without_a_statement_is_checked_for_its_work_alone() -> None:
    assert refuses_payload(Unstated(), {"anything": 3, "work": {"lr": 0.1, "steps": None}}) is None
    for work in ({"clip": 1.0}, {"lr": 0}, {"epochs": 0}, {"batch": True}, 3):
        assert "work" in str(refuses_payload(Unstated(), {"work": work}))
    assert extended(Unstated.entries, more=Flag()) is None

    class Makes(Wrapper):
        """Makes the payload of the op inside it."""

        inner = Asked()

        def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
            return {"centre": VECTOR}

    assert refuses_payload(Makes(), {"count": 7}) is None


def test_an_inherited_statement_is_extended_and_reduced() -> None:
    more = extended(Asked.entries, "count", flag=optional(Flag()))
    assert more is not None and list(more) == ["centre", "flag"] and more["flag"].optional


def test_an_op_that_reads_its_payload_otherwise_than_its_base_does_not_inherit_the_statement() -> None:
    """A base may read an entry by which its subclass, which adds noise for example, would tell too much."""

    class Reads(SGD):
        def start(self, ctx: Any, w: Any, payload: Payload, memory: Memory) -> Any:
            return super().start(ctx, w, payload, memory)

    class Renamed(SGD):
        name = "renamed"

    class Scores(NetworkPredictor):
        def outputs(self, objective: Any, payload: Payload, x: Any) -> Any:
            return super().outputs(objective, payload, x)

    assert Reads.entries is None and Scores.entries is None and Renamed.entries is SGD.entries
    assert Normalise(Reads()).entries is None and Normalise(Renamed()).entries is not None


def test_a_simulated_algorithm_that_sends_an_unread_entry_is_an_error() -> None:
    class Sends(hansa.FedAvg):
        async def round(self, fed: hansa.Federation, state: hansa.State) -> hansa.State:
            await fed.reduce(SGD(), {"model": state.params._asdict(), "secret": 3})
            return state

    task = hansa.Task(lambda: torch.nn.Linear(2, 1), "mse", [(torch.zeros(3, 2), torch.zeros(3, 1))])
    with pytest.raises(AlgorithmError, match="'secret' is not read; expected model"):
        hansa.simulate(Sends(), task, rounds=1, progress=False)


@pytest.mark.parametrize("kind", ["op", "local", "predictor"])
def test_every_part_of_hansa_states_its_entries(kind: str) -> None:
    own = {name: part for name, part in registered(kind).items() if part.__module__.startswith("hansa.")}
    assert own and not [name for name, part in own.items() if part.entries is None]  # type: ignore[attr-defined]
