"""Chosen metrics in a deployed job: the bits of the simulation, and what a party's policy allows of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, League, samples

import hansa
from hansa.core.plain_data import build
from hansa.experiment.config import parse
from hansa.holdings.gateway import SampleGateway
from hansa.local import SGD
from hansa.metrics import AUC, F1, Accuracy, ConfusionMatrix, FunctionMetric, Recall
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.net.party.gateway import OwnerGateway
from hansa.net.party.policy import Policy
from hansa.net.party.samples import PartySamples
from hansa.net.party.vault import PartyVault
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.privacy import spent

METRICS: list[Any] = ["f1", "auc", "confusion-matrix", {"name": "recall", "by": "a", "edges": [0.0]}]
HEADER = ("y", "a", "b", "c")
FLOOR = "[privacy]\nsecure = true\n"


def pair(party: int, header: tuple[str, ...] = HEADER) -> PartySamples:
    return PartySamples(samples(party)[0], samples(party + 10)[0], header)


def tree(**run: Any) -> dict[str, Any]:
    task = {"parties": ["x"], "model": "logistic", "dtype": "float64", "prepare": "standardise"}
    return {"task": task, "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "batch": 6}},
            "run": {"rounds": 1, "seed": 3, "metrics": METRICS, **run}}  # fmt: skip


def simulated(**given: Any) -> dict[str, Any]:
    model = build("model", "logistic", inputs=(3,), outputs=2)
    task = hansa.Task(lambda: model().double(), "cross_entropy", [pair(k).train for k in range(3)],
                      party_tests=[pair(k).test for k in range(3)], classes=2, names=PARTIES, header=HEADER,
                      prepare=hansa.Standardise())  # fmt: skip
    settings = {"rounds": 1, "seed": 3, "metrics": METRICS, "engine": "reference", **given}
    return hansa.simulate(hansa.FedAvg(SGD(lr=0.1, batch=6)), task, **settings).history[-1]


def deployed(league: League, order: dict[str, Any], **policies: str) -> dict[str, Any]:
    for number, name in enumerate(PARTIES):
        league.join(name, pair(number), policies.get(name, ""))
    job = league.submit(order)
    ended = league.ended(job)
    assert ended["status"] == "finished", ended["reason"]
    line: dict[str, Any] = league.shown(job)["rounds"][-1]
    return line


@pytest.mark.slow
@pytest.mark.parametrize("secure", [{}, {"privacy": {"secure": "masking"}}])
def test_a_deployed_job_measures_the_bits_of_the_simulation(secure: dict[str, Any], league: League) -> None:
    line, wanted = deployed(league, {**tree(), **secure}), simulated(**secure)
    for name in ("accuracy", "f1", "auc", "confusion_matrix", "recall_by_a", "recall_by_a_gap"):
        assert line[name] == wanted[name]
    assert line["loss"] == (pytest.approx(wanted["loss"], rel=1e-6) if secure else wanted["loss"])  # random last digits
    assert line.get("parties") == wanted.get("parties")


def test_a_party_whose_policy_allows_fewer_numbers_is_left_out_of_the_metrics(league: League) -> None:
    line = deployed(league, tree(), bob="[evaluate]\nnumbers = 5\n")
    assert set(line["parties"]) == {"ann", "cid"} and "f1" in line


def test_a_function_runs_at_parties_that_list_it_alone(league: League) -> None:
    own = "sklearn.metrics:cohen_kappa_score"
    with pytest.raises(Exception, match=r"not among serve\.functions"):
        league.submit(tree(metrics=[own]))


def test_groups_of_a_deployed_job_must_be_named(league: League) -> None:
    unnamed = tree(metrics=[{"name": "recall", "by": "a"}])
    why = r"run\.metrics: recall by 'a': parties do not tell the values of a column; list them, as in groups = \[0, 1\]"
    with pytest.raises(ConfigError, match=why):  # before anything is sent
        league.operator.submit(parse(unnamed), "job")
    with pytest.raises(Exception, match=why):  # and by the aggregator
        league.submit(unnamed)
    assert league.operator.jobs() == []


def gateway(folder: Path, op: EvaluateMetrics, policy: str, n: int = 40) -> OwnerGateway:
    (folder / "party.toml").write_text(policy)
    read = Policy.read(folder / "party.toml")
    x, y = torch.zeros(n, 2), torch.zeros(n)
    x[:15, 0] = 1
    vault = PartyVault(folder, spent, read.privacy.budget, read.peers)
    opened = OwnerGateway(SampleGateway((x, y), (x, y), ("y", "sex", "b")), read, vault, "job", op, {})
    opened._checked = True  # the floor refuses every evaluation outside a secure sum
    opened.open("a")
    return opened


BY_SEX = Recall(by="sex", groups=(0, 1))


@pytest.mark.parametrize(
    ("metrics", "policy", "why"),
    [
        (
            (F1(), ConfusionMatrix()),
            "[evaluate]\nnumbers = 10\n",
            "allows 10 numbers per evaluation, and these metrics",
        ),
        ((AUC(),), FLOOR, r"allows 200 numbers per evaluation, .* evaluate\.numbers"),
        ((BY_SEX,), FLOOR, "group its test samples by 'sex'"),
        ((BY_SEX,), "[evaluate.groups]\nage = [0, 1]\n", "group its test samples by 'sex'"),
        ((BY_SEX,), "[evaluate.groups]\nsex = [0, 2]\n", "group its test samples by 'sex'"),
        ((Recall(by=0, groups=(0, 1)),), "[evaluate.groups]\nsex = [0, 1]\n", "group its test samples by 0"),
        ((Recall(by="sex", edges=(0, 1)),), "[evaluate.groups]\nsex = [0, 1]\n", "group its test samples"),
    ],
)
def test_what_metrics_let_the_aggregator_choose_is_bounded_by_the_party(
    metrics: Any, policy: str, why: str, tmp_path: Path
) -> None:
    op = EvaluateMetrics(metrics=metrics, classes=2)
    refused = gateway(tmp_path, op, policy)._limits.refuses(op, 40)
    assert refused is not None and re.search(why, refused)


def test_a_policy_lists_the_groups_that_it_allows(tmp_path: Path) -> None:
    for metric, policy in (
        (BY_SEX, f"{FLOOR}[evaluate.groups]\nsex = [0, 1]\n"),
        (Recall(by="sex", edges=(0.5,)), f"{FLOOR}[evaluate.groups]\nsex = {{ edges = [0.5] }}\n"),
        (AUC(bins=50), FLOOR),
        (BY_SEX, ""),
    ):
        op = EvaluateMetrics(metrics=(metric,), classes=2)
        opened = gateway(tmp_path, op, policy)
        assert opened._limits.refuses(op, 40) is None
        assert opened.least == (20 if policy else 0)  # each group needs as many samples as an evaluation
        assert opened.test_column("sex").sum() == 15
    with pytest.raises(PartyError, match="no column 'age'"):
        opened.test_column("age")
    for wrong in ("sex = []", "sex = 3", "sex = { values = [1] }", "sex = ['a']"):
        with pytest.raises(ConfigError, match=r"groups: 'sex' needs a list"):
            gateway(tmp_path, op, f"[evaluate.groups]\n{wrong}\n")


def test_a_policy_refuses_functions_that_it_does_not_list() -> None:
    op = EvaluateMetrics(metrics=(Accuracy(), FunctionMetric(function="my_module:cost")), classes=2)
    assert Policy().refuses_op(op) == "its policy does not allow the function 'my_module:cost'"
    assert Policy(functions=("my_module:cost",)).refuses_op(op) is None


def test_a_column_is_read_as_an_evaluation_and_counted(tmp_path: Path) -> None:
    op = EvaluateMetrics(metrics=(BY_SEX,), classes=2)
    policy = "[budget]\nper_job = { evaluate = 0 }\n"
    with pytest.raises(PartyError, match="0 evaluations per job"):
        gateway(tmp_path, op, policy).test_column("sex")


@pytest.mark.parametrize("fields", [{"classes": -1}, {"classes": 2**40}, {"metrics": (Accuracy(),) * 65}])
def test_sizes_that_no_evaluation_has_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"at most 64 metrics|must be at least 0"):
        EvaluateMetrics(**{"metrics": (F1(),), "classes": 2, **fields})
