"""A protocol may take over `reduce`: here a masked sum (after Bonawitz et al. 2017) under FedAvg as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.core import rng
from hansa.core.federation import Ask, Federation, Reduced
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, Wrapper
from hansa.fusion import WeightedMean
from hansa.local import SGD

POINT = 2.0**32  # the fixed point


@dataclass(frozen=True)
class Masked(Wrapper):
    """The inner op's weighted reply in fixed point, hidden by masks that cancel between each pair of parties."""

    inner: Op = SGD()
    uniform: bool = False
    name: ClassVar[str] = "test-masked"

    def before(self, party: Party, payload: Payload, memory: Memory) -> Payload:
        return {name: value for name, value in payload.items() if name != "pairs"}

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        weight = 1 if self.uniform else reply.weight
        hidden = {
            name: (value.double() * weight * POINT).round().to(torch.int64) + self.mask(party, payload, name, value)
            for name, value in reply.tensors.items()
        }
        plain[party.id] = reply.tensors["w"]
        return Reply({**hidden, "weight": torch.tensor([weight])}), memory

    def mask(self, party: Party, payload: Payload, name: str, like: Tensor) -> Tensor:
        total = torch.zeros(like.shape, dtype=torch.int64)
        for other in payload["pairs"]:
            if other != party.id:
                low, high = sorted((party.id, other))  # a secret of the two, here from a seed
                draws = rng.generator(99, "pair", low, high, party.round, name).integers(
                    -(2**63), 2**63, like.shape, dtype=np.int64
                )
                total += torch.from_numpy(draws) * (1 if party.id == low else -1)
        return total

    def expects(self, payload: Payload) -> dict[str, Shape]:
        inner = {name: (shape, torch.int64) for name, (shape, _) in self.inner.expects(payload).items()}
        return {**inner, "weight": ((1,), torch.int64)}


plain: dict[int, Tensor] = {}
seen: list[dict[int, Tensor]] = []


class MaskedSum:
    """Sums masked replies modulo 2^64; it sees no reply in the clear."""

    async def reduce(self, fed: Federation, ask: Ask) -> Reduced:
        assert ask.op is not None
        payload = {**ask.payload, "pairs": list(ask.parties)}
        answer = await fed.gather(Masked(ask.op, ask.uniform), payload, parties=ask.parties)
        seen.append(dict(zip(answer.parties, answer.rows("w"), strict=True)))
        sums = {
            name: answer.rows(name).sum(0).double() / POINT  # int64 wraps around, which is the arithmetic that is meant
            for name in answer.replies[0].tensors
            if name != "weight"
        }
        weight = int(answer.rows("weight").sum())
        return Reduced(sums, weight, len(answer.parties))


def task() -> hansa.Task:
    make = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(n, 3, generator=make).double(), torch.randint(2, (n,), generator=make)) for n in (40, 60, 30, 90)
    ]
    return hansa.Task(lambda: nn.Linear(3, 2).double(), "cross_entropy", data)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_fedavg_under_a_masked_sum_gives_the_plain_result_to_fixed_point_precision(engine: str, uniform: bool) -> None:
    algorithm = hansa.FedAvg(local=SGD(lr=0.5, epochs=2), fusion=WeightedMean(uniform=uniform))
    given: dict[str, Any] = {"rounds": 3, "engine": engine}
    open_sum = hansa.simulate(algorithm, task(), **given)
    masked = hansa.simulate(algorithm, task(), protocol=MaskedSum(), **given)
    difference = (open_sum.state.params.w - masked.state.params.w).abs().max()
    assert 0 < float(difference) < 3 * 4 / POINT
    assert [line["replies"] for line in masked.history] == [4] * 3


def test_what_the_aggregator_sees_looks_nothing_like_an_update() -> None:
    seen.clear()
    hansa.simulate(hansa.FedAvg(local=SGD(lr=0.5)), task(), rounds=1, protocol=MaskedSum())
    (replies,) = seen
    assert set(replies) == {0, 1, 2, 3}
    for party, hidden in replies.items():
        sent = hidden.double() / POINT
        assert float(sent.abs().max()) > 1e6  # an update's entries are below 1
        assert float(plain[party].abs().max()) < 1
        assert not torch.allclose(sent, plain[party] * 40, atol=1e3)
    shares = torch.stack(list(replies.values())).double() / 2.0**63
    assert float(shares.abs().mean()) == pytest.approx(0.5, abs=0.2)  # uniform over the ring


def test_a_protocol_may_use_verbs_that_the_algorithm_does_not_declare() -> None:
    assert hansa.FedAvg().verbs == {"reduce"}
    done = hansa.simulate(hansa.FedAvg(), task(), rounds=1, protocol=MaskedSum())
    assert done.history[0]["asked"] == 4
