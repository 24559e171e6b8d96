"""A party that multiplies its sums, where weights are capped as in a deployment: rejected by name, or rescaled."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hansa
from hansa.classical.linear import LogisticNewton
from hansa.classical.naive_bayes import GaussianNB
from hansa.core.data_op import DataOp
from hansa.core.op import Replies, Reply
from hansa.core.round_record import Record
from hansa.replies.replies import WEIGHT_CAP, combine
from hansa.sim import runtime

PARTIES, EACH = 14, 40
HONEST = {"below", "above", "places"}  # numbers that do not depend on the samples
METHODS = [
    hansa.Boosting(max_depth=3, bins=16, cuts="sketch"),
    hansa.RandomForest(trees=6, per_round=6, max_depth=4, bins=16),
    GaussianNB(),
    LogisticNewton(ridge=0.01),
]


def times(reply: Reply, factor: int, stated: int) -> Reply:
    """The sums of a reply times a factor, with gradients and moments of the other sign; and a stated weight."""
    tensors = {name: tensor if name in HONEST else tensor * factor for name, tensor in reply.tensors.items()}
    for name in {"sum", "gradient"} & set(tensors):
        tensors[name] = -tensors[name]
    if "sums" in tensors:
        tensors["sums"][:, :-2] *= -1
    return Reply(tensors, reply.weight * stated, reply.maxima, reply.metrics)


def accuracy(method: Any, patch: pytest.MonkeyPatch, lie: Callable[[Reply], Reply]) -> tuple[float, Record]:
    """The accuracy of a model whose first party lies, with the cap of a deployment; and what all rounds recorded."""
    seen = Record()

    def capped(ask: Any, outcomes: Any, rules: Any, record: Record, *more: Any) -> Any:
        each: list[tuple[int, Reply | str]] = []
        for item in outcomes:
            each += [(p, item.copy(k)) for k, p in enumerate(item.parties)] if isinstance(item, Replies) else [item]
        heaviest = None
        if not isinstance(ask.op, DataOp):
            each = [
                (party, lie(reply) if party == 0 and isinstance(reply, Reply) and reply.tensors else reply)
                for party, reply in each
            ]
            stated = [ask.op.stated_samples(reply, ask.payload_of(p)) for p, reply in each if isinstance(reply, Reply)]
            heaviest = WEIGHT_CAP * statistics.median_low(stated)
        answer = combine(ask, each, replace(rules, max_weight=10**9), record, *more, heaviest=heaviest)
        seen.rejected |= record.rejected
        seen.capped |= record.capped
        return answer

    patch.setattr(runtime, "combine", capped)
    x = np.random.default_rng(0).normal(size=((PARTIES + 10) * EACH, 6))
    y = (x[:, 0] + 0.5 * x[:, 1] - 0.4 * x[:, 2] > 0).astype(np.int64)
    rows = [slice(k * EACH, (k + 1) * EACH) for k in range(PARTIES)]
    task = hansa.Task(None, "cross_entropy", [(torch.tensor(x[r]), torch.tensor(y[r])) for r in rows])
    result = hansa.simulate(method, task, rounds=6, engine="reference", seed=1, progress=False)
    found = result.predict(x[PARTIES * EACH :]).argmax(1).numpy()
    return float((found == y[PARTIES * EACH :]).mean()), seen


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_party_that_multiplies_its_sums_counts_as_ten_medians_at_most(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten reversed medians of 23 leave 13 honest ones the majority; 200 did not."""
    honest, record = accuracy(method, monkeypatch, lambda reply: reply)
    assert honest > 0.85 and not record.capped and not record.rejected
    alone, record = accuracy(method, monkeypatch, lambda reply: times(reply, 200, 1))
    assert alone > honest - 0.06 and "more than 40 samples can add up to" in record.rejected[0]
    reversed_, record = accuracy(method, monkeypatch, lambda reply: times(reply, 200, 200))
    assert reversed_ > 0.55, reversed_
    assert record.capped[0].startswith("its sums over 8000 samples count 0.04993 times, as 400, 10 times the median")
    stated, record = accuracy(method, monkeypatch, lambda reply: times(reply, 1, 10**6))
    assert stated > honest - 0.06 and list(record.capped) == [0]  # it counts for nothing


def test_a_party_that_multiplies_its_noisy_sums_counts_as_ten_medians_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A noisy reply states no number of samples: its largest number does."""
    private = hansa.Boosting(
        max_depth=2, bins=4, cuts="public", span=(-2.0, 2.0), sigma=0.3, epsilon=3000.0, l2=5.0
    )  # fmt: skip
    _, record = accuracy(private, monkeypatch, lambda reply: reply)
    assert not record.capped
    _, record = accuracy(private, monkeypatch, lambda reply: times(reply, 200, 1))
    assert "times, as " in record.capped[0] and "10 times the median" in record.capped[0]


def test_one_large_honest_party_is_rescaled_and_its_trees_still_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 100 times the samples of the median party: its rounded totals differ between features."""
    draws = np.random.default_rng(3)
    sizes = [2000, 20, 20, 20, 20]
    x = draws.normal(size=(sum(sizes), 4))
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    ends = np.cumsum(sizes)
    parties = [
        (torch.tensor(x[end - n : end]), torch.tensor(y[end - n : end])) for n, end in zip(sizes, ends, strict=True)
    ]
    capped: dict[int, str] = {}

    def limited(ask: Any, outcomes: Any, rules: Any, record: Record, *more: Any) -> Any:
        answer = combine(ask, outcomes, rules, record, *more, heaviest=None if isinstance(ask.op, DataOp) else 200)
        assert not record.rejected
        capped.update(record.capped)
        return answer

    monkeypatch.setattr(runtime, "combine", limited)
    task = hansa.Task(None, "cross_entropy", parties)
    for method in (hansa.Boosting(max_depth=3, bins=8, cuts="sketch", growth="leaves", leaves=6), METHODS[1]):
        result = hansa.simulate(method, task, rounds=3, engine="reference", seed=1, progress=False)
        assert not any("empty" in line for line in result.history)
        assert float((result.predict(x).argmax(1).numpy() == y).mean()) > 0.8
    assert list(capped) == [0]


def test_a_party_behind_a_mask_counts_for_no_more_than_max_weight() -> None:
    """It rescales its own sums, and the masks have no room for more."""
    draws = np.random.default_rng(3)
    x = draws.normal(size=(1000, 4))
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    parties = [(torch.tensor(x[at]), torch.tensor(y[at])) for at in (slice(0, 900), slice(900, 950), slice(950, 1000))]
    task = hansa.Task(None, "cross_entropy", parties)
    method = hansa.Boosting(max_depth=2, bins=4)
    found = {}
    for most in (900, 60):
        settings: dict[str, Any] = {"privacy": {"secure": {"name": "masking", "max_weight": most}}}
        result = hansa.simulate(method, task, rounds=2, engine="reference", seed=1, progress=False, **settings)
        assert not any("empty" in line for line in result.history)
        found[most] = int(result.state.slots["trees"]["count"][0])
    assert found[900] == 1000 and 150 <= found[60] <= 100 + 64 + 5
