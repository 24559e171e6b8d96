"""Replies that may not be fused are rejected on arrival: the party learns the reason, and the model is as if the
party had not been asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from league import PARTIES, League, samples

from hansa.core.op import Reply
from hansa.net.party import agent as party
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Receipt, Work
from hansa.plumbing import codec

pytestmark = pytest.mark.usefixtures("quick")
TREE = {"task": {"dataset": "heart", "model": "logistic", "dtype": "float64"}, "run": {"rounds": 2, "quorum": 2}}


def changed(**given: Any) -> Callable[[Reply], Reply]:
    """A reply with other tensors, or another weight."""

    def change(reply: Reply) -> Reply:
        tensors = {name: alter(reply.tensors["w"].clone()) for name, alter in given.get("tensors", {}).items()}
        return Reply({**reply.tensors, **tensors}, given.get("weight", reply.weight), reply.maxima, reply.metrics)

    return change


def measuring(**metrics: float) -> Callable[[Reply], Reply]:
    """A reply with other metrics."""
    return lambda reply: Reply(reply.tensors, reply.weight, reply.maxima, {**reply.metrics, **metrics})


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def alter(w: torch.Tensor) -> torch.Tensor:
        w.view(-1)[0] = value
        return w

    return alter


BAD: dict[str, tuple[Callable[[Reply], Reply], str]] = {
    "not a number": (changed(tensors={"w": first(math.nan)}), "not finite"),
    "infinite": (changed(tensors={"w": first(-math.inf)}), "not finite"),
    "another shape": (changed(tensors={"w": lambda w: w[:-1]}), "has the shape"),
    "one more dimension": (changed(tensors={"w": lambda w: w[None]}), "has the shape"),
    "another type": (changed(tensors={"w": lambda w: w.to(torch.float32)}), "expected torch.float64"),
    "another name": (changed(tensors={"v": lambda w: w}), "it has the tensors"),
    "a name of many letters": (changed(tensors={"\x1b[2J" * 2000: lambda w: w}), "it has the tensors"),
    "negative weight": (changed(weight=-5), "weight is -5"),
    "no weight": (changed(weight=0), "weight is 0"),
    "huge weight": (changed(weight=10**12), "over the limit of 1000000000"),
    "a weight beyond counting": (changed(weight=2**53), "over 2^53"),
    "a trillion times too long": (changed(tensors={"w": lambda w: w * 1e12 / w.norm() * 3}), "norm of its update"),
    "a loss beyond all": (measuring(train_loss=1.7e308), "its metric train_loss is 1.7e+308, and must lie in 0"),
    "a loss that dwarfs the model": (measuring(train_loss=1e30), "its metric train_loss is 1e+30"),
    "a negative loss": (measuring(train_loss=-1e-9), "its metric train_loss is -1e-09"),
    "a metric of its own": (
        lambda reply: Reply(reply.tensors, reply.weight, reply.maxima, {**reply.metrics, "mine": 1.0}),
        "not asked for",
    ),
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Receipt]:
    """The receipts that parties get."""
    receipts: list[Receipt] = []
    unpack = party.unpack

    def noting(data: bytes, kind: type[Any]) -> Any:
        value = unpack(data, kind)
        if kind is Receipt:
            receipts.append(value)
        return value

    monkeypatch.setattr(party, "unpack", noting)
    return receipts


def run(league: League, names: tuple[str, ...]) -> dict[str, Any]:
    for number, name in enumerate(PARTIES):
        if name in names:
            league.join(name, samples(number))
    return league.ended(league.submit(TREE, min_parties=len(names)))


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of a job that only two of the parties take part in."""
    league = League(tmp_path_factory.mktemp("without") / "league")
    try:
        ended = run(league, ("ann", "bob"))
        assert ended["status"] == "finished", ended["reason"]
        return league.model(ended["id"])
    finally:
        league.close()


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_refused_with_the_reason_and_changes_nothing(
    kind: str, league: League, told: list[Receipt], without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, why = BAD[kind]
    plain = Worker.answer

    def answer(self: Any, work: Work, *rest: Any) -> tuple[Reply | str, bool]:
        reply, staged = plain(self, work, *rest)
        if work.party == 2 and work.phase == "round" and isinstance(reply, Reply):
            reply = change(reply)
        return reply, staged

    monkeypatch.setattr(Worker, "answer", answer)
    ended = run(league, PARTIES)
    assert ended["status"] == "finished", ended["reason"]
    refused = [receipt for receipt in told if receipt.status == "rejected"]
    assert [(receipt.party, receipt.round) for receipt in refused] == [("cid", 0), ("cid", 1)]
    assert all(why in str(receipt.why) for receipt in refused)
    for line in ended["rounds"]:
        assert line["members"] == ["ann", "bob"] and why in line["rejected"]["cid"]
    assert codec.digest(league.model(ended["id"])) == codec.digest(without)
    assert len(list(league.aggregator.blobs)) == 1, "of what was refused nothing is kept"


def test_a_run_may_allow_longer_updates_and_heavier_replies(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TREE["run"], "max_norm", 1e15)  # type: ignore[arg-type]
    monkeypatch.setitem(TREE["run"], "max_weight", 10**13)  # type: ignore[arg-type]
    plain = Worker.answer

    def answer(self: Any, work: Work, *rest: Any) -> tuple[Reply | str, bool]:
        reply, staged = plain(self, work, *rest)
        if work.party == 2 and work.phase == "round" and isinstance(reply, Reply):
            reply = changed(tensors={"w": lambda w: w * 1e12 / w.norm() * 3}, weight=10**12)(reply)
        return reply, staged

    monkeypatch.setattr(Worker, "answer", answer)
    ended = run(league, PARTIES)
    assert all(line["members"] == list(PARTIES) and "rejected" not in line for line in ended["rounds"])


def test_a_reply_counts_for_no_more_than_ten_medians_whatever_it_claims(
    league: League, found: Callable[..., League], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cap depends only on the members of the round: neither on the order of arrival nor on the claimed weight."""
    plain, sizes = Worker.answer, sorted(len(samples(number)[0][0]) for number in range(3))
    claims: dict[int, int] = {}

    def answer(self: Any, work: Work, *rest: Any) -> tuple[Reply | str, bool]:
        reply, staged = plain(self, work, *rest)
        if work.party in claims and work.phase == "round" and isinstance(reply, Reply):
            reply = changed(weight=claims[work.party])(reply)
        return reply, staged

    monkeypatch.setattr(Worker, "answer", answer)
    models = []
    for place, weight in ((league, 10**9), (found(), 10 * sizes[1])):
        claims[2] = weight
        ended = run(place, PARTIES)
        assert ended["status"] == "finished", ended["reason"]
        models.append(codec.digest(place.model(ended["id"])))
        for line in ended["rounds"]:
            assert ("capped" in line) == (weight == 10**9)
            assert line["members"] == list(PARTIES)
    assert models[0] == models[1]


def test_who_says_its_size_late_and_alone_is_drawn_no_more_often(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are asked once; the only party of a later ask had only its own size as the median, and was drawn in
    every round."""
    plain, asked = Worker.answer, []

    def answer(self: Any, work: Work, *rest: Any) -> tuple[Reply | str, bool]:
        reply, staged = plain(self, work, *rest)
        if work.party == 2 and work.phase == "select":
            asked.append(work.round)
            return ("not now" if len(asked) == 1 else changed(weight=10**9)(reply)), False  # type: ignore[arg-type]
        return reply, staged

    monkeypatch.setattr(Worker, "answer", answer)
    league.join_all()
    settings = {"rounds": 24, "quorum": 1, "cohort_size": 1, "select": "weighted"}
    ended = league.ended(league.submit({**TREE, "run": settings}))
    assert ended["status"] == "finished" and len(asked) == 2, ended["reason"]
    others = [line["members"] for line in ended["rounds"] if line["members"] != ["cid"]]
    assert len(others) > 1, "by ten medians it is drawn in five of six rounds"
