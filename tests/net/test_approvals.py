"""The owner of a party approves a job before its first ask; asks beyond the approved manifest are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from league import PARTIES, League, samples
from msgspec import structs
from typer.testing import CliRunner, Result

from hansa.cli import approve as approving  # noqa: F401 (adds its command)
from hansa.cli.app import app
from hansa.net.aggregator import job as jobs
from hansa.net.aggregator import runtime
from hansa.net.aggregator.manifest import make_manifest
from hansa.net.party import approval_gate
from hansa.net.party import approvals as approvals_of_parties
from hansa.net.party.approvals import Approvals
from hansa.net.party.approve_rules import Approve
from hansa.net.party.policy import Policy
from hansa.net.party.vault import PartyVault
from hansa.net.transport.manifest import AllowedOp, Manifest, encode_manifest, manifest_digest
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.privacy import spent

TASK = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
ASK, RULES = '[approve]\nmode = "ask"\n', '[approve]\nmode = "rules"\njobs = ["job"]\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "TICK", 0.05)
    monkeypatch.setattr(approval_gate, "POLL", 1.0)


def joined(league: League, *policies: str) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, samples(number), policies[number] if number < len(policies) else "")


def experiment(**tables: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"task": TASK, "algorithm": {"name": "fedavg", "local": {"epochs": 1}}, "run": {"rounds": 2}}
    return {**tree, **{name: {**tree.get(name, {}), **table} for name, table in tables.items()}}


def approve(league: League, party: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["approve", *words, "--state", str(league.members[party].store.folder)])


def announced(league: League, party: str, job: str) -> Callable[[], bool]:
    return lambda: job in Approvals(league.members[party].store.folder).jobs()


def reason(league: League, job: str) -> str:
    return str(league.shown(job)["reason"])


def test_a_job_waits_for_the_owner_and_has_the_bits_of_a_job_that_did_not_wait(league: League) -> None:
    joined(league, "", ASK)
    job = league.submit(experiment())
    league.until(lambda: "waiting for the approval of the owners of: bob" in reason(league, job))
    shown = approve(league, "bob", job, "--show")
    assert shown.exit_code == 0 and "rounds: at most 2" in shown.stdout and f"{job}: waiting" in shown.stdout
    assert "no terminal to ask" in str(approve(league, "bob", job).exception)
    assert approve(league, "bob", job, "--yes").exit_code == 0
    ended = league.ended(job)
    assert ended["status"] == "finished" and [line["members"] for line in ended["rounds"]] == [list(PARTIES)] * 2
    league.members["bob"].leave()
    league.members["bob"] = type(league.members["ann"])(league, "bob", samples(1), "")
    again = league.submit(experiment())
    assert league.ended(again)["status"] == "finished"
    assert league.shown(again)["rounds"][-1]["model"] == ended["rounds"][-1]["model"]  # their hashes


@pytest.mark.slow
def test_a_job_goes_on_without_a_waiting_party_which_joins_once_it_is_approved(league: League) -> None:
    joined(league, "", ASK)
    job = league.submit(experiment(run={"rounds": 4000}), min_parties=2)
    league.until(lambda: len(league.shown(job)["rounds"]) > 1)
    assert league.shown(job)["rounds"][0]["members"] == ["ann", "cid"]
    (entry,) = league.events("not taking part")
    assert entry["party"] == "bob" and "its owner has not approved the job yet" in entry["detail"]
    assert approve(league, "bob", job, "--yes").exit_code == 0
    league.until(lambda: league.shown(job)["rounds"][-1]["members"] == list(PARTIES))
    assert approve(league, "bob", job, "--revoke").exit_code == 0
    league.until(lambda: "its owner refuses the job" in str(league.shown(job)["rounds"][-1].get("missing")))
    league.runner.stop(job)
    league.ended(job)


def test_an_owner_who_refuses_does_not_hold_the_job_up(league: League) -> None:
    joined(league, "", ASK)
    job = league.submit(experiment())
    league.until(announced(league, "bob", job))
    assert approve(league, "bob", job, "--revoke").exit_code == 0
    assert [line["members"] for line in league.ended(job)["rounds"]] == [["ann", "cid"]] * 2
    assert "its owner refuses the job" in league.events("not taking part")[0]["detail"]


@pytest.mark.slow
def test_a_job_that_is_resumed_has_the_manifest_that_was_approved(league: League) -> None:
    joined(league, RULES, RULES, RULES)
    job = league.submit(experiment(run={"rounds": 60}))
    league.until(lambda: len(league.shown(job)["rounds"]) > 1)
    league.stop()
    league.start()
    ended = league.ended_after_all(job)
    assert ended["status"] == "finished"
    assert [line["members"] for line in ended["rounds"]] == [list(PARTIES)] * 60


def test_rules_approve_a_job_and_say_so(league: League) -> None:
    joined(league, RULES + "rounds = 2\n")
    job = league.submit(experiment())
    assert league.ended(job)["status"] == "finished"
    listed = json.loads(approve(league, "ann", "--json").stdout)["jobs"][job]
    assert listed["status"] == "approved" and listed["by"] == "the rules jobs, rounds"


def test_a_job_beyond_the_rules_waits_for_the_owner(league: League) -> None:
    joined(league, RULES + "rounds = 1\n")
    job = league.submit(experiment())
    league.until(lambda: "owners of: ann" in reason(league, job))
    assert approve(league, "ann", job, "--yes").exit_code == 0
    assert league.ended(job)["status"] == "finished"


# A lying aggregator


def announce(monkeypatch: pytest.MonkeyPatch, change: Callable[[Manifest], dict[str, Any]]) -> None:
    """Announce another manifest than that of the job."""

    def lie(*given: Any) -> Manifest:
        manifest = make_manifest(*given)
        return structs.replace(manifest, **change(manifest))

    monkeypatch.setattr(jobs, "make_manifest", lie)


def other_epochs(manifest: Manifest) -> dict[str, Any]:
    ops = [
        structs.replace(op, fixed={**op.fixed, "epochs": 9}) if op.name == "sgd" else op for op in manifest.ops or ()
    ]
    return {"ops": tuple(ops)}


LIES: dict[str, tuple[Callable[[Manifest], dict[str, Any]], str]] = {
    "fields": (other_epochs, "sgd.epochs = 9, and the ask has 1"),
    "ops": (lambda m: {"ops": (AllowedOp("describe", {}, {}, ("loss",)),)}, "the ops describe, and the ask has 'sgd'"),
    "rounds": (lambda m: {"rounds": 0}, "0 rounds, and the ask is of round 1"),
    "model": (lambda m: {"task": {**m.task, "model": "2nn"}}, 'task.model = "2nn", and the ask has "logistic"'),
    "seed": (lambda m: {"task": {**m.task, "seed": 7}}, "task.seed = 7, and the ask has 0"),
    "trainings": (lambda m: {"trainings": 0}, "0 asks to train per round, and round 1 has more"),
    "cohort": (lambda m: {"min_cohort": 3}, "cohorts of at least 3, and the ask has 1"),
    "protection": (lambda m: {"protected": ("secure-masked",)}, "inside 'secure-masked' alone"),
    "numbers": (lambda m: {"parties": (*m.parties[1:], m.parties[0])}, "as its number"),
}  # fmt: skip


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", LIES)
def test_an_aggregator_that_asks_for_something_else_is_refused(kind: str, league: League,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    change, difference = LIES[kind]
    announce(monkeypatch, change)
    joined(league, RULES, RULES, RULES)
    ended = league.ended(league.submit(experiment(run={"rounds": 1, "eval_parties": False})))
    assert ended["status"] == "failed"
    assert f"the approved manifest allows {difference}" in ended["reason"] or difference in ended["reason"]


@pytest.mark.parametrize("kind", ["left out", "other certificate"])
def test_a_sum_with_another_party_is_refused(kind: str, league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(manifest: Manifest) -> dict[str, Any]:
        *others, (name, _) = manifest.parties
        return {"parties": (*others, ("eve" if kind == "left out" else name, "0" * 64))}

    announce(monkeypatch, change)
    joined(league, RULES)
    ended = league.ended(league.submit(experiment(run={"rounds": 1}, privacy={"secure": "masking", "active": True})))
    assert ended["status"] == "failed"
    wanted = "does not list the party cid" if kind == "left out" else "lists cid with the certificate 000"
    assert wanted in str(ended["reason"]) + str(ended["rounds"])


def test_a_party_counts_the_cohort_that_the_manifest_promises(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, lambda manifest: {"min_cohort": 4})
    monkeypatch.setattr(runtime, "Work", lambda *fields: Work(*fields[:11], 4, *fields[12:]))
    joined(league, RULES)
    ended = league.ended(league.submit(experiment(run={"rounds": 1}, privacy={"secure": "masking", "active": True})))
    assert ended["status"] == "failed"
    assert "cohort of at least 4, and 3 of the 3 parties" in str(ended["reason"]) + str(ended["rounds"])


def test_the_worker_itself_answers_nothing_without_the_approval_of_this_manifest(league: League) -> None:
    member = league.join("ann", samples(0), ASK)
    data, other = encode_manifest(manifest()), encode_manifest(manifest(rounds=9))
    blob = Blob("0" * 64, 1)
    message = {"op": {"kind": "op", "name": "describe"}, "payload": {}, "round": 0}
    approvals, worker, task = Approvals(member.store.folder), member.worker, {"task": {}, "preparations": []}

    def answered(manifest: bytes | None) -> bool:
        named = None if manifest is None else Blob(manifest_digest(manifest), len(manifest))
        work = Work("job-1", "job", 0, 0, "describe", 0, blob, blob, None, None, None, 1, manifest=named)
        reply = worker.answer(work, message, task)[0]
        if isinstance(reply, str):
            assert reply == "it waits for its owner's approval; the owner runs `hansa approve job-1`"
        return not isinstance(reply, str)

    assert not answered(data)
    approvals.decide("job-1", data, True)
    assert answered(data) and not answered(other) and not answered(None)
    approvals.decide("job-1", data, False)
    assert not answered(data)


def test_another_training_in_a_round_is_refused_and_a_repeat_is_not(tmp_path: Path) -> None:
    vault = PartyVault(tmp_path, spent, None, {})
    vault.train("job-1", 0, "a" * 64, 1)
    vault.train("job-1", 0, "a" * 64, 1)
    vault.train("job-1", 1, "b" * 64, 1)
    with pytest.raises(PartyError, match="allows 1 asks to train per round, and round 1 has more"):
        vault.train("job-1", 0, "b" * 64, 1)
    again = PartyVault(tmp_path, spent, None, {})
    with pytest.raises(PartyError):
        again.train("job-1", 0, "b" * 64, 1)


# Decisions


@pytest.fixture
def party(league: League) -> Path:
    """The folder of an enrolled party."""
    return league.join("ann", samples(0)).store.folder


def manifest(**fields: Any) -> Manifest:
    ops = (AllowedOp("sgd", {"epochs": 2, "steps": None}), AllowedOp("describe", {}, {}, ("loss",)))
    whole = Manifest("league", "job-1", "job", {"model": "logistic"}, ops, (), {}, 5, 1, 1, {"name": "fedavg"}, {},
                     (("ann", None), ("bob", None)))  # fmt: skip
    return structs.replace(whole, **fields)


def test_a_decision_counts_for_one_manifest_and_for_the_signature_of_the_party(party: Path) -> None:
    approvals, ask = Approvals(party), Approve("ask")
    assert approvals.review("job-1", ask).status == "waiting"
    first = encode_manifest(manifest())
    approvals.announce("job-1", first)
    assert approvals.review("job-1", ask).status == "waiting"
    approvals.decide("job-1", first, True)
    assert approvals.review("job-1", ask).status == "approved" and approvals.approved("job-1") == manifest()
    approvals.announce("job-1", encode_manifest(manifest(rounds=500)))
    changed = approvals.review("job-1", ask)
    assert changed.status == "waiting" and "changed since the last decision" in changed.why
    shown = CliRunner().invoke(app, ["approve", "job-1", "--show", "--state", str(party)])
    assert "-   rounds: at most 5" in shown.stdout and "+   rounds: at most 500" in shown.stdout
    approvals.announce("job-1", first)
    assert approvals.review("job-1", ask).status == "approved"
    path = party / "approvals" / "job-1" / "decision.json"
    path.write_text(path.read_text().replace("the owner", "somebody"))
    assert approvals.review("job-1", ask).status == "waiting"
    with pytest.raises(ConfigError, match=r"signature .* is not this party's; run hansa approve job-1 again"):
        approvals.decision("job-1")


def test_the_manifests_of_many_jobs_do_not_fill_the_disk_and_a_refusal_stays(
    party: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approvals_of_parties, "JOBS", 3)
    approvals, rules = Approvals(party), Approve("rules", rounds=5)
    for number in range(1, 9):
        data = encode_manifest(manifest(job=f"job-{number}"))
        approvals.announce(f"job-{number}", data)
        if number in (1, 2):
            approvals.decide(f"job-{number}", data, approved=number == 2)
    assert sorted(approvals.jobs()) == ["job-1", "job-6", "job-7", "job-8"]
    assert approvals.review("job-1", rules).status == "refused"


def test_rules_do_not_approve_another_manifest_of_a_job_that_the_owner_refused(party: Path) -> None:
    approvals, rules = Approvals(party), Approve("rules", rounds=5)
    first, second = (encode_manifest(manifest(rounds=rounds)) for rounds in (5, 4))
    approvals.announce("job-1", first)
    approvals.decide("job-1", first, approved=False)
    approvals.announce("job-1", second)
    verdict = approvals.review("job-1", rules)
    assert verdict.status == "waiting" and "has refused an earlier manifest of the job" in verdict.why
    approvals.decide("job-1", second, approved=True)
    assert approvals.review("job-1", rules).status == "approved"


def test_rules_do_not_approve_after_a_refusal_that_a_crash_interrupted(party: Path) -> None:
    """The manifest is stored before the decision; a crash in between leaves the earlier refusal without its own."""
    approvals, other = Approvals(party), encode_manifest(manifest(rounds=4))
    approvals.decide("job-1", encode_manifest(manifest()), False)
    (party / "approvals" / "job-1" / approvals_of_parties.APPROVED).write_bytes(other)
    approvals.announce("job-1", other)
    assert approvals.last_decided("job-1") is None
    verdict = approvals.review("job-1", Approve("rules", rounds=5))
    assert verdict.status == "waiting" and "has refused an earlier manifest" in verdict.why


def test_the_manifest_of_another_job_is_refused(party: Path) -> None:
    with pytest.raises(Exception, match="the manifest is of the job job-1, and the ask is of job-2"):
        Approvals(party).announce("job-2", encode_manifest(manifest()))


def test_a_manifest_that_changes_after_the_owner_read_it_is_not_approved(party: Path) -> None:
    """Between `--show` and `--yes` the aggregator may announce another manifest."""
    approvals = Approvals(party)
    approvals.announce("job-1", encode_manifest(manifest()))
    read = CliRunner().invoke(app, ["approve", "job-1", "--show", "--state", str(party)]).stdout
    digest = read.partition("SHA-256 of this manifest: ")[2][:64]
    assert digest == manifest_digest(encode_manifest(manifest()))
    approvals.announce("job-1", encode_manifest(manifest(rounds=9)))
    words = ["approve", "job-1", "--yes", "--digest", digest, "--state", str(party)]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, ConfigError)
    assert "has announced another manifest since" in str(refused.exception)
    assert approvals.decision("job-1") is None
    approvals.announce("job-1", encode_manifest(manifest()))
    assert CliRunner().invoke(app, words).exit_code == 0 and approvals.approved("job-1") == manifest()


def test_a_job_that_was_not_announced_cannot_be_approved(party: Path) -> None:
    done = CliRunner().invoke(app, ["approve", "../ann", "--yes", "--state", str(party)])
    assert "announced no job '../ann'" in str(done.exception) and "set approve.mode" in str(done.exception)
    assert "not the folder of an enrolled party" in str(
        CliRunner().invoke(app, ["approve", "--state", str(party / "x")]).exception
    )


# Rules

PRIVATE = AllowedOp("dp-sgd", {"epsilon": 1.0, "delta": 1e-5})
SIGNED = (AllowedOp("secure-keys", {"active": True}), AllowedOp("secure-masked"))
CLUSTERS = AllowedOp("cluster-train", {"hidden": True})
PHASES = AllowedOp("alternating", {"head_epochs": 10_000, "base_epochs": 1})
OPEN_PHASES = AllowedOp("alternating", {"base_epochs": 1}, {}, ("head_epochs",))


@pytest.mark.parametrize("rules, fields, unmet", [
    ({"jobs": ("heart-*",)}, {}, "jobs does not list 'job'"),
    ({"models": ("2nn",)}, {}, "models does not list 'logistic'"),
    ({"models": ("logistic",)}, {"task": {"models": {"a": {"name": "2nn"}}}}, "models does not list '2nn'"),
    ({"algorithms": ("scaffold",)}, {}, "algorithms does not list 'fedavg'"),
    ({"parties": ("ann",)}, {}, "parties does not list 'bob'"),
    ({"min_parties": 3}, {}, "min_parties is 3, and the job has 2 parties"),
    ({"min_cohort": 2}, {}, "min_cohort is 2, and the job allows cohorts of 1"),
    ({"rounds": 4}, {}, "rounds is 4, and the job has 5"),
    ({"epochs": 1}, {}, "epochs is 1, and the job allows 2"),
    ({"epochs": 2}, {"work": {"epochs": (1.0, None)}}, "epochs is 2, and the job allows inf"),
    ({"epochs": 2}, {"ops": (AllowedOp("sgd", {}, {}, ("epochs",)),)}, "epochs is 2, and the job allows inf"),
    ({"steps": 5}, {"ops": (AllowedOp("sgd", {"steps": 6}),)}, "steps is 5, and the job allows 6"),
    ({"epochs": 1}, {"ops": (AllowedOp("sgd", {"epochs": 1, "steps": 10**6}),)}, "counts its work in steps"),
    ({"epochs": 2}, {"work": {"epochs": (1.0, math.nan)}}, "epochs is 2, and the job allows inf"),
    ({"epochs": 5}, {"ops": (AllowedOp("sgd", {"epochs": 5}), PHASES)}, "epochs is 5, and the job allows 50005"),
    ({"steps": 5, "epochs": 1}, {"ops": (AllowedOp("sgd", {"steps": 5}), PHASES)}, "steps is 5, and the job allows"),
    ({"epochs": 5}, {"ops": (AllowedOp("sgd", {"epochs": 5}), OPEN_PHASES)}, "epochs is 5, and the job allows inf"),
    ({"rounds": 5}, {"trainings": None}, "rounds is 5, and the job may ask to train any number of times per round"),
    ({"active": True}, {"ops": (*SIGNED, CLUSTERS), "protected": ("secure-masked",)}, "'cluster-train' tells clusters"),
    ({"min_cohort": 2}, {"ops": (CLUSTERS,), "min_cohort": 3}, "min_cohort is a rule, and 'cluster-train' tells"),
    ({"epochs": 2}, {"work": {"steps": (1.0, 2.0)}}, "counts its work in steps"),
    ({"steps": 1}, {}, "may count its work in epochs"),
    ({"steps": 1}, {"ops": (), "work": {"epochs": (1.0, 10.0)}}, "may count its work in epochs"),
    ({"models": ("logistic",)}, {"task": {"models": {"a": "logistic"}, "model": "2nn"}}, "models does not list '2nn'"),
    ({"models": ("logistic",)}, {"task": {"model": "logistic", "other_model": True}}, "may describe others"),
    ({"secure": True}, {}, "require a secure sum"),
    ({"active": True}, {"protected": ("secure-masked",)}, "sums with signatures"),
    ({"epsilon": 1.0}, {}, "'sgd' are not differentially private"),
    ({"epsilon": 1.0}, {"ops": (AllowedOp("dp-sgd", {"epsilon": 2.0}),)}, "'dp-sgd' has 2.0"),
    ({"epsilon": 1.0}, {"ops": (AllowedOp("dp-sgd", {"epsilon": None}),)}, "'dp-sgd' has no limit"),
    ({"epsilon": 1.0}, {"ops": (PRIVATE, CLUSTERS)}, "'cluster-train' are not differentially private"),
    ({"epsilon": 1.0}, {"ops": (PRIVATE, AllowedOp("mixed"))}, "'mixed' are not differentially private"),
    ({"epsilon": 1.0}, {"ops": (PRIVATE, AllowedOp("standardise-own"))}, "'standardise-own' are not differentially"),
    ({"epsilon": 1.0}, {"ops": (AllowedOp("sgd", {"epsilon": 1.0}),)}, "'sgd' are not differentially private"),
    ({"epsilon": 1.0}, {"ops": (AllowedOp("column-moments"),)}, "'column-moments' are not differentially private"),
    ({"epsilon": 1.0}, {"ops": (AllowedOp("dp-sgd", {"epsilon": 1.0, "delta": 0.9}),)}, "'dp-sgd' has 0.9"),
    ({"epsilon": 1.0}, {"ops": (AllowedOp("dp-sgd", {"epsilon": 1.0}, {}, ("delta",)),)}, "'dp-sgd' has no limit"),
    ({"epsilon": 1.0, "delta": 1e-9}, {"ops": (AllowedOp("dp-sgd", {"epsilon": 1.0, "delta": 1e-5}),)}, "has 1e-05"),
    ({"rounds": 5}, {"ops": None}, "the manifest allows any op"),
])  # fmt: skip
def test_a_manifest_beyond_a_rule_is_not_approved(rules: dict[str, Any], fields: dict[str, Any], unmet: str) -> None:
    (why,) = Approve("rules", **rules).unmet(manifest(**fields))
    assert unmet in why


def test_a_manifest_that_meets_all_rules_is_approved() -> None:
    rules = Approve("rules", jobs=("j*",), models=("logistic",), algorithms=("fedavg",), parties=("ann", "b*"),
                    min_parties=2, min_cohort=1, rounds=5, epochs=2, steps=1)  # fmt: skip
    assert rules.unmet(manifest()) == []
    ops = (PRIVATE, *SIGNED, AllowedOp("contribution"), AllowedOp("personal"), AllowedOp("apply-standardise"))
    private = manifest(ops=ops, protected=("secure-masked",))
    assert Approve("rules", epsilon=1.0, secure=True, active=True).unmet(private) == []
    alternating = AllowedOp("alternating", {"head_epochs": 10, "base_epochs": 3})  # as of fedrep with local.epochs = 3
    assert Approve("rules", epochs=13).unmet(manifest(ops=(AllowedOp("sgd", {"epochs": 3}), alternating))) == []
    counts = manifest(ops=(AllowedOp("split-counts"),), trainings=None)  # no ask of it trains
    assert Approve("rules", rounds=5).unmet(counts) == []


@pytest.mark.parametrize("other", [
    AllowedOp("secure-keys", {"active": False}), AllowedOp("secure-shares", {}, {}, ("active",)),
    AllowedOp("secure-paillier"),
])  # fmt: skip
def test_no_sum_without_signatures_hides_beside_one_with_signatures(other: AllowedOp) -> None:
    """An ask needs to match one of the ops of a manifest, so an op that is listed twice is its weaker one."""
    ops = (AllowedOp("secure-keys", {"active": True}), AllowedOp("secure-masked"), other)
    (why,) = Approve("rules", active=True).unmet(manifest(ops=ops, protected=("secure-masked",)))
    assert f"allows {other.name!r} without them" in why


@pytest.mark.parametrize("text, message", [
    ('[approve]\nmode = "rules"\n', "needs a rule"), ("[approve]\nrounds = 3\n", "is a rule, and mode is 'always'"),
    ('[approve]\nmode = "rules"\nrounds = -1\n', "rounds must be at least 1"), ('[approve]\nmode = "never"\n', "mode"),
    ("[approve]\nround = 3\n", "unknown field 'round'"),
])  # fmt: skip
def test_a_mistake_in_the_table_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "party.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Policy.read(tmp_path / "party.toml")
