"""Limits on the running statistics and counters that a party sends beside its update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hansa
from hansa.core.op import Party, Replies, Reply
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD
from hansa.numerics.objective import Objective
from hansa.numerics.params import ParamSpec
from hansa.replies.buffer_checks import variances
from hansa.replies.reply_checks import Rules, fault, stack_fault

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(2))
Y = (X.sum(1) > 0).long()
OP = SGD(epochs=2, batch=10)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def replied() -> tuple[Reply, dict[str, Any], Rules]:
    """An honest reply, the payload of its ask, and the rules of a deployed job."""
    objective = Objective(net, "cross_entropy", 0)
    payload = {"model": objective.initial._asdict()}
    reply, _ = OP.run(Party(0, objective, SampleGateway((X, Y)), 0), payload, {})
    return reply, payload, Rules(max_stats=1e6, variances=variances(objective.spec))


def test_variances_are_found_by_their_place() -> None:
    assert variances(ParamSpec.of(net())) == ((3, 6), (11, 16))
    assert variances(ParamSpec.of(nn.Linear(2, 2))) == ()


def test_what_an_honest_party_sends_is_taken() -> None:
    reply, payload, rules = replied()
    assert fault(reply, OP, payload, rules) is None
    stack = Replies([0, 1], {name: torch.stack([v, v]) for name, v in reply.tensors.items()}, [reply.weight] * 2,
                    {name: torch.stack([v, v]) for name, v in reply.maxima.items()})  # fmt: skip
    assert stack_fault(stack, OP, [payload], rules) is None


LIES: list[tuple[str, int, float, str]] = [
    ("stats", 0, 1e30, "running statistics moved by 1e+30"), ("stats", 3, 1e30, "moved by"),
    ("stats", 4, -1e-3, "running variances is negative"), ("stats", 15, -1.0, "running variances is negative"),
    ("stats", 7, -3e6, "run.max_stats"), ("stats", 3, 3e13, "moved by 2.739e+06"),
    ("counts", 0, 2**52, "counters moved by"),
    ("counts", 1, 601, "its steps allow 600"), ("counts", 1, -(2**40), "counters moved by"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "at", "value", "words"), LIES)
def test_a_lie_about_buffers_is_rejected_alone_and_in_a_stack(name: str, at: int, value: float, words: str) -> None:
    reply, payload, rules = replied()
    honest = Reply(dict(reply.tensors), reply.weight, dict(reply.maxima), reply.metrics)
    group = reply.tensors if name == "stats" else reply.maxima
    group[name] = group[name].clone()
    group[name][at] = value
    assert words in str(fault(reply, OP, payload, rules))
    both = honest, reply
    stack = Replies([0, 1], {n: torch.stack([r.tensors[n] for r in both]) for n in reply.tensors}, [reply.weight] * 2,
                    {n: torch.stack([r.maxima[n] for r in both]) for n in reply.maxima})  # fmt: skip
    assert words in str(stack_fault(stack, OP, [payload], rules))


def test_a_variance_may_move_by_the_square_of_what_a_mean_may() -> None:
    reply, payload, rules = replied()
    reply.tensors["stats"] = reply.tensors["stats"].clone()
    reply.tensors["stats"][3] = 1e12  # the variance of a feature whose values are millions
    assert fault(reply, OP, payload, rules) is None
    reply.tensors["stats"][0] = 1e12  # and a mean
    assert "moved by 1e+12" in str(fault(reply, OP, payload, rules))


def test_counters_may_rise_by_what_a_party_was_told_to_do() -> None:
    reply, payload, rules = replied()
    reply.maxima["counts"] = torch.tensor([9000, 9000])
    assert "counters" in str(fault(reply, OP, payload, rules))
    assert fault(reply, OP, {**payload, "work": {"steps": 90}}, rules) is None


def test_a_simulation_limits_statistics_only_where_the_run_says_so() -> None:
    far = [(X * 1e5, Y), (X * 1e5 + 1e6, Y)]

    def normed() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    runs = [hansa.simulate(hansa.FedAvg(), hansa.Task(normed, "cross_entropy", far), rounds=1, **given)
            for given in ({}, {"max_stats": 1e3})]  # fmt: skip
    assert "rejected" not in runs[0].history[0]
    assert len(runs[1].history[0]["rejected"]) == 2
