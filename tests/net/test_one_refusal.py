"""After a reading, a party has one refusal, which says nothing and is counted; before it, reasons are told in full."""

from __future__ import annotations

import errno
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hansa.classical.convex_sums import ConvexSums
from hansa.classical.trees.bins import Bins
from hansa.classical.trees.private import PrivateHistograms
from hansa.classical.trees.table import TreeTable
from hansa.core.ask import op_config
from hansa.core.entries import stated
from hansa.core.op import Memory, Op, Party, Payload, Reply
from hansa.core.plain_data import build
from hansa.core.quantities import AnyCount
from hansa.core.registry import register
from hansa.core.route_op import RouteOp
from hansa.local import SGD
from hansa.local.dp_sgd import DPSGD
from hansa.local.finetune import PREFIX, FineTune
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.samples import preparer
from hansa.net.party.store import PartyStore
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import AlgorithmError, ConfigError, DataError, NotAdmitted, OutOfRange, PartyError
from hansa.plumbing.stopping import Halted
from hansa.secure.routing import RouteReceive
from hansa.transforms import TopK
from hansa.transforms.downlink import packed_form

TASK: dict[str, Any] = {
    "model": "logistic", "dtype": "float64", "shape": [3], "outputs": 2, "loss": "cross_entropy", "classes": 2,
    "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False,
}  # fmt: skip
X, Y = torch.arange(60, dtype=torch.float64).reshape(20, 3) / 60, torch.arange(20) % 2
MODEL = {"w": torch.zeros(8, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}
ERRORS: dict[str, Callable[[], BaseException]] = {
    "party": lambda: PartyError("a label is 41"), "range": lambda: OutOfRange("a label is 41"),
    "data": lambda: DataError("a label is 41"), "config": lambda: ConfigError("a label is 41"),
    "algorithm": lambda: AlgorithmError("a label is 41"), "admission": lambda: NotAdmitted("a label is 41"),
    "value": lambda: ValueError("a label is 41"), "memory": lambda: MemoryError("a label is 41"),
    "time": lambda: Halted("a label is 41"), "file": lambda: OSError(errno.ENOENT, "a label is 41"),
}  # fmt: skip
WIDE = "[ranges]\nlr = [0.0, 1e308]\n"
FLOORS = ("dp = true", "epsilon = 1.0", "secure = true", "active = true")


@register("test-failing")
@dataclass(frozen=True)
class Failing(SGD):
    """Train, and fail before or after the samples are read, or give an answer once."""

    entries = SGD.entries

    error: str = ""
    early: bool = False
    number: AnyCount = 0

    def train(self, party: Party, payload: Payload, memory: Memory, rule: Any = None) -> tuple[Reply, Memory]:
        if self.early:
            raise ERRORS[self.error]()
        return super().train(party, payload, memory, rule)

    def drawn(self, party: Party) -> Any:
        if self.error == "once":
            party.vault.once("an answer", str(self.number))
        elif self.error and not self.early:
            raise ERRORS[self.error]()
        return super().drawn(party)


class Asker:
    """A party in a folder, and its answers."""

    def __init__(self, folder: Path, policy: str, x: torch.Tensor, y: torch.Tensor) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "party.toml").write_text(policy)
        self.store = PartyStore(folder)
        self.reads: list[tuple[str, str]] = []  # what the worker tells its agent
        agent: Any = SimpleNamespace(reads=lambda job, ask: self.reads.append((job, ask)), sign=None)
        self.worker = Worker(self.store, preparer(((x, y), None)), agent=agent)

    def __call__(
        self, op: Op, payload: Any = None, round: int = 0, task: Any = TASK, job: str = "job-1", **more: Any
    ) -> Reply | str:
        payload = {"model": MODEL} if payload is None else payload
        message = {"op": op_config(op), "payload": payload, "round": round, **more}
        about = {"task": task, "preparations": []}
        blobs = [Blob(hashlib.sha256(data).hexdigest(), len(data)) for data in map(codec.encode, (message, about))]
        work = Work(job, "job", 0, round, "round", 0, *blobs, None, None, None, 1)
        self.work = work
        return self.worker.answer(work, message, about)[0]

    @property
    def declined(self) -> float:
        return self.worker.vault.contents.declined()


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Callable[..., Asker]]:
    made: list[Asker] = []

    def make(policy: str = "", x: torch.Tensor = X, y: torch.Tensor = Y, again: bool = False) -> Asker:
        if again:
            made[-1].store.close()
        made.append(Asker(tmp_path / f"party-{len(made) - again}", policy, x, y))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("floor", ["", *FLOORS[1:3]])
def test_any_error_after_a_reading_is_the_same_refusal_and_counted(
    party: Callable[..., Asker], floor: str, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = party(f"[privacy]\n{floor}" if floor else "")
    assert here(FineTune(Failing(error=error))) == REFUSAL and here.declined == 1
    assert "a label is 41" in caplog.text, "the owner learns the reason"
    assert here(FineTune(Failing(error=error))) == REFUSAL and here.declined == 1, "the same ask counts once"


def test_the_transform_of_a_packed_model_lies_in_the_owners_ranges(party: Callable[..., Asker]) -> None:
    here = party("[ranges]\nshare = [0.1, 1.0]")
    nobody: Any = None
    packed = [
        packed_form(each, each.pack(nobody, "w", MODEL["w"], {})[0], 8) for each in (TopK(share=0.05), TopK(share=0.5))
    ]
    assert "requires a share of 0.1 to 1, and the job has 0.05 in 'top-k'" in str(here(SGD(), packed=packed[0]))
    assert isinstance(here(SGD(), packed=packed[1]), Reply)


@pytest.mark.parametrize("error", ["party", "data", "time", "admission"])
def test_before_a_reading_the_reason_is_told_and_costs_nothing(party: Callable[..., Asker], error: str) -> None:
    here = party("[privacy]\nsecure = true")
    assert here(FineTune(Failing(error=error, early=True))) == "a label is 41" and here.declined == 0


def test_what_the_aggregator_stops_and_a_full_disk_are_no_answer(
    party: Callable[..., Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = party("[privacy]\nsecure = true")
    for name, error in (("stopped", Halted(None)), ("full", OSError(errno.ENOSPC, "full"))):
        monkeypatch.setitem(ERRORS, name, lambda error=error: error)
        with pytest.raises(type(error)):
            here(FineTune(Failing(error=name)))
    assert here.declined == 0


@pytest.mark.parametrize("floor", FLOORS)
def test_any_floor_limits_what_is_declined_after_a_reading(party: Callable[..., Asker], floor: str) -> None:
    policy = f"[privacy]\n{floor}\ndeclines = 2"
    here, failing = party(policy), FineTune(Failing(error="value"))
    assert [here(failing, round=round) for round in (0, 1)] == [REFUSAL] * 2
    said = here(FineTune(SGD()), round=2)
    assert "decline 2 asks over all jobs" in said and "declines in party.toml" in said
    again = party(policy, again=True)  # neither a restart nor another job gives declines back
    assert again(FineTune(SGD()), round=2) == said and "decline 2 asks" in again(FineTune(SGD()), job="job-2")
    assert again.declined == 2


def test_an_ask_that_was_declined_is_not_read_again(
    party: Callable[..., Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails a second time would be another bit: the time limit, for example."""
    here = party("[privacy]\nsecure = true")
    monkeypatch.setitem(ERRORS, "once more", lambda: Halted("slow"))
    assert here(FineTune(Failing(error="once more"))) == REFUSAL
    monkeypatch.setattr(Failing, "drawn", SGD.drawn)
    assert here(FineTune(Failing(error="once more"))) == REFUSAL and here.declined == 1


def test_an_answer_for_other_content_is_refused_and_counted(party: Callable[..., Asker]) -> None:
    """By the range of a masked sum, a party either declines or has answered before: both reveal the same bit."""
    here = party("[privacy]\nsecure = true\ndeclines = 2")
    said = [here(FineTune(Failing(error="once", number=k))) for k in range(4)]
    assert isinstance(said[0], Reply) and said[1:3] == [REFUSAL] * 2 and "decline 2 asks" in said[3]
    assert here.declined == 2


def test_a_failure_with_memory_counts_as_one_after_a_reading(party: Callable[..., Asker]) -> None:
    here = party("[privacy]\nsecure = true")
    assert isinstance(here(FineTune(SGD())), Reply)
    here.worker._memory.recall = lambda *_: {f"{PREFIX}w": torch.ones(8)}  # type: ignore[method-assign]
    assert here(FineTune(Failing(error="party", early=True)), round=1) == REFUSAL and here.declined == 1


@register("test-receiving")
@dataclass(frozen=True)
class Receiving(RouteOp):
    """Fail when messages arrive, as the party's memory says."""

    entries = stated()

    def receive(self, party: Party, payload: Payload, inbox: Any, memory: Memory) -> tuple[None, Memory]:
        raise PartyError(f"a label is {int(memory['label'])}")


def test_a_receiver_without_a_reply_that_fails_with_memory_is_declined_and_counted(party: Callable[..., Asker]) -> None:
    here = party("[privacy]\ndp = true")
    here.worker._memory.recall = lambda *_: {"label": torch.tensor(41)}  # type: ignore[method-assign]
    assert (
        here(RouteReceive(Receiving()), {"route": {"senders": torch.zeros(0).long()}}) == REFUSAL and here.declined == 1
    )


def test_a_model_that_the_owner_bounds_is_no_decline_although_there_is_memory(party: Callable[..., Asker]) -> None:
    """The bound compares models alone; a party with memory would soon have no declines left."""
    here = party("[privacy]\nsecure = true\n[broadcast]\nnorm = 1.0")
    assert isinstance(here(FineTune(SGD())), Reply)
    here.worker._memory.recall = lambda *_: {f"{PREFIX}w": torch.ones(8)}  # type: ignore[method-assign]
    far = {"model": {**MODEL, "w": torch.full((8,), 9.0, dtype=torch.float64)}}
    assert "broadcast.norm" in here(FineTune(SGD()), far, round=1) and here.declined == 0


def test_the_agent_learns_of_a_reading_before_it_begins(party: Callable[..., Asker]) -> None:
    """A worker that is killed counts as a decline from then on."""
    here = party("[privacy]\ndp = true")
    here(FineTune(Failing(error="value", early=True)))
    building = len(here.reads)
    here(FineTune(SGD()), round=1)
    assert len(here.reads) == building + 1 and here.reads[-1][0] == "job-1"
    here.worker.declined(*here.reads[-1])
    assert here(FineTune(SGD()), round=1) == REFUSAL


def test_a_party_that_cannot_be_built_counts_once_per_task(party: Callable[..., Asker]) -> None:
    here = party("[privacy]\nsecure = true\ndeclines = 2")

    def broken(*_: Any) -> Any:
        raise DataError("there are 42 classes")

    here.worker._prepare = broken
    assert [here(SGD(), round=k) for k in range(3)] == [REFUSAL] * 3 and here.declined == 1
    assert here(SGD(), task={**TASK, "classes": 41}, job="job-2") == REFUSAL and here.declined == 2
    assert "decline 2 asks" in here(SGD(), task={**TASK, "classes": 40}, job="job-3")


def test_public_samples_that_cannot_be_read_are_no_decline(party: Callable[..., Asker]) -> None:
    """They are the aggregator's: with a few of them it would end all work of a party."""
    here, data = party("[privacy]\nsecure = true"), b"no samples"
    digest = hashlib.sha256(data).hexdigest()
    here.worker._public.folder.mkdir()
    (here.worker._public.folder / digest).write_bytes(data)
    said = here(FineTune(SGD()), task={**TASK, "public": {"digest": digest, "size": len(data)}})
    assert isinstance(said, str) and said != REFUSAL and here.declined == 0


def test_no_record_decides_whether_a_fine_tuning_is_answered(party: Callable[..., Asker]) -> None:
    """564 asks whose fine-tuning diverges for some samples revealed three records to twelve digits."""
    other = X.clone()
    other[0] = 1e9
    op = FineTune(SGD(lr=1e302, epochs=3))
    said = [party(f"[privacy]\nsecure = true\n{WIDE}", x)(op) for x in (X, other)]
    assert all(isinstance(each, Reply) and not each.tensors for each in said)


def test_a_party_whose_fine_tuning_diverges_stages_the_model_that_it_was_sent(party: Callable[..., Asker]) -> None:
    here = party(WIDE, 1e9 * X)
    assert isinstance(here(FineTune(SGD(lr=1e302, epochs=3))), Reply)
    staged = here.worker._memory.recall("job-1", here.work.ask, set())
    assert staged is not None and torch.equal(staged[f"{PREFIX}w"], MODEL["w"])


def test_labels_outside_of_the_job_add_nothing_to_private_sums(party: Callable[..., Asker]) -> None:
    """A refusal revealed a label, whatever the noise."""
    table = TreeTable(1)
    table.add_root(0, len(X), np.zeros(1))
    payload = {"bins": Bins.of_features([[0.5]] * 3, []).payload(), "trees": table.arrays().payload(),
               "slots": torch.zeros(1, 2, dtype=torch.int64), "base": torch.zeros(1, dtype=torch.float64),
               "features": torch.arange(3)}  # fmt: skip
    op, odd = PrivateHistograms(sigma=2.0, bits=10), Y.clone()
    odd[0] = 41
    for y in (Y, odd):  # a job without classes, and one that does not have the class
        here = party("[privacy]\nepsilon = 50.0", X, y)
        said = {str(here(op, payload, task={**TASK, "model": None, "classes": None}))}
        said |= {str(here(op, payload, task={**TASK, "model": None}))} if y is odd else set()
        assert all("2 classes" in text or "it states 42 classes" in text for text in said), said
        assert here.declined == 0
    targets, counts = op.labels(here.worker._prepare(0, {**TASK, "model": None, "classes": 42}, "cpu"), odd)
    assert targets.tolist() == [0, *Y[1:].tolist()] and counts.tolist() == [False] + [True] * 19
    assert "bits" in party("[privacy]\nepsilon = 50.0")(PrivateHistograms(bits=30), payload)


def test_a_sample_on_which_a_model_fails_adds_nothing_to_a_private_sum(
    party: Callable[..., Asker], own_models: Callable[[], list[float]]
) -> None:
    here = party('functions = ["models_of_refusals:fussy"]\n[privacy]\nepsilon = 50.0', X + 3.5)
    task = {**TASK, "model": "models_of_refusals:fussy"}
    model = {**MODEL, "w": torch.zeros(8, dtype=torch.float64)}
    assert isinstance(here(DPSGD(steps=2, sigma=2.0), {"model": model}, task=task), Reply)


def test_a_model_that_keeps_state_is_not_trained_with_differential_privacy(
    party: Callable[..., Asker], own_models: Callable[[], list[float]]
) -> None:
    """A sample changed what later ones added: the sum moved by 1.57 clips."""
    task = {**TASK, "model": "models_of_refusals:stateful"}
    functions = 'functions = ["models_of_refusals:stateful"]\n'
    here = party(f"{functions}[privacy]\nepsilon = 50.0")
    assert "keeps state between its calls" in here(DPSGD(steps=2, sigma=2.0), task=task) and here.declined == 0
    assert not here.worker.vault.contents.spent
    assert isinstance(party(functions)(DPSGD(steps=2, sigma=2.0), task=task), Reply), "without a floor it is trained"


def test_a_model_that_cannot_be_made_is_no_decline(
    party: Callable[..., Asker], own_models: Callable[[], list[float]]
) -> None:
    """No sample has been read, and a few such tasks would end all work of a party."""
    here = party('functions = ["models_of_refusals:huge"]\n[privacy]\nsecure = true')
    said = here(FineTune(SGD()), task={**TASK, "model": "models_of_refusals:huge"})
    assert said == "malformed task (RuntimeError); see the party's log" and here.declined == 0


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the owner: one fails on large samples, one adds what it has seen before, one cannot be made."""

    class Fussy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and bool((x.detach() > 4).any()):
                raise ValueError("too large")
            return super().forward(x)

    class Stateful(nn.Linear):
        seen = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before, self.seen = self.seen, float(x.detach().sum())
            return super().forward(x) * (1 + before)

    class Huge(nn.Linear):
        def named_buffers(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("can't allocate memory")

    module: Any = type(sys)("models_of_refusals")
    module.fussy, module.stateful = lambda: Fussy(3, 2).double(), lambda: Stateful(3, 2).double()
    module.huge = lambda: Huge(3, 2).double()
    monkeypatch.setitem(sys.modules, "models_of_refusals", module)


def test_no_refusal_names_a_column_or_a_label(party: Callable[..., Asker]) -> None:
    large = X.clone()
    large[:, 2] = 1e200
    payload = {"w": torch.zeros(1, 4, dtype=torch.float64)}
    here = party("", large)
    assert here(ConvexSums(), payload) == REFUSAL and here.declined == 1


@pytest.mark.parametrize("name", ["samples", "split-size"])
def test_a_number_of_samples_is_a_reading(party: Callable[..., Asker], name: str) -> None:
    here, op = party("[budget]\ntotal = { statistics = 1 }"), build("op", name)
    assert isinstance(here(op, {}), Reply) and here.worker.vault.contents.count() == {"statistics": 1}
    assert "1 asks for statistics over all jobs" in here(op, {}, round=1)
    assert "its policy requires" in party("[privacy]\ndp = true")(op, {})
