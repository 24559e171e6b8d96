"""Jobs with several models and public samples: each party's choice and limits, and the bits of the simulation."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from league import PARTIES, League, samples

import hansa
from hansa.core import own_model
from hansa.core.op import Party
from hansa.core.plain_data import build, to_config
from hansa.holdings.gateway import SampleGateway
from hansa.net.aggregator.blobs import Blobs
from hansa.net.aggregator.party_routes import PartyRoutes
from hansa.net.aggregator.runtime import NetworkRuntime
from hansa.net.party.policy import Policy
from hansa.net.party.public_store import PublicStore, named_public
from hansa.net.party.samples import PartySamples, preparer
from hansa.net.transport.wire import Blob, Order
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, NotAdmitted, PartyError

MODELS = {"small": "logistic", "large": {"name": "2nn", "hidden": 4}}
PUBLIC = torch.randn(10, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
METHOD = hansa.FedMD(local=hansa.SGD(lr=0.1, batch=6), align=6, private_epochs=2)


def tree(**task: Any) -> dict[str, Any]:
    table = {"parties": ["x"], "models": MODELS, "public": "public.npz", "dtype": "float64", **task}
    return {"task": table, "algorithm": to_config(METHOD), "run": {"rounds": 2, "seed": 3, "eval_parties": False}}


def submit(league: League, public: Any = PUBLIC, run: Any = None, **task: Any) -> str:
    """Submit a job, whose public samples come with the order."""
    blob, job = Blob(*league.aggregator.blobs.put(codec.pieces({"public": public, "header": []}))), tree(**task)
    return league.runner.submit(Order("job", {**job, "run": {**job["run"], **(run or {})}}, blob, None))


def joined(league: League, **policies: str) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, PartySamples(*samples(number)), policies.get(name, ""))


def reference(*assigned: str, parties: Any = (0, 1, 2), rounds: int = 2) -> hansa.Result:
    fields: dict[str, Any] = {"inputs": (3,), "outputs": 2}
    parts = {"small": build("model", "logistic", **fields), "large": build("model", "2nn", hidden=4, **fields)}
    made = {name: lambda part=part: part().double() for name, part in parts.items()}
    pairs = [samples(k)[0] for k in parties]
    task = hansa.Task(parties=pairs, classes=2, models=made, assigned=assigned or None, public=PUBLIC)
    return hansa.simulate(METHOD, task, rounds=rounds, seed=3, eval_parties=False)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [(), ("large", "large", "small")], ids=["in turn", "own choice"])
def test_a_job_gives_the_bits_of_the_simulation_and_sends_public_samples_once(
    choice: tuple[str, ...], league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, honest = [], PartyRoutes.public

    async def counted(self: PartyRoutes, call: Any) -> web.StreamResponse:
        sent.append(call.name)
        return await honest(self, call)

    monkeypatch.setattr(PartyRoutes, "public", counted)
    league.stop()  # the routes are made when the aggregator starts
    league.start()
    joined(league, **{name: f'model = "{model}"\n' for name, model in zip(PARTIES, choice, strict=False)})
    for _ in range(2):  # the second job has the same public samples
        job = submit(league)
        ended, wanted = league.ended(job), reference(*choice)
        assert ended["status"] == "finished", ended["reason"]
        assert codec.encode(league.model(job)) == codec.encode(wanted.saved_model())
        assert [line["bytes_down"] for line in ended["rounds"]] == [line["bytes_down"] for line in wanted.history]
        summary = league.operator.job(job)["summary"]
        assert summary["bytes_down"] == wanted.summary["bytes_down"]
    assert sorted(sent) == sorted(PARTIES)
    assert len(list((league.folder / "homes" / "ann" / "public").iterdir())) == 1


@pytest.mark.slow
def test_no_parameter_of_a_party_s_model_is_in_any_message(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read all that passed the aggregator: every message to a party, and every reply."""
    monkeypatch.setattr(Blobs, "discard", lambda self, digest: None)
    monkeypatch.setattr(Blobs, "sweep", lambda self, keep: 0)
    joined(league)
    job = submit(league)
    assert league.ended(job)["status"] == "finished"
    wire = b"".join(league.aggregator.blobs.read(digest) for digest in league.aggregator.blobs)
    wanted, earlier = reference(), reference(rounds=1)
    scores = wanted.state.slots["scores"]
    assert scores.numpy().tobytes() in wire  # the consensus of the last round
    models = wanted.training.holdings.models
    assert models is not None
    for k in range(3):
        party = Party(k, models.of(k), SampleGateway(samples(k)[0]), 3)
        for w in (wanted.memories[k]["own/w"], earlier.memories[k]["own/w"], party.initial().w):
            assert len(w) > 5 and not any(number.tobytes() in wire for number in w.numpy() if number)


@pytest.mark.slow
def test_a_party_that_leaves_and_comes_back_keeps_its_model(league: League) -> None:
    joined(league)
    job = submit(league, run={"rounds": 12})
    league.until(lambda: len(league.shown(job)["rounds"]) >= 1)
    for name in ("bob", "cid"):
        league.members.pop(name).leave()
        league.join(name, PartySamples(*samples(PARTIES.index(name))))
    ended, wanted = league.ended(job), reference(rounds=12)
    assert ended["status"] == "finished" and not any("missing" in line for line in ended["rounds"])
    assert codec.encode(league.model(job)) == codec.encode(wanted.saved_model())
    for line, expected in zip(ended["rounds"], wanted.history, strict=True):
        assert [line[name] for name in ("train_loss", "digest_loss")] == [
            expected[name] for name in ("train_loss", "digest_loss")
        ]


@pytest.mark.slow
def test_parties_refuse_what_their_owners_did_not_allow_and_the_others_go_on(found: Callable[..., League]) -> None:
    size = codec.size({"x": PUBLIC})
    for policy, sentence in (
        (
            'model = "huge"\n',
            "its policy chooses the model 'huge' (model in party.toml), and the job has 'small', 'large'",
        ),
        ('models = ["2nn"]\nmodel = "small"\n', "its policy does not accept the model 'logistic'"),
        (
            "[limits]\npublic = 100\n",
            "its policy stores at most 100 bytes of public samples (limits.public in party.toml), and those of the job "
            f"have {size}",
        ),
    ):
        league = found()
        joined(league, bob=policy)
        ended = league.ended(submit(league))
        assert ended["status"] == "finished", ended["reason"]
        for line in ended["rounds"]:
            assert line["missing"] == {"bob": sentence} and line["members"] == ["ann", "cid"]


def test_a_party_does_not_change_its_model_during_a_job(league: League) -> None:
    joined(league, bob='model = "small"\n')
    job = submit(league, run={"rounds": 100_000, "quorum": 2})
    league.until(lambda: len(league.shown(job)["rounds"]) >= 1)
    league.members.pop("bob").leave()
    league.join("bob", PartySamples(*samples(1)), 'model = "large"\n')
    sentence = "the job's models for this party in league were 'small' and are now 'large'; they are fixed once per job"
    league.until(lambda: sentence in [line.get("missing", {}).get("bob") for line in league.shown(job)["rounds"][-9:]])
    league.runner.stop(job)
    assert league.ended(job)["status"] == "stopped"


def test_public_samples_with_another_hash_are_refused(league: League, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NetworkRuntime.publish_samples

    def lying(self: NetworkRuntime, tree: Any) -> None:
        honest(self, tree)
        self.task["public"] = {**self.task["public"], "digest": "ab" * 32}

    monkeypatch.setattr(NetworkRuntime, "publish_samples", lying)
    joined(league)
    ended = league.ended(submit(league))
    sentence = "the public samples that it was sent are not those that the task names (SHA-256 abababababab)"
    assert ended["status"] == "failed" and f"ann, bob, cid: {sentence}" in ended["reason"], ended["reason"]
    assert not (league.folder / "homes" / "ann" / "public").exists()


def test_a_job_whose_public_samples_do_not_fit_fails_with_the_reason(league: League) -> None:
    joined(league)
    for public, sentence in (
        (torch.zeros(4, 5, dtype=torch.float64), "public: samples are (5,), the parties' (3,)"),
        ([PUBLIC, torch.full((10,), 7)], "public: targets must lie in 0..1, got 7..7"),
    ):
        ended = league.ended(submit(league, public))
        assert ended["status"] == "failed" and ended["reason"] == sentence


def test_an_order_with_an_unknown_function_or_another_algorithm_is_refused(league: League) -> None:
    with pytest.raises(ConfigError, match=r"task\.models\.large: 'os:getcwd' is not among serve\.functions"):
        submit(league, models={"small": "logistic", "large": "os:getcwd"})
    with pytest.raises(ConfigError, match=r"fedavg combines updates of one model, and task\.models has 2"):
        league.submit({**tree(), "algorithm": "fedavg"})
    with pytest.raises(ConfigError, match=r"fedavg uses no public samples; leave task\.public out"):
        league.submit({"task": {"parties": ["x"], "model": "logistic", "public": "x.npz"}, "algorithm": "fedavg"})


TASK = {"model": None, "models": MODELS, "turn": ["small", "large"], "bases": {}, "dtype": "float64", "shape": [3],
        "outputs": 2, "loss": "cross_entropy", "classes": 2, "party_test": 0.0, "seed": 0, "bf16": False,
        "prepared": False}  # fmt: skip


def test_a_party_takes_its_turn_unless_its_owner_chooses() -> None:
    assert [Policy().choose(TASK, party)["chosen"] for party in range(3)] == ["small", "large", "small"]
    assert Policy(model="large").choose(TASK, 0)["model"] == MODELS["large"]
    assert Policy(model="large").choose({"model": "logistic"}, 0) == {"model": "logistic"}  # one model: no choice
    for wrong in ({"turn": []}, {"turn": ["tiny"]}, {"turn": None}, {"models": 7}, {"models": []}, {"bases": 7},
                  {"turn": [7]}, {"models": {"small": 7, "large": 7}}):  # fmt: skip
        with pytest.raises(DataError, match="malformed task"):
            Policy().choose({**TASK, **wrong}, 0)


def test_a_party_checks_the_public_samples_of_a_task() -> None:
    prepare, task = preparer(PartySamples(*samples(0))), Policy().choose(TASK, 0)
    party = prepare(0, {**task, "public": {"x": PUBLIC}}, "cpu")
    assert party.public is not None and torch.equal(party.public.x, PUBLIC) and party.public.y is None
    assert len(prepare(1, {**task, "public": {"x": PUBLIC, "y": torch.zeros(10)}}, "cpu").public.y) == 10  # type: ignore[union-attr,arg-type]
    for wrong, sentence in (
        ({"x": torch.zeros(4, 5)}, "public: samples are"), ({"x": PUBLIC * torch.inf}, "infinite"),
        ({"z": PUBLIC}, "table"), ({"x": [1.0]}, "tensors"), (7, "table"), ({"x": torch.tensor(1.0)}, "no sample"),
        ({"x": PUBLIC, "y": torch.full((10,), 9)}, "targets must lie in"),
    ):  # fmt: skip
        with pytest.raises(NotAdmitted, match=sentence):
            prepare(0, {**task, "public": wrong}, "cpu")
    for malformed in (7, {"digest": "ab"}, {"digest": "ab" * 32, "size": -1}, {"digest": "ab" * 32}, ["ab" * 32, 3]):
        with pytest.raises(DataError, match="malformed task: public must be"):
            named_public({"task": {"public": malformed}})


def test_stored_public_samples_have_a_limit_and_damage_is_found(tmp_path: Path) -> None:
    store, blobs = PublicStore(tmp_path / "public", 250), []
    for number in range(3):
        file = tmp_path / "fetched"
        file.write_bytes(bytes([number]) * 100)
        blobs.append(Blob(hashlib.sha256(file.read_bytes()).hexdigest(), 100))
        store.add(file, blobs[-1])
    assert [store.has(blob) for blob in blobs] == [False, True, True]  # the oldest one made room
    (tmp_path / "public" / blobs[1].digest).write_bytes(b"damaged" * 20)
    assert [PublicStore(tmp_path / "public", 250).has(blob) for blob in blobs] == [False, False, True]


def test_a_party_that_remembers_another_architecture_declines() -> None:
    objective = Objective(lambda: torch.nn.Linear(3, 2), "cross_entropy", 0)
    party = Party(0, objective, SampleGateway((torch.zeros(2, 3), torch.zeros(2).long())), 0)
    memory = own_model.remember({}, Params(torch.zeros(5), torch.zeros(0), torch.zeros(0, dtype=torch.int64)))
    with pytest.raises(PartyError, match="it remembers a model of 5 parameters, and its model has 8"):
        own_model.recall(party, memory)
    first, other = (dataclasses.replace(party, id=k).initial() for k in (0, 1))
    assert torch.equal(first.w, own_model.recall(party, {}).w) and not torch.equal(first.w, other.w)
