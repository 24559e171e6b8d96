"""Dimensions that an op leaves open up to a bound: what is accepted, what is rejected, what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import hansa
from hansa.core.ask import Ask, Gathered
from hansa.core.federation import Federation
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.core.round_record import Record
from hansa.core.route_op import PeerOp
from hansa.core.shapes import UpTo
from hansa.core.wrapper import Wrapper
from hansa.local import SGD, LocalSolver
from hansa.net.party.workload import Workload
from hansa.numerics.params import Params
from hansa.plumbing.errors import AlgorithmError, ConfigError
from hansa.replies.replies import combine, expected_size, reply_size
from hansa.replies.reply_checks import Rules, fault
from hansa.secure.encoding import SumLayout, WideFixedPoint
from hansa.sim.clock import traffic


@register("test-rows")
@dataclass(frozen=True)
class SendRows(Op):
    """As many rows as the party's payload allows, or as `count` says; and the maxima of as many."""

    count: AnyCount | None = None

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        count = payload["most"] if self.count is None else self.count
        return Reply({"rows": torch.full((count, 2), float(party.id))}, weight=party.n), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"rows": ((UpTo(payload["most"]), 2), torch.float32)}


def rows(count: int, wide: int = 2) -> Reply:
    return Reply({"rows": torch.ones(count, wide)})


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_size_up_to_the_bound_is_accepted(count: int) -> None:
    assert fault(rows(count), SendRows(), {"most": 3}, Rules()) is None


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (rows(4), "rows has the shape (4, 2), expected (up to 3, 2)"),
        (rows(2, 3), "rows has the shape (2, 3), expected (up to 3, 2)"),
        (Reply({"rows": torch.ones(2)}), "rows has the shape (2,), expected (up to 3, 2)"),
        (Reply({"rows": torch.ones(2, 2, 1)}), "rows has the shape (2, 2, 1), expected (up to 3, 2)"),
        (Reply({"rows": torch.ones(2, 2).double()}), "rows is torch.float64, expected torch.float32"),
    ],
)
def test_a_reply_over_its_bound_or_of_another_shape_is_rejected(reply: Reply, reason: str) -> None:
    assert fault(reply, SendRows(), {"most": 3}, Rules()) == reason


def test_each_party_has_the_bound_of_its_own_payload() -> None:
    ask = Ask("gather", 0, "round", 0, SendRows(), {}, (0, 1, 2), each={k: {"most": k} for k in range(3)})
    record = Record()
    answer = combine(ask, [(0, rows(1)), (1, rows(1)), (2, rows(1))], Rules(), record)
    assert isinstance(answer, Gathered)
    assert answer.parties == (1, 2)
    assert record.rejected == {0: "rows has the shape (1, 2), expected (up to 0, 2)"}
    assert record.bytes_up == 3 * reply_size(rows(1))


def test_the_largest_size_limits_an_upload_and_takes_no_memory() -> None:
    assert expected_size(SendRows(), {"most": 7}) == reply_size(rows(7))
    assert expected_size(SendRows(), {"most": 10**12}) > 8 * 10**12
    with pytest.raises(AlgorithmError, match=r"\(up to 281474976710656, 2\) allows more than 2\^48 numbers"):
        expected_size(SendRows(), {"most": 2**48})


@pytest.mark.parametrize("bound", [-1, 1.0, True, "3", None, 2**48 + 1])
def test_an_invalid_bound_is_refused(bound: Any) -> None:
    with pytest.raises(AlgorithmError, match="UpTo: the bound must be a whole number from 0 to"):
        UpTo(bound)


def test_a_party_refuses_bounds_beyond_its_memory() -> None:
    limits = Workload(memory=10**9)
    assert limits.refuses(SendRows(), 2, {"most": 100}) is None
    assert "limits.memory in party.toml" in (limits.refuses(SendRows(), 2, {"most": 10**9}) or "")


def test_the_simulated_clock_reckons_each_party_with_its_own_bound() -> None:
    ask = Ask("gather", 0, "round", 0, SendRows(), {}, (0, 1), each={0: {"most": 0}, 1: {"most": 1000}})
    few, many = traffic(ask).tolist()
    assert many - few >= 8000


def test_replies_of_unequal_shapes_are_not_stacked() -> None:
    answer = Gathered((0, 1, 2), (rows(2), rows(3), rows(2)))
    sentence = (
        r"'rows' has different shapes in the replies, such as \(2, 2\) and \(3, 2\), so it cannot be stacked; read"
    )
    for stack in (answer.rows, answer.matrix):
        with pytest.raises(AlgorithmError, match=sentence):
            stack("rows")
    assert Gathered((0, 1), (rows(2), rows(2))).rows("rows").shape == (2, 2, 2)


@register("test-prefix")
@dataclass(frozen=True)
class Prefix(Wrapper):
    """Send the first entries of the update: as many as the party's id says, plus one."""

    inner: LocalSolver = SGD()

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        return replace(reply, tensors={"w": reply.tensors["w"][: party.id + 1]}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"w": ((UpTo(len(payload["model"]["w"])),), payload["model"]["w"].dtype)}


@register("test-prefixes")
@dataclass(frozen=True)
class Prefixes(hansa.Algorithm):
    """Gathers updates of unequal lengths; or submits their op, or sums them, which is refused."""

    verb: str = "gather"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({self.verb} | ({"next"} if self.verb == "submit" else set()))

    async def round(self, fed: Federation, state: hansa.State) -> hansa.State:
        payload = {"model": state.params._asdict()}
        if self.verb == "reduce":
            await fed.reduce(Prefix(), payload)
        if self.verb == "submit":
            for party in fed.available:
                await fed.submit(Prefix(), payload, party)
            replies = [(await fed.next()).reply for _ in fed.available]
        else:
            replies = list((await fed.gather(Prefix(), payload)).replies)
        w = state.params.w.clone()
        for reply in replies:
            assert reply is not None
            w[: len(reply.tensors["w"])] += reply.tensors["w"]
        lengths = sorted(len(reply.tensors["w"]) for reply in replies if reply is not None)
        return state.replace(Params(w, state.params.stats, state.params.counts), lengths=lengths)


def task(parties: int = 4) -> hansa.Task:
    draws = torch.Generator().manual_seed(1)
    pairs = [
        (torch.randn(9, 3, generator=draws, dtype=torch.float64), torch.randint(0, 2, (9,), generator=draws))
        for _ in range(parties)
    ]
    return hansa.Task(lambda: torch.nn.Linear(3, 2).double(), "cross_entropy", pairs)


@pytest.mark.parametrize("verb", ["gather", "submit"])
def test_updates_of_unequal_lengths_arrive_whole_in_every_engine(verb: str) -> None:
    runs = {name: hansa.simulate(Prefixes(verb), task(), rounds=2, engine=name) for name in ("reference", "stacked")}
    runs["workers"] = hansa.simulate(Prefixes(verb), task(), rounds=2, engine="workers")
    for result in runs.values():
        assert result.state.slots["lengths"] == [1, 2, 3, 4]
        assert torch.allclose(result.state.params.w, runs["reference"].state.params.w, rtol=0, atol=1e-12)
        assert result.history[0]["bytes_up"] == runs["reference"].history[0]["bytes_up"]
    assert torch.equal(runs["workers"].state.params.w, runs["reference"].state.params.w)


def test_an_answer_that_does_not_fit_a_worker_s_slot_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from hansa.sim import shared_memory, workers

    expected = hansa.simulate(Prefixes(), task(), rounds=1, engine="reference")
    monkeypatch.setattr(workers, "OPEN", 0)
    monkeypatch.setattr(workers, "ALIGN", 8)
    monkeypatch.setattr(shared_memory, "ALIGN", 8)
    assert torch.equal(
        hansa.simulate(Prefixes(), task(), rounds=1, engine="workers").state.params.w, expected.state.params.w
    )


def test_a_sum_over_open_sizes_is_refused_before_a_party_is_asked() -> None:
    with pytest.raises(
        AlgorithmError, match=r"'test-prefix' leaves the size of w open .* cannot be summed; gather them"
    ):
        hansa.simulate(Prefixes("reduce"), task(), rounds=1)


def test_an_exchange_of_open_sizes_is_refused() -> None:
    @dataclass(frozen=True)
    class Mixed(PeerOp):
        name = "mixed"
        inner: Op = SendRows()

    exchange = Federation(range(2), 0, 0, 2).exchange(Mixed(), {"most": 2}, mixing=torch.ones(2, 2) / 2)
    with pytest.raises(AlgorithmError, match="'rows' of the messages of 'mixed' has an open dimension"):
        exchange.send(None)


@pytest.mark.parametrize("secure", ["masking", "paillier"])
def test_a_secure_sum_over_open_sizes_is_refused(secure: str) -> None:
    with pytest.raises(AlgorithmError, match="leaves the size of w open"):
        hansa.simulate(Prefixes("reduce"), task(), rounds=1, privacy={"secure": secure})
    with pytest.raises(ConfigError, match="cannot be summed"):  # and by the party, whatever its aggregator is
        SumLayout(Prefix(), {"model": {"w": torch.ones(3), "counts": torch.ones(0)}}, WideFixedPoint(8.0, 16))


def test_replies_of_open_size_that_reach_a_sum_are_an_error_of_the_algorithm() -> None:
    """The first party's size is fixed, so only the replies show it."""

    @dataclass(frozen=True)
    class Sometimes(SendRows):
        name = "sometimes"

        def expects(self, payload: Payload) -> dict[str, Shape]:
            return {"rows": ((UpTo(2) if payload.get("open") else 2, 2), torch.float32)}

    ask = Ask("reduce", 0, "round", 0, Sometimes(), {}, (0, 1), each={1: {"open": True}})
    with pytest.raises(AlgorithmError, match="cannot be summed"):
        combine(ask, [(0, rows(2)), (1, rows(2))], Rules(), Record())


@dataclass(frozen=True)
class Halved(SGD):
    """A solver that may send less than the whole update."""

    name = "test-halved"

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"w": ((UpTo(len(payload["model"]["w"])),), payload["model"]["w"].dtype)}


@pytest.mark.parametrize("fusion", ["mean", "median"])
def test_a_solver_with_open_sizes_is_refused_when_the_algorithm_is_configured(fusion: str) -> None:
    algorithm = hansa.FedAvg(local=Halved(), fusion=hansa.build("fusion", fusion))
    with pytest.raises(ConfigError, match=f"'test-halved' leaves the size of w open .* fusion '{fusion}' combines"):
        hansa.simulate(algorithm, task(), rounds=1)


def test_attacks_that_compare_updates_are_refused_and_others_work() -> None:
    with pytest.raises(ConfigError, match="'alie' needs updates of one length, and the op 'test-prefix'"):
        hansa.simulate(Prefixes(), task(8), rounds=1, adversary={"name": "alie", "fraction": 0.25})
    flip = {"name": "sign-flip", "parties": ["0", "1", "2", "3"]}
    flipped = hansa.simulate(Prefixes(), task(), rounds=1, adversary=flip)
    initial = flipped.training.objective.initial.w
    honest = hansa.simulate(Prefixes(), task(), rounds=1)
    assert torch.allclose(flipped.state.params.w - initial, initial - honest.state.params.w)
