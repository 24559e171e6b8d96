"""The privacy budget of a party in a run: what it spends, when it stops, and that no budget is given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hansa
from hansa.core.ask import op_config
from hansa.core.budget import Release, Spending
from hansa.local.dp_sgd import DPSGD
from hansa.privacy import spent
from hansa.privacy.accounting import epsilon
from hansa.testing.party_process import StdioParty, load

SIZES = (20, 30, 50)
ENGINES = pytest.mark.parametrize("engine", ["stacked", "reference"])


def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 1, dtype=torch.float64)


def task() -> hansa.Task:
    draw = torch.Generator().manual_seed(1)
    shards = []
    for n in SIZES:
        x = torch.randn(n, 3, generator=draw, dtype=torch.float64)
        shards.append((x, x.sum(1, keepdim=True)))
    return hansa.Task(model, "mse", shards)


def run(local: DPSGD, **settings: Any) -> hansa.Result:
    return hansa.simulate(hansa.FedAvg(local=local), task(), **{"rounds": 3, "engine": "reference", **settings})


def cost(n: int, rounds: int, local: DPSGD) -> float:
    return epsilon([Release(min(1.0, local.batch / n), local.sigma, rounds * local.count(n))], local.delta)  # type: ignore[operator]


@ENGINES
def test_a_round_says_what_each_party_has_spent_so_far_and_the_most_of_it(engine: str) -> None:
    local = DPSGD(batch=5, sigma=2.0, epochs=2)
    for line in run(local, engine=engine).history:
        expected = {str(k): cost(n, line["round"], local) for k, n in enumerate(SIZES)}
        assert line["epsilons"] == pytest.approx(expected)
        assert line["epsilon"] == max(line["epsilons"].values())
        assert line["delta"] == 1e-5


@ENGINES
def test_a_party_whose_next_round_would_be_over_its_budget_declines_and_the_others_go_on(engine: str) -> None:
    local = DPSGD(batch=5, sigma=2.0)
    limited = DPSGD(batch=5, sigma=2.0, epsilon=(cost(20, 2, local) + cost(20, 3, local)) / 2)
    lines = run(limited, rounds=4, engine=engine).history
    assert [line["replies"] for line in lines] == [3, 3, 2, 2]
    assert lines[2]["missing"]["0"].startswith("its privacy budget is spent: epsilon ")
    assert lines[3]["epsilons"]["0"] == lines[1]["epsilons"]["0"] == pytest.approx(cost(20, 2, local))
    assert lines[3]["epsilons"]["2"] == pytest.approx(cost(50, 4, local))


@ENGINES
def test_a_run_ends_when_every_party_has_spent_its_budget(engine: str) -> None:
    result = run(DPSGD(batch=5, sigma=2.0, epsilon=cost(50, 2, DPSGD(batch=5, sigma=2.0))), rounds=50, engine=engine)
    assert result.summary["stopped"] == "every party's privacy budget is spent"
    assert result.history[-1]["replies"] == 0
    assert "empty" in result.history[-1]
    assert max(result.history[-1]["epsilons"].values()) <= cost(50, 2, DPSGD(batch=5, sigma=2.0))


@pytest.mark.parametrize("settings", [{"max_norm": 1e-9}, {"quorum": 3, "absent": lambda party, round: party == 2}])
def test_what_left_a_party_is_spent_though_the_reply_was_rejected_or_the_round_aborted(settings: Any) -> None:
    local = DPSGD(batch=5, sigma=2.0)
    lines = run(local, **settings).history
    assert all("empty" in line for line in lines)
    assert lines[-1]["epsilons"]["0"] == pytest.approx(cost(20, 3, local))
    assert ("2" in lines[-1]["epsilons"]) is ("quorum" not in settings)  # an absent party spent nothing


def test_a_party_that_was_not_asked_spends_nothing() -> None:
    local = DPSGD(batch=5, sigma=2.0)
    line = run(local, rounds=1, cohort_size=1).history[0]
    assert len(line["epsilons"]) == 1


def test_a_run_that_goes_on_has_the_same_numbers(tmp_path: Path) -> None:
    local = DPSGD(batch=5, sigma=2.0, epsilon=cost(20, 3, DPSGD(batch=5, sigma=2.0)))
    whole = run(local, rounds=5, run_dir=tmp_path / "whole")

    def interrupt(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(local, rounds=5, run_dir=tmp_path / "cut", on_round=interrupt)
    again = run(local, rounds=5, run_dir=tmp_path / "cut", resume=True)
    names = ("epsilon", "epsilons", "missing", "replies")
    assert [[line.get(n) for n in names] for line in again.history] == [
        [line.get(n) for n in names] for line in whole.history
    ]
    assert torch.equal(again.state.params.w, whole.state.params.w)
    assert again.history[-1]["missing"]


@pytest.mark.parametrize("force", [False, True])
def test_no_run_begins_or_ends_to_be_private_on_its_way(tmp_path: Path, force: bool) -> None:
    central = {"dp": {"kind": "central", "sigma": 1.0, "delta": 1e-5}}
    kinds: list[tuple[Any, Any]] = [(hansa.SGD(), None), (DPSGD(), None), (hansa.SGD(), central)]
    for begun, (local, privacy) in enumerate(kinds):
        run(local, rounds=1, run_dir=tmp_path / str(begun), privacy=privacy)
        for local, privacy in kinds[:begun] + kinds[begun + 1 :]:
            with pytest.raises(hansa.ConfigError, match="its epsilon would not cover all of its rounds"):
                run(local, rounds=2, run_dir=tmp_path / str(begun), resume=True, force=force, privacy=privacy)
    more = run(DPSGD(sigma=2.0), rounds=2, run_dir=tmp_path / "1", resume=True, force=True)
    both = [Release(1.0, 1.0), Release(1.0, 2.0)]
    assert more.history[-1]["epsilons"]["0"] == pytest.approx(epsilon(both, 1e-5))  # the spending stays


def test_with_a_least_cohort_only_the_most_is_told() -> None:
    line = run(DPSGD(batch=5, sigma=2.0), rounds=1, min_cohort=2).history[0]
    assert "epsilons" not in line
    assert line["epsilon"] == pytest.approx(cost(20, 1, DPSGD(batch=5, sigma=2.0)))


def test_without_noise_the_epsilon_is_no_number_and_with_a_budget_nobody_takes_part() -> None:
    assert run(DPSGD(batch=5, sigma=0.0), rounds=1).history[0]["epsilon"] is None
    result = run(DPSGD(batch=5, sigma=0.0, epsilon=100.0), rounds=3)
    assert result.summary["stopped"] == "every party's privacy budget is spent"
    assert result.history[0]["replies"] == 0


def test_tickets_are_paid_for_as_rounds_are() -> None:
    local = DPSGD(batch=5, sigma=2.0)
    lines = hansa.simulate(hansa.FedBuff(local=local, buffer=1), task(), rounds=4, engine="reference").history
    paid = sum(line["replies"] for line in lines)
    assert paid == 4
    assert lines[-1]["epsilon"] >= cost(50, 1, local)
    limited = DPSGD(batch=5, sigma=2.0, epsilon=cost(20, 1, local) * 1.001)
    lines = hansa.simulate(hansa.FedBuff(local=limited, buffer=1), task(), rounds=9, engine="reference").history
    assert any("budget is spent" in why for line in lines for why in line.get("missing", {}).values())


def test_less_work_costs_less() -> None:
    local = DPSGD(batch=5, sigma=2.0, epochs=4)
    told = run(local, rounds=1, own={"0": {"epochs": 1}, "1": {"batch": 10}}).history[0]["epsilons"]
    assert told["0"] == pytest.approx(cost(20, 1, DPSGD(batch=5, sigma=2.0)))
    assert told["1"] == pytest.approx(cost(30, 1, DPSGD(batch=10, sigma=2.0, epochs=4)))
    assert told["2"] == pytest.approx(cost(50, 1, local))


def test_books_come_back_from_a_checkpoint() -> None:
    op, books = DPSGD(batch=5, sigma=2.0), Spending(spent)
    books.charge(3, op, 20, {})
    books.charge(3, op, 20, {"work": {"batch": 10}})
    books.charge(1, op, 40, {})
    again = Spending(spent)
    again.restore(books.tree())
    assert again.charge(3, op, 20, {}) == books.charge(3, op, 20, {})
    assert again.charge(2, op, 0, {}) is None


def test_a_party_in_a_process_of_its_own_pays_too_and_dropping_what_it_staged_pays_nothing_back() -> None:
    local = DPSGD(batch=5, sigma=2.0)
    op = DPSGD(batch=5, sigma=2.0, epsilon=30.0)
    tree = {
        "task": {"dataset": "digits", "model": "logistic", "dtype": "float64"},
        "partition": {"name": "iid", "parties": 20}, "algorithm": {"name": "fedavg"},
    }  # fmt: skip
    agent = StdioParty(load, spent)
    agent.handle({"type": "task", "experiment": tree, "folder": ".", "party": 0})
    assert agent.party is not None
    n, w = agent.party.n, agent.party.objective.initial
    payload = {"model": w._asdict()}
    told, drop = [], list[str]()
    for k in range(2):
        ask = {"type": "ask", "id": f"{k}", "op": op_config(op), "payload": payload, "round": k, "drop": drop}
        told.append(float(agent.handle(ask)["reply"]["metrics"]["epsilon"]))
        agent.handle({"type": "settle", "keep": [], "drop": [f"{k}"]})
    assert told == pytest.approx([cost(n, 1, local), cost(n, 2, local)])
    tight = op_config(DPSGD(batch=5, sigma=2.0, epsilon=told[1]))
    ask = {"type": "ask", "id": "2", "op": tight, "payload": payload, "round": 2, "drop": []}
    assert agent.handle(ask)["declined"].startswith("its privacy budget is spent")


@pytest.mark.parametrize(("field", "value"), [("epsilon", 0.0), ("epsilon", -1.0), ("delta", 0.0), ("delta", 1.0)])
def test_a_budget_that_is_none_is_refused(field: str, value: float) -> None:
    with pytest.raises(hansa.ConfigError, match=field):
        DPSGD(**{field: value})
