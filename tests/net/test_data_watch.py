"""A party notices at the beginning of a round that its files have changed; its budgets go on; alarms stay with it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import League
from test_reloading import JoinedParty, job

from hansa.core.ask import op_config
from hansa.core.op import Op, Reply
from hansa.core.predictor import Evaluate
from hansa.holdings.fitting import kept_features
from hansa.local import DPSGD, SGD
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.metrics.numbers import LossMetric
from hansa.net.party import data_watch
from hansa.net.party.data_watch import WatchedSamples, data_paths, signature
from hansa.net.party.samples import PartySamples, preparer, read_samples, samples_digest
from hansa.net.party.store import PartyStore
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec
from hansa.plumbing.errors import DataError

TASK = {"model": "logistic", "dtype": "float64", "shape": [3], "outputs": 2, "loss": "cross_entropy", "classes": 2,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip
MODEL = {"w": torch.zeros(8, dtype=torch.float64), "stats": torch.zeros(0), "counts": torch.zeros(0).long()}

RIGHT = torch.tensor([-1.0, 0, 0, 1, 0, 0, 0, 0], dtype=torch.float64)  # parameters that tell the classes apart


def write(path: Path, rows: int, seed: int = 0, flip: bool = False) -> None:
    """Replace a file as a whole: two separable classes, with wrong labels if `flip`."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=draws)
    y = ((x[:, 0] > 0) ^ flip).long()
    lines = [",".join(map(str, [*row.tolist(), int(label)])) for row, label in zip(x, y, strict=True)]
    new = path.with_suffix(".new")
    new.write_text("a,b,c,label\n" + "\n".join(lines) + "\n")
    os.replace(new, path)


class Home:
    """A party in this process, whose samples are in a file."""

    def __init__(self, folder: Path, policy: str = "") -> None:
        folder.mkdir(exist_ok=True)
        (folder / "party.toml").write_text(policy)
        self.path, self.folder = folder / "own.csv", folder
        if not self.path.exists():
            write(self.path, 20)
            write(folder / "test.csv", 30, seed=9)
        paths = [self.path, folder / "test.csv"]
        read = functools.partial(read_samples, str(paths[0]), "label", str(paths[1]))
        self.watched, self.store = WatchedSamples(read, paths, folder), PartyStore(folder)

        def prepare(*about: Any) -> Any:
            return preparer(self.watched.samples, 10**6)(*about)

        digest = functools.partial(samples_digest, self.watched.samples)
        self.worker = Worker(self.store, prepare, digest, None, self.watched.look)

    def ask(self, round: int, op: Op | None = None, w: float = 0.0, job: str = "job-1") -> Reply | str:
        payload = {"model": {**MODEL, "w": w * RIGHT}}
        message = {"op": op_config(op or SGD(steps=1, batch=None)), "payload": payload, "round": round}
        blobs = [Blob(hashlib.sha256(codec.encode(tree)).hexdigest(), 100) for tree in (message, TASK)]
        work = Work(job, "job", 0, round, "round", 0, *blobs, None, None, None, 1)
        return self.worker.answer(work, message, {"task": TASK, "preparations": []})[0]

    def weight(self, round: int, **more: Any) -> int:
        reply = self.ask(round, **more)
        assert isinstance(reply, Reply), reply
        return reply.weight

    def notes(self) -> list[dict[str, Any]]:
        path = self.folder / data_watch.FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Callable[..., Home]]:
    made: list[Home] = []

    def make(policy: str = "") -> Home:
        for before in made:
            before.store.close()
        made.append(Home(tmp_path / "home", policy))
        return made[-1]

    yield make
    made[-1].store.close()


def test_changed_files_are_read_at_the_next_round_and_not_within_one(home: Callable[..., Home]) -> None:
    party = home()
    assert party.weight(0) == 20
    write(party.path, 25, seed=1)
    assert party.weight(0) == 20  # the round under way keeps its samples
    assert party.weight(1) == 25
    now = samples_digest(read_samples(str(party.path), "label", str(party.folder / "test.csv")))
    (note,) = party.notes()
    assert (note["event"], note["job"], note["round"], note["rows"]) == ("data changed", "job-1", 1, 25)
    assert note["sha256"] == now != note["before"]
    assert party.weight(2) == 25 and len(party.notes()) == 1


def test_training_goes_on_as_a_party_that_starts_with_the_new_file_trains(home: Callable[..., Home]) -> None:
    party = home()
    party.ask(0)
    write(party.path, 25, seed=1)
    changed = party.ask(1)
    fresh = home().ask(1)
    assert isinstance(changed, Reply) and isinstance(fresh, Reply)
    assert torch.equal(changed.tensors["w"], fresh.tensors["w"])


def test_a_file_of_samples_that_are_not_in_memory_is_looked_at_before_every_ask(tmp_path: Path) -> None:
    """With the samples of the file's new content, a repeated ask would have the noise of the old ones."""
    file, y = tmp_path / "x.npy", torch.arange(20) % 2
    np.save(file, np.zeros((20, 3)))

    def read() -> PartySamples:
        return PartySamples((kept_features(np.load(file, mmap_mode="r"), "x"), y))

    watched = WatchedSamples(read, [file], tmp_path)
    work = Work("job", "job", 0, 1, "round", 0, Blob("0" * 64, 1), Blob("0" * 64, 1), None, None, None, 1)
    assert not watched.look(work) and not watched.look(work)
    np.load(file, mmap_mode="r+")[3] = 7.0
    os.utime(file)
    assert watched.look(work) and not watched.look(work)


def test_a_file_that_was_touched_alone_is_no_change(home: Callable[..., Home]) -> None:
    party = home()
    party.ask(0)
    os.utime(party.path, ns=(1, 1))
    assert party.weight(1) == 20 and party.notes() == []


def test_changed_test_samples_are_noticed_too(home: Callable[..., Home]) -> None:
    party = home()
    assert party.weight(0, op=Evaluate()) == 30
    write(party.folder / "test.csv", 40)
    assert party.weight(1, op=Evaluate()) == 40


def test_an_evaluation_on_other_test_samples_is_another_query(home: Callable[..., Home]) -> None:
    party = home()
    first = party.ask(0, Evaluate())
    write(party.folder / "test.csv", 30, seed=3)
    party.ask(0, Evaluate(), job="job-2")  # a new round: the party reads its files again
    again = party.ask(0, Evaluate())
    assert isinstance(first, Reply) and isinstance(again, Reply) and first.metrics != again.metrics
    assert party.worker.vault.contents.count() == {"evaluate": 3}


def test_data_that_were_withdrawn_are_not_used_any_more(home: Callable[..., Home]) -> None:
    party = home()
    party.ask(0)
    party.path.rename(party.folder / "away")
    for round in (1, 2):
        assert party.ask(round) == "its data cannot be read at present; see the party's log"
    party.path.write_text("a,b\nx,y\n")
    assert party.ask(3) == "its data cannot be read at present; see the party's log"
    assert [note["event"] for note in party.notes()] == ["data unreadable"] * 3
    write(party.path, 22)
    assert party.weight(3) == 22


@pytest.mark.parametrize("renew", ["", "renew = true\n"])
def test_a_changed_file_does_not_renew_a_budget_of_queries(renew: str, home: Callable[..., Home]) -> None:
    party = home(f"[budget]\nqueries = 3\n{renew}")
    for round in range(3):
        party.weight(round)
        write(party.path, 21 + round, seed=round)
    assert "they are used up" in str(party.ask(3))


def test_a_changed_file_does_not_renew_a_privacy_budget(home: Callable[..., Home]) -> None:
    floor = "[limits]\nepochs = 99\n[privacy]\nepsilon = 1.0\ndelta = 1e-5\n"
    party, op = home(floor), DPSGD(sigma=9.0, steps=1)
    answered = 0
    while isinstance(party.ask(answered, op), Reply):
        answered += 1
    assert answered >= 1, party.ask(answered, op)
    write(party.path, 28, seed=5)
    assert "budget is spent" in str(party.ask(answered + 1, op))
    assert party.notes()[-1]["event"] == "data changed"


@pytest.mark.parametrize("op", [Evaluate(), EvaluateMetrics(metrics=(LossMetric(),), classes=2)])
def test_a_loss_that_rises_gives_an_alarm_that_stays_with_the_party(
    op: Op, home: Callable[..., Home], caplog: pytest.LogCaptureFixture
) -> None:
    party = home()
    replies = [party.ask(round, op, w=2.0 + 0.01 * round) for round in range(12)]
    assert party.notes() == []
    write(party.folder / "test.csv", 30, seed=9, flip=True)
    replies += [party.ask(round, op, w=3.0 + 0.01 * round) for round in (12, 12, 13, 14, 15)]
    alarms = [note for note in party.notes() if note["event"] == "drift alarm"]
    assert len(alarms) == 1 and alarms[0]["job"] == "job-1" and 12 <= alarms[0]["round"] <= 14
    assert alarms[0]["why"].startswith("its loss is")
    assert "drift alarm: its loss is" in caplog.text
    for reply in replies:  # replies have the same fields as ever
        assert isinstance(reply, Reply) and "alarm" not in str(reply.tree())


def test_a_party_remembers_the_losses_of_a_bounded_number_of_jobs(
    home: Callable[..., Home], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_watch, "JOBS", 3)
    party = home()
    for number in range(5):
        party.ask(0, Evaluate(), job=f"job-{number}")
    assert list(party.worker._losses._past) == ["job-2", "job-3", "job-4"]


def test_functions_and_rows_with_ids_are_read_once(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a\n1\n")
    assert data_paths(str(file), None, None) == [file]
    assert data_paths(str(file), None, "id") == []
    assert data_paths("my_module:load", None, None) == []
    calls = list[int]()

    def read() -> PartySamples:
        calls.append(1)
        return PartySamples((torch.zeros(1, 1), torch.zeros(1)))

    watched = WatchedSamples(read, [], tmp_path)
    work = Work("job", "job", 0, 1, "round", 0, Blob("0" * 64, 1), Blob("0" * 64, 1), None, None, None, 1)
    assert not watched.look(work) and len(calls) == 1


def test_files_that_change_while_they_are_read_are_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a\n1\n")

    def read() -> PartySamples:
        file.write_text(file.read_text() + "1\n")
        return PartySamples((torch.zeros(1, 1), torch.zeros(1)))

    with pytest.raises(DataError, match="changed while they were read"):
        WatchedSamples(read, [file], tmp_path)


def test_the_signature_of_a_folder_is_that_of_all_files_below(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("x.npy", "deep/y.npy"):
        (tmp_path / "data" / name).write_bytes(b"1")
    before = signature([tmp_path / "data"])
    assert len(before) == 2
    (tmp_path / "data" / "deep" / "y.npy").write_bytes(b"12")
    assert signature([tmp_path / "data"]) != before


@pytest.mark.slow
def test_a_running_party_takes_its_new_file(found: Callable[..., League], tmp_path: Path) -> None:
    league = found()
    party = JoinedParty(league, tmp_path)
    try:
        league.until(lambda: bool(league.queue.present([league.number("ann")])))
        assert league.ended(job(league))["status"] == "finished"
        text = (tmp_path / "ann.csv").read_text().splitlines()
        (tmp_path / "new.csv").write_text("\n".join([*text, *text[1:4]]) + "\n")
        os.replace(tmp_path / "new.csv", tmp_path / "ann.csv")
        assert league.ended(job(league))["status"] == "finished"
        (line,) = party.wait("the party's data have changed")
        assert line["rows"] == len(text) + 2
        notes = [json.loads(line) for line in (party.state / data_watch.FILE).read_text().splitlines()]
        assert [note["event"] for note in notes] == ["data changed"]
    finally:
        party.process.terminate()
        party.process.wait(60)
