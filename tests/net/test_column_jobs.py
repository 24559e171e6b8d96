"""Jobs whose parties hold different columns of the same people: roles, ids, policy, and parties that lie."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from league import PARTIES, PATIENCE, League, samples

import hansa
from hansa import Algorithm, Federation, State, register
from hansa.core.algorithm import Problem
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.data.describe import Description, agreed_columns
from hansa.experiment.column_tasks import hold_out_people
from hansa.holdings.gateway import TableRows
from hansa.holdings.labels import Labels
from hansa.net.party.after_reading import REFUSAL
from hansa.net.party.samples import PartySamples, preparer, read_samples
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, DataError, HansaError
from hansa.testing import same_bits

pytestmark = pytest.mark.usefixtures("quick")
WIDTHS, HOLDER = (2, 4, 1), 1
ALLOWED = "matches = 10"
SHARE = 0.3  # of the people that are held out for tests


def summed(x: torch.Tensor, ids: Any) -> dict[str, torch.Tensor]:
    return {"sum": x.double().sum(0), "ids": torch.tensor(sum(int(text) for text in ids.tolist()))}


@register("test-column-sums")
@dataclass(frozen=True)
class ColumnSums(Op):
    """The sums of a party's columns and of its ids."""

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply(summed(party.data.features("statistics"), party.ids)), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((payload["width"],), torch.float64), "ids": ((), torch.int64)}


@register("test-column-tests")
@dataclass(frozen=True)
class ColumnTests(Op):
    """The sums of a party's columns in its test rows."""

    evaluates: ClassVar[bool] = True

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return Reply({"sum": party.data.test_features("evaluate").double().sum()}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"sum": ((), torch.float64)}


@register("test-summing-columns")
@dataclass(frozen=True)
class Summing(Algorithm):
    """Sum the columns of all parties."""

    trains: ClassVar[bool] = False
    data: ClassVar[Literal["rows", "columns"]] = "columns"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    def init(self, problem: Problem) -> State:
        assert problem.layout is not None
        shapes = [None if shape is None else shape[0] for shape in problem.layout.shapes]
        return State(Params.none(), slots={"widths": shapes, "holders": list(problem.layout.label_holders)})

    async def round(self, fed: Federation, state: State) -> State:
        each = {p: {"width": width} for p, width in enumerate(state.slots["widths"]) if width is not None}
        got = await fed.gather(ColumnSums(), {}, parties=list(each), each=each)
        return state.replace(sums={str(p): r.tensors for p, r in zip(got.parties, got.replies, strict=True)})

    async def evaluate(self, fed: Federation, state: State) -> dict[str, float]:
        got = await fed.gather(ColumnTests(), {}, parties=fed.parties)
        return {"accuracy": sum(float(reply.tensors["sum"]) for reply in got.replies)}

    def predictor(self, state: State) -> tuple[str, dict[str, Any]]:
        return "joint", dict(state.slots)


def rows(party: int, width: int | None = None, labels: bool | None = None) -> TableRows:
    """A party's rows: people 10 * party to 10 * party + 40, in an order of its own."""
    draw = np.random.default_rng(party)
    people = draw.permutation(np.arange(10 * party, 10 * party + 40))
    x = torch.from_numpy(draw.normal(size=(40, width or WIDTHS[party])))
    labelled = party == HOLDER if labels is None else labels
    return TableRows(x, torch.from_numpy(people % 2) if labelled else None, people.astype(np.str_))


def tree(task: dict[str, Any] | None = None, **run: Any) -> dict[str, Any]:
    table = {"dataset": "heart", "loss": "cross_entropy", "dtype": "float64", **(task or {})}
    return {"task": table, "partition": "columns", "algorithm": "test-summing-columns", "run": {"rounds": 2, **run}}


def join(league: League, own: Callable[[int], Any] = rows, policy: Callable[[str], str] = lambda name: ALLOWED) -> None:
    for number, name in enumerate(PARTIES):
        league.join(name, PartySamples(own(number)), policy(name))


def refused(league: League) -> dict[str, str]:
    """Why parties do not take part in the job, by name."""
    return {entry["party"]: json.loads(entry["detail"])["why"] for entry in league.events("not taking part")}


def test_a_deployed_job_over_columns_has_the_bits_of_its_simulation(league: League) -> None:
    join(league)
    done = league.ended(league.submit(tree({"prepare": "standardise", "party_test": SHARE}, seed=5), min_parties=3))
    assert done["status"] == "finished", done["reason"]
    both = [hold_out_people(rows(party), SHARE, 5) for party in range(3)]
    task = hansa.Task(None, "cross_entropy", [train[:2] for train, _ in both], None, [test[:2] for _, test in both],
                      list(PARTIES), 2, hansa.data.Standardise(), ids=[train.ids for train, _ in both],
                      test_ids=[test.ids for _, test in both])  # fmt: skip
    reference = hansa.simulate(Summing(), task, rounds=2, seed=5)
    assert reference.state.slots["holders"] == [HOLDER] and len(reference.state.slots["sums"]) == 3
    assert same_bits(league.model(done["id"]), reference.saved_model())
    for line, expected in zip(done["rounds"], reference.history, strict=True):
        assert line["accuracy"] == expected["accuracy"]


def test_a_party_must_allow_jobs_to_match_its_rows(league: League) -> None:
    join(league, policy=lambda name: "" if name == "ann" else ALLOWED)
    done = league.ended(league.submit(tree(), min_parties=3))
    why = "its policy does not let jobs match its rows with those of other parties; see matches in party.toml"
    assert refused(league) == {"ann": why}
    assert done["status"] == "finished" and all(line["replies"] == 2 for line in done["rounds"])
    assert league.model(done["id"])["payload"]["widths"] == [None, 4, 1]  # type: ignore[call-overload]


@pytest.mark.slow
def test_ids_are_read_as_often_as_the_policy_allows_over_all_jobs(league: League) -> None:
    join(league, policy=lambda name: "matches = 3" if name == "ann" else ALLOWED)
    first, second = (league.ended(league.submit(tree(), min_parties=3)) for _ in range(2))
    assert [line["replies"] for line in first["rounds"]] == [3, 3]
    assert [line["replies"] for line in second["rounds"]] == [3, 2]
    assert second["rounds"][1]["missing"] == {"ann": REFUSAL}  # the op reads features first


def test_a_job_goes_on_after_a_restart_and_a_repeated_ask_is_counted_once(league: League) -> None:
    join(league, policy=lambda name: "matches = 2")
    worker, reached, go = league.members["bob"].worker, threading.Event(), threading.Event()
    plain, answered = worker.answer, list[int]()

    def late(work: Any, message: dict[str, Any], task: dict[str, Any]) -> Any:
        reply = plain(work, message, task)
        if message["op"]["name"] == "test-column-sums" and work.round == 1:
            answered.append(work.round)
            reached.set()
            assert go.wait(PATIENCE)
            if len(answered) == 1:
                raise OSError(errno.ENOSPC, "the disk is full")  # the party is asked again
        return reply

    worker.answer = late  # type: ignore[method-assign]
    job = league.submit(tree(), min_parties=3)
    assert reached.wait(PATIENCE)
    league.stop()  # bob has read its ids, and the aggregator has no reply yet
    go.set()
    league.start()
    done = league.ended_after_all(job)
    assert done["status"] == "finished" and [line["replies"] for line in done["rounds"]] == [3, 3], done
    assert len(answered) == 2
    task = hansa.Task(None, "cross_entropy", [rows(party)[:2] for party in range(3)], names=list(PARTIES), classes=2,
                      ids=[rows(party).ids for party in range(3)])  # fmt: skip
    assert same_bits(league.model(job), hansa.simulate(Summing(), task, rounds=2).saved_model())


def doubled(own: TableRows) -> TableRows:
    assert own.ids is not None
    ids = own.ids.copy()
    ids[3] = ids[7]
    return own._replace(ids=ids)


def test_a_party_without_ids_is_refused_by_name(league: League) -> None:
    join(league, lambda party: (rows(0), rows(1), samples(2)[0])[party])
    done = league.ended(league.submit(tree(), min_parties=3))
    assert list(refused(league)) == ["cid"] and "its rows have no ids" in refused(league)["cid"]
    assert done["status"] == "finished"


def test_an_id_twice_is_an_error_for_the_owner() -> None:
    with pytest.raises(DataError, match=r"two rows have the same id; an id names one row of a party \(case and white"):
        preparer(PartySamples(doubled(rows(0))))


def test_a_party_without_labels_is_refused_by_a_job_over_rows(league: League) -> None:
    join(league, lambda party: rows(2) if party == 2 else (torch.ones(9, 1).double(), torch.arange(9) % 2))
    table = {"dataset": "heart", "model": "logistic", "dtype": "float64"}
    done = league.ended(league.submit({"task": table, "run": {"rounds": 1}}, min_parties=3))
    assert done["status"] == "finished", done["reason"]
    assert refused(league) == {
        "cid": "it has no labels, and this job trains on parties with the same columns and labels"
    }


def test_a_job_over_columns_needs_a_label_holder(league: League) -> None:
    join(league, lambda party: rows(party, labels=False))
    done = league.ended(league.submit(tree(), min_parties=3))
    assert done["status"] == "failed" and "none of the parties has labels" in done["reason"]


def test_a_party_whose_data_have_another_width_than_it_described_is_named(
    league: League, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(league)
    plain = league.members["cid"].worker.answer

    def lie(work: Any, message: dict[str, Any], task: dict[str, Any]) -> Any:
        reply, staged = plain(work, message, task)
        if message["op"]["name"] == "describe":
            reply = Description((5,), 0, "none", False, False).reply()
        return reply, staged

    league.members["cid"].worker.answer = lie  # type: ignore[method-assign]
    done = league.ended(league.submit(tree(), min_parties=3))
    assert [line["missing"] for line in done["rounds"]] == 2 * [
        {"cid": "its samples have the shape (1,), and it described others to the job"}
    ]


def test_a_reply_of_another_width_than_described_is_rejected_by_name(league: League) -> None:
    join(league)
    plain = league.members["cid"].worker.answer

    def lie(work: Any, message: dict[str, Any], task: dict[str, Any]) -> Any:
        reply, staged = plain(work, message, task)
        if message["op"]["name"] == "test-column-sums":
            reply = replace(reply, tensors={**reply.tensors, "sum": torch.zeros(5, dtype=torch.float64)})
        return reply, staged

    league.members["cid"].worker.answer = lie  # type: ignore[method-assign]
    done = league.ended(league.submit(tree(), min_parties=3))
    assert all(list(line["rejected"]) == ["cid"] and line["replies"] == 2 for line in done["rounds"])


SETTINGS: dict[str, Any] = {
    "shapes": [[2], None], "party_test": 0.0, "seed": 0, "loss": "cross_entropy", "bf16": False, "classes": 2,
    "prepared": False, "dtype": "float64",
}  # fmt: skip


@pytest.mark.parametrize(
    ("number", "own", "settings", "reason"),
    [(1, rows(1), {}, "it had not described its columns when the job began"),
     (0, rows(1), {}, r"its samples have the shape \(4,\), and it described others"),
     (0, samples(0)[0], {}, "its rows have no ids"),
     (0, rows(0), {"dtype": "int8"}, "task.dtype must be one of float32, float64"),
     (0, rows(0, labels=True), {"classes": 1}, r"its targets must lie in 0\.\.0, and it states 2 classes"),
     (0, rows(0)._replace(x=rows(0).x * torch.nan), {}, "its features have missing values")],
)  # fmt: skip
def test_a_party_checks_the_task_itself(number: int, own: Any, settings: dict[str, Any], reason: str) -> None:
    prepare = preparer(PartySamples(own))
    with pytest.raises(HansaError, match=reason):
        prepare(number, {**SETTINGS, **settings}, "cpu")
    assert preparer(PartySamples(rows(0)))(0, SETTINGS, "cpu").data.features("train").shape == (40, 2)


def one(kind: str, classes: int = 0, missing: bool = False) -> Description:
    return Description(
        (3,), classes, kind, False, missing, Labels(0, classes - 1, classes) if classes else Labels(0, 0, 0)
    )


def test_label_holders_must_agree_on_their_targets_and_others_need_none() -> None:
    common, out = agreed_columns(
        {"a": one("class", 3), "b": one("none", missing=True), "c": replace(one("none"), shape=(9,))}
    )
    assert (common.classes, common.kind, common.missing, common.shape, out) == (3, "class", True, (), {})
    _, out = agreed_columns({"a": one("class", 2), "b": one("class", 2), "c": one("real")})
    assert list(out) == ["c"] and "its targets are real numbers" in out["c"]
    with pytest.raises(ConfigError, match="targets are of different kinds"):
        agreed_columns({"a": one("class", 2), "b": one("real")})


def test_a_party_reads_its_ids_from_a_file_or_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, more in (("train", ""), ("test", "9")):
        (tmp_path / f"{name}.csv").write_text(f"who,a,y\nann{more},1,0\nbob{more},2,1\n")
    path, test = str(tmp_path / "train.csv"), str(tmp_path / "test.csv")
    train, held, header, *_ = read_samples(path, "y", test, "who")
    assert train[2].tolist() == ["ann", "bob"] and held is not None and held[2].tolist() == ["ann9", "bob9"]  # type: ignore[misc]
    assert header == ("y", "a")
    assert read_samples(path, None, None, "who").train[1] is None
    (tmp_path / "column_data.py").write_text(
        "import numpy as np\n"
        "def both(): return (np.ones((2, 3)), None, [1, 2]), (np.ones((1, 3)), None, [3])\n"
        "def twice(): return np.ones((2, 3)), np.zeros(2), [1, 1]\n"
        "def five(): return 1, 2, 3, 4, 5\n"
    )
    monkeypatch.chdir(tmp_path)
    train, held, *_ = read_samples("column_data:both")
    assert train[1] is None and train[2].tolist() == ["1", "2"] and held is not None and len(held[0]) == 1  # type: ignore[misc]
    with pytest.raises(DataError, match="two rows have the same id"):
        read_samples("column_data:twice")
    with pytest.raises(DataError, match=r"must return \(x, y\), \(x, y, ids\), a data set, or two of them"):
        read_samples("column_data:five")
    with pytest.raises(DataError, match=r"--test: .*train.csv: a test row has the id of a training row"):
        read_samples(path, "y", path, "who")
    with pytest.raises(ConfigError, match="--ids names a column of a CSV file"):
        read_samples("column_data:both", ids="who")
