"""LEGATO: steady layers count more, and the aggregator remembers the last rounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rules import close, draw, seeds
from torch import Tensor, nn

import hansa
from hansa.core.algorithm import State
from hansa.core.federation import Federation
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.core.plain_data import build
from hansa.core.registry import register
from hansa.core.wrapper import Wrapper
from hansa.fusion import Fused, Legato, Median, WeightedMean
from hansa.fusion.legato import layer_weights
from hansa.local import SGD, LocalSolver
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError
from hansa.run.loop import FUSION_MEMORY
from hansa.testing import PartyPool, check_algorithm, check_engines
from small_tasks import learnable

LAYERS = [("a", 2), ("b", 1)]
FIRST = torch.tensor([[3.0, 4, 1], [0, 5, 3]], dtype=torch.float64)
SECOND = torch.tensor([[0.0, 4, -3], [6, 0, 1]], dtype=torch.float64)


def fused(rounds: Sequence[Tensor], log: int = 5, layers: Any = LAYERS, parties: Any = None) -> list[Fused]:
    """The results of rounds, one after another; `parties` has the parties of each round."""
    results: list[Fused] = []
    for number, rows in enumerate(rounds):
        memory = results[-1].memory if results else None
        ids = None if parties is None else parties[number]
        results.append(Legato(log=log).examine(rows, layers=layers, memory=memory, parties=ids))
    return results


# The rule on tensors


def test_two_rounds_by_hand() -> None:
    # Layer a has the norms 5, 5 and then 4, 6: divided by their medians 1, 1 and 0.8, 1.2, so its spread is 0.1.
    # Layer b has the norms 1, 3 and then 3, 1: 0.5, 1.5 and 1.5, 0.5, so its spread is 0.5.
    first, second = fused([FIRST, SECOND])
    assert first.w.tolist() == [1.5, 4.5, 2]
    a, b = 5 / 6, 1 / 6
    assert close(second.w, [a * 3 + b * 1.5, a * 2 + b * 4.5, b * -1 + a * 2])
    assert second.shares == [0.5, 0.5]
    assert second.excluded == []


def test_the_log_has_this_round_and_those_before_it() -> None:
    third = torch.tensor([[4.0, 0, 2], [0, 4, 2]], dtype=torch.float64)
    two, three = (fused([FIRST, SECOND, third], log=log)[-1] for log in (2, 3))
    # With two rounds the norms of a are 4, 6 and 4, 4, those of b are 3, 1 and 2, 2: spreads of 0.1 and 0.25.
    a, b = 10 / 14, 4 / 14
    past = SECOND.mean(0)
    assert close(two.w, [a * 2 + b * past[0], a * 2 + b * past[1], b * 2 + a * past[2]])
    assert not close(three.w, two.w)
    for log in (1, 2, 3, 7):
        memory = fused([FIRST, SECOND, third, FIRST, SECOND], log=log)[-1].memory
        assert (0 if memory is None else len(memory["means"])) == min(5, log - 1)


def by_party(rounds: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Each party's layers from its present and its past updates, as published; all parties in all rounds."""
    now, past = rounds[-1], rounds[:-1]
    pieces = [torch.split(rows, list(lengths), 1) for rows in rounds]
    spreads = []
    for layer in range(len(lengths)):
        norms = [round[layer].norm(dim=1) for round in pieces]
        vectors = [values / values.quantile(0.5) for values in norms]
        middle = sum(vectors) / len(vectors)
        spreads.append(math.sqrt(sum(float((v - middle).square().mean()) for v in vectors) / len(vectors)))
    factors = [1 / max(spread, 1e-3) for spread in spreads]
    out = []
    for row in range(len(now)):
        own = []
        for layer, factor in enumerate(factors):
            w = factor / sum(factors)
            earlier = sum(round[layer][row] for round in pieces[:-1])
            own.append(w * pieces[-1][layer][row] + (1 - w) / len(past) * earlier)
        out.append(torch.cat(own))
    return torch.stack(out).mean(0)


@given(seed=seeds, n=st.integers(1, 6), rounds=st.integers(2, 5))
def test_it_is_the_mean_over_parties_of_their_own_present_and_past_updates(seed: int, n: int, rounds: int) -> None:
    every = [draw(seed + k, n) for k in range(rounds)]
    layers = [("a", 3), ("b", 1), ("c", 3)]
    assert close(fused(every, log=rounds, layers=layers)[-1].w, by_party(every, [3, 1, 3]))


@given(seed=seeds)
def test_the_order_of_parties_does_not_matter(seed: int) -> None:
    every, turn = [draw(seed + k, 5) for k in range(3)], [3, 1, 4, 0, 2]
    layers = [("a", 4), ("b", 3)]
    turned = [rows[turn] for rows in every]
    there = fused(turned, layers=layers, parties=[turn] * 3)[-1]
    assert close(there.w, fused(every, layers=layers)[-1].w)
    later = fused([every[0], *turned[1:]], layers=layers, parties=[range(5), turn, turn])[-1]
    assert close(later.w, there.w)  # a party is known by its number, not by its row


def test_a_layer_with_steady_norms_has_the_larger_weight() -> None:
    rounds = [torch.tensor([[1.0, k + 1], [1.0, 9 - k]], dtype=torch.float64) for k in range(4)]
    memory = fused(rounds, layers=[("steady", 1), ("other", 1)])[-1].memory
    assert memory is not None
    weights = layer_weights(memory)
    assert weights is not None
    assert float(weights.sum()) == pytest.approx(1)
    assert float(weights[0]) > 0.99
    falling = [rows / 10**k for k, rows in enumerate(rounds)]  # norms that fall at all parties alike are steady
    assert close(layer_weights(fused(falling, layers=[("steady", 1), ("other", 1)])[-1].memory), weights)  # type: ignore[arg-type]


def test_a_party_that_misses_rounds_or_joins_later_has_the_rounds_that_it_has() -> None:
    alone = fused([FIRST, SECOND], parties=[(0, 1), (2, 3)])[-1]
    assert torch.equal(alone.w, SECOND.mean(0))  # nobody is in two rounds: nothing is known about steadiness
    # Party 1 alone is in both: its relative norms of a are 1 and 0.8, those of b 1.5 and 1.5.
    mixed = fused([FIRST, SECOND], parties=[(0, 1), (1, 2)])[-1]
    a, b = 1 / 0.1, 1 / 1e-3
    w = torch.tensor([a, a, b], dtype=torch.float64) / (a + b)
    assert close(mixed.w, w * SECOND.mean(0) + (1 - w) * FIRST.mean(0))


def test_one_layer_one_round_and_one_party_are_defined() -> None:
    for layers in (None, (), [("all", 3)]):
        assert torch.equal(fused([FIRST, SECOND], layers=layers)[-1].w, SECOND.mean(0))
    assert torch.equal(fused([FIRST, SECOND], log=1)[-1].w, SECOND.mean(0))
    single = fused([FIRST[:1], SECOND[:1]])[-1]  # a party is its own mean, so its layers are equally steady
    assert close(single.w, (FIRST[0] + SECOND[0]) / 2)


def test_zeros_are_defined_and_a_layer_without_updates_takes_no_weight() -> None:
    zeros = torch.zeros_like(FIRST)
    assert torch.equal(fused([zeros, zeros])[-1].w, zeros[0])
    assert bool(torch.isfinite(fused([zeros, FIRST, zeros, SECOND])[-1].w).all())
    wide = [torch.cat([rows, torch.zeros(2, 4)], 1) for rows in (FIRST, SECOND)]
    frozen = fused(wide, layers=[*LAYERS, ("frozen", 4)])[-1]
    assert torch.equal(frozen.w[:3], fused([FIRST, SECOND])[-1].w)


@given(seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_result_lies_between_the_means_of_its_rounds(seed: int, dtype: torch.dtype) -> None:
    rounds = [draw(seed + k, 4, dtype=dtype) * 10.0**k for k in range(4)]
    means = torch.stack([rows.double().mean(0) for rows in rounds])
    result = fused(rounds, layers=[("a", 3), ("b", 4)])[-1].w.double()
    slack = 1e-5 * means.abs().max()
    assert bool(((result >= means.min(0).values - slack) & (result <= means.max(0).values + slack)).all())


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_tiny_and_huge_updates_have_the_weights_of_others(size: float) -> None:
    assert close(fused([FIRST * size, SECOND * size])[-1].w / size, fused([FIRST, SECOND])[-1].w)
    with pytest.raises(hansa.DataError, match="legato: the updates are too large to be added"):
        fused([torch.full((2, 30), 1.7e308, dtype=torch.float64)], layers=[("a", 30)])


def test_a_row_that_is_not_finite_is_left_out_with_its_party() -> None:
    spoilt = torch.stack([SECOND[0], torch.full((3,), math.nan, dtype=torch.float64), SECOND[1]])
    seen = fused([FIRST, spoilt], parties=[(4, 6), (4, 5, 6)])[-1]
    clean = fused([FIRST, SECOND], parties=[(4, 6), (4, 6)])[-1]
    assert torch.equal(seen.w, clean.w)
    assert seen.memory is not None
    assert seen.memory["parties"].tolist() == [4, 6, 4, 6]


def test_noise_in_one_layer_is_evened_out_and_the_other_layer_is_left_as_it_is() -> None:
    draws = torch.Generator().manual_seed(3)
    rounds, honest = [], []
    for _ in range(40):
        rows = torch.ones(6, 40, dtype=torch.float64) + 0.1 * torch.randn(6, 40, generator=draws, dtype=torch.float64)
        honest.append(rows.mean(0))
        rows = rows.clone()
        rows[0, :20] += 30 * torch.rand(1, generator=draws) * torch.randn(20, generator=draws, dtype=torch.float64)
        rounds.append(rows)
    results = fused(rounds, layers=[("attacked", 20), ("other", 20)])

    def error(vectors: Sequence[Tensor], at: slice) -> float:
        apart = [(v - h)[at].square().mean() for v, h in zip(vectors, honest, strict=True)][5:]
        return math.sqrt(float(sum(apart)) / len(apart))

    mean, legato = [rows.mean(0) for rows in rounds], [result.w for result in results]
    attacked, other = slice(0, 20), slice(20, 40)
    assert error(legato, attacked) < 0.6 * error(mean, attacked)
    assert error(legato, other) < 0.05


def test_a_liar_gains_no_more_weight_than_its_share_in_each_round() -> None:
    """With a full log an update counts w / n now, at most 1 / (n (log - 1)) in later rounds, and then no more."""
    rounds = [torch.zeros(4, 6, dtype=torch.float64) for _ in range(12)]
    rounds[5][0] = 7.0
    moved = [result.w for result in fused(rounds, log=4, layers=[("a", 3), ("b", 3)])]
    assert bool((moved[5] > 0).all())
    assert bool((moved[5] <= 7 / 4).all())
    for later in (6, 7, 8):
        assert bool((moved[later] <= 7 / (4 * 3) + 1e-12).all())
    assert not bool(torch.stack(moved[9:]).any())  # it has left the log
    assert bool((sum(moved) < 2 * 7 / 4).all())  # type: ignore[attr-defined]


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="log must be at least 1, got 0; 1 is the present round"):
        Legato(log=0)
    with pytest.raises(ConfigError, match="the layers have 3 numbers in all, and an update has 4"):
        Legato()(torch.ones(2, 4), layers=LAYERS)
    memory = fused([FIRST])[-1].memory
    for other, layers in ((torch.ones(2, 4), [("a", 4)]), (FIRST, [("a", 3)])):
        with pytest.raises(ConfigError, match="the memory is of updates with other layers"):
            Legato()(other, layers=layers, memory=memory)


# In runs


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def task(parties: int = 6) -> hansa.Task:
    *pairs, test = learnable([12 + 3 * k for k in range(parties)] + [200], seed=1)
    return hansa.Task(two_layers, "cross_entropy", pairs, test, classes=3)


def log_of(done: Any) -> dict[str, Any]:
    (memory,) = done.state.slots[FUSION_MEMORY].values()
    return memory  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [hansa.FedYogi, hansa.Scaffold], ids=lambda kind: kind.name)
def test_a_run_keeps_the_promises_of_all_algorithms(algorithm: Any, pool: PartyPool) -> None:
    check_algorithm(algorithm(fusion=Legato(log=2)), pool)


@pytest.mark.thin(2)
@pytest.mark.parametrize("algorithm", [hansa.FedAvg, hansa.FedPer, hansa.FedNova, hansa.QFedAvg, hansa.EASGD],
                         ids=lambda kind: kind.name)  # fmt: skip
def test_methods_that_fuse_pass_the_memory_on(algorithm: Any) -> None:
    reference = check_engines(algorithm(fusion="legato"))
    assert len(log_of(reference)["means"]) == min(4, len(reference.history))


def test_a_run_fuses_the_parameters_of_the_model_as_layers() -> None:
    done = hansa.simulate(hansa.FedAvg(fusion="legato"), task(), rounds=4, engine="reference")  # type: ignore[arg-type]
    log = log_of(done)
    assert log["norms"].shape == (4 * 6, 4)
    assert [len(mean) for mean in log["means"]] == [51] * 4
    plain = hansa.simulate(hansa.FedAvg(fusion=Legato(log=1)), task(), rounds=4, engine="reference")
    assert FUSION_MEMORY not in plain.state.slots
    assert not torch.equal(done.state.params.w, plain.state.params.w)


def test_the_log_is_bounded_whatever_parties_take_part() -> None:
    sizes = []
    for rounds in (4, 12):
        done = hansa.simulate(hansa.FedAvg(fusion=Legato(log=3)), task(9), rounds=rounds, cohort_size=3)
        log = log_of(done)
        assert [len(mean) for mean in log["means"]] == [51] * 2
        assert log["norms"].shape == (2 * 3, 4)
        sizes.append(codec.size(log))
    assert sizes[0] == sizes[1]


def test_an_empty_round_leaves_the_log_as_it_was() -> None:
    def absent(party: int, round: int) -> bool:
        return round == 2

    algorithm = hansa.FedAvg(fusion="legato", local=SGD(lr=0.1, batch=None))  # type: ignore[arg-type]
    three = hansa.simulate(algorithm, task(), rounds=3, engine="reference", absent=absent)
    two = hansa.simulate(algorithm, task(), rounds=2, engine="reference")
    assert "empty" in three.history[2]
    assert codec.encode(three.state.tree()["slots"]) == codec.encode(two.state.tree()["slots"])


def test_a_party_that_is_missing_in_a_round_is_missing_in_the_log() -> None:
    done = hansa.simulate(hansa.FedAvg(fusion="legato"), task(), rounds=3,  # type: ignore[arg-type]
                          absent=lambda party, round: (party, round) == (2, 1))  # fmt: skip
    log = log_of(done)
    assert [log["parties"][log["rounds"] == k].tolist() for k in range(3)] == [
        [0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]]  # fmt: skip


class Stop(BaseException):
    """The end of a process."""


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 3:
            raise Stop

    settings: dict[str, Any] = {"rounds": 6, "engine": "reference", "cohort_size": 4, "checkpoint_seconds": 0.0}
    algorithm = hansa.FedYogi(fusion=Legato(log=3))
    whole = hansa.simulate(algorithm, task(), **settings)
    with pytest.raises(Stop):
        hansa.simulate(algorithm, task(), run_dir=tmp_path / "run", on_round=stop, **settings)
    again = hansa.simulate(algorithm, task(), run_dir=tmp_path / "run", resume=True, **settings)
    assert codec.encode(again.state.tree()) == codec.encode(whole.state.tree())


@pytest.mark.parametrize(
    "compress",
    [
        "int8",
        {"name": "error-feedback", "inner": "sign"},
        {"*bias": "identity", "*": {"name": "qsgd", "bits": 2, "elias": True}},
    ],
    ids=str,
)
def test_it_sees_opened_updates(compress: Any) -> None:
    settings: dict[str, Any] = {"rounds": 3, "compress": compress}
    reference, stacked = (
        hansa.simulate(hansa.FedAvg(fusion="legato"), task(), engine=engine, **settings)  # type: ignore[arg-type]
        for engine in ("reference", "stacked")
    )
    torch.testing.assert_close(stacked.state.params.w, reference.state.params.w, rtol=0, atol=1e-9)


@register("test-noisy-layer")
@dataclass(frozen=True)
class NoisyLayer(Wrapper):
    """Party 0 adds noise of a random size to the first layer of its update."""

    inner: LocalSolver = SGD(lr=0.3, batch=None, epochs=2)
    kind: ClassVar[str] = "local"

    def after(self, party: Party, payload: Payload, reply: Reply, memory: Memory) -> tuple[Reply, Memory]:
        if party.id == 0:
            draws = party.rng("test-noisy-layer")
            noise = torch.zeros_like(reply.tensors["w"])
            noise[:24] = torch.from_numpy(20 * draws.random() * draws.normal(size=24))
            reply.tensors = {**reply.tensors, "w": reply.tensors["w"] + noise}
        return reply, memory


@pytest.mark.slow
def test_random_noise_of_one_party_in_one_layer_moves_the_model_less_in_a_round_than_under_the_mean() -> None:
    """What the noise of all rounds adds up to is the same."""

    def steps(fusion: Any) -> float:
        algorithm = hansa.FedAvg(local=NoisyLayer(), fusion=fusion)
        models = [hansa.simulate(algorithm, task(), rounds=n, engine="reference").state.params.w for n in range(7, 12)]
        return sum(float((after - before)[:24].norm()) for before, after in itertools.pairwise(models))

    assert steps(Legato()) < 0.6 * steps(WeightedMean(uniform=True))


# Refusals


@register("test-fuses-arrivals")
@dataclass(frozen=True)
class FusesArrivals(hansa.FedAvg):
    """FedAvg that says that it takes updates as they arrive."""

    participation: ClassVar[Literal["cohort", "all", "own"]] = "own"

    async def round(self, fed: Federation, state: State) -> State:
        raise AssertionError("it must be refused before the first round")


@pytest.mark.parametrize(
    ("algorithm", "settings", "reason"),
    [
        (hansa.FedAvg(fusion=Legato()), {"privacy": {"secure": "masking"}}, "which a secure sum hides"),
        (hansa.PruneFL(fusion=Legato()), {}, "the parties of prunefl send other parameters from round to round"),
        (FusesArrivals(fusion=Legato()), {}, "test-fuses-arrivals takes updates as they arrive"),
        (hansa.FedAvg(fusion=Legato()), {"sums": "exact"}, "legato does not sum the replies"),
    ],
    ids=["secure sum", "prunefl", "asynchronous", "exact sums"],
)
def test_what_cannot_work_is_refused_before_it_runs(algorithm: Any, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        hansa.simulate(algorithm, task(), rounds=1, **settings)


@pytest.mark.parametrize("algorithm", ["fedbuff", "zeno++", "d-psgd", "naive-bayes"])
def test_methods_without_a_fusion_have_no_place_for_it(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="fusion"):
        build("algorithm", algorithm, fusion="legato")


def test_a_fusion_without_memory_leaves_no_slot() -> None:
    for fusion in ("mean", Median()):
        done = hansa.simulate(hansa.FedAvg(fusion=fusion), task(), rounds=1)  # type: ignore[arg-type]
        assert FUSION_MEMORY not in done.state.slots
