"""A party's watch over the models that it is sent: rounds, replays, changes and losses."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from league import samples
from torch import Tensor

import hansa
from hansa.core.ask import op_config
from hansa.core.op import Op, Reply, perform
from hansa.core.plain_data import to_config
from hansa.core.registry import registered
from hansa.core.route_op import RouteOp
from hansa.core.wrapper import Wrapper
from hansa.experiment.config import parse
from hansa.local import DPSGD, SGD
from hansa.local.finetune import FineTune
from hansa.local.solver import LocalSolver
from hansa.net.party import model_watch
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.broadcast import Broadcasts
from hansa.net.party.model_watch import FILE, ModelWatch, training_loss
from hansa.net.party.op_parts import parts
from hansa.net.party.policy import Policy
from hansa.net.party.samples import preparer
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.party.vault_lines import read_vault
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.select.power_of_choice import Loss
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine
from hansa.testing import TREE, experiment_for
from hansa.testing.experiments import simulated
from hansa.transforms import ClippedUpdate

TASK = {"model": "logistic", "dtype": "float64", "shape": [3], "outputs": 2, "loss": "cross_entropy", "classes": 2,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip


def model(value: float | Tensor, size: int = 8) -> dict[str, Any]:
    w = value if isinstance(value, Tensor) else torch.full((size,), value / math.sqrt(size), dtype=torch.float64)
    return {"w": w, "stats": torch.zeros(0), "counts": torch.zeros(0).long()}


class Asker:
    """A party in this process, asked directly."""

    def __init__(self, folder: Path, policy: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "party.toml").write_text(policy)
        self.store = PartyStore(folder)
        self.worker = Worker(self.store, preparer((samples(0)[0], None), 10**6))

    def __call__(self, round: int, value: float | Tensor, op: Op | None = None, job: str = "job-1",
                 says: int | None = None) -> Reply | str:  # fmt: skip
        said = round if says is None else says
        message = {"op": op_config(op or SGD(steps=1)), "payload": {"model": model(value)}, "round": said}
        blobs = [Blob(hashlib.sha256(codec.encode(tree)).hexdigest(), 100) for tree in (message, TASK)]
        work = Work(job, "job", 0, round, "round", 0, *blobs, None, None, None, 1)
        return self.worker.answer(work, message, {"task": TASK, "preparations": []})[0]

    def refusals(self) -> int:
        return read_vault(self.store.folder).refusals.total()


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Callable[[str], Asker]]:
    made: list[Asker] = []

    def make(policy: str = "") -> Asker:
        for before in made:
            before.store.close()
        made.append(Asker(tmp_path / "home", policy))
        return made[-1]

    yield make
    made[-1].store.close()


def refused(answer: Reply | str, sentence: str) -> bool:
    return isinstance(answer, str) and sentence in answer and "\n" not in answer


def test_an_earlier_round_is_refused_by_default_and_logged(
    party: Callable[..., Asker], caplog: pytest.LogCaptureFixture
) -> None:
    asks = party()
    for round in (0, 3, 3):  # the same ask again, as after a crash
        assert isinstance(asks(round, 1.0), Reply)
    assert refused(asks(2, 1.0), "the ask is of round 2, and this party has trained in round 3 of the job")
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING][-1].startswith("model refused: the")
    assert isinstance(asks(2, 1.0, Loss()), Reply)  # trains nothing: an evaluation may lag behind
    assert isinstance(asks(2, 1.0, job="job-2"), Reply)
    assert refused(party()(2, 1.0, ClippedUpdate(SGD(), 1.0)), "round 2")  # after a restart, and inside another op
    assert isinstance(party("[broadcast]\nrounds = false")(2, 1.0), Reply)


def test_a_model_that_was_not_trained_is_not_remembered(party: Callable[..., Asker]) -> None:
    asks = party("[limits]\nepochs = 5\n[privacy]\nepsilon = 1.0\n")
    assert refused(asks(9, 1.0, DPSGD(sigma=0.3, steps=500)), "budget is spent")
    assert isinstance(asks(0, 1.0, DPSGD(sigma=9.0, steps=1)), Reply)


def test_the_round_of_a_message_is_that_of_its_ask(party: Callable[..., Asker]) -> None:
    assert refused(party()(4, 1.0, says=2), "it is of round 4, and its message of another round")


def test_a_model_of_an_earlier_round_is_refused(party: Callable[..., Asker]) -> None:
    asks = party("[broadcast]\nreplays = true")
    for round, value in enumerate((1.0, 2.0, 2.0, 3.0)):  # an aborted round leaves the model as it was
        assert isinstance(asks(round, value), Reply)
    assert refused(asks(4, 2.0), "it has seen this model in an earlier round")
    assert isinstance(asks(4, 2.0, FineTune(SGD(steps=1))), Reply)  # of the best model of a run
    assert isinstance(asks(5, 4.0), Reply)
    assert refused(party("[broadcast]\nreplays = true")(6, 1.0), "it has seen this model")
    assert isinstance(party()(6, 1.0), Reply)


def test_a_change_beyond_the_norm_is_refused_and_the_last_accepted_model_stays(party: Callable[..., Asker]) -> None:
    asks = party("[broadcast]\nnorm = 1.0")
    assert isinstance(asks(0, 50.0), Reply)  # nothing to compare it with
    assert isinstance(asks(1, 50.9), Reply)
    assert refused(asks(2, 52.0), "changed by a norm of 1.1 since the last one, and its policy allows 1 ")
    assert refused(party("[broadcast]\nnorm = 1.0")(3, 52.0), "changed by a norm of 1.1")
    assert isinstance(asks(3, 51.5), Reply)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.7e308])
@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_is_not_finite_is_refused(party: Callable[..., Asker], value: float, first: bool) -> None:
    asks = party("[broadcast]\nfactor = 9.0")
    if not first:
        assert isinstance(asks(0, 1.0), Reply)
    assert refused(asks(1, torch.full((8,), value, dtype=torch.float64)), "finite")


def test_a_change_beyond_a_factor_of_the_usual_change_is_refused(party: Callable[..., Asker]) -> None:
    asks = party("[broadcast]\nfactor = 3.0")
    for round, value in enumerate((0.0, 5.0, 5.0, 6.0, 7.0)):  # changes 5, 1, 1: too few at first
        assert isinstance(asks(round, value), Reply)
    assert refused(asks(5, 10.5), "a norm of 3.5 since the last one, and the median of its changes is 1; its policy "
                                  "allows 3 times that")  # fmt: skip
    assert isinstance(asks(6, 9.9), Reply)


def test_a_model_of_another_shape_or_none_cannot_be_compared(party: Callable[..., Asker]) -> None:
    asks = party("[broadcast]\nnorm = 1.0")
    asks(0, 1.0)
    assert refused(asks(1, torch.zeros(5, dtype=torch.float64)), "model.w must be a tensor")
    for limits in (Broadcasts(norm=1.0), Broadcasts(factor=2.0), Broadcasts(replays=True), Broadcasts(loss=2.0)):
        with pytest.raises(PartyError, match="this ask trains without a model"):  # between parties, for example
            asks.worker._watch.check(limits, "job-3", 0, SGD(), {"mixing": torch.ones(1)}, lambda: 1.0)


def test_a_rise_of_the_loss_is_refused_without_a_number_and_counted(party: Callable[..., Asker]) -> None:
    policy = "[broadcast]\nloss = 2.0\nrefusals = 2"
    asks = party(policy)
    for round in range(3):
        assert isinstance(asks(round, 0.01 * round), Reply)  # a loss of about 0.69
    poisoned = torch.tensor([40.0, -40.0] * 4, dtype=torch.float64)
    said = asks(3, poisoned)
    assert refused(said, REFUSAL)
    assert asks(3, poisoned) == said and asks.refusals() == 1  # the same ask counts once
    assert refused(asks(4, poisoned), REFUSAL) and asks.refusals() == 2
    again = party(policy)  # neither a restart nor a new job gives refusals back
    assert refused(again(5, 0.05), "its policy allows it to refuse 2 models over all jobs")
    assert refused(again(0, 0.05, job="job-9"), "they are used up")
    assert refused(again(4, poisoned), REFUSAL)  # a repeat
    assert isinstance(again(5, 0.02), Reply)  # the model that it trained last


def test_a_refused_ask_is_refused_again_whatever_the_median_has_become(party: Callable[..., Asker]) -> None:
    """Otherwise an aggregator that moves the median finds the loss of one model by any number of uncounted bits."""
    asks = party("[broadcast]\nloss = 1.5\nrefusals = 2")

    def worse(scale: float) -> Tensor:
        return scale * torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)

    for scale in (0.0, 0.01, 0.02):
        assert isinstance(asks(0, worse(scale)), Reply)
    scales = [0.05 * step for step in range(1, 200)]
    probe = next(scale for scale in scales if isinstance(asks(0, worse(scale)), str))
    assert asks.refusals() == 1
    for share in (0.9, 0.92, 0.94, 0.96, 0.98):  # models that are accepted, and move the median
        assert isinstance(asks(0, worse(share * probe)), Reply)
    assert isinstance(asks(0, worse(probe * 1.001)), Reply), "this loss is now allowed"
    assert refused(asks(0, worse(probe)), REFUSAL) and asks.refusals() == 1


def test_a_model_that_fails_on_a_sample_is_refused_as_a_large_loss_is(
    party: Callable[..., Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Tensor:
        raise IndexError("a character of the data")

    asks = party("[broadcast]\nloss = 2.0")
    monkeypatch.setattr("hansa.numerics.objective.Objective.outputs", fails)
    assert refused(asks(0, 0.0), REFUSAL) and asks.refusals() == 1


def test_the_loss_is_that_of_all_training_samples_and_needs_a_whole_model(
    party: Callable[..., Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = party("[broadcast]\nloss = 2.0")
    said = asks(0, torch.zeros(5, dtype=torch.float64))
    assert refused(said, "model.w must be a tensor") and asks.refusals() == 0
    assert isinstance(asks(0, 1.0), Reply)
    reply = asks(0, 1.0, Loss())
    assert isinstance(reply, Reply)
    assert asks.worker._ready is not None
    for batch in (7, 256):
        monkeypatch.setattr(model_watch, "BATCH", batch)
        found = training_loss(asks.worker._ready[1], {"model": model(1.0)})
        assert found == pytest.approx(float(reply.tensors["loss"]), rel=1e-12)


def test_the_samples_are_read_through_the_gateway_before_the_model_is_trained(
    party: Callable[..., Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, purposes = party("[broadcast]\nloss = 2.0"), []
    admit = "hansa.kernel.gateway.GuardedGateway.admit"
    monkeypatch.setattr(admit, lambda self, purpose: purposes.append((purpose, self._op.name)))
    asks(0, 1.0)
    assert purposes == [("statistics", "model-loss"), ("train", "sgd")]

    def closed(self: Any, purpose: str) -> None:
        raise PartyError("the kernel refuses")

    monkeypatch.setattr(admit, closed)
    assert asks(1, 2.0) == "the kernel refuses"


def test_what_is_remembered_is_bounded_and_survives_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = Broadcasts(replays=True, norm=9.0, loss=9.0)
    watch = ModelWatch(PartyMemory(tmp_path))
    for round in range(300):
        watch.remember("a", watch.check(limits, "a", round, SGD(), {"model": model(float(round))}, lambda: 1.0))
    tree = PartyMemory(tmp_path).get("a", FILE)
    assert [len(tree[name]) for name in ("models", "changes", "losses")] == [256, 32, 32] and tree["round"] == 299
    path = tmp_path / "a" / FILE
    path.write_bytes(path.read_bytes()[:-1])
    ModelWatch(PartyMemory(tmp_path)).check(limits, "a", 0, SGD(), {"model": model(0.0)}, lambda: 1.0)
    assert "record of earlier models is lost" in caplog.text


@pytest.mark.parametrize(
    ("losses", "worst"), [((1.0, 4.0, 2.0), 5.0), ((-1.0, -4.0, -2.0), 1.0), ((0.0, 0.0, 0.0), 0.0)]
)
def test_the_largest_loss_is_the_factor_above_the_median_also_where_losses_are_negative(
    tmp_path: Path, losses: tuple[float, ...], worst: float
) -> None:
    watch, limits = ModelWatch(PartyMemory(tmp_path)), Broadcasts(loss=2.5)
    for round, value in enumerate(losses):
        payload = {"model": model(float(round))}
        watch.remember("a", watch.check(limits, "a", round, SGD(), payload, lambda value=value: value))  # type: ignore[misc]
    watch.check(limits, "a", 3, SGD(), {"model": model(3.0)}, lambda: worst)
    with pytest.raises(PartyError, match="rose beyond"):
        watch.check(limits, "a", 3, SGD(), {"model": model(3.0)}, lambda: math.nextafter(worst, math.inf))


def test_the_largest_change_is_the_norm_and_the_factor_above_the_median(tmp_path: Path) -> None:
    watch = ModelWatch(PartyMemory(tmp_path))

    def change(limits: Broadcasts, round: int, w: float, job: str = "a") -> None:
        payload = {"model": model(torch.tensor([w, 0.0]))}
        watch.remember(job, watch.check(limits, job, round, SGD(), payload, lambda: 0.0))

    for job in ("a", "b"):
        change(Broadcasts(norm=4.0), 0, 0.0, job)
    for round, w in ((1, 4.0), (2, 8.0), (3, 4.0)):  # changes of 4: at the bound
        change(Broadcasts(norm=4.0), round, w)
    for limits in (Broadcasts(norm=8.0), Broadcasts(factor=2.0)):
        with pytest.raises(PartyError, match=r"changed by a norm of 8\.5"):
            change(limits, 4, 12.5)
    change(Broadcasts(factor=2.0), 4, 12.0)
    for round, w in ((1, 1.0), (2, 9.0)):  # in another job there are too few changes before these
        change(Broadcasts(factor=2.0), round, w, "b")
    with pytest.raises(PartyError, match="without a model"):
        watch.check(Broadcasts(norm=9.0), "a", 5, SGD(), {"model": {"w": torch.zeros(2), "stats": None}}, lambda: 0.0)


@pytest.mark.parametrize(("table", "sentence"), [
    ("norm = 0.0", "broadcast.norm must be above 0"), ("norm = inf", "broadcast.norm: expected a number"),
    ("factor = 0.5", "broadcast.factor must be at least 1"), ("loss = 0.9", "broadcast.loss must be at least 1"),
    ("refusals = -1", "broadcast.refusals must be at least 0"), ("refusals = 3", "set broadcast.loss too"),
    ("loss = 2.0\n[privacy]\ndp = true", "requires differential privacy; leave out one of them"),
    ("other = 1", "other"),
])  # fmt: skip
def test_a_wrong_table_is_refused_in_one_sentence(tmp_path: Path, table: str, sentence: str) -> None:
    (tmp_path / "party.toml").write_text(f"[broadcast]\n{table}")
    with pytest.raises(ConfigError, match=sentence):
        Policy.read(tmp_path / "party.toml")


def test_a_private_party_may_check_changes(party: Callable[..., Asker]) -> None:
    asks = party("[privacy]\ndp = true\n[broadcast]\nnorm = 1.0")
    assert isinstance(asks(0, 1.0, DPSGD(steps=1)), Reply)
    assert refused(asks(1, 3.0, DPSGD(steps=1)), "changed by a norm of 2")


def test_a_model_beside_the_one_that_is_trained_does_not_satisfy_the_watch(tmp_path: Path) -> None:
    """Ops that start elsewhere ignore the model of the payload, so a harmless one could stand there."""
    watch = ModelWatch(PartyMemory(tmp_path))
    other = [part() for part in registered("op").values() if issubclass(part, RouteOp) and issubclass(part, Wrapper)]
    other += [registered("op")[name]() for name in ("pfnm-train", "fedma-train", "fedmd-learn", "fedmd-scores")]
    assert {"gossip", "push-sum", "fuse-neighbours"} <= {op.name for op in other}
    for op in other:
        with pytest.raises(PartyError, match="this ask trains without a model"):
            watch.check(Broadcasts(norm=1.0), "job-1", 0, op, {"model": model(0.0)}, lambda: 1.0)


STRUCTURAL = ("another shape than the last one", "trains without a model", "no whole model of the task")


@pytest.mark.slow
def test_no_honest_run_of_any_algorithm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default none; with limits that allow much, only those that send no whole model of one shape."""
    wide = Broadcasts(norm=1e4, factor=1e3, loss=1e2)
    reasons: dict[str, set[str]] = {}
    running = ""

    def one(self: ReferenceEngine, op: Op, job: PartyWork, round: int) -> Outcome:
        party = self.party(job.party, round)
        if any(isinstance(part, LocalSolver) for part in parts(op)):
            for name, limits in (("default", Broadcasts()), ("wide", wide)):
                watch = ModelWatch(PartyMemory(tmp_path / f"{name}-{job.party}"))
                try:
                    check = watch.check(
                        limits, running, round, op, job.payload, lambda: training_loss(party, job.payload)
                    )
                    watch.remember(running, check)
                except PartyError as error:
                    reasons.setdefault(f"{name} {running}", set()).add(str(error))
        return perform(op, party, job.payload, dict(job.memory))

    monkeypatch.setattr(ReferenceEngine, "one", one)
    for name, part in registered("algorithm").items():
        running = name
        algorithm: Any = part()
        if part.__module__.startswith("hansa.") and algorithm.data != "columns":
            simulated(experiment_for(algorithm), engine="reference")
    running = "finetune"
    fine = parse({**TREE, "algorithm": to_config(hansa.FedAvg()), "run": {**TREE["run"], "finetune": {"epochs": 1}}})
    simulated(fine, engine="reference")
    for name, found in reasons.items():
        assert name.startswith("wide "), (name, found)
        assert all(any(reason in text for reason in STRUCTURAL) for text in found), (name, found)
    assert not any(name in reasons for name in ("wide fedavg", "wide scaffold", "wide fedprox", "wide finetune"))
