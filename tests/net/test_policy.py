"""A party's policy: what it refuses, with which reason, and its own settings."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from league import PARTIES, League, samples

import hansa
from hansa.algorithms.fedmd import PublicScores
from hansa.core.ask import op_config, op_of
from hansa.core.op import Op
from hansa.core.plain_data import build
from hansa.core.predictor import Evaluate
from hansa.experiment.tasks import make_model
from hansa.local import DPSGD, SGD, Mixed
from hansa.local.cluster import ClusterTrain
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.floor import Floor
from hansa.net.party.policy import TABLES, Policy
from hansa.net.party.policy_template import TOML
from hansa.net.party.samples import preparer
from hansa.net.transport.wire import Blob, Order, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError
from hansa.secure.masking_ops import SecureMasked

TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
BLOB = Blob("ab" * 32, 1)


def work(name: str = "heart", min_cohort: int = 1) -> Work:
    return Work("heart-1", name, 0, 0, "round", 0, BLOB, BLOB, None, None, None, min_cohort)


def policy(tmp_path: Path, text: str) -> Policy:
    (tmp_path / "party.toml").write_text(text)
    return Policy.read(tmp_path / "party.toml")


def test_without_a_file_everything_registered_is_accepted_and_the_file_is_written(tmp_path: Path) -> None:
    found = Policy.read(tmp_path / "party.toml")
    assert found == Policy() == Policy.read(tmp_path / "party.toml")
    assert found.refuses_work(work()) is None and found.refuses_op(SGD()) is None
    assert found.refuses_model("logistic") is None and found.refuses_model(None) is None


def test_jobs_are_accepted_by_name_and_by_the_least_cohort(tmp_path: Path) -> None:
    found = policy(tmp_path, 'jobs = ["heart-*", "eye"]\nmin_cohort = 3')
    assert found.refuses_work(work("heart-2", 3)) is None and found.refuses_work(work("eye", 9)) is None
    assert "does not accept the job 'heart'" in str(found.refuses_work(work("heart", 3)))
    assert "does not accept the job 'Eye'" in str(found.refuses_work(work("Eye", 3)))
    assert "at least 3, and the job allows 2; set run.min_cohort" in str(found.refuses_work(work("eye", 2)))


@pytest.mark.parametrize(
    ("op", "inside"),
    [
        (SGD(), []),
        (Evaluate("network"), []),
        (build("op", "probe"), ["sgd"]),
        (build("op", "gossip"), ["sgd"]),
        (build("local", "personal"), ["sgd"]),
        (build("op", "probe", inner=build("local", "personal", inner=build("local", "adam"))), ["personal", "adam"]),
    ],
)
def test_an_op_inside_another_counts_too(tmp_path: Path, op: Op, inside: list[str]) -> None:
    names = [op.name, *inside]
    listed = ", ".join(f'"{name}"' for name in names)
    assert policy(tmp_path, f"ops = [{listed}]").refuses_op(op) is None
    for name in names:
        others = ", ".join(f'"{other}"' for other in names if other != name)
        assert policy(tmp_path, f"ops = [{others}]").refuses_op(op) == f"its policy does not accept the op {name!r}"


@pytest.mark.parametrize("op", [Mixed(DPSGD()), ClusterTrain(DPSGD()), ClusterTrain(DPSGD(), hidden=True)])
def test_a_private_party_refuses_what_tells_more_than_the_noisy_updates_inside(op: Any) -> None:
    floor, models = Floor(dp=True), {"model": {"w": torch.zeros(2, 3)}}
    assert floor.refuses(op.inner, 100, models) is None
    assert f"its policy requires differential privacy, and {op.name!r} has none" in str(floor.refuses(op, 100, models))


@pytest.mark.parametrize("text", ["min_cohort = 2", "[privacy]\nactive = true"])
def test_sums_that_tell_clusters_apart_are_refused_whatever_cohort_is_claimed(tmp_path: Path, text: str) -> None:
    """The sum of a cluster with one party is its update, and the aggregator chooses the models of the clusters."""
    op = SecureMasked(ClusterTrain(SGD(), hidden=True), parties=3)
    assert "tells clusters apart" in str(policy(tmp_path, text).refuses_op(op))
    assert policy(tmp_path, "").refuses_op(op) is None


def test_active_parties_join_no_secure_sum_of_a_job_with_several_models(tmp_path: Path) -> None:
    """The job chooses the models: with constant scores of the others, the sum was the scores of one party."""
    op, message = SecureMasked(PublicScores(), parties=3), {"payload": {"begin": True}}
    several = {"models": {"a": "logistic", "b": {"name": "2nn", "hidden": 4}}, "turn": ["a", "b"]}
    active = policy(tmp_path, "[privacy]\nactive = true")
    assert "the job have different models" in str(active.refuses_several(op, message, several))
    assert active.refuses_several(PublicScores(), message, several) is None
    assert active.refuses_several(op, message, {"models": {"a": "logistic", "b": "logistic"}, "turn": ["a"]}) is None
    assert active.refuses_several(op, message, {"model": "logistic"}) is None
    assert policy(tmp_path, "").refuses_several(op, message, several) is None


def test_models_are_accepted_by_name_and_functions_only_letter_for_letter(tmp_path: Path) -> None:
    found = policy(tmp_path, 'models = ["log*"]\nfunctions = ["mine:net"]')
    assert found.refuses_model("logistic") is None and found.refuses_model({"name": "logistic", "outputs": 3}) is None
    assert "'2nn'" in str(found.refuses_model({"name": "2nn"})) and "'2nn'" in str(found.refuses_model("2nn"))
    assert found.refuses_model("mine:net") is None and found.refuses_model({"name": "mine:net"}) is None
    for name in ("mine:nets", "os:system", "mine:*", "log:x", ":"):
        assert "does not allow the function" in str(
            policy(tmp_path, 'functions = ["mine:net", "*"]').refuses_model(name)
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own = {rate = 1}", "unknown field 'rate'; a party may set lr, batch, epochs, steps"),
        ("own = {lr = 0}", "own.lr: expected a positive number, got 0"),
        ("own = {lr = true}", "own.lr: expected a positive number"),
        ('own = {lr = "1"}', "own.lr: expected a positive number"),
        ("own = {lr = nan}", "own.lr: expected a positive number"),
        ("own = {batch = 2.5}", "own.batch: expected a whole number, got 2.5"),
        ("own = {steps = -1}", "own.steps: expected a positive number"),
        ("own = {lr = inf}", "own.lr is inf, and this policy allows 0 to 1e+06"),
        ("own = {lr = 5}\nranges = {lr = [0, 1]}", "every ask would be refused"),
        ("own = {batch = 4}\nranges = {batch = [32, 64]}", "own.batch is 4, and this policy allows 32 to 64"),
        ("own = {epochs = 9}\nlimits = {epochs = 5}", "own.epochs is 9, and this policy allows 0 to 5"),
        ("max_bytes = 100000000000000000000", "max_bytes: the whole number has more than 64 bits"),
        ("limits = {epochs = 9223372036854775808}", "limits: epochs: the whole number has more than 64 bits"),
        ("evaluate = {groups = {sex = [0, 100000000000000000000]}}", "sex: 1: the whole number has more than 64 bits"),
        ("jobs = 5", "expected a list of a text"),
        ('device = "tpu"', "unknown device 'tpu'; use 'cpu', 'cuda' or 'cuda:N'"),
        ("job = []", "unknown field 'job'"),
        ('approve = "ask"', "approve: expected a table, got 'ask'"),
        ("jobs = [", "cannot read"),
        ("[privacy]\ndiscrete = true", "discrete applies to the noise of dp-sgd, which this party does not require"),
    ],
)
def test_what_a_policy_cannot_say_is_refused_with_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(tmp_path, text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_its_own_work_goes_before_what_it_is_told(tmp_path: Path) -> None:
    found = policy(tmp_path, "[own]\nlr = 0.5\nepochs = 2")
    told = {"model": 1, "work": {"steps": 7, "lr": 9.0}}
    assert found.payload(SGD(), told) == {"model": 1, "work": {"steps": None, "lr": 0.5, "epochs": 2}}
    assert found.payload(build("local", "personal"), {}) == {"work": {"steps": None, "lr": 0.5, "epochs": 2}}
    for name in ("pfnm-train", "fedma-train", "fedmd-learn"):  # ops that have a local solver
        assert found.payload(build("op", name), {}) == {"work": {"steps": None, "lr": 0.5, "epochs": 2}}
    scores = PublicScores(1, 5, 2, private=SGD(batch=1))
    assert policy(tmp_path, "own = {batch = 32}").payload(scores, {"begin": True})["work"] == {"batch": 32}
    assert found.payload(Evaluate("network"), told) is told
    assert found.payload(build("local", "gradient"), told) is told
    assert Policy().payload(SGD(), told) is told
    told = {"work": {"steps": None, "epochs": 9}}
    assert policy(tmp_path, "own = {steps = 3}").payload(SGD(), told)["work"] == {"steps": 3}
    with pytest.raises(ConfigError, match="own: epochs has no effect beside steps"):
        policy(tmp_path, "own = {epochs = 2, steps = 3}")


def test_a_party_is_asked_nothing_but_ops() -> None:
    for kind, name in (("dataset", "heart"), ("model", "logistic"), ("algorithm", "fedavg")):
        with pytest.raises(ConfigError, match="is not an op, so a party cannot run it"):
            op_of({"kind": kind, "name": name}, where="ask")
    for op in (SGD(), Evaluate("network")):
        assert op_of(op_config(op), where="ask") == op


# Over the network


def simulated(algorithm: Any = None, **run: Any) -> dict[str, Any]:
    task = hansa.Task(make_model("logistic", "float64", ".", (3,), 2), "cross_entropy",
                      [samples(k)[0] for k in range(3)], names=list(PARTIES), classes=2)  # fmt: skip
    result = hansa.simulate(algorithm or hansa.FedAvg(), task, engine="reference", **run)
    return result.saved_model()


def same(a: Any, b: Any) -> bool:
    return codec.encode(a) == codec.encode(b)


def joined(league: League, **policies: str) -> None:
    for k, name in enumerate(PARTIES):
        league.join(name, samples(k), policies.get(name, ""))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("local", "own"),
    [("sgd", "lr = 0.5\nbatch = 5"), ("sgd", "epochs = 3"), ("sgd", "steps = 2"), ("adam", "lr = 0.02")],
)
def test_a_partys_own_work_is_what_it_trains_with(league: League, local: str, own: str) -> None:
    joined(league, bob=f"[own]\n{own}")
    run = {"rounds": 2, "seed": 4}
    job = league.submit({"task": TASK, "algorithm": {"name": "fedavg", "local": {"name": local}}, "run": run})
    assert league.ended(job)["status"] == "finished"
    table = dict(line.split(" = ") for line in own.splitlines())
    tree = {"bob": {name: float(value) if name == "lr" else int(value) for name, value in table.items()}}
    algorithm = build("algorithm", "fedavg", local=local)
    assert same(league.model(job), simulated(algorithm=algorithm, own=tree, **run))
    assert not same(league.model(job), simulated(algorithm=algorithm, **run))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('jobs = ["other"]', "its policy does not accept the job 'job'"),
        ("min_cohort = 2", "its policy requires a cohort of at least 2, and the job allows 1"),
        ('ops = ["sgd"]', "its policy does not accept the op 'describe'"),
    ],
)
def test_who_refuses_a_job_is_left_out_and_the_log_says_why(
    league: League, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hansa.net")
    joined(league, cid=text)
    job = league.submit({"task": TASK, "run": {"rounds": 2}})
    ended = league.ended(job)
    assert ended["status"] == "finished" and [line["members"] for line in ended["rounds"]] == [["ann", "bob"]] * 2
    (entry,) = league.events("not taking part")
    assert entry["job"] == job and entry["party"] == "cid" and why in entry["detail"]
    assert [e["event"] for e in league.operator.log(job) if e["party"] == "cid"] == [
        "answer refused",
        "not taking part",
    ]
    (refusal,) = [record for record in caplog.records if record.msg == "ask refused"]
    assert why in refusal.__dict__["detail"]["why"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('ops = ["describe"]', "its policy does not accept the op 'sgd'"),
        ('models = ["2nn"]', "its policy does not accept the model 'logistic'"),
    ],
)
def test_who_refuses_a_rounds_work_is_missing_and_the_round_says_why(league: League, text: str, why: str) -> None:
    joined(league, cid=text)
    ended = league.ended(league.submit({"task": TASK, "run": {"rounds": 2}}))
    assert ended["status"] == "finished"
    assert [line["missing"] for line in ended["rounds"]] == [{"cid": why}] * 2


def test_a_function_reaches_an_import_only_through_the_partys_list(
    found: Callable[..., League], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_nets_of_tests.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Linear(3, 2).double()\n"
    )
    league = found(functions=("my_nets_of_tests:net",))
    joined(league, ann='functions = ["my_nets_of_tests:net"]', bob='functions = ["my_nets_of_tests:net"]')
    tree = {"task": {**TASK, "model": "my_nets_of_tests:net"}, "run": {"rounds": 1}}
    ended = league.ended(league.submit(tree))
    assert ended["rounds"][0]["members"] == ["ann", "bob"]
    assert "does not allow the function 'my_nets_of_tests:net'" in ended["rounds"][0]["missing"]["cid"]
    with pytest.raises(ConfigError, match=r"not among serve\.functions"):
        league.submit({"task": {**TASK, "model": "os:getcwd"}})


def test_a_job_that_everybody_refuses_fails_with_the_reasons(league: League) -> None:
    joined(league, ann='jobs = ["x"]', bob="min_cohort = 3", cid='ops = ["sgd"]')
    ended = league.ended(league.submit({"task": TASK}))
    assert ended["status"] == "failed"
    for said in ("ann: its policy does not accept the job", "bob: ", "cohort of at least 3", "the op 'describe'"):
        assert said in ended["reason"]
    assert len(league.events("not taking part")) == 3 and len(league.events("job failed")) == 1


def test_a_job_with_too_few_that_accept_it_fails_instead_of_waiting_for_ever(league: League) -> None:
    joined(league, ann='jobs = ["x"]')
    ended = league.ended(league.submit({"task": TASK, "run": {"min_cohort": 3}}))
    assert ended["status"] == "failed"
    assert "needs 3 parties, and 2 are left" in ended["reason"] and "does not accept the job" in ended["reason"]


def test_a_party_trains_where_its_policy_says(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def watched(given: Any) -> Any:
        prepare = preparer(given)

        def note(number: int, task: dict[str, Any], device: str) -> Any:
            asked.append(device)
            return prepare(number, task, "cpu")

        return note

    monkeypatch.setattr("league.preparer", watched)
    joined(league, bob='device = "meta"')
    assert league.ended(league.submit({"task": TASK, "run": {"rounds": 1}}))["status"] == "finished"
    assert set(asked) == {"cpu", "meta"}


def test_what_fails_at_a_party_is_said_without_quoting_its_data(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(given: Any) -> Any:
        prepare = preparer(given)

        def fail(number: int, task: dict[str, Any], device: str) -> Any:
            if number == 2 and task:
                raise ValueError("the patient is called Zoe")
            return prepare(number, task, device)

        return fail

    monkeypatch.setattr("league.preparer", broken)
    joined(league)
    ended = league.ended(league.submit({"task": TASK, "run": {"rounds": 1}}))
    assert ended["rounds"][0]["missing"] == {"cid": REFUSAL}
    assert "Zoe" not in str([dict(row) for row in league.ledger.all("SELECT * FROM log")])


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ({"name": "logistic", "inputs": [3], "outputs": 2}, None),
        ({"name": "2nn", "inputs": [3], "outputs": 2}, "its policy does not accept the model '2nn'"),
        ({"name": "logistic", "inputs": [3], "outputs": 10**9}, "models of at most 1000 parameters"),
        ({"name": "os:getcwd"}, "malformed ask: architecture must be the fields of a registered model"),
        ("logistic", "malformed ask: architecture must be the fields of a registered model"),
        ({"inputs": [3]}, "malformed ask: architecture must be the fields of a registered model"),
        (None, "malformed ask: architecture must be the fields of a registered model"),
    ],
)
def test_a_model_that_a_payload_describes_is_checked_like_the_task_s(
    tmp_path: Path, architecture: Any, reason: str | None
) -> None:
    found = policy(tmp_path, 'models = ["logistic"]\n[limits]\nparameters = 1000')
    refused = found.refuses_architecture({"model": {}, "architecture": architecture})
    assert refused is None if reason is None else reason in str(refused)
    assert found.refuses_architecture({"model": {}}) is None
    inside = {"inner": "finetuned", "payload": {"inner": "network", "payload": {"architecture": architecture}}}
    assert found.refuses_architecture(inside) == refused


OWN_PARTS = """
from dataclasses import dataclass

import torch

from hansa.fusion import WeightedMean
from hansa.local import SGD


@dataclass(frozen=True)
class Local(SGD):
    "SGD under another name."


@dataclass(frozen=True)
class Fuse(WeightedMean):
    "The mean under another name."


def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="none")
"""


def test_own_parts_are_named_by_a_job_and_imported_only_by_parties_that_list_them(
    found: Callable[..., League], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_parts_of_tests.py").write_text(OWN_PARTS)
    local, fuse, loss = (f"my_parts_of_tests:{name}" for name in ("Local", "Fuse", "loss"))
    league = found(functions=(local, fuse, loss))
    joined(league, ann=f'functions = ["{local}", "{loss}"]', bob=f'functions = ["{local}", "{loss}"]',
           cid=f'functions = ["{loss}", "my_parts_of_tests:*"]')  # fmt: skip
    tree = {"task": {**TASK, "loss": loss}, "run": {"rounds": 2},
            "algorithm": {"name": "fedavg", "local": local, "fusion": fuse}}  # fmt: skip
    ended = league.ended(league.submit(tree))
    assert ended["status"] == "finished", ended["reason"]
    for line in ended["rounds"]:
        assert line["members"] == ["ann", "bob"]
        why = f"ask: {local!r} is not among the functions that its policy allows (functions in party.toml)"
        assert line["missing"] == {"cid": why}
    plain = league.ended(league.submit({"task": TASK, "run": {"rounds": 2}}))
    assert plain["status"] == "finished"
    for unlisted in ({"algorithm": "antigravity:Alg"}, {"run": {"select": "antigravity:Select"}},
                     {"task": {**TASK, "loss": "antigravity:loss"}}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"'antigravity:\w+' is not among serve\.functions of federation\.toml"):
            league.submit({"task": TASK, **unlisted})
    assert "antigravity" not in sys.modules


def test_a_job_chooses_no_arguments_of_a_function(tmp_path: Path) -> None:
    found = policy(tmp_path, 'functions = ["os:getcwd"]')
    assert "may not choose arguments" in str(found.refuses_model({"name": "os:getcwd", "path": "/etc"}))


def test_the_samples_of_an_order_name_no_function_that_the_aggregator_does_not_list(league: League) -> None:
    joined(league)
    central = Blob(*league.runner.blobs.put(codec.pieces({"loss": "antigravity:loss", "classes": 2})))
    ended = league.ended(league.runner.submit(Order("job", {"task": TASK}, central, None)))
    assert ended["status"] == "failed" and "is not among serve.functions of federation.toml" in ended["reason"]
    assert "antigravity" not in sys.modules


NAMED = re.compile(r"(?:# )?(?P<name>[a-z_]+) = ")
TABLE = re.compile(r"(?:# )?\[(?P<name>[a-z]+)\]")


def settings(text: str) -> set[str]:
    """The names of the settings in a listing, whether they are commented out or not, except those of open tables."""
    table, names = "", set()
    for line in text.splitlines():
        if found := TABLE.match(line):
            table = found["name"] + "."
            names.add(found["name"])
        elif (found := NAMED.match(line)) and table not in ("ranges.", "peers.", "own.", "data."):
            names.add(table + found["name"])
    return names


def test_the_listings_of_the_policy_have_every_setting_and_its_default(tmp_path: Path) -> None:
    expected = {field.name for field in dataclasses.fields(Policy)}
    expected |= {f"{name}.{field.name}" for name, kind in TABLES.items() for field in dataclasses.fields(kind)}
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    listing = page.split("commented out, with an example:\n\n```toml\n")[1].split("```")[0]
    assert settings(listing) == settings(TOML) == expected
    assert policy(tmp_path, listing) == policy(tmp_path, TOML) == Policy()
    shown = {f"{k}.{n}" for k, v in tomllib.loads(listing).items() if isinstance(v, dict) for n in v}
    absent = {f"{name}.{field.name}" for name, kind in TABLES.items() for field in dataclasses.fields(kind)
              if field.default in (None, ())}  # fmt: skip
    assert shown == {name for name in expected if "." in name} - absent  # a setting with a default shows it
