"""Honest parties with ordinary, heterogeneous data: no default limit of a deployed job rejects their replies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from league import PARTIES, League, samples
from torch import nn

import hansa
from hansa.core.op import Party
from hansa.core.plain_data import build
from hansa.experiment.tasks import make_model
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD
from hansa.net.aggregator import reply_rules
from hansa.net.party.samples import PartySamples
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.replies.buffer_checks import variances
from hansa.replies.reply_checks import Rules, fault

pytestmark = pytest.mark.usefixtures("quick")


def same_bits(league: League, parties: list[Any], loss: str, **run: Any) -> list[dict[str, Any]]:
    """The rounds of a deployed job; all parties were fused, and the model has the bits of the reference engine."""
    for name, pair in zip(PARTIES, parties, strict=True):
        league.join(name, PartySamples(pair))
    task = {"dataset": "heart", "model": "logistic", "dtype": "float64", "loss": loss}
    job = league.submit({"task": task, "run": {"rounds": 3, **run}})
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    assert [line["members"] for line in ended["rounds"]] == [list(PARTIES)] * 3
    outputs, classes = (2, 2) if loss == "cross_entropy" else (1, None)
    given = hansa.Task(make_model("logistic", "float64", ".", (3,), outputs), loss, parties, names=list(PARTIES),
                       classes=classes)  # fmt: skip
    result = hansa.simulate(build("algorithm", "fedavg"), given, engine="reference", rounds=3, **run)
    assert codec.encode(league.model(job)) == codec.encode(result.saved_model())
    rounds: list[dict[str, Any]] = ended["rounds"]
    return rounds


@pytest.mark.parametrize("scale", [1e6, 1e8])
def test_targets_of_millions_are_learned(league: League, scale: float) -> None:
    """House prices: the first updates have the size of the prices, and the squared error that of their squares."""
    xs = [samples(k)[0][0] for k in range(3)]
    rounds = same_bits(league, [(x, scale * (1 + 0.1 * x[:, 0])) for x in xs], "mse")
    assert rounds[0]["train_loss"] > scale**2 / 10 > rounds[-1]["train_loss"] / 100


def test_a_party_with_many_samples_counts_in_full_where_the_run_says_how_many(league: League) -> None:
    sizes = (12, 12, 600)
    rounds = same_bits(league, [samples(k, n)[0] for k, n in enumerate(sizes)], "cross_entropy", max_weight=1000)
    assert not any("capped" in line for line in rounds)


@pytest.mark.parametrize("limit", [{"max_weight": 1000}, {}], ids=["stated", "by default"])
def test_sums_over_many_samples_count_in_full_where_the_run_says_how_many(
    league: League, limit: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Of a preparation too."""
    parties = [samples(k, n)[0] for k, n in enumerate((12, 12, 600))]
    for name, pair in zip(PARTIES, parties, strict=True):
        league.join(name, PartySamples(pair))
    task = {"dataset": "heart", "model": None, "dtype": "float64", "prepare": "standardise"}
    job = league.submit({"task": task, "algorithm": "naive-bayes", "run": {"rounds": 3, **limit}})
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    given = hansa.Task(None, "cross_entropy", parties, names=list(PARTIES), prepare=hansa.data.Standardise())
    result = hansa.simulate(build("algorithm", "naive-bayes"), given, engine="reference", rounds=3)
    assert (codec.encode(league.model(job)) == codec.encode(result.saved_model())) == bool(limit)
    capped = [line["capped"] for line in ended["rounds"] if "capped" in line]
    assert (not capped) == bool(limit) == ("counts the sums of some parties in part" not in caplog.text)
    for reasons in capped:
        assert reasons["cid"].startswith("its sums over 600 samples count 0.2 times, as 120, 10 times the median")


@pytest.mark.parametrize("scale", [1e5, 1e8])
def test_batch_norm_may_learn_the_scale_of_raw_features(scale: float) -> None:
    """Incomes, bytes: the variance is the square of the scale, and the first round moves it there from 1."""
    draw = torch.Generator().manual_seed(0)
    x = scale * (1 + torch.randn(400, 4, generator=draw))
    objective = Objective(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), "cross_entropy", 0)
    op, payload = SGD(epochs=2, batch=10), {"model": objective.initial._asdict()}
    reply, _ = op.run(Party(0, objective, SampleGateway((x, (x[:, 0] > scale).long())), 0), payload, {})
    assert reply.tensors["stats"].max() > 0.3 * scale**2
    rules = Rules(max_stats=reply_rules.FAR, growth=reply_rules.LARGE, variances=variances(objective.spec))
    assert fault(reply, op, payload, rules) is None
