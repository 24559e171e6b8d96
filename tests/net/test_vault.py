"""Privacy spending of a deployed party: recorded before the reply, once per ask, bounded by the policy."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from league import PARTIES, League, samples

import hansa
from forked import needs_fork
from hansa.cli import main
from hansa.core.ask import op_config
from hansa.core.budget import Budget, Release
from hansa.core.entries import Number, stated
from hansa.core.op import Op, Payload, Reply
from hansa.core.plain_data import build
from hansa.core.predictor import Evaluate, Predictor
from hansa.core.registry import register
from hansa.data.describe import Describe
from hansa.data.prepare import ApplyStandardise, StandardiseOwn
from hansa.local import SGD
from hansa.local.dp_sgd import DPSGD
from hansa.metrics.classes import Accuracy
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.evaluations import FLOORED, Evaluations
from hansa.net.party.floor import Floor
from hansa.net.party.policy import Policy
from hansa.net.party.query_budget import QueryBudget
from hansa.net.party.samples import preparer
from hansa.net.party.store import PartyStore
from hansa.net.party.vault import PartyVault
from hansa.net.party.vault_lines import FILE, read_vault
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Blob, Work
from hansa.numerics.objective import Objective
from hansa.plumbing import codec, disk
from hansa.plumbing import crash_points as points
from hansa.plumbing.errors import ConfigError, DataError, PartyError
from hansa.plumbing.stopping import Brake, Halted, braked
from hansa.privacy import spent
from hansa.privacy.accounting import epsilon
from hansa.secure.masking_ops import CHECKS, SEALED, SecureKeys, SecureMasked, SecureShares
from hansa.secure.paillier import PrivateKey
from hansa.secure.paillier_sum import PaillierEncrypt
from hansa.secure.primes import Stream

LOCAL = DPSGD(batch=5, sigma=2.0)
TASK = {"model": "logistic", "dtype": "float64", "shape": [3], "outputs": 2, "loss": "cross_entropy", "classes": 2,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip


def usual_payload(op: Op) -> dict[str, Any]:
    """A model, and the entries of a masked sum, where the op reads them."""
    model = {"w": torch.zeros(8, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
    rows = {name: torch.zeros(0, size, dtype=torch.uint8) for name, size in (("sealed", SEALED), ("checks", CHECKS))}
    known = {"model": model, "secure": {"ids": torch.zeros(0).long(), **rows}}
    return {name: value for name, value in known.items() if op.entries is None or name in op.entries}


class Place:
    """A party's folder, and its answers."""

    def __init__(self, folder: Path, policy: str = "", shift: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "party.toml").write_text(policy)
        self.folder, self.store = folder, PartyStore(folder)
        (x, y), _ = samples(0)
        self.n = len(x)
        self.worker = Worker(self.store, preparer(((x + shift, y), None)))

    def answer(self, op: Op = LOCAL, round: int = 0, job: str = "job-1", task: Any = TASK,
               preparations: Any = (), payload: Any = None, number: int = 0) -> Reply | str:  # fmt: skip
        message = {"op": op_config(op), "payload": payload or usual_payload(op), "round": round}
        blobs, about = [], {"task": task, "preparations": list(preparations)}
        for tree in (message, about):
            data = codec.encode(tree)
            blobs.append(Blob(hashlib.sha256(data).hexdigest(), len(data)))
        work = Work(job, "job", number, round, "round", 0, *blobs, None, None, None, 1)
        return self.worker.answer(work, message, about)[0]

    def costs(self, rounds: int) -> float:
        return epsilon([Release(5 / self.n, 2.0, rounds * LOCAL.count(self.n))], 1e-5)

    @property
    def lines(self) -> list[bytes]:
        """The lines of its vault, without those that it writes once."""
        path = self.folder / FILE
        all_of = path.read_bytes().splitlines() if path.exists() else []
        return [line for line in all_of if b"task.party_test" not in line and b'"name":"marks"' not in line]


@pytest.fixture
def place(tmp_path: Path) -> Any:
    """Opens a party's folder again, as after a restart of the party."""
    made: list[Place] = []

    def make(policy: str = "", shift: float = 0.0) -> Place:
        for old in made:
            old.store.close()
        made.append(Place(tmp_path / "home", policy, shift))
        return made[-1]

    yield make
    for old in made:
        old.store.close()


def update(reply: Reply | str) -> torch.Tensor:
    assert isinstance(reply, Reply), reply
    return reply.tensors["w"]


def test_a_reply_says_what_the_party_has_spent_in_the_job_and_it_is_kept(place: Any) -> None:
    party = place()
    for k in range(3):
        reply = party.answer(round=k)
        assert reply.metrics == {"epsilon": pytest.approx(party.costs(k + 1))}
    assert party.answer(job="job-2").metrics["epsilon"] == pytest.approx(party.costs(1))
    again = place()
    assert again.answer(round=3).metrics["epsilon"] == pytest.approx(party.costs(4))
    assert len(again.lines) == 5


def test_the_same_ask_again_gets_the_same_bytes_and_costs_nothing(place: Any) -> None:
    party = place()
    first = party.answer()
    assert torch.equal(update(party.answer()), update(first))
    again = place().answer()
    assert torch.equal(update(again), update(first))
    assert again.metrics == first.metrics
    assert len(party.lines) == 1


def test_the_same_ask_after_the_secret_was_lost_has_other_noise_and_costs_again(place: Any) -> None:
    here = place()
    first = here.answer()
    (here.folder / "secret").unlink()
    again = place()
    assert not torch.equal(update(first), update(again.answer()))
    assert len(again.lines) == 2 and again.worker.vault.contents.all_releases[0].steps == 2 * LOCAL.count(again.n)


def test_another_version_draws_other_noise(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions may round differently; the same noise on both answers would reveal the difference."""
    first = update(place().answer())
    for module, version in ((hansa, "9.9.9"), (torch, "99.0")):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__version__", version)
            assert not torch.equal(update(place().answer()), first)
    assert torch.equal(update(place().answer()), first)


def test_noise_is_never_used_for_another_answer(place: Any) -> None:
    """Two answers with the same noise would reveal their difference. Without noise, only the clipped gradients of a
    few samples would differ."""
    small = DPSGD(batch=5, sigma=1000.0, steps=1, lr=1.0)
    first = update(place().answer(small))
    others = [
        place(shift=1e-6).answer(small),  # other data
        place("own = {lr = 1.000001}").answer(small),  # its own policy
        place().answer(DPSGD(batch=5, sigma=1000.0, steps=1, lr=1.000001)),  # another message
        place().answer(small, job="job-2"),
    ]
    for other in others:
        assert float((update(other) - first).norm()) > 100
    assert len(place().lines) == 5


def test_a_partys_draws_are_its_own(tmp_path: Path) -> None:
    parties = [Place(tmp_path / name) for name in ("one", "two")]
    one, two = (update(party.answer()) for party in parties)
    for party in parties:
        party.store.close()
    assert not torch.equal(one, two)
    for party in parties:
        secret = party.folder / "secret"
        assert secret.stat().st_size == 32 and secret.stat().st_mode & 0o777 == 0o600


def test_a_jobs_budget_and_the_partys_own_over_all_jobs_end_its_training(place: Any) -> None:
    party = place()
    limit = (party.costs(2) + party.costs(3)) / 2
    job = DPSGD(batch=5, sigma=2.0, epsilon=limit)
    assert [isinstance(party.answer(job, k), Reply) for k in range(3)] == [True, True, False]
    assert str(party.answer(job, 2)).startswith("its privacy budget is spent: epsilon ")
    assert isinstance(party.answer(job, 0, "job-2"), Reply)  # a budget of its own
    tight = place(f"[privacy]\nepsilon = {(party.costs(3) + party.costs(4)) / 2}\ndelta = 1e-5")
    assert str(tight.answer(job, 1, "job-2")).startswith("its privacy budget is spent: epsilon ")
    assert isinstance(tight.answer(job, 0, "job-2"), Reply)  # paid for before
    assert len(tight.lines) == 3


def test_what_was_spent_survives_a_kill_between_spending_and_replying_and_is_not_spent_twice(place: Any) -> None:
    needs_fork()
    party = place()
    child = os.fork()
    if child == 0:  # the party's process: it dies once the update is made, before anything is sent
        points.install(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == "party.trained" else None)
        party.answer()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (line,) = party.lines
    assert json.loads(line)["steps"] == LOCAL.count(party.n)
    again = place()
    assert again.answer().metrics == {"epsilon": pytest.approx(again.costs(1))}
    assert again.lines == [line]
    assert again.answer(round=1).metrics == {"epsilon": pytest.approx(again.costs(2))}


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_nothing_is_sent_that_could_not_be_kept(place: Any, fails: str) -> None:
    party = place()
    party.answer()

    def full(what: str, path: Path, *more: Any) -> None:
        if what == fails and path.name == FILE:
            raise OSError(28, "no room")

    disk.observe(full)
    try:
        with pytest.raises(OSError, match="no room"):  # it is asked anew, and may have room then
            party.answer(round=1)
    finally:
        disk.observe(None)
    assert party.answer(round=1).metrics["epsilon"] == pytest.approx(party.costs(2))
    assert place().worker.vault.contents.all_releases == (Release(5 / party.n, 2.0, 2 * LOCAL.count(party.n)),)


def test_a_line_that_was_cut_off_is_no_line_and_a_damaged_one_stops_the_party(place: Any) -> None:
    party = place()
    party.answer()
    path = party.folder / FILE
    whole = path.read_bytes()
    for torn in (b'{"job":"job-1"', b"\0\0\0\n"):
        path.write_bytes(whole + torn)
        place()
        assert path.read_bytes() == whole
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(DataError, match="line 1: damaged"):
        PartyVault(party.folder, spent)


def test_what_is_answered_once_is_answered_about_one_thing(tmp_path: Path) -> None:
    vault = PartyVault(tmp_path, spent).for_job("job-1")
    vault.once("round 3", "aa")
    vault.once("round 3", "aa")
    again = PartyVault(tmp_path, spent)
    again.for_job("job-2").once("round 3", "bb")
    with pytest.raises(PartyError, match="answered round 3 before"):
        again.for_job("job-1").once("round 3", "bb")
    assert len((tmp_path / FILE).read_bytes().splitlines()) == 2


def test_neither_what_was_answered_nor_what_was_spent_is_forgotten(tmp_path: Path) -> None:
    vault = PartyVault(tmp_path, spent)
    vault.read("job-1", "ask", "train", "", LOCAL, 50, {}, QueryBudget())
    for k in range(7):
        vault.once("job-1", f"{k}", "aa")
    again = PartyVault(tmp_path, spent, Budget(0.1, 1e-5))
    assert read_vault(tmp_path).all_releases == again.contents.all_releases == (Release(0.1, 2.0, 10),)
    with pytest.raises(PartyError, match="answered 0 before"):
        again.once("job-1", "0", "bb")
    with pytest.raises(PartyError, match="budget is spent"):
        again.read("job-1", "other", "train", "", LOCAL, 50, {}, QueryBudget())


@pytest.mark.parametrize(("floor", "op", "why"), [
    ("dp = true", SGD(), "requires differential privacy, and 'sgd' has none; use the local solver 'dp-sgd'"),
    ("epsilon = 3.0", SGD(), "requires differential privacy"),
    ("epsilon = 3.0", build("op", "gossip"), "requires differential privacy"),
    ("dp = true", DPSGD(sigma=0.0), "requires a sigma of at least 0.3, and the job has 0"),
    ("dp = true", DPSGD(sigma=1e-6), "requires a sigma of at least 0.3, and the job has 1e-06"),
    ("epsilon = 3.0", DPSGD(sigma=0.2), None),
    ("dp = true\ndiscrete = true", DPSGD(mechanism="float"), "requires discrete noise, and the job has local"),
    ("dp = true\ndiscrete = true", DPSGD(mechanism="discrete"), None),
    ("dp = true\ndiscrete = true", DPSGD(), None),
    ("dp = true", DPSGD(mechanism="float"), None),
    ("sigma = 1.5", DPSGD(sigma=1.0), "requires a sigma of at least 1.5, and the job has 1"),
    ("secure = true", DPSGD(), "requires a secure sum"),
    ("active = true", DPSGD(), "requires masked sums with signatures, and 'dp-sgd' is not part of one"),
    ("active = true", SecureKeys(), "'secure-keys' is not part of one"),
    ("active = true", SecureShares(3, 0.7, 2), "'secure-shares' is not part of one"),
    ("active = true", build("op", "secure-paillier", inner=SGD()), "'secure-paillier' is not part of one"),
    ("active = true", SecureKeys(active=True), None),
    ("active = true", SecureShares(3, 0.7, 2, active=True), None),
    ("active = true", SecureMasked(SGD()), None),
    ("sigma = 1.5", DPSGD(sigma=1.5), None),
    ("dp = true", build("op", "gossip", inner=DPSGD()), None),
    ("dp = true\nsecure = true", Evaluate("network"), "'evaluate' would reveal its reply"),
    ("active = true", Evaluate("network"), "'evaluate' is not part of one"),
    ("dp = true\nsecure = true", SecureMasked(Evaluate("network")), None),
    ("active = true", SecureMasked(Evaluate("network")), None),
    ("epsilon = 1.0", Evaluate("network"), None),
    ("dp = true\nsecure = true", build("op", "describe"), None),
    ("", SGD(), None),
])  # fmt: skip
def test_a_policy_has_a_floor_of_privacy(tmp_path: Path, floor: str, op: Op, why: str | None) -> None:
    (tmp_path / "party.toml").write_text(f"[privacy]\n{floor}")
    said = Policy.read(tmp_path / "party.toml").privacy.refuses(op, 40, {})
    assert (said is None) if why is None else (said is not None and why in said)


FLOORS = ["dp = true", "epsilon = 3.0", "sigma = 1.0", "secure = true", "active = true"]


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("share", [0.5, 0.1, 0.98])
def test_under_any_floor_nothing_is_held_out_and_no_training_sample_is_measured(
    place: Any, floor: str, share: float
) -> None:
    held_out = {**TASK, "party_test": share}
    party = place(f"[privacy]\n{floor}")
    for op in (Evaluate(), SecureMasked(Evaluate())):
        assert "no job may evaluate on its training samples" in party.answer(op, task=held_out)
    ready = party.worker._ready[1]
    assert ready.n == party.n and ready.data.tests is None
    assert isinstance(place().answer(Evaluate(), task=held_out), Reply)


def test_without_a_floor_a_job_may_hold_samples_out_in_one_way_only(place: Any) -> None:
    def split(share: Any, seed: Any = 0) -> dict[str, Any]:
        return {**TASK, "party_test": share, "seed": seed}

    assert isinstance(place().answer(Evaluate(), task=split(0.5)), Reply)
    again = place()  # a party that was started again knows it still
    assert isinstance(again.answer(Evaluate(), round=1, task=split(0.5)), Reply)
    for share, seed in ((0.5, 1), (0.52, 0), (0, 0)):
        for op in (Evaluate(), SGD()):
            assert "they are fixed once per job" in again.answer(op, task=split(share, seed))
    said = again.answer(Evaluate(), round=2, task=split(0.5), number=1)
    assert said == "the job's numbers of this party were 0 and are now 1; they are fixed once per job"
    assert isinstance(again.answer(Evaluate(), job="job-2", task=split(0.52, 1)), Reply)
    for share, seed in (
        (1.0, 0),
        (-0.1, 0),
        (float("nan"), 0),
        (True, 0),
        ("0.5", 0),
        (None, 0),
        (0.5, 0.5),
        (0.5, None),
    ):
        said = again.answer(Evaluate(), job="job-3", task=split(share, seed))
        assert said.startswith("task.party_test must be at least 0" if seed == 0 else "task.seed must be"), said


@pytest.mark.parametrize(("op", "name", "shapes"), [
    ("column-moments", "centre", [(30, 1, 3), (30, 3), (1, 3), (3, 1), (1,), ()]),
    ("class-moments", "centre", [(2, 30, 3), (2, 1, 3), (2, 1), (3,), (2, 3, 1)]),
])  # fmt: skip
def test_statistics_are_of_all_samples_whatever_the_shape_of_the_question(
    place: Any, op: str, name: str, shapes: list[tuple[int, ...]]
) -> None:
    """With one more dimension, a sum over the samples would become one number per sample."""
    party = place()

    def ask(tensor: Any) -> Any:
        return party.answer(build("op", op), payload={name: tensor})

    good = torch.zeros((3,) if op == "column-moments" else (2, 3), dtype=torch.float64)
    assert isinstance(ask(good), Reply)
    for shape in shapes:
        assert "of the shape" in ask(torch.zeros(shape, dtype=torch.float64))
    assert "of the shape" in ask(None) and "of the shape" in ask(good.long())
    for odd in (torch.nan, torch.inf):
        assert "finite real numbers" in ask(torch.full_like(good, odd))


def test_a_sum_that_takes_too_long_counts_as_declined_as_one_whose_worker_is_killed(place: Any) -> None:
    """The aggregator chooses the work, and how long it takes may depend on the samples."""
    here = place("[privacy]\nsecure = true")
    model = {"w": torch.zeros(8, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
    payload = {"model": model, "secure": PrivateKey.generate(1024, Stream(b"key")).public.tensor()}
    op, stopped = PaillierEncrypt(inner=SGD(steps=3), key_bits=1024), Brake(99.0)
    with braked(Brake(-1.0)):
        assert here.answer(op, payload=payload) == REFUSAL
    assert here.worker.vault.contents.declined() == 1
    stopped.pull()
    with braked(stopped), pytest.raises(Halted):  # nobody waits for the reply, and nothing is told
        here.answer(op, round=1, payload=payload)
    assert here.worker.vault.contents.declined() == 1


@register("test-fragile")
@dataclass(frozen=True)
class Fragile(Predictor):
    """A model that fails on samples with a large value."""

    error: ClassVar[type[Exception]] = IndexError
    entries = stated(largest=Number())

    def outputs(self, objective: Objective, payload: Payload, x: torch.Tensor) -> torch.Tensor:
        if float(x[0, 0]) > float(payload["largest"]):
            raise self.error
        return torch.zeros(len(x), 2, dtype=x.dtype)


@pytest.mark.parametrize("error", [IndexError, RuntimeError])
def test_a_model_that_fails_on_the_first_samples_of_a_hidden_evaluation_is_counted(
    place: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The party runs a model on two samples before the sum begins. Each failure reveals a bit of them."""
    monkeypatch.setattr(Fragile, "error", error)
    here = place("[privacy]\nsecure = true\ndeclines = 2")
    here.worker = Worker(here.store, preparer((samples(0)[0], samples(1, 30)[0])))
    op = PaillierEncrypt(inner=EvaluateMetrics("test-fragile", (Accuracy(),), 2), range=99.0, key_bits=1024)
    key = PrivateKey.generate(1024, Stream(b"key")).public.tensor()
    said = [str(here.answer(op, round=k, payload={"largest": -100.0 - k, "secure": key})) for k in range(3)]
    assert said[:2] == [REFUSAL] * 2 and "declines in party.toml" in said[2], said
    assert here.worker.vault.contents.declined() == 2


@pytest.mark.parametrize("op", [LOCAL, Evaluate("network")])
def test_no_preparation_makes_a_private_reply_depend_on_all_samples_at_once(place: Any, op: Op) -> None:
    """Scaled by their own moments, all samples change with one of them: by more than the noise for one hides. And
    metrics of test samples, which need no noise, would tell the moments of the training samples."""
    here, steps = place("[privacy]\nepsilon = 9.0"), [{"op": op_config(StandardiseOwn()), "payload": {}}]
    here.worker = Worker(here.store, preparer((samples(0)[0], samples(1, 30)[0])))
    assert isinstance(here.answer(op), Reply)
    assert "'standardise-own' prepares each sample by numbers of all training samples" in str(
        here.answer(op, job="job-2", preparations=steps)
    )


def test_neither_a_preparation_nor_a_model_is_another_for_each_row(place: Any) -> None:
    held_out = {**TASK, "party_test": 0.5}
    party = place()
    test = party.worker._prepare(0, held_out, "cpu").data.tests
    rows = party.n - test
    step = {"op": op_config(build("op", "apply-standardise"))}
    for shape, good in (((3,), True), ((rows, 3), False), ((rows, 1), False), ((2, 1, 3), False)):
        payload = {"mean": torch.zeros(shape), "std": torch.ones(shape)}
        said = party.answer(Evaluate(), task=held_out, preparations=[{**step, "payload": payload}])
        assert isinstance(said, Reply) if good else "mean must be a tensor of finite real numbers" in said
    loss = build("op", "loss", predictor="naive-bayes")
    for op, n in ((Evaluate("naive-bayes"), test), (loss, rows)):
        for extra, good in (((), True), ((1,), False), ((n,), False), ((1, n), False), ((1, 1), False)):
            model = {"mean": torch.zeros(*extra, 2, 3), "var": torch.ones(*extra, 2, 3), "prior": torch.ones(2) / 2}
            said = party.answer(op, task=held_out, payload=model)
            assert isinstance(said, Reply) if good else "mean must be a tensor" in said, (op, extra)


def test_a_policy_limits_evaluations_and_what_they_are_measured_on(place: Any) -> None:
    held_out = {**TASK, "party_test": 0.5}

    def answers(party: Place, **given: Any) -> bool:
        said = party.answer(Evaluate(), task=held_out, **given)
        if isinstance(said, Reply):
            return True
        assert ("evaluate." in said or "budget." in said) and "party.toml" in said, said
        return False

    assert not answers(place(f"[evaluate]\nmin_samples = {place().n}"))
    assert answers(place("[evaluate]\nmin_samples = 2"))
    limits = "[budget]\nper_job = { evaluate = 2 }\ntotal = { evaluate = 4 }"
    party = place(limits)
    assert answers(party) and answers(party), "the same question again counts once"
    assert answers(party, round=1)
    assert not answers(party, round=2)
    party = place(limits)  # neither the party's start nor another job gives anything back
    assert answers(party, round=1) and not answers(party, round=2)
    assert answers(party, job="job-2") and answers(party, job="job-3") and not answers(party, job="job-4")
    assert isinstance(party.answer(SGD(), round=9, task=held_out), Reply), "training goes on"


def test_under_a_floor_evaluations_are_limited_without_a_word_of_the_owners() -> None:
    plain, own = Evaluations(), Evaluations(min_samples=3)
    assert plain.under(False) == plain and plain.under(True) == FLOORED == Evaluations(20, 200, {})
    assert own.under(False) == own and own.under(True) == Evaluations(3, 200, {})


@pytest.mark.parametrize("name", ["min_samples", "numbers"])
def test_a_limit_that_is_negative_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "party.toml").write_text(f"[evaluate]\n{name} = -1")
    with pytest.raises(ConfigError, match=f"{name} must be at least 0"):
        Policy.read(tmp_path / "party.toml")


def test_what_an_aggregator_says_beside_the_op_does_not_get_below_the_floor(tmp_path: Path) -> None:
    (tmp_path / "party.toml").write_text("[privacy]\nsigma = 1.0")
    floor = Policy.read(tmp_path / "party.toml").privacy
    for work in ({"sigma": 0.1}, {"clip": 1e-30}, {"per_layer": True}, {"batch": torch.ones(40)}, {"batch": math.nan}):
        with pytest.raises(ConfigError, match="work"):
            floor.refuses(DPSGD(sigma=1.0), 40, {"work": work})


@pytest.mark.parametrize(("text", "said"), [
    ("epsilon = 0.0", "epsilon must be above 0"), ("delta = 2.0", "delta must be above 0 and below 1"),
    ("sigma = -1.0", "sigma must be at least 0"), ("sigmas = 1.0", "unknown field 'sigmas'"),
    ("dp = 1", "expected"), ("clip = [0.1, 1.0]", "privacy.clip is now clip in the table [ranges]"),
])  # fmt: skip
def test_a_floor_that_is_none_is_refused_with_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "party.toml").write_text(f"[privacy]\n{text}")
    with pytest.raises(ConfigError) as caught:
        Policy.read(tmp_path / "party.toml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_shows_what_is_spent(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    party = place("[privacy]\nepsilon = 30.0")
    party.answer()
    party.answer(job="job-2")
    monkeypatch.setattr(sys, "argv", ["hansa", "privacy", "spent", "--state", str(party.folder), "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    told = json.loads(capsys.readouterr().out)
    assert (told["budget"], told["delta"]) == (30.0, 1e-5)
    assert told["epsilon"] == pytest.approx(party.costs(2))
    read = {"train": 1, "statistics": 0, "match": 0, "evaluate": 0, "describe": 0}
    spending = {"epsilon": pytest.approx(party.costs(1)), "replies": 1, "declines": 0, "refusals": 0, "queries": 1}
    assert told["jobs"]["job-1"] == {**spending, **read}
    assert told["left"]["epsilon"] == pytest.approx(30 - party.costs(2)) and told["train"] == told["queries"] == 2
    monkeypatch.setattr(sys, "argv", ["hansa", "privacy", "spent", "--state", str(party.folder.parent)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "is not the folder of a party" in capsys.readouterr().err


# Over the network


def test_a_job_says_what_its_parties_have_spent_and_ends_when_their_budgets_are(league: League) -> None:
    sizes = [len(samples(k)[0][0]) for k in range(3)]
    costs = [epsilon([Release(5 / n, 2.0, LOCAL.count(n))], 1e-5) for n in sizes]
    twice = [epsilon([Release(5 / n, 2.0, 2 * LOCAL.count(n))], 1e-5) for n in sizes]
    for k, name in enumerate(PARTIES):
        floor = f"[privacy]\nepsilon = {(costs[2] + twice[2]) / 2}" if name == "cid" else ""
        league.join(name, samples(k), floor)
    local = {"name": "dp-sgd", "batch": 5, "sigma": 2.0, "epsilon": max(twice) * 1.0001}
    tree = {"task": {"dataset": "heart", "model": "logistic", "dtype": "float64"}, "run": {"rounds": 9},
            "algorithm": {"name": "fedavg", "local": local}}  # fmt: skip
    ended = league.ended(league.submit(tree))
    assert (ended["status"], ended["reason"]) == ("finished", "every party's privacy budget is spent")
    first, second, last = ended["rounds"][0], ended["rounds"][1], ended["rounds"][-1]
    assert first["epsilons"] == pytest.approx(dict(zip(PARTIES, costs, strict=True)))
    assert first["epsilon"] == pytest.approx(max(costs)) and first["delta"] == 1e-5
    assert second["missing"]["cid"].startswith("its privacy budget is spent")
    assert second["epsilons"]["ann"] == pytest.approx(twice[0])
    assert last["replies"] == 0 and set(last["missing"]) == set(PARTIES)


@pytest.mark.slow
def test_the_aggregators_own_secret_decides_who_is_drawn_is_kept_and_is_told_nobody(league: League) -> None:
    league.join_all()
    tree = {"task": {"dataset": "heart", "model": "logistic", "dtype": "float64"}, "algorithm": {"name": "fedavg"},
            "run": {"rounds": 6, "select": "poisson", "cohort_size": 2, "eval_parties": False}}  # fmt: skip
    jobs = [league.submit(tree) for _ in range(2)]
    drawn = [[line["members"] for line in league.ended(job)["rounds"]] for job in jobs]
    assert drawn[0] != drawn[1]  # of one seed
    find = "SELECT secret FROM job_facts WHERE job = ?"
    secrets = [league.ledger.one(find, job)["secret"] for job in jobs]
    assert len({len(secret) for secret in secrets}) == 1 and secrets[0] != secrets[1]
    out = league.folder / "exported"
    league.operator.export(out)
    told = out.read_text() + json.dumps([league.operator.job(job) for job in jobs] + league.operator.log(None))
    assert not any(secret in told for secret in secrets)


STRICT = "[privacy]\nepsilon = 1.0\nsigma = 4.0\nsecure = true\nactive = true\n"


@pytest.mark.parametrize("op", [Describe(), SecureMasked(inner=Describe())], ids=lambda op: op.name)
@pytest.mark.parametrize("task", [{**TASK, "dtype": "float32", "prepared": True}, {}], ids=["task", "none"])
def test_a_party_describes_its_data_only_as_they_are(place: Any, op: Op, task: Any) -> None:
    """A preparation that makes values above a bound overflow would reveal whether there are any: by halving the
    bound, 60 descriptions revealed the largest value of a column to the last digit, despite every floor."""
    here = place(STRICT)
    assert isinstance(here.answer(Describe(), task={}), Reply)
    said = []
    for bound in (1e-3, 1e9):
        values = {"mean": torch.zeros(3).double(), "std": torch.full((3,), bound / 3.4028236e38).double()}
        preparations = [{"op": op_config(ApplyStandardise()), "payload": values}]
        said.append(here.answer(op, task=task, preparations=preparations))
    assert said[0] == said[1] and "only before there is a task or a preparation" in str(said[0])


def test_a_sample_that_the_model_cannot_take_is_not_told_by_a_failure(place: Any) -> None:
    """The aggregator chooses the size of a model's vocabulary, and so which samples the model cannot take: a failure
    would reveal that such a sample was drawn."""
    x = torch.randint(0, 5, (12, 4), generator=torch.Generator().manual_seed(0))
    x[3, 2] = 7
    here = place("[privacy]\nepsilon = 5.0\n")
    here.worker = Worker(here.store, preparer(((x, torch.zeros_like(x)), None)))
    model = {"name": "char-lstm", "inputs": [4], "outputs": 5, "embed": 2, "hidden": 3, "layers": 1}
    task = {**TASK, "model": model, "dtype": "float32", "shape": [4], "outputs": 5, "classes": None}
    start = here.worker._prepare(0, task, "cpu").objective.initial
    for k, batch in enumerate((None, 4, 1)):
        solver = DPSGD(batch=batch, sigma=2.0, steps=1)
        assert isinstance(here.answer(solver, round=k, task=task, payload={"model": start._asdict()}), Reply)


def test_labels_that_a_model_has_no_outputs_for_are_refused_whoever_is_drawn(place: Any) -> None:
    task = {**TASK, "outputs": 1, "classes": None}
    model = {"w": torch.zeros(4).double(), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
    here, solver = place("[privacy]\nepsilon = 5.0\n"), DPSGD(batch=1, sigma=2.0, steps=1)
    said = {str(here.answer(solver, round=k, task=task, payload={"model": model})) for k in range(5)}
    assert said == {
        "the model gives 1 outputs for a sample, and there are 2 classes; give it one output per class, or "
        "number the classes from 0 without gaps"
    }  # by what the owner states, so nothing is counted
    assert here.worker.vault.contents.declined() == 0


def test_a_party_declines_few_sums_for_what_its_numbers_are(place: Any) -> None:
    """The aggregator chooses the range of a sum: by halving it, 135 sums revealed a record to eight digits."""
    policy, step = "[privacy]\nsecure = true\ndeclines = 3\n", SGD(batch=1, steps=1)
    tiny, wide = (PaillierEncrypt(inner=step, range=range, key_bits=1024) for range in (2.0**-20, 16.0))
    model = {"w": torch.zeros(8, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
    payload = {"model": model, "secure": PrivateKey.generate(1024, Stream(b"key")).public.tensor()}
    here = place(policy)
    said = [here.answer(tiny, round=k // 2, job=f"job-{k // 2}", payload=payload) for k in range(10)]
    assert [text == REFUSAL for text in said] == [True] * 6 + [False] * 4, "the same ask counts once"
    assert len(set(said[6:])) == 1 and "declines in party.toml" in said[6]
    again = place(policy)  # a party that was started again knows it still
    assert {again.answer(op, round=9, payload=payload) for op in (tiny, wide)} == {said[6]}, "whatever its numbers are"
    assert isinstance(place(policy.replace("3", "4")).answer(wide, round=9, payload=payload), Reply)
    for declines in (-1, 3):
        with pytest.raises(ConfigError, match="declines"):
            Floor(declines=declines)
