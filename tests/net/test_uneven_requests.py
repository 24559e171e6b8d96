"""An aggregator that asks the parties of a masked sum for different things, to open the update of one of them.

Each lie makes the replies of all parties but ann vanish, or be known to the aggregator. Before, the sum was ann's
update. The parties are real workers with certificates, whose owners require secure sums with signatures.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from league import logistic_task, samples
from test_masked_jobs import Certified

import hansa
from hansa.core.ask import Ask
from hansa.core.driver import drive
from hansa.core.federation import Federation
from hansa.core.op import Reply
from hansa.core.round_record import Record
from hansa.core.runtime import complete
from hansa.net.party.samples import preparer
from hansa.net.party.store import PartyStore
from hansa.net.party.vault_lines import read_vault
from hansa.net.party.worker import Worker
from hansa.net.transport import certificates
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, RoundAborted
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules
from hansa.secure import Masking
from hansa.transforms import Packed

NAMES = ("ann", "bob", "cid", "dan")
ANN = 0
TASK = {"model": "logistic", "dtype": "float32", "shape": [3], "outputs": 2, "loss": "cross_entropy", "classes": 2,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip
FLOOR = "min_cohort = 3\n[privacy]\nsecure = true\nactive = true\n"
SOLVER = hansa.build("local", "sgd", lr=0.1, batch=16)
Message = dict[str, Any]


@dataclass
class Home:
    """A deployed party without a network."""

    folder: Path
    number: int
    tip: str | None = None

    def answer(self, ask: Ask, message: Message, task: Message) -> Reply | str:
        store = PartyStore(self.folder)
        blobs = [Blob(hashlib.sha256(codec.encode(tree)).hexdigest(), 100) for tree in (message, task)]
        work = Work("job-1", "job", self.number, ask.round, "round", ask.index, *blobs, None, self.tip, None, 3)
        try:
            reply, staged = Worker(
                store, preparer((samples(self.number)[0], None), store.policy.limits.parameters)
            ).answer(work, codec.decode(codec.encode(message)), codec.decode(codec.encode(task)))
        finally:
            store.close()
        self.tip = work.ask if staged else self.tip
        return reply


@dataclass
class Aggregator:
    """Sums the updates of the parties, and may lie to any of them."""

    homes: list[Home]
    change: Callable[[int, Message], Message] = lambda party, message: message
    tasks: Callable[[int, str], Message] = lambda party, op: {"task": TASK, "preparations": []}
    said: list[tuple[str, int, Reply | str]] = field(default_factory=list)

    def sum(self, work: Message | None = None, solver: Any = SOLVER, round: int = 0) -> Any:
        """The mean update; None if the round has no result."""
        fed = Federation(range(4), round, 0, 4, protocol=Masking(active=True, threshold=0.7))
        w = torch.linspace(-1, 1, 8, dtype=torch.float32)
        payload = {"model": {"w": w, "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}}
        payload |= {} if work is None else {"work": work}
        try:
            reduced = complete(drive(fed.reduce(solver, payload, uniform=True), "round"), self._gather)
        except RoundAborted:
            return None
        return reduced.mean("w")

    def _gather(self, ask: Any) -> Any:
        outcomes = []
        for party in ask.parties:
            message = self.change(party, copy.copy(ask.message(party)))
            reply = self.homes[party].answer(ask, message, self.tasks(party, message["op"]["name"]))
            self.said.append((message["op"]["name"], party, reply))
            outcomes.append((party, reply))
        return combine(ask, outcomes, Rules(), Record())

    def reasons(self) -> str:
        return " | ".join(reply for _, _, reply in self.said if isinstance(reply, str))


@pytest.fixture
def homes(tmp_path: Path) -> list[Home]:
    authority = certificates.make_ca("league")
    made = [Home(Certified(tmp_path / name, authority, name).folder, k) for k, name in enumerate(NAMES)]
    for home in made:
        enrolled = {"party": home.folder.name, "federation": "league", "url": "", "instance": "1"}
        (home.folder / "party.json").write_text(json.dumps(enrolled))
        (home.folder / "party.toml").write_text(FLOOR)
    return made


def update_of_ann(tmp_path: Path) -> torch.Tensor:
    """What the aggregator is after."""
    found: Any = Aggregator([Home(tmp_path / "double", ANN)])
    fed = Federation(range(1), 0, 0, 1)
    w = torch.linspace(-1, 1, 8, dtype=torch.float32)
    payload = {"model": {"w": w, "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}}
    return complete(drive(fed.reduce(SOLVER, payload, uniform=True), "round"), found._gather).mean("w")


def inner(op: Message, **fields: Any) -> Message:
    return {**op, "inner": {**op["inner"], **fields}}


def to_others(name: str, change: Callable[[Message], Message]) -> Callable[[int, Message], Message]:
    """Change the messages with one op, to all parties but ann."""
    return lambda party, message: change(message) if party != ANN and message["op"]["name"] == name else message


def masked(**changes: Callable[[Any], Any]) -> Callable[[int, Message], Message]:
    """Ask the others for other masked numbers than were announced."""
    return to_others(
        "secure-masked",
        lambda message: {**message, **{name: change(message[name]) for name, change in changes.items()}},
    )


def announced(op: Callable[[Message], Message], payload: Callable[[Message], Message] = lambda payload: payload) -> Any:
    """Announce to the others what they will be asked, which is not what ann will be asked."""

    def change(party: int, message: Message) -> Message:
        if party == ANN:
            return message
        if message["op"]["name"] == "secure-shares" and "asked" in message["payload"]:
            asked = message["payload"]["asked"]
            told = {**asked, "op": op(asked["op"]), "payload": payload(asked["payload"])}
            return {**message, "payload": {**message["payload"], "asked": told}}
        if message["op"]["name"] == "secure-masked":
            return {**message, "op": op(message["op"]), "payload": payload(message["payload"])}
        return message

    return change


def of_zeros(payload: Message) -> Message:
    """A model whose gradient is known: large weights that classify all samples with certainty."""
    return {**payload, "model": {**payload["model"], "w": payload["model"]["w"] * 1e6}}


LIES: dict[str, tuple[Callable[[int, Message], Message], str]] = {
    "a wide range": (masked(op=lambda op: {**op, "range": 2.0**30, "bits": 52, "max_weight": 1}), "another 'bits'"),
    "a range as wide as they come": (masked(op=lambda op: {**op, "range": 2.0**100}), "range"),
    "another op": (masked(op=lambda op: inner(op, lr=1e-30)), "another 'inner' in the op"),
    "another model": (masked(payload=of_zeros), "another 'model' in the payload"),
    "other work": (masked(payload=lambda p: {**p, "work": {"lr": 1e-30}}), "another 'work' in the payload"),
    "another op, announced": (announced(lambda op: inner(op, lr=1e-30)), "share secrets with it are left"),
    "other work, announced": (
        announced(lambda op: op, lambda payload: {**payload, "work": {"lr": 1e-30}}), "share secrets with it are left"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_aggregator_that_asks_others_for_something_else_cannot_open_an_update(
    lie: str, homes: list[Home], tmp_path: Path
) -> None:
    change, reason = LIES[lie]
    aggregator = Aggregator(homes, change)
    found, wanted = aggregator.sum(), update_of_ann(tmp_path)
    assert float(wanted.abs().max()) > 1e-3
    if found is not None:
        assert not torch.allclose(4 * found, wanted, atol=1e-4), "the sum is ann's update"
        assert not any(torch.allclose(count * found, wanted, atol=1e-4) for count in (1, 2, 3))
    assert reason in aggregator.reasons()


@pytest.mark.parametrize("asks", [("secure-keys", "secure-shares", "secure-masked"), ("secure-masked",)])
def test_an_aggregator_that_gives_others_another_task_cannot_open_an_update(
    asks: tuple[str, ...], homes: list[Home]
) -> None:
    """With other preparations: here all samples of the others are zero."""
    zeros = {"mean": torch.zeros(3, dtype=torch.float64), "std": torch.full((3,), 1e30, dtype=torch.float64)}
    steps = [{"op": {"kind": "op", "name": "apply-standardise"}, "payload": zeros}]

    def tasks(party: int, op: str) -> Message:
        return {"task": TASK, "preparations": steps if party != ANN and op in asks else []}

    aggregator = Aggregator(homes, tasks=tasks)
    assert aggregator.sum() is None
    assert ("not signed by" if len(asks) > 1 else "asks for another task") in aggregator.reasons()


def test_parties_refuse_a_sum_over_one_model_that_is_another_at_the_others(homes: list[Home]) -> None:
    """All are told the same task, in which the others have a layer that makes their updates zero."""
    chain = {"name": "chain", "inputs": [3], "outputs": 2}
    layers = {"ann": ["linear 3 2", "identity"], "others": ["linear 3 2", "relu"]}
    models = {name: {**chain, "layers": own} for name, own in layers.items()}

    def tasks(party: int, op: str) -> Message:
        several = {"models": models, "turn": ["ann", "others", "others", "others"]}
        return {"task": {**TASK, "model": models["ann"], **several}, "preparations": []}

    aggregator = Aggregator(homes, tasks=tasks)
    assert aggregator.sum() is None
    assert "the parties of the job have different models" in aggregator.reasons()


@pytest.mark.parametrize("work", [{"lr": 1e-3}, {"steps": 2}, {"batch": 200}, {"lr": 0.1 + 1e-9}])
def test_parties_refuse_a_sum_in_which_one_works_otherwise(work: Message, homes: list[Home]) -> None:
    """Here the aggregator tells all parties what each will be asked, and asks each for that."""

    def change(party: int, message: Message) -> Message:
        payload = message["payload"]
        if "asked" in payload:
            each = {str(k): {"work": {"lr": 0.1, **work}} for k in range(1, 4)}
            payload = {**payload, "asked": {**payload["asked"], "each": each}}
        if message["op"]["name"] == "secure-masked" and party != ANN:
            payload = {**payload, "work": {"lr": 0.1, **work}}
        return {**message, "payload": payload}

    aggregator = Aggregator(homes, change)
    assert aggregator.sum() is None
    assert "asks all parties for the same work" in aggregator.reasons()


@pytest.mark.parametrize("decay", [1e6, 1e3])
def test_parties_whose_updates_diverge_decline_instead_of_sending_what_is_known(
    decay: float, homes: list[Home]
) -> None:
    """They sent zeros, or the limit of the range. So the sum was the update of a party that took fewer steps."""
    diverging = hansa.build("local", "sgd", lr=0.1, batch=16, steps=10, weight_decay=decay)
    aggregator = Aggregator(homes)
    fed = Federation(range(4), 0, 0, 4, protocol=Masking(active=True, threshold=0.7))
    model = {"w": torch.zeros(8), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
    with pytest.raises(RoundAborted):
        complete(drive(fed.reduce(diverging, {"model": model}, uniform=True), "round"), aggregator._gather)
    assert [read_vault(home.folder).declined() for home in homes] == [1, 1, 1, 1]


def test_a_party_that_has_forgotten_a_sum_signs_no_list_of_survivors(homes: list[Home]) -> None:
    """Its owner has acknowledged a loss: it may have signed another list."""

    def change(party: int, message: Message) -> Message:
        if party == ANN and message["op"]["name"] == "secure-consistent":
            shutil.rmtree(homes[ANN].folder / "sessions")
        return message

    aggregator = Aggregator(homes, change)
    aggregator.sum()
    assert "no state of this secure sum" in aggregator.reasons()
    assert ("secure-consistent", ANN) not in [
        (op, who) for op, who, reply in aggregator.said if isinstance(reply, Reply)
    ]


def test_honest_asks_are_answered(homes: list[Home]) -> None:
    assert Aggregator(homes).sum() is not None


def test_a_run_with_different_work_says_so() -> None:
    """Ten steps in place of one, where each multiplies the update by nine, opened the update of one party."""
    task, run = logistic_task(), {"rounds": 1, "own": {"0": {"epochs": 2}}}
    with pytest.raises(ConfigError, match=r"asks all parties for the same work.*change run.pace or run.own.*active"):
        hansa.simulate(hansa.FedAvg(), task, privacy={"secure": "masking"}, **run)
    curious = {"secure": "masking", "active": False}
    assert hansa.simulate(hansa.FedAvg(), task, privacy=curious, **run).history[0]["replies"] == 3


@pytest.mark.parametrize(
    "solver",
    [hansa.build("local", "plus", inner=SOLVER), Packed(SOLVER, hansa.build("transform", "error-feedback", inner={
        "name": "rand-k", "k": 2, "shared": True, "scaled": False}))],
    ids=["own model", "error feedback"],
)  # fmt: skip
def test_no_sum_builds_on_memory_that_only_one_party_has(homes: list[Home], solver: Any) -> None:
    aggregator = Aggregator(homes)
    assert aggregator.sum(solver=solver) is not None
    for home in homes[1:]:
        home.tip = None  # "your reply was not used"
    aggregator.sum(solver=solver, round=1)
    first, second = (reply for op, party, reply in aggregator.said if op == "secure-masked" and party == ANN)
    assert not isinstance(first, str)
    assert isinstance(second, str) and "depend on what this party remembers of earlier asks" in second


def test_memory_that_a_reply_does_not_depend_on_is_no_reason_to_refuse(homes: list[Home]) -> None:
    solver, aggregator = hansa.build("local", "ditto", inner=SOLVER), Aggregator(homes)
    sums = [aggregator.sum(solver=solver, round=round) for round in range(2)]
    assert all(mean is not None for mean in sums) and aggregator.reasons() == ""
