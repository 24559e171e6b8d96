"""Jobs under [privacy] across a network: differential privacy, a secure sum and few bits, over mutual TLS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from league import PARTIES, League, samples

import hansa
from hansa.core.budget import Release
from hansa.experiment.tasks import make_model
from hansa.plumbing.errors import ConfigError
from hansa.privacy.accounting import epsilon

CENTRAL = {"kind": "central", "sigma": 2.0, "delta": 1e-5, "clip": 0.5}
MASKED = {"secure": "masking", "bits": 12, "stochastic": True}


def tree(privacy: dict[str, Any], rounds: int = 2, **run: Any) -> dict[str, Any]:
    return {
        "task": {"parties": ["x"], "model": "logistic", "dtype": "float64"},
        "algorithm": {"name": "fedavg", "local": {"name": "sgd", "lr": 0.1}},
        "run": {"rounds": rounds, "seed": 3, "eval_parties": False, **run}, "privacy": privacy,
    }  # fmt: skip


def numbers(saved: Any) -> torch.Tensor:
    """The parameters of a saved model."""
    return torch.cat([value.reshape(-1) for _, value in sorted(saved["params"].items())])


@pytest.mark.slow
def test_privacy_secrecy_and_few_bits_in_one_job_over_mutual_tls(league: League) -> None:
    league.join_all()
    jobs = [league.submit(tree({**MASKED, "dp": CENTRAL})), league.submit(tree({**MASKED, "dp": CENTRAL})),
            league.submit(tree({"dp": {**CENTRAL, "sigma": 0}})),
            league.submit(tree({**MASKED, "bits": 32, "dp": {**CENTRAL, "sigma": 0}}))]  # fmt: skip
    ended = [league.ended(job) for job in jobs]
    assert [one["status"] for one in ended] == ["finished"] * 4, [one["reason"] for one in ended]
    for line in ended[0]["rounds"]:
        assert line["epsilon"] == epsilon([Release(1.0, 2.0, line["round"])], 1e-5, "pld") and line["replies"] == 3
        assert "train_loss" not in line
    noisy, again, plain, hidden = (numbers(league.model(job)) for job in jobs)
    assert torch.allclose(plain, hidden, rtol=0, atol=1e-6)
    assert not torch.equal(noisy, again)  # the noise is the parties' own, whatever the run's seed
    assert 0.1 < float((noisy - plain).std()) < 3


def test_the_aggregators_noise_is_not_of_the_seed_and_a_restart_repeats_no_round(league: League) -> None:
    league.join_all()
    job = league.submit(tree({"dp": CENTRAL}, rounds=4))
    league.until(lambda: bool(league.shown(job)["rounds"]))
    league.stop()
    league.start()
    ended = league.ended_after_all(job)
    assert ended["status"] == "finished", ended["reason"]
    spent = [line["epsilon"] for line in ended["rounds"]]
    assert spent == [epsilon([Release(1.0, 2.0, n)], 1e-5, "pld") for n in (1, 2, 3, 4)]
    data = [samples(number)[0] for number in range(3)]
    task = hansa.Task(make_model("logistic", "float64", ".", (3,), 2), "cross_entropy", data, classes=2)
    settings = tree({"dp": CENTRAL}, rounds=4)
    same_seed = hansa.simulate(hansa.FedAvg(local=hansa.SGD(lr=0.1)), task, privacy=settings["privacy"],
                               **settings["run"])  # fmt: skip
    assert not torch.allclose(numbers(league.model(job)), numbers(same_seed.saved_model()), rtol=0, atol=0.01)


def test_an_order_that_privacy_does_not_allow_is_refused_when_it_comes(league: League) -> None:
    with pytest.raises(ConfigError, match="one round with sigma"):
        league.submit(tree({"dp": {**CENTRAL, "epsilon": 0.1}}))
    with pytest.raises(ConfigError, match="sums without noise"):
        order = tree({"dp": CENTRAL})
        league.submit({**order, "task": {**order["task"], "prepare": "standardise"}})
    with pytest.raises(ConfigError, match=r"privacy\.bound"):
        order = tree(MASKED)
        league.submit({**order, "algorithm": {"name": "fedavg", "fusion": "median"}})


def test_under_central_privacy_nothing_is_evaluated_party_by_party(league: League) -> None:
    order = tree({"dp": CENTRAL}, eval_parties=True)
    with pytest.raises(ConfigError, match=r"run\.eval_parties"):
        league.submit({**order, "task": {**order["task"], "party_test": 0.5}})
    for number, name in enumerate(PARTIES):
        train, _ = samples(number)
        league.join(name, (train, train if name == PARTIES[0] else None))  # one has test samples of its own
    ended = league.ended(league.submit(order))
    assert ended["status"] == "failed" and "run.eval_parties" in ended["reason"] and not ended["rounds"]


@pytest.mark.slow
@pytest.mark.parametrize(("privacy", "floor"), [
    ({"secure": "masking"}, "secure = true"),
    ({"secure": "masking", "active": True}, "active = true"),
    ({"secure": "paillier", "key_bits": 1024}, "secure = true"),
    ({"secure": "functional", "max_weight": 128}, "secure = true"),
])  # fmt: skip
def test_parties_with_a_floor_evaluate_within_the_secure_sum(
    league: League, privacy: dict[str, Any], floor: str
) -> None:
    data = [samples(number)[0] for number in range(3)]
    for name, own in zip(PARTIES, data, strict=True):
        league.join(name, (own, own), f"[privacy]\n{floor}\n[evaluate]\nmin_samples = 2")
    ended = league.ended(league.submit(tree(privacy, eval_parties=True)))
    assert ended["status"] == "finished", ended["reason"]
    task = hansa.Task(make_model("logistic", "float64", ".", (3,), 2), "cross_entropy", data, classes=2,
                      party_tests=data)  # fmt: skip
    plain = hansa.simulate(hansa.FedAvg(local=hansa.SGD(lr=0.1)), task, rounds=2, seed=3)
    for line, same in zip(ended["rounds"], plain.history, strict=True):
        assert line["loss"] == pytest.approx(same["loss"], abs=1e-3)
        assert line["accuracy"] == pytest.approx(same["accuracy"], abs=0.05)
        assert not [name for name in line if name.startswith("party_")] and "parties" not in line


@pytest.mark.slow
def test_a_party_that_declines_costs_the_evaluation_and_not_the_round(league: League) -> None:
    data = [samples(number)[0] for number in range(3)]
    for name, own in zip(PARTIES, data, strict=True):
        most = f"[budget]\nper_job = {{ evaluate = {1 if name == 'bob' else 9} }}"
        league.join(name, (own, own), f"[privacy]\nsecure = true\n[evaluate]\nmin_samples = 2\n{most}")
    ended = league.ended(league.submit(tree({"secure": "masking"}, eval_parties=True, target=2.0, metric="accuracy")))
    assert ended["status"] == "finished", ended["reason"]
    assert ["accuracy" in line for line in ended["rounds"]] == [True, False]
    assert "bob: its policy allows 1 evaluations per job" in ended["rounds"][1]["unmeasured"]
    assert [line["replies"] for line in ended["rounds"]] == [3, 3]
