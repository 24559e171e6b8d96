"""A relay that lies is refused or rejected by name, and gains no more than its parties could together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hansa.classical.trees.bins import Bins
from hansa.classical.trees.histograms import GradientHistograms
from hansa.core.ask import Ask
from hansa.core.op import Reply
from hansa.local import SGD
from hansa.net.aggregator.queue import RelayTerms
from hansa.net.aggregator.relayed import RelayedReplies, judged, read_relayed
from hansa.net.transport.wire import LeafOutcome
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError
from hansa.replies.partial_sums import ReplySum
from hansa.replies.reply_checks import Rules

MODEL = {"w": torch.ones(3), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
RULES = Rules(exact=True, max_weight=10, max_norm=2.0)


def terms(sums: bool = True, rules: Rules = RULES, parties: tuple[int, ...] = (0, 1, 2, 3)) -> RelayTerms:
    ask = Ask("reduce" if sums else "gather", 0, "round", 0, SGD(), {"model": MODEL}, parties)
    return RelayTerms(ask, rules, sums)


def reply(value: float = 0.5, weight: int = 2) -> Reply:
    op = SGD()
    shapes = op.expects({"model": MODEL})
    return Reply({name: torch.full(shape, value, dtype=dtype) for name, (shape, dtype) in shapes.items()}, weight,
                 {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in
                  op.expects_maxima({"model": MODEL}).items()})  # fmt: skip


def summed(*replies: Reply) -> Reply:
    total = ReplySum()
    for one in replies:
        total.add(one)
    return total.reply()


def accepted(*parties: int) -> dict[int, LeafOutcome]:
    return {party: LeafOutcome(party, "accepted", "0" * 64) for party in parties}


def statuses(content: RelayedReplies, given: RelayTerms, leaves: tuple[int, ...] = (0, 1, 2)) -> dict[int, str]:
    return {party: outcome.status for party, outcome in judged(content, "north", given, leaves).items()}


def test_an_honest_sum_is_accepted_and_a_silent_party_is_missing() -> None:
    content = RelayedReplies(accepted(0, 1), summed(reply(), reply()))
    assert statuses(content, terms()) == {0: "accepted", 1: "accepted", 2: "missing"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda total: setattr(total, "count", 3), "stands for 3 parties, and its sender was given 2"),
        (lambda total: setattr(total, "weight", 21), "its weight is 21"),
        (lambda total: total.tensors.update(x=torch.zeros(1)), "it has the tensors"),
        (lambda total: total.metrics.update(train_loss=1.0), "metrics outside its sums"),
    ],
)
def test_a_sum_that_its_parties_cannot_have_made_rejects_them_all(change: Callable[[Reply], Any], why: str) -> None:
    total = summed(reply(), reply())
    change(total)
    outcomes = judged(RelayedReplies(accepted(0, 1), total), "north", terms(), (0, 1, 2))
    assert all(outcomes[party].status == "rejected" and why in str(outcomes[party].why) for party in (0, 1))
    assert "north" in str(outcomes[0].why)


def test_a_sum_whose_mean_breaks_a_limit_on_single_updates_is_rejected() -> None:
    assert statuses(RelayedReplies(accepted(0, 1), summed(reply(1.1), reply(1.1))), terms())[0] == "accepted"
    outcomes = judged(RelayedReplies(accepted(0, 1), summed(reply(1.2), reply(1.2))), "north", terms(), (0, 1))
    assert "the norm of its mean update" in str(outcomes[0].why)


@pytest.mark.parametrize(("row", "value"), [(0, 60), (1, -1), (2, -3), (2, 20)])
def test_sums_of_a_tree_that_no_samples_add_up_to_are_rejected(row: int, value: int) -> None:
    op, rules = GradientHistograms(bits=2), Rules(exact=True, max_weight=10)
    bins = Bins.of_features([[0.5], [0.5]], ()).payload()
    payload = {"bins": bins, "slots": torch.tensor([[0, 0]]), "features": torch.arange(2)}
    given = RelayTerms(Ask("reduce", 0, "round", 0, op, payload, (0, 1), uniform=True), rules, True)
    total = ReplySum(uniform=True)
    for _ in range(2):
        total.add(Reply({"sums": torch.tensor([[[4, -4, 0] * 2, [1, 1, 0] * 2, [5, 4, 0] * 2]])}, 9))
    sums = total.reply()
    assert statuses(RelayedReplies(accepted(0, 1), sums), given, (0, 1))[0] == "accepted"
    sums.tensors["sums"][0, row, [0, 3]] = value
    outcomes = judged(RelayedReplies(accepted(0, 1), sums), "north", given, (0, 1))
    assert outcomes[0].status == "rejected" and "the partial sum of north" in str(outcomes[0].why)


def test_a_sum_where_single_replies_were_asked_for_is_rejected() -> None:
    content = RelayedReplies(accepted(0, 1), summed(reply(), reply()))
    outcomes = judged(content, "north", terms(sums=False), (0, 1))
    assert "was asked for single replies" in str(outcomes[0].why)


def test_a_single_reply_that_breaks_a_rule_is_rejected_alone() -> None:
    content = RelayedReplies(accepted(0, 1), None, {0: reply(), 1: reply(weight=11)})
    assert statuses(content, terms(sums=False)) == {0: "accepted", 1: "rejected", 2: "missing"}


def test_a_relay_answers_only_for_its_own_parties() -> None:
    with pytest.raises(DataError, match="party 3, which was not asked through it"):
        judged(RelayedReplies(accepted(0, 3), summed(reply(), reply())), "north", terms(), (0, 1, 2))


def test_a_relay_above_another_one_need_not_know_every_party_of_an_ask() -> None:
    above = dataclasses.replace(terms(), numbers={0: 7, 1: 8})  # it does not know the parties 2 and 3
    assert above.behind({7, 9}) == {0} and terms().behind({1, 9}) == {1}


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"relay": [{"party": 0, "status": "accepted"}] * 2, "replies": {"0": "reply"}}, "names a party twice"),
        ({"relay": [{"party": 0, "status": "accepted"}], "replies": {}}, "not those of the parties"),
        ({"relay": [{"party": 0, "status": "missing"}], "replies": {}}, "gives a reason"),
        ({"relay": [{"party": 0, "status": "lost", "why": "x"}], "replies": {}}, "not a valid answer"),
        ({"relay": [{"party": -1, "status": "missing", "why": "x"}], "replies": {}}, "not a valid answer"),
        ({"relay": [], "replies": {"x": "reply"}}, "not a valid answer"),
        ({"relay": [], "replies": {}, "sum": "reply"}, "not those of the parties"),
        ({"relay": 3, "replies": {}}, "not a valid answer"),
        ({"tensors": {}}, "not the answer of a relay"),
        ([1], "not the answer of a relay"),
    ],
)
def test_a_malformed_answer_is_refused_in_one_sentence(tmp_path: Path, tree: Any, why: str) -> None:
    def fill(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: fill(value) for name, value in part.items()}
        return reply().tree() if part == "reply" else part

    path = tmp_path / "blob"
    path.write_bytes(codec.encode(fill(tree)))
    with pytest.raises(DataError, match=why):
        read_relayed(path)
