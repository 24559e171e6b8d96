"""A party's limits on work: checked before it starts; work stops when the aggregator no longer waits for it."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import PATIENCE, League, samples

from hansa.classical.counts import SplitCounts
from hansa.classical.domains import ValueProfile
from hansa.classical.naive_bayes import ClassMoments
from hansa.core.ask import op_config
from hansa.core.op import Op, Reply
from hansa.core.predictor import Evaluate
from hansa.local import SGD, Adam, Proximal
from hansa.local.dp_sgd import DPSGD
from hansa.local.personal import Personal
from hansa.local.solver import LocalSolver
from hansa.net.party import agent as parties
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.policy import Policy
from hansa.net.party.samples import preparer
from hansa.net.party.store import PartyMemory, PartyStore
from hansa.net.party.worker import Worker
from hansa.net.party.workload import Workload, machine_memory
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, PartyError
from hansa.plumbing.stopping import Brake, Halted, braked, go_on
from hansa.secure import functional, ring
from hansa.secure.masking_ops import CHECKS, KEYS, SEALED, SecureMasked, SecureShares
from hansa.secure.paillier import PublicKey
from hansa.secure.primes import Stream, prime
from hansa.select.tiers import Probe

TASK = {"model": "logistic", "dtype": "float64", "shape": [3], "outputs": 2, "loss": "cross_entropy", "classes": 2,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip
LIMITS = "[limits]\nepochs = 50\nsteps = 500\nparameters = 100000\nparticipants = 20\nmemory = 100000000\n"


def answer(folder: Path, op: Op, payload: Any = None, policy: str = LIMITS, **task: Any) -> Reply | str:
    """The answer of a party with that policy."""
    folder.mkdir(exist_ok=True)
    (folder / "party.toml").write_text(policy)
    store = PartyStore(folder)
    try:
        worker = Worker(store, preparer((samples(0)[0], None), store.policy.limits.parameters))
        model = {"w": torch.zeros(8, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
        rows = {"sealed": torch.zeros(0, SEALED), "checks": torch.zeros(0, CHECKS)}
        hidden = {"ids": torch.zeros(0).long(), **{name: table.byte() for name, table in rows.items()}}
        usual = {"model": model, "secure": hidden}
        usual = {name: value for name, value in usual.items() if name in (op.entries or ())}
        message = {"op": op_config(op), "payload": {**usual, **(payload or {})}, "round": 0}
        described = {**TASK, **task}
        blobs = [Blob(hashlib.sha256(codec.encode(tree)).hexdigest(), 100) for tree in (message, described)]
        work = Work("job-1", "job", 0, 0, "round", 0, *blobs, None, None, None, 1)
        return worker.answer(work, message, {"task": described, "preparations": []})[0]
    finally:
        store.close()


@pytest.mark.parametrize("solver", [
    SGD(epochs=10**9, batch=1), SGD(steps=10**9), Adam(epochs=10**9), Proximal(epochs=10**9), DPSGD(steps=10**12),
    Personal(inner=SGD(epochs=10**9)), Probe(SGD(steps=10**9)),
    SecureMasked(inner=SGD(epochs=10**9)),
], ids=lambda op: op.name)  # fmt: skip
def test_too_many_epochs_or_steps_are_refused_in_one_sentence_before_anything_is_done(
    solver: Op, tmp_path: Path
) -> None:
    said = answer(tmp_path / "home", solver)
    assert isinstance(said, str) and "its policy gives an ask at most " in said
    assert "limits.epochs" in said or "limits.steps" in said


def test_a_refused_ask_is_refused_before_the_party_hashes_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Any] = []
    honest = Worker._input_digest
    monkeypatch.setattr(Worker, "_input_digest", lambda self, *inputs: hashed.append(inputs) or honest(self, *inputs))
    assert isinstance(answer(tmp_path / "home", SGD(epochs=10**9)), str) and not hashed
    assert isinstance(answer(tmp_path / "other", SGD()), Reply) and len(hashed) == 1


@pytest.mark.parametrize(("work", "words"), [
    ({"epochs": 10**9}, "limits.epochs in party.toml"), ({"steps": 10**9}, "at most 500 steps"),
    ({"batch": 1, "epochs": 50}, "limits.steps"), ({"epochs": 10**9, "batch": None}, "limits."),
    ({"epochs": 1e9}, "work.epochs must be a whole number"), ({"lr": "fast"}, "work.lr must be"),
    ({"lr": float("nan")}, "work.lr"), ({"steps": True}, "work.steps"),
    ({"momentum": 0.5}, "expected lr, epochs, batch"),
    ({"sigma": 0.0}, "expected lr, epochs, batch"),
    (["epochs"], "work must be a table"),
])  # fmt: skip
def test_what_an_ask_lays_over_the_solver_is_checked_too(work: Any, words: str, tmp_path: Path) -> None:
    said = answer(tmp_path / "home", SGD(batch=10), {"work": work})
    assert isinstance(said, str) and words in said


@pytest.mark.parametrize("model", [
    {"name": "2nn", "hidden": 10**9}, {"name": "2nn", "hidden": 10**30}, {"name": "2nn", "hidden": 400},
    {"name": "logistic", "outputs": 10**9},
])  # fmt: skip
def test_a_model_that_is_too_large_is_refused_before_it_takes_memory(model: Any, tmp_path: Path) -> None:
    said = answer(tmp_path / "home", SGD(), model=model)
    assert isinstance(said, str)
    assert (
        "its policy allows models of at most 100000 parameters" in said or "the function that makes it failed" in said
    )


@pytest.mark.parametrize("model", [
    {"name": "resnet-gn", "inputs": [1, 8, 8], "depth": 6 * 10**8 + 2}, {"name": "char-lstm", "layers": 10**9},
])  # fmt: skip
def test_a_model_of_too_many_layers_is_refused_before_any_is_made(model: Any, tmp_path: Path) -> None:
    said = answer(tmp_path / "home", SGD(), model=model)
    assert isinstance(said, str) and ("depth must be" in said or "layers must be" in said)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "payload"), [
    (ValueProfile(10**9), {}), (SplitCounts(tuple(range(1000)), 1000, 1000, 1000), {}),
    (ClassMoments(), {"centre": torch.zeros(10**6, dtype=torch.float64).expand(40, -1)}),
], ids=lambda value: getattr(value, "name", ""))  # fmt: skip
def test_a_reply_that_would_fill_the_memory_is_refused(op: Op, payload: Any, tmp_path: Path) -> None:
    """By its size, or before by a payload or fields that do not fit the task."""
    said = answer(tmp_path / "home", op, payload)
    assert isinstance(said, str)
    assert re.search(r"at most 100000000 bytes \(limits.memory|malformed ask|the party's task has", said)


def test_a_secure_sum_of_too_many_neighbours_is_refused(tmp_path: Path) -> None:
    payload = {"ids": torch.arange(3), "keys": torch.zeros(3, KEYS, dtype=torch.uint8), "asked": {}}
    said = answer(tmp_path / "home", SecureShares(10**6, 0.9, 10**6), payload)
    assert isinstance(said, str) and "at most 20 participants (limits.participants in party.toml)" in said
    said = answer(tmp_path / "home", SecureShares(10**6, 0.9, 4), payload)  # as many parties, and few neighbours
    assert isinstance(said, str) and "limits" not in said


def test_ordinary_work_is_done_under_the_default_limits(tmp_path: Path) -> None:
    for op in (SGD(epochs=5, batch=10), DPSGD(batch=5), SGD(steps=30)):
        assert isinstance(answer(tmp_path / "home", op, policy=""), Reply), op.name
    assert isinstance(answer(tmp_path / "home", SGD(), {"work": {"lr": 0.5, "batch": 5, "steps": None}}), Reply)


@pytest.mark.parametrize("line", ["epochs = 0", "steps = -1", "seconds = 0", "hours = 3", "parameters = 'many'"])
def test_limits_that_make_no_sense_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "party.toml").write_text(f"[limits]\n{line}\n")
    with pytest.raises(ConfigError, match=r"party\.toml.*limits"):
        Policy.read(tmp_path / "party.toml")


def test_messages_that_fill_the_memory_are_not_fetched() -> None:
    policy = Policy(limits=Workload(memory=3000))
    big, small = Blob("0" * 64, 1001), Blob("0" * 64, 1000)
    for blobs, fits in (((small, small), True), ((big, small), False), ((small, big), False)):
        said = policy.refuses_work(Work("job-1", "job", 0, 0, "round", 0, *blobs, None, None, None, 1))
        assert said is None if fits else said is not None and "limits.memory" in said


def test_an_ask_that_takes_too_long_is_stopped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with braked(Brake(0.2)):
        said = answer(tmp_path / "home", SGD(steps=10**6), policy="")
    assert said == REFUSAL
    assert "its policy gives an ask at most 0.2 seconds (limits.seconds in party.toml)" in caplog.text


def test_a_brake_holds_for_the_thread_that_entered_it() -> None:
    brake, heard = Brake(1e9), []
    brake.pull()

    def other() -> None:
        go_on()
        heard.append("went on")

    with braked(brake):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(Halted):
            go_on()
    go_on()
    assert heard == ["went on"]


def test_evaluation_stops_between_its_batches(tmp_path: Path) -> None:
    brake = Brake(1e9)
    brake.pull()
    x, y = samples(0)[0]
    made = preparer(((x, y), (x, y)))(0, TASK, "cpu")
    with braked(brake), pytest.raises(Halted):
        Evaluate().run(made, {"model": made.objective.initial._asdict()}, {})


def test_a_tree_in_which_a_node_is_below_itself_is_refused(tmp_path: Path) -> None:
    """Version 0.1.0 followed such a tree for ever."""
    tree = {"domain": [{"cuts": [0.0]}] * 3, "feature": torch.tensor([0, 0]), "child": torch.tensor([[1, 1], [0, 0]])}
    assert "malformed tree" in answer(tmp_path / "home", SplitCounts((1,), 3, 2, 2), tree)  # type: ignore[operator]
    x, y = samples(0)[0]
    made = preparer(((x, y), (x, y)))(0, TASK, "cpu")
    with pytest.raises(PartyError, match="malformed tree"):
        Evaluate("id3").run(made, {**tree, "counts": torch.ones(2, 2)}, {})


@pytest.mark.parametrize("work", [
    lambda: prime(Stream(b"secret"), 512), lambda: PublicKey(2**1024 + 1).encrypt(1, Stream(b"secret")),
    lambda: ring.add_mask(np.zeros(4, np.uint64), bytes(32)), lambda: functional.encrypt(1, 2, 3),
    lambda: SplitCounts((0,), 3, 2, 2).run(
        preparer((samples(0)[0], None))(0, TASK, "cpu"),
        {"domain": [{"cuts": [0.0]}] * 3, "feature": torch.tensor([-1]), "child": torch.tensor([[-1, -1]])}, {},
    ),
], ids=["prime", "paillier", "masks", "functional", "tree"])  # fmt: skip
def test_ops_that_are_no_training_stop_between_their_steps_too(work: Callable[[], Any]) -> None:
    brake = Brake(1e9)
    brake.pull()
    with braked(brake), pytest.raises(Halted):
        work()


def test_a_party_remembers_a_limited_number_of_jobs(tmp_path: Path) -> None:
    memory, kept = PartyMemory(tmp_path, jobs=3), {"m": torch.ones(2)}
    for number in range(6):
        memory.stage(f"job-{number}", "0/round/0", kept)
        os.utime(tmp_path / f"job-{number}", ns=(number, number))  # whatever the resolution of the clock
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-3", "job-4", "job-5"]
    memory.stage("job-3", "1/round/0", kept)  # the oldest memory is deleted, and work continues
    assert memory.recall("job-3", "0/round/0") and memory.recall("job-4", "0/round/0")
    assert memory.recall("job-1", "0/round/0") is None


@pytest.mark.slow
def test_memory_is_bounded_by_the_operating_system_and_the_party_lives_on() -> None:
    """In a separate process, because the limit cannot be removed again."""
    program = f"""
import resource, torch
from hansa.net.party.workload import Workload
Workload(memory={3 * 2**30}).confine()
try:
    parts = [torch.zeros(2**28) for _ in range(5)]
except RuntimeError as error:
    print(Workload(memory={3 * 2**30}).exhausted(error))
print(torch.ones(3).sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    assert "at most 3221225472 bytes (limits.memory in party.toml), and this one takes more" in done.stdout
    assert done.stdout.endswith("3.0\n")
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 3 * 2**30 and machine_memory() > 2**28


LONG = {"task": {"dataset": "heart", "model": "logistic"}, "run": {"rounds": 1},
        "algorithm": {"name": "fedavg", "local": {"lr": 1e-9, "batch": 1, "steps": 300_000}}}  # fmt: skip
SHORT = {"task": {"dataset": "heart", "model": "logistic"}, "run": {"rounds": 1}}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a party is about to take its first step."""
    monkeypatch.setattr(parties, "HEARTBEAT", 0.05)
    event, drawn = threading.Event(), LocalSolver.drawn

    def draw(self: LocalSolver, party: Any) -> Any:
        event.set()
        return drawn(self, party)

    monkeypatch.setattr(LocalSolver, "drawn", draw)
    return event


def test_a_party_stops_when_the_job_is_stopped_and_does_the_next_one(league: League, begun: threading.Event) -> None:
    league.join("ann", samples(0))
    job = league.submit(LONG, min_parties=1)
    assert begun.wait(PATIENCE)
    assert league.runner.stop(job)
    after = league.submit(SHORT, min_parties=1)
    assert league.ended(after)["status"] == "finished"
    league.until(lambda: not any(thread.name == "work" for thread in threading.enumerate()))


@pytest.mark.slow
def test_a_party_stops_when_the_deadline_has_passed(league: League, begun: threading.Event) -> None:
    league.join("ann", samples(0))
    tree = {**LONG, "run": {"rounds": 1, "deadline": 2.0}}
    job = league.submit(tree, min_parties=1)
    assert begun.wait(PATIENCE)
    assert league.ended(job)["status"] == "failed"
    assert league.ended(league.submit(SHORT, min_parties=1))["status"] == "finished"


def test_a_long_step_of_work_that_nobody_awaits_is_waited_for(
    league: League, begun: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step cannot be interrupted: a party whose step took longer than a minute exited, although only the job had
    ended."""
    monkeypatch.setattr(parties, "STUCK", 0.05)
    drawn = LocalSolver.drawn

    def draw(self: LocalSolver, party: Any) -> Any:
        if self.has("steps") and self.steps == 300_000:  # type: ignore[attr-defined]
            begun.set()
            time.sleep(1.0)
        return drawn(self, party)

    monkeypatch.setattr(LocalSolver, "drawn", draw)
    league.join("ann", samples(0))
    job = league.submit(LONG, min_parties=1)
    assert begun.wait(PATIENCE)
    assert league.runner.stop(job)
    assert league.ended(league.submit(SHORT, min_parties=1))["status"] == "finished"


def test_a_party_that_leaves_stops_its_work(league: League, begun: threading.Event) -> None:
    member = league.join("ann", samples(0))
    league.submit(LONG, min_parties=1)
    assert begun.wait(PATIENCE)
    member.leave()
    league.until(lambda: not any(thread.name == "work" for thread in threading.enumerate()))


def test_work_that_is_refused_its_sign_of_life_stops_too(league: League, begun: threading.Event) -> None:
    member = league.join("ann", samples(0))
    league.submit(LONG, min_parties=1)
    assert begun.wait(PATIENCE)
    league.operator.revoke("ann")
    member.gone()
    league.until(lambda: not any(thread.name == "work" for thread in threading.enumerate()))


def test_a_limit_that_the_process_cannot_start_with_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"limits\.memory is 1000 bytes, but the party needs at least \d+ to start"):
        Workload(memory=1000).confine()
    with pytest.raises(ConfigError, match="min_cohort must be at least 1, got 0"):
        Policy(min_cohort=0)
