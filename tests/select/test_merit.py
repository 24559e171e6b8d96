"""Selection by merit: the floor, the order of merits, what is remembered, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hansa
from hansa.core.ask import Gathered
from hansa.core.federation import Federation
from hansa.core.op import Reply
from hansa.fusion import Median
from hansa.local import DPSGD, SGD
from hansa.plumbing.errors import ConfigError
from hansa.select import Merit
from hansa.select.merit import cosine, fall, in_proportion, systematic
from hansa.select.selector import SelectorState
from quadratics import task as quadratics

SGD1 = SGD(lr=0.1, batch=None)


def draw(select: Merit, state: SelectorState, parties: int, cohort: int, round: int) -> tuple[int, ...]:
    """One draw of a selector that asks nobody."""
    fed = Federation(range(parties), round, 3, cohort)
    steps: Any = select.select(fed, hansa.FedAvg(), None, state)  # type: ignore[arg-type]
    with pytest.raises(StopIteration) as done:
        steps.send(None)
    cohort_drawn: tuple[int, ...] = done.value.value[0]
    return cohort_drawn


def rates(select: Merit, merits: list[float], cohort: int, draws: int = 3000) -> np.ndarray[Any, Any]:
    state = {"merit": torch.tensor(merits, dtype=torch.float64)}
    counts = np.zeros(len(merits))
    for round in range(draws):
        drawn = draw(select, state, len(merits), cohort, round)
        assert len(drawn) == cohort and list(drawn) == sorted(set(drawn))
        counts[list(drawn)] += 1
    return counts / draws


def test_every_party_keeps_its_floor_and_better_parties_are_selected_more_often() -> None:
    select = Merit(floor=0.25, strength=5.0)
    merits = [1.0, 0.5, 0.0, -0.5, -1.0, -1.0, math.nan, -1.0]
    expected = select.chances(np.array(merits), 2)
    assert expected.sum() == pytest.approx(2.0) and expected.min() >= 0.25 * 2 / 8 and expected.max() <= 1
    assert (np.diff(expected[:5]) < 0).all()
    seen = rates(select, merits, 2)
    assert np.abs(seen - expected).max() < 4 * math.sqrt(0.25 / 3000)
    assert seen.min() > 0.8 * 0.25 * 2 / 8


def test_with_equal_merits_the_draw_is_uniform() -> None:
    for merits in ([0.3] * 6, [math.nan] * 6, [0.3, math.nan] * 3):
        assert Merit(strength=20.0).chances(np.array(merits), 2) == pytest.approx([1 / 3] * 6, abs=1e-12)
    seen = rates(Merit(), [0.3] * 6, 3)
    assert np.abs(seen - 0.5).max() < 4 * math.sqrt(0.25 / 3000)
    state = {"merit": torch.full((4,), 0.3, dtype=torch.float64)}
    pairs = {draw(Merit(), state, 4, 2, round) for round in range(200)}
    assert len(pairs) == 6  # every pair occurs


def test_the_shares_are_at_most_one_and_in_proportion_below() -> None:
    shares = in_proportion(np.array([100.0, 1.0, 2.0, 3.0]), 2)
    assert shares == pytest.approx([1.0, 1 / 6, 2 / 6, 3 / 6])
    assert in_proportion(np.array([5.0, 1.0]), 2) == pytest.approx([1.0, 1.0])
    assert systematic(np.array([0.5, 1.0, 0.5]), 0.2).tolist() == [0, 1]
    assert systematic(np.array([0.5, 1.0, 0.5]), 0.7).tolist() == [1, 2]


def test_scores_are_bounded_whatever_a_party_sends() -> None:
    a = torch.tensor([3.0, 4.0])
    assert cosine(a, 2 * a) == pytest.approx(1.0) and cosine(a, -a) == pytest.approx(-1.0)
    assert cosine(a, torch.zeros(2)) == 0.0
    assert cosine(torch.tensor([1e38, 1e38]), torch.tensor([1e-38, 1e-38])) == pytest.approx(1.0)
    assert fall(2.0, 1.0) == 0.5 and fall(1.0, 1e9) == -1.0 and fall(1.0, math.nan) == -1.0 and fall(0.0, 0.0) == 0.0


def test_the_merit_is_a_moving_mean_of_the_scores() -> None:
    """F_k = (w - b_k)^2 / 2: updates towards 4 agree with the change of the model, the one towards -1 does not."""
    optima = [4.0, 4.0, -1.0]
    done = hansa.simulate(hansa.FedAvg(local=SGD1), quadratics([1.0] * 3, optima), rounds=2, select=Merit(rate=0.5))
    assert done.training.progress.selection["merit"].tolist() == pytest.approx([1.0, 1.0, -1.0], abs=1e-6)
    state: SelectorState = {"merit": torch.tensor([0.2, math.nan], dtype=torch.float64)}
    fed = Federation(range(2), 0, 0, 2)
    before = done.state.replace(done.state.params._replace(w=torch.tensor([0.0], dtype=torch.float64)))
    after = done.state.replace(done.state.params._replace(w=torch.tensor([1.0], dtype=torch.float64)))
    replies = tuple(Reply({"w": torch.tensor([v], dtype=torch.float64)}) for v in (-3.0, 5.0))
    merit = Merit(rate=0.25).judged(fed, before, after, Gathered((0, 1), replies), state)["merit"]
    assert merit.tolist() == pytest.approx([0.75 * 0.2 - 0.25, 1.0])


@pytest.mark.parametrize(
    ("measure", "fusion"), [("loss", hansa.WeightedMean()), ("loss", Median()), ("agreement", Median())]
)
def test_parties_with_wrong_labels_lose_merit_and_are_selected_less(measure: Any, fusion: Any) -> None:
    draws = torch.Generator().manual_seed(1)
    pairs = []
    for party in range(9):
        x = torch.randn(24, 3, generator=draws, dtype=torch.float64)
        y = (x.sum(1) > 0).long()
        pairs.append((x, 1 - y if party < 2 else y))
    clean = torch.randn(40, 3, generator=draws, dtype=torch.float64)
    task = hansa.Task(
        lambda: nn.Linear(3, 2).double(), "cross_entropy", pairs, trusted=(clean, (clean.sum(1) > 0).long())
    )
    select = Merit(measure=measure, strength=6.0, floor=0.1)
    done = hansa.simulate(
        hansa.FedAvg(local=SGD(lr=0.1, batch=None, steps=2), fusion=fusion),
        task,
        rounds=40,
        cohort_size=5,
        select=select,
    )
    merit = done.training.progress.selection["merit"]
    assert float(merit[:2].mean()) < float(merit[2:].mean()) - 0.1
    late = [int(name) for line in done.history[10:] for name in line["cohort"]]
    assert sum(party < 2 for party in late) / len(late) < 0.7 * 2 / 9


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedavgm", "fednova", "qfedavg"])
def test_watched_updates_change_no_bit_of_the_model_and_no_metric(name: str, run: Callable[..., Any]) -> None:
    sizes = [4, 9, 6]
    one, other = (
        run(select, sizes, hansa.build("algorithm", name), rounds=3, engine="reference")
        for select in (Merit(), "uniform")
    )
    assert torch.equal(one.result.state.params.w, other.result.state.params.w)
    for a, b in zip(one.result.history, other.result.history, strict=True):
        assert a.get("train_loss") == b.get("train_loss") and a["bytes_up"] == b["bytes_up"]
    assert set(one.kept) == {"merit"} and not torch.isnan(one.kept["merit"]).any()


def test_a_resumed_run_selects_the_same_parties(tmp_path: Path) -> None:
    optima = [1.0, 2.0, 3.0, -4.0, 5.0]
    settings: dict[str, Any] = {"select": Merit(strength=6.0), "cohort_size": 2, "engine": "reference"}

    def simulate(rounds: int, **more: Any) -> Any:
        algorithm = hansa.FedAvg(local=SGD1)
        return hansa.simulate(algorithm, quadratics([1.0] * 5, optima), rounds=rounds, **settings, **more)

    whole = simulate(8)
    simulate(3, run_dir=tmp_path / "run")
    resumed = simulate(8, run_dir=tmp_path / "run", resume=True)
    assert [line["cohort"] for line in resumed.history] == [line["cohort"] for line in whole.history]
    assert torch.equal(resumed.state.params.w, whole.state.params.w)


def test_an_aborted_round_teaches_nothing() -> None:
    done = hansa.simulate(
        hansa.FedAvg(local=SGD1), quadratics([1.0] * 3, [1.0, 2.0, 3.0]), rounds=2, select=Merit(), quorum=3,
        absent=lambda party, round: party == 0,
    )  # fmt: skip
    assert all("empty" in line for line in done.history)
    assert "merit" not in done.training.progress.selection


def test_what_merit_cannot_judge_is_refused_in_one_sentence(run: Callable[..., Any]) -> None:
    def refused(reason: str, algorithm: Any, select: Any = None, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=reason):
            run(select or Merit(), [6, 6, 6], algorithm, rounds=1, **settings)

    fedavg = hansa.FedAvg()
    refused("secure sum", fedavg, privacy={"secure": "masking"})
    refused("bounded updates", fedavg, privacy={"bound": 1.0})
    refused("exact sums", fedavg, sums="exact")
    refused("central differential privacy", fedavg, privacy={"dp": {"kind": "central", "sigma": 1.0}})
    refused("needs samples of the server's own", fedavg, Merit(measure="loss"))
    refused("mostly noise", hansa.FedAvg(local=DPSGD(epsilon=1.0)))
    refused("different models", hansa.FedPer())
    refused("different models", hansa.HypCluster())
    refused("different models", hansa.PruneFL())
    for fields in ({"floor": 0.0}, {"floor": 1.5}, {"rate": 0.0}, {"strength": -1.0}, {"samples": 0}):
        with pytest.raises(ConfigError, match=next(iter(fields))):
            Merit(**fields)  # type: ignore[arg-type]
    for name in ("fedbuff", "naive-bayes", "d-psgd", "adaptive-top-k"):
        with pytest.raises(ConfigError, match=r"run\.select"):
            run(Merit(), [6, 6, 6], hansa.build("algorithm", name), rounds=1)
