"""HypCluster and IFCA: card 10.2 of the specification."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa.cli.show import print_rounds
from hansa.core.algorithm import Problem, State
from hansa.core.op import Party, Replies, Reply, perform
from hansa.core.registry import register
from hansa.fusion import FLTrust, Krum, Median
from hansa.holdings.gateway import SampleGateway
from hansa.local import DPSGD, SGD, Gradient
from hansa.local.cluster import CLUSTER, ClusterTrain
from hansa.net.party.workload import Workload
from hansa.numerics.objective import Objective
from hansa.plumbing.errors import ConfigError
from hansa.replies.replies import ReplyCombiner
from hansa.replies.reply_checks import Rules, received
from hansa.report import clusters
from hansa.report.run_report import run_report
from hansa.server import Descent, Momentum
from hansa.testing import NetworkPool, PartyPool, check_algorithm
from hansa.transforms import ErrorFeedback, Int8
from quadratics import ENGINES
from quadratics import task as quadratics

PARTIES = 6
SOLVER = SGD(lr=0.5, epochs=5, batch=8)
METHODS = [hansa.HypCluster, hansa.IFCA]


def placed(problem: Problem, points: tuple[float, ...]) -> State:
    """The first state of an algorithm whose models are these numbers."""
    w = torch.tensor(points, dtype=problem.initial.w.dtype).unsqueeze(1)
    assigned = torch.full((problem.parties,), -1)
    return State(problem.initial._replace(w=w[0]), slots={"w": w, "assigned": assigned, "usual": 0})


@register("test-clusters-given")
@dataclass(frozen=True)
class GivenStarts(hansa.HypCluster):
    """HypCluster whose models start at given numbers."""

    points: tuple[float, ...] = (-1.0, 1.0)

    def init(self, problem: Problem) -> State:
        return placed(problem, self.points)


def given(points: tuple[float, ...], **fields: Any) -> GivenStarts:
    return GivenStarts(**{"local": SGD(lr=1.0, batch=None), "clusters": len(points), "points": points, **fields})


def net() -> nn.Module:
    return nn.Linear(3, 2).double()


def sort_of(party: int) -> int:
    return party % 2


def samples(party: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The two kinds of parties have opposite labels for equal samples."""
    draws = torch.Generator().manual_seed(100 * seed + party)
    x = torch.randn(count, 3, generator=draws, dtype=torch.float64)
    line = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    return x, ((x @ line > 0).long() + sort_of(party)) % 2


def task(**changes: Any) -> hansa.Task:
    parties = [samples(k, 14 + 4 * k, 1) for k in range(PARTIES)]
    tests = [samples(k, 40, 2) for k in range(PARTIES)]
    return hansa.Task(**{"model": net, "parties": parties, "party_tests": tests, "classes": 2, **changes})


def apart(result: Any) -> bool:
    """Whether the two kinds of parties are in different clusters."""
    numbers = [int(result.memories[party][CLUSTER]) for party in range(PARTIES)]
    return all((numbers[k] == numbers[0]) == (sort_of(k) == sort_of(0)) for k in range(PARTIES))


@pytest.mark.thin(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("server", [Descent(), Momentum(beta=0.5)])
def test_with_one_cluster_hypcluster_is_fedavg_bit_for_bit(engine: str, hidden: bool, server: Any) -> None:
    one = hansa.simulate(
        hansa.HypCluster(local=SOLVER, server=server, clusters=1, hidden=hidden), task(), rounds=3, engine=engine
    )
    plain = hansa.simulate(hansa.FedAvg(local=SOLVER, server=server), task(), rounds=3, engine=engine)
    assert torch.equal(one.state.params.w, plain.state.params.w)
    assert [line["train_loss"] for line in one.history] == [line["train_loss"] for line in plain.history]


def test_with_one_cluster_ifca_is_fedavg_with_equal_weights_and_its_gradients_are_fedsgd() -> None:
    equal = hansa.WeightedMean(uniform=True)
    models = hansa.simulate(hansa.IFCA(local=SOLVER, clusters=1), task(), rounds=3)
    plain = hansa.simulate(hansa.FedAvg(local=SOLVER, fusion=equal), task(), rounds=3)
    assert torch.equal(models.state.params.w, plain.state.params.w)
    steps = hansa.simulate(
        hansa.IFCA(local=Gradient(), server=Descent(lr=0.3), clusters=1, option="gradient"), task(), rounds=3
    )
    sgd = hansa.simulate(hansa.FedSGD(server=Descent(lr=0.3), fusion=equal), task(), rounds=3)
    assert torch.equal(steps.state.params.w, sgd.state.params.w)


def test_the_gradient_option_divides_by_the_parties_of_the_whole_cohort() -> None:
    curves, optima = [1.0] * 4, [-3.0, -2.0, -4.0, 9.0]

    @register("test-ifca-given")
    @dataclass(frozen=True)
    class Given(hansa.IFCA):
        """IFCA whose models start at -1 and 1."""

        def init(self, problem: Problem) -> State:
            return placed(problem, (-1.0, 1.0))

    algorithm = Given(local=Gradient(), server=Descent(lr=0.5), option="gradient")
    done = hansa.simulate(algorithm, quadratics(curves, optima), rounds=1)
    left, right = done.state.slots["w"].flatten().tolist()
    assert left == pytest.approx(-1 - 0.5 / 4 * sum(-1 - b for b in optima[:3]), abs=1e-12)
    assert right == pytest.approx(1 - 0.5 / 4 * (1 - 9), abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hidden", [False, True])
def test_two_separated_quadratics_recover_their_memberships_in_the_first_round(engine: str, hidden: bool) -> None:
    optima, sizes = [-9.0, -10.0, -12.0, 8.0, 11.0], [1, 2, 3, 4, 5]
    algorithm = given((-1.0, 1.0), hidden=hidden)
    done = hansa.simulate(algorithm, quadratics([1.0] * 5, optima, sizes), rounds=1, engine=engine)
    assert [int(done.memories[k][CLUSTER]) for k in range(5)] == [0, 0, 0, 1, 1]
    assert done.history[0]["clusters"]["weights"] == [6.0, 9.0]
    means = [sum(n * b for n, b in zip(sizes[s], optima[s], strict=True)) / sum(sizes[s])
             for s in (slice(0, 3), slice(3, 5))]  # fmt: skip
    assert done.state.slots["w"].flatten().tolist() == pytest.approx(means, abs=1e-12)


def test_the_objective_never_rises_when_every_cluster_is_minimised_exactly() -> None:
    draws = torch.Generator().manual_seed(5)
    optima = (10 * torch.randn(12, generator=draws)).tolist()
    sizes = [1 + k % 4 for k in range(12)]
    done = hansa.simulate(
        given((-0.3, -0.1, 0.2, 0.4)), quadratics([1.0] * 12, optima, sizes), rounds=8, engine="reference"
    )
    values = [line["cluster_loss"] for line in done.history]
    models = done.state.slots["w"].flatten().tolist()
    last = sum(n * min((h - b) ** 2 / 2 for h in models) for n, b in zip(sizes, optima, strict=True)) / sum(sizes)
    values.append(last)
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(values))
    assert values[-1] < 0.5 * values[0]


def test_the_numbers_of_clusters_have_no_meaning() -> None:
    optima = [-9.0, -10.0, 1.0, 2.0, 8.0, 11.0]
    order = (2, 0, 1)
    points = (-5.0, 1.5, 6.0)
    one, other = (
        hansa.simulate(given(start), quadratics([1.0] * 6, optima), rounds=3, engine="reference")
        for start in (points, tuple(points[k] for k in order))
    )
    assert torch.equal(one.state.slots["w"][list(order)], other.state.slots["w"])
    for k in range(6):
        assert order[int(other.memories[k][CLUSTER])] == int(one.memories[k][CLUSTER])


def test_of_equal_models_the_first_is_taken_and_an_empty_cluster_keeps_its_model() -> None:
    done = hansa.simulate(given((2.0, 2.0, 50.0)), quadratics([1.0] * 3, [1.0, 2.0, 3.0]), rounds=1)
    assert done.history[0]["clusters"]["sizes"] == [3, 0, 0]
    assert done.state.slots["w"].flatten().tolist() == pytest.approx([2.0, 2.0, 50.0], abs=1e-12)


@pytest.mark.thin(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fields", [{}, {"hidden": True}, {"start": "spread"}, {"restarts": 2, "trial": 2},
                                    {"fusion": Median()}, {"server": Momentum(lr=0.5, beta=0.5)}])  # fmt: skip
def test_parties_of_two_kinds_find_two_models(method: Any, fields: dict[str, Any]) -> None:
    done = hansa.simulate(method(local=SOLVER, **fields), task(), rounds=8)
    assert apart(done)
    assert done.history[-1]["accuracy"] > 0.9
    common = hansa.simulate(hansa.FedAvg(local=SOLVER), task(), rounds=8)
    assert common.history[-1]["accuracy"] < 0.7  # one model cannot fit both kinds


@pytest.mark.parametrize("hidden", [False, True])
def test_the_engines_agree_and_sums_tell_the_same_models(hidden: bool) -> None:
    runs = [
        hansa.simulate(hansa.HypCluster(local=SOLVER, hidden=h), task(), rounds=3, engine=engine)
        for h, engine in ((hidden, "reference"), (hidden, "stacked"), (not hidden, "reference"))
    ]
    for other in runs[1:]:
        assert torch.allclose(runs[0].state.slots["w"], other.state.slots["w"], rtol=0, atol=1e-12)


def test_the_metrics_line_tells_members_and_moves() -> None:
    points = (0.0, 3.0)
    optima = [-20.0, 0.0, 1.4, 3.2]
    done = hansa.simulate(given(points), quadratics([1.0] * 4, optima), rounds=2, engine="reference")
    first, second = (line["clusters"] for line in done.history)
    assert first["parties"] == {"0": 0, "1": 0, "2": 0, "3": 1} and first["moved"] == {} and first["moves"] == 0
    assert second["moved"] == {"1": [0, 1], "2": [0, 1]}
    assert second["sizes"] == [1, 3] and second["moves"] == 2


def test_spread_adds_the_model_of_the_party_with_the_largest_loss() -> None:
    optima = [0.0, 1.0, -1.0, 20.0, -30.0]
    done = hansa.simulate(
        hansa.HypCluster(local=SGD(lr=1.0, batch=None), clusters=3, start="spread"),
        quadratics([1.0] * 5, optima), rounds=2, engine="reference",
    )  # fmt: skip
    models = done.state.slots["w"].flatten().tolist()
    # Round 1: all train 0, the mean is -2, and party 4 adds -30. Round 2: 3 has the largest loss under (-2, -30).
    assert models == pytest.approx([5.0, -30.0, 20.0], abs=1e-12)
    assert [line["clusters"]["sizes"] for line in done.history] == [[5], [4, 1]]


def test_spread_finds_what_a_random_start_may_miss() -> None:
    """With zero as the only initial value, random starts are refused, and spread ones still separate."""
    optima = [-9.0, -10.0, 8.0, 11.0]
    with pytest.raises(ConfigError, match="same values every time"):
        hansa.simulate(hansa.HypCluster(), quadratics([1.0] * 4, optima), rounds=1)
    done = hansa.simulate(
        hansa.HypCluster(local=SGD(lr=1.0, batch=None), start="spread"), quadratics([1.0] * 4, optima), rounds=4
    )
    assert sorted(done.state.slots["w"].flatten().tolist()) == pytest.approx([-9.5, 9.5], abs=1e-12)


def test_restarts_go_on_with_the_start_of_least_loss() -> None:
    algorithm = hansa.HypCluster(local=SOLVER, clusters=2, restarts=3, trial=2)
    done = hansa.simulate(algorithm, task(), rounds=7)
    losses = [done.history[at]["cluster_loss"] for at in (1, 3, 5)]  # the last round of each trial
    best = losses.index(min(losses))
    stops = hansa.simulate(algorithm, task(), rounds=2 * best + 2)
    after = stops.state.slots["best"] if best < 2 else stops.state.slots["w"]
    whole = hansa.simulate(algorithm, task(), rounds=6)
    assert torch.equal(whole.state.slots["w"], after)
    assert not {"later", "trial", "best", "best_loss"} & set(whole.state.slots)
    assert done.history[6]["cluster_loss"] < min(losses)


def test_starts_come_from_files(tmp_path: Path) -> None:
    whole = hansa.simulate(hansa.HypCluster(local=SOLVER), task(), rounds=4)
    saved = str(whole.save(tmp_path / "clusters"))
    again = hansa.simulate(hansa.HypCluster(local=SOLVER, starts=(saved,)), task(), rounds=1)
    first = hansa.HypCluster(local=SOLVER, starts=(saved,)).init(again.training.problem)
    assert torch.equal(first.slots["w"], whole.state.slots["w"])
    singles = [
        str(hansa.simulate(hansa.FedAvg(local=SOLVER), task(), rounds=1, seed=k).save(tmp_path / str(k)))
        for k in range(2)
    ]
    hansa.simulate(hansa.HypCluster(starts=tuple(singles)), task(), rounds=1)
    for starts, reason in (((singles[0],), "1 files have 1 models"), (("nowhere.safetensors",) * 2, "cannot be read")):
        with pytest.raises(ConfigError, match=reason):
            hansa.simulate(hansa.HypCluster(starts=starts), task(), rounds=1)
    (tmp_path / "broken").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no model of this task"):
        hansa.simulate(hansa.HypCluster(starts=(str(tmp_path / "broken"), singles[0])), task(), rounds=1)


def test_a_party_predicts_with_its_cluster_and_a_new_one_by_its_loss(tmp_path: Path) -> None:
    done = hansa.simulate(hansa.HypCluster(local=SOLVER), task(), rounds=8)
    loaded = hansa.load(done.save(tmp_path / "run"))
    for party in range(PARTIES):
        x, y = samples(party, 40, 2)
        scores = done.predict(x, party)
        assert float((scores.argmax(1) == y).double().mean()) > 0.85
        assert torch.equal(scores, loaded.predict(x, net, party=party))
    for kind in (0, 1):
        x, y = samples(50 + kind, 30, 3)
        newcomer = done.fitted(x, y)
        assert float((newcomer.predict(x).argmax(1) == y).double().mean()) > 0.85
        assert torch.equal(loaded.fitted(x, y, net).predict(x), newcomer.predict(x))
        assert torch.equal(newcomer.model()(x), newcomer.predict(x))
    tuned = hansa.simulate(hansa.HypCluster(local=SOLVER), task(), rounds=8, finetune={"epochs": 1})
    assert torch.equal(tuned.fitted(x, y).predict(x), newcomer.predict(x))  # a new party has not fine-tuned it
    plain = hansa.simulate(hansa.FedAvg(local=SOLVER), task(), rounds=1, finetune={"epochs": 1})
    assert torch.equal(plain.fitted(x, y).predict(x), plain.predict(x))
    with pytest.raises(ConfigError, match="no model for a new party"):
        hansa.simulate(hansa.FedPer(local=SOLVER), task(), rounds=1).fitted(x, y)


def test_a_party_that_never_trained_has_the_model_of_the_largest_cluster() -> None:
    done = hansa.simulate(hansa.HypCluster(local=SOLVER), task(), rounds=6, absent=lambda party, _: party == 5)
    assert 5 not in done.memories
    usual = done.state.slots["usual"]
    assert usual == max(range(2), key=done.history[-1]["clusters"]["weights"].__getitem__)
    x = samples(5, 4, 9)[0]
    member = next(k for k in range(5) if int(done.memories[k][CLUSTER]) == usual)
    assert torch.equal(done.predict(x, 5), done.predict(x, member))


def test_a_fusion_that_needs_more_members_leaves_a_small_cluster_as_it_is() -> None:
    optima = [-9.0, -9.5, -10.0, -10.5, -11.0, 8.0]
    done = hansa.simulate(given((-1.0, 1.0), fusion=Krum(f=1)), quadratics([1.0] * 6, optima), rounds=1)
    assert done.state.slots["w"][1] == 1.0 and float(done.state.slots["w"][0]) in optima
    assert "krum" in done.history[0]["clusters"]["kept"]["1"]
    assert list(done.history[0]["fusion"]["shares"]) == ["0", "1", "2", "3", "4"]


@pytest.mark.thin(2)
@pytest.mark.parametrize("party", [0, 3])
@pytest.mark.parametrize("claim", [-1, 2, 10**12])
def test_a_claim_of_a_cluster_that_does_not_exist_is_rejected(
    party: int, claim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ClusterTrain.around

    def lies(self: Any, who: Any, payload: Any, memory: Any) -> Generator[Any, Any, Any]:
        reply, memory = yield from honest(self, who, payload, memory)
        if who.id == party:
            reply.tensors["cluster"] = torch.tensor(claim)
        return reply, memory

    monkeypatch.setattr(ClusterTrain, "around", lies)
    done = hansa.simulate(hansa.HypCluster(local=SOLVER), task(), rounds=2, engine="reference")
    assert all(list(line["rejected"]) == [str(party)] for line in done.history)
    assert all(str(party) not in line["clusters"]["parties"] for line in done.history)


def test_a_party_cannot_be_in_two_clusters_or_count_twice() -> None:
    models = torch.zeros(3, 4)
    payload = {"model": {"w": models, "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}}
    known, hidden = ClusterTrain(), ClusterTrain(hidden=True)

    def judged(op: ClusterTrain, **tensors: Tensor) -> Any:
        return received(Reply(tensors, weight=5), op, payload, Rules())

    assert isinstance(judged(known, w=torch.zeros(4), cluster=torch.tensor(2)), Reply)
    assert "shape" in judged(known, w=torch.zeros(4), cluster=torch.tensor([0, 1]))
    assert "shape" in judged(known, w=torch.zeros(12), cluster=torch.tensor(0))
    assert isinstance(judged(hidden, w=torch.zeros(12), share=torch.tensor([0.0, 1.0, 0.0])), Reply)
    assert "share" in judged(hidden, w=torch.zeros(12), share=torch.tensor([1.0, 1.0, 0.0]))
    assert "share" in judged(hidden, w=torch.zeros(12), share=torch.tensor([0.0, 5.0, 0.0]))
    assert "share is negative" in judged(hidden, w=torch.zeros(12), share=torch.tensor([0.0, -1.0, 0.0]))


def test_behind_a_secure_sum_no_message_tells_the_cluster_of_a_party(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Reply] = []
    add = ReplyCombiner.add

    def watch(self: ReplyCombiner, replies: Replies, *more: Any) -> None:
        seen.extend(map(replies.row, range(len(replies.parties))))
        add(self, replies, *more)

    algorithm = hansa.HypCluster(local=SOLVER, hidden=True)
    plain = hansa.simulate(algorithm, task(), rounds=2, eval_parties=False)
    monkeypatch.setattr(ReplyCombiner, "add", watch)
    masked = hansa.simulate(algorithm, task(), rounds=2, eval_parties=False, privacy={"secure": "masking"})
    assert torch.allclose(masked.state.slots["w"], plain.state.slots["w"], rtol=0, atol=1e-5)
    assert set(masked.history[0]["clusters"]) == {"weights"}
    names = {name for reply in seen for name in (*reply.tensors, *reply.metrics)}
    assert seen and not names & {"w", "share", "cluster", "cluster_loss", "train_loss"}


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    def refused(reason: str, algorithm: Any, given_task: Any = None, **run: Any) -> None:
        with pytest.raises(ConfigError, match=reason) as error:
            hansa.simulate(algorithm, given_task or task(), rounds=1, **run)
        assert "\n" not in str(error.value)

    hyp = hansa.HypCluster
    refused("7 clusters are more than the 6 parties", hyp(clusters=7))
    refused("3 clusters are more than the 2 parties", hyp(clusters=3), cohort_size=2)
    refused("hidden = true", hyp(), privacy={"secure": "masking"})
    refused("central differential privacy covers neither", hyp(), privacy={"dp": {"kind": "central", "sigma": 1.0}})
    refused(
        "central differential privacy covers neither",
        hyp(hidden=True),
        privacy={"dp": {"kind": "central", "sigma": 1.0}},
    )
    refused("epsilon", hyp(local=DPSGD(epsilon=1.0)))
    refused("min_cohort", hyp(), min_cohort_size=2)
    refused("several models in one message", hyp(), compress_down=Int8())
    refused("remembers numbers of an update", hyp(), compress=ErrorFeedback())
    refused("belong to no cluster", hyp(fusion=FLTrust()), task(trusted=samples(9, 8, 4)))
    refused("one half of scaffold", hyp(local=hansa.Controlled()))
    refused("BatchNorm", hyp(), task(model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()))
    refused("needs algorithm.local = 'gradient'", hansa.IFCA(option="gradient"))
    for fields, reason in (
        ({"clusters": 0}, "clusters"), ({"restarts": 0}, "restarts"), ({"trial": 1}, "trial"),
        ({"hidden": True, "start": "spread"}, "single party"), ({"hidden": True, "fusion": Median()}, "median"),
        ({"start": "spread", "fusion": Median()}, "passes by 'median'"),
        ({"restarts": 2, "start": "spread"}, "restarts"),
        ({"starts": ("a",), "restarts": 2}, "restarts = 2 has no effect while starts"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            hyp(**fields)


@pytest.mark.slow
def test_it_works_with_transforms_selectors_and_small_cohorts() -> None:
    for run in ({"compress": Int8()}, {"select": "weighted", "cohort": 0.5}, {"cohort_size": 3, "max_norm": 50.0},
                {"select": {"name": "power-of-choice", "variant": "rpow-d"}, "cohort_size": 3}):  # fmt: skip
        done = hansa.simulate(hansa.HypCluster(local=SOLVER), task(), rounds=10, **run)
        assert done.history[-1]["accuracy"] > 0.8, run
    summed = hansa.HypCluster(local=SOLVER, hidden=True)
    assert hansa.simulate(summed, task(), rounds=10, sums="exact", cohort_size=4).history[-1]["accuracy"] > 0.8
    assert apart(hansa.simulate(summed, task(), rounds=6, privacy={"bound": 5.0}))


@pytest.mark.slow
def test_a_robust_fusion_protects_each_cluster_from_its_own_liar() -> None:
    parties = [samples(k, 20, 1) for k in range(10)]
    many = task(parties=parties, party_tests=[samples(k, 40, 2) for k in range(10)])
    for fusion, low, high in ((Median(), 0.85, 1.0), (hansa.WeightedMean(), 0.0, 0.8)):
        done = hansa.simulate(
            hansa.HypCluster(local=SOLVER, fusion=fusion), many, rounds=8,
            adversary=hansa.SignFlip(parties=(0, 1), scale=20.0),
        )  # fmt: skip
        assert low <= done.history[-1]["accuracy"] <= high, fusion


@pytest.mark.slow
def test_the_state_of_restarts_and_of_a_growing_start_is_resumed(tmp_path: Path) -> None:
    for name, fields in (("spread", {"start": "spread", "clusters": 3}), ("again", {"restarts": 2, "trial": 2})):
        algorithm = hansa.HypCluster(local=SOLVER, **fields)  # type: ignore[arg-type]
        whole = hansa.simulate(algorithm, task(), rounds=5)
        for at in (1, 2, 3):
            folder = tmp_path / f"{name} {at}"
            hansa.simulate(algorithm, task(), rounds=at, run_dir=folder)
            resumed = hansa.simulate(algorithm, task(), rounds=5, run_dir=folder, resume=True)
            assert torch.equal(whole.state.slots["w"], resumed.state.slots["w"])
            assert torch.equal(whole.state.slots["assigned"], resumed.state.slots["assigned"])


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"hidden": True}, {"start": "spread", "clusters": 3}, {"restarts": 2, "trial": 2}])
def test_every_form_keeps_the_promises_in_every_runtime(
    fields: dict[str, Any], pool: PartyPool, network: NetworkPool
) -> None:
    check_algorithm(hansa.HypCluster(**fields), pool, network)


def test_the_report_and_the_terminal_show_the_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optima = [-20.0, 0.0, 1.4, 3.2]
    hansa.simulate(given((0.0, 3.0)), quadratics([1.0] * 4, optima), rounds=2, run_dir=tmp_path / "run")
    history = hansa.load(tmp_path / "run").history
    assert clusters.table(history) == [
        ("0", "0", "0", "-"), ("1", "1", "1", "2"), ("2", "1", "1", "2"), ("3", "1", "0", "-"),
    ]  # fmt: skip
    assert [clusters.sizes_text(line) for line in history] == ["3+1", "1+3, 2 moved"]
    assert "last moved in round" in run_report(tmp_path / "run").read_text()
    print_rounds(history)
    assert "1+3, 2 moved" in capsys.readouterr().out
    assert clusters.sizes_text({"clusters": {"weights": [6.0, 9.0]}}) == "6+9"


def test_a_party_bounds_the_models_that_it_evaluates_and_declines_malformed_ones() -> None:
    op = ClusterTrain(SGD(steps=1))

    def payload(w: Any) -> dict[str, Any]:
        return {"model": {"w": w, "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}}

    assert Workload(steps=5).refuses(op, 4, payload(torch.zeros(4, 8))) is None
    assert "requests 6" in str(Workload(steps=5).refuses(op, 4, payload(torch.zeros(5, 8))))
    objective = Objective(net, "cross_entropy", 0)
    party = Party(0, objective, SampleGateway(samples(0, 6, 1)), 0)
    good = torch.randn(3, 8, dtype=torch.float64)
    assert isinstance(perform(op, party, payload(good), {}), tuple)
    for w in (good[0], good[:, :7], good.unsqueeze(0), good[:0], good * torch.nan, good.long(), None):
        assert isinstance(perform(op, party, payload(w), {}), str)
    assert isinstance(perform(op, party, {"model": good}, {}), str)
