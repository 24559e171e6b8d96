"""What a party states about its samples decides which tasks it accepts; no sample does."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from league import PATIENCE, League
from test_reloading import JoinedParty

from hansa.core.ask import op_config
from hansa.core.op import Op, Party, Reply
from hansa.core.predictor import Evaluate
from hansa.data.class_weights import WeighClasses
from hansa.data.describe import Describe, Description
from hansa.data.prepare import ApplyStandardise, ColumnMoments, StandardiseOwn
from hansa.data.statement import DataStatement
from hansa.data.table_ops import TableMagnitudes
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.local import SGD
from hansa.net.party import preparations
from hansa.net.party.data_statement import add_table, facts, proposed, stated
from hansa.net.party.data_watch import WatchedSamples
from hansa.net.party.evaluations import check_rows
from hansa.net.party.policy import Policy
from hansa.net.party.reloading import PolicyReloader
from hansa.net.party.samples import PartySamples, preparer, read_samples
from hansa.net.party.store import PartyStore
from hansa.net.party.vault_lines import FILE
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Blob, Work
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, NotAdmitted, PartyError

TASK = {"model": "logistic", "dtype": "float64", "shape": [2], "outputs": 50, "loss": "cross_entropy", "classes": 50,
        "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip
FIFTY = DataStatement((2,), "classes", classes=50)
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
Y = torch.tensor([0, 1, 41, 3, 2, 1])
Answer = Callable[..., Any]


def twin(largest: int = 42) -> PartySamples:
    """The samples of a party that differs from another one in its largest label."""
    return stated(PartySamples((X, torch.where(Y == 41, largest, Y))), FIFTY)


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[Answer]:
    """Has two parties answer the same ask; returns both answers after checking that their vaults are alike."""
    stores: list[PartyStore] = []

    def answer(samples: Sequence[PartySamples], task: dict[str, Any], op: Op, payload: dict[str, Any],
               steps: Sequence[tuple[Op, dict[str, Any]]] = ()) -> list[Reply | str]:  # fmt: skip
        out, vaults = [], []
        for own in samples:
            folder = tmp_path / f"home-{len(stores)}"
            stores.append(PartyStore(folder))
            message = {"op": op_config(op), "payload": payload, "round": 0}
            tree = {"task": task, "preparations": [{"op": op_config(o), "payload": p} for o, p in steps]}
            blobs = [Blob(hashlib.sha256(codec.encode(one)).hexdigest(), 9) for one in (message, tree)]
            work = Work("job-1", "job", 0, 0, "round", 0, *blobs, None, None, None, 1)
            out.append(Worker(stores[-1], preparer(own)).answer(work, message, tree)[0])
            path = folder / FILE
            vaults.append([json.loads(line).get("kind") for line in path.read_text().splitlines()] if path.is_file()
                          else [])  # fmt: skip
        assert vaults[0] == vaults[-1]
        return out

    yield answer
    for store in stores:
        store.close()


def alike(answers: list[Reply | str]) -> str:
    """What both parties say: the same sentence, or replies of the same form (then an empty text)."""
    forms = [
        one if isinstance(one, str) else {name: (tensor.shape, tensor.dtype) for name, tensor in one.tensors.items()}
        for one in answers
    ]
    assert forms[0] == forms[1]
    return forms[0] if isinstance(forms[0], str) else ""


def model(classes: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    parameters = torch.zeros(3 * classes, dtype=dtype)
    return {"model": {"w": parameters, "stats": torch.zeros(0), "counts": torch.zeros(0).long()}}


def table(path: Path, diagnoses: Sequence[str]) -> PartySamples:
    path.write_text("age,diagnosis,sick\n" + "".join(f"{20 + k},{each},{k % 2}\n" for k, each in enumerate(diagnoses)))
    return read_samples(str(path), "sick")


@pytest.mark.parametrize(("kind", "refused"), [("number", "does not hold numbers"), ("date", "does not hold dates"),
                                               ("text", "")])  # fmt: skip
@pytest.mark.parametrize("missing", [["flu", "cold"], ["flu", "cold", "hiv"], ["20"], []])
def test_words_of_the_aggregator_s_choice_are_not_compared_with_cells(
    kind: str, refused: str, missing: list[str], answers: Answer, tmp_path: Path
) -> None:
    """Before, a table with the kind "number" for texts told whether the words covered all cells."""
    twins = [table(tmp_path / f"{k}.csv", ["flu", "cold", last, "flu"]) for k, last in enumerate(("hiv", "cold"))]
    tree = {"columns": [["age", "number"], ["diagnosis", kind]], "missing": missing, "labels": []}
    task = {**TASK, "model": None, "classes": 2, "outputs": 2, "prepared": True, "table": tree}
    got = answers(twins, task, TableMagnitudes(), {"features": [[0, ""]]})
    assert refused in alike(got) and bool(refused) == isinstance(got[0], str)
    if not refused:
        assert all(torch.equal(got[0].tensors[name], got[1].tensors[name]) for name in got[0].tensors)


@pytest.mark.parametrize("classes", [None, 2, 41, 42, 43, 49, 50, 60])
@pytest.mark.parametrize("outputs", [42, 43, 50])
def test_classes_and_outputs_of_a_task_are_compared_with_the_statement(
    classes: int | None, outputs: int, answers: Answer
) -> None:
    """Before, the number of classes and of outputs bisected the largest label."""
    got = answers([twin(41), twin(42)], {**TASK, "classes": classes, "outputs": outputs}, SGD(steps=1), model(outputs))
    said = alike(got)
    if classes is not None and classes < 50:
        assert said == f"its targets must lie in 0..{classes - 1}, and it states 50 classes (classes in party.toml)"
    else:
        assert (said == "") == (outputs == 50)
        assert outputs == 50 or f"the model gives {outputs} outputs for a sample, and there are 50 classes" in said


@pytest.mark.parametrize("large", [1e39, 1.0])
def test_numbers_beyond_the_type_of_a_task_are_clamped(large: float, answers: Answer) -> None:
    x = X.clone()
    x[0, 0] = large
    own = stated(PartySamples((x, Y)), FIFTY)
    task = {**TASK, "dtype": "float32"}
    got = answers([twin(), own], task, SGD(steps=1, batch=None), model(50, torch.float32))
    assert alike(got) == ""
    made = preparer(own)(0, task, "cpu").data.train("train")[0]
    assert made[0, 0] == min(large, torch.finfo(torch.float32).max) and bool(made.isfinite().all())


def test_a_job_over_columns_is_compared_with_the_statement_too() -> None:
    ids = np.array(["a", "b", "c", "d", "e", "f"])
    x = X.clone()
    x[0, 0] = -1e300
    own = stated(PartySamples(TableRows(x, Y, ids)), DataStatement((2,), "classes", classes=50, ids=True))
    task = {"shapes": [[2]], "party_test": 0.0, "seed": 0, "loss": "cross_entropy", "bf16": False, "classes": 50,
            "prepared": False, "dtype": "float32"}  # fmt: skip
    made = preparer(own)(0, task, "cpu")
    assert made.data.features("train")[0, 0] == torch.finfo(torch.float32).min
    for change, why in (({"classes": 49}, "0..48"), ({"shapes": [[3]]}, "described others"), ({"loss": "bce"}, "bce"),
                        ({"shapes": [None]}, "had not described"), ({"shapes": 3}, "malformed")):  # fmt: skip
        with pytest.raises(NotAdmitted, match=why):
            preparer(own)(0, {**task, **change}, "cpu")


class Untouched:
    """Features or targets that nobody may read."""

    dtype = torch.float64
    shape = (6, 2)

    def __len__(self) -> int:
        return 6

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the party read {name} of its samples")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the party read its samples")


@pytest.mark.parametrize(
    ("statement", "task", "why"),
    [
        (FIFTY, {"shape": [3]}, r"its samples have the shape \(2,\), those of the job \(3,\)"),
        (FIFTY, {"classes": True}, "classes must be a whole number"),
        (FIFTY, {"loss": "bce", "classes": None, "outputs": 1}, "do not all lie in 0..1"),
        (FIFTY, {"table": {"missing": [], "labels": []}}, "no table with named columns"),
        (FIFTY, {"model": "nothing"}, "nothing"),
        (FIFTY, {"shape": 2}, r"malformed task \(TypeError\); see the party's log"),
        (FIFTY, {"shapes": [[2]], "dtype": "int8"}, "task.dtype must be one of"),
        (DataStatement((2,), "numbers"), {}, "not whole class numbers"),
        (DataStatement((2,), "whole"), {}, "set task.loss = 'mse'"),
        (DataStatement((2,), "none"), {}, "it has no labels"),
        (DataStatement((2,), "classes", classes=50, missing=True), {}, "missing values; set task.prepare"),
        (DataStatement((2,), "classes", classes=50, weights=True), {"weighs": False}, "samples have weights"),
        (DataStatement((2,), "classes", classes=2, target_shape=(2,), one_hot=True), {}, "look one-hot"),
        (DataStatement((2,), "classes", classes=50, target="y", columns={"a": "number", "b": "number"}),
         {"header": ["y", "a", "c"]}, "its columns lack 'c' and have besides 'b'"),
        (DataStatement((2,), "classes", classes=50, target="y", columns={"a": "number", "b": "text"}),
         {}, "its column 'b' holds texts; set task.prepare = 'table'"),
    ],
)  # fmt: skip
def test_a_task_that_does_not_fit_is_refused_in_full_before_a_sample_is_read(
    statement: DataStatement, task: dict[str, Any], why: str
) -> None:
    samples: Any = PartySamples((Untouched(), Untouched()), statement=statement)  # type: ignore[arg-type]
    with pytest.raises(NotAdmitted, match=why):
        preparer(samples)(0, {**TASK, **task}, "cpu")


def test_a_description_is_the_statement_and_reads_no_sample() -> None:
    statement = DataStatement((2,), "classes", classes=50, missing=True, tests=True)
    party = preparer(PartySamples((Untouched(), Untouched()), statement=statement))(0, {}, "cpu")  # type: ignore[arg-type]
    told = Description.of(Describe().run(party, {}, {})[0])
    assert (told.shape, told.classes, told.kind, told.tests, told.missing) == ((2,), 50, "class", True, True)
    assert Description.of(Describe("mse").run(party, {}, {})[0]).kind == "real"
    with pytest.raises(NotAdmitted, match="bce needs"):
        Describe("bce").run(party, {}, {})


def test_a_preparation_is_tried_on_a_made_up_row_before_samples_are_prepared(answers: Answer) -> None:
    weights = {"weights": torch.ones(42, dtype=torch.float64)}
    op, sgd = ColumnMoments(), {"centre": torch.zeros(2, dtype=torch.float64)}
    numbers = {"mean": torch.zeros(2), "std": torch.ones(2)}
    for steps, why in (
        ([(WeighClasses(), weights)], "real numbers of the shape [classes]"),  # before: whether label 42 occurs
        ([(ApplyStandardise(), {"mean": torch.zeros(3), "std": torch.ones(3)})], "mean must be a tensor"),
        ([(ApplyStandardise(), {})], "mean is missing"),
        ([(ApplyStandardise(), numbers), (SGD(), {})], "is not a preparation of data"),
    ):  # fmt: skip
        assert why in alike(answers([twin(41), twin(42)], {**TASK, "prepared": True}, op, sgd, steps))
    extreme = {"mean": torch.tensor([torch.inf, -1e300]), "std": torch.tensor([0.0, 1e-300])}
    steps = [(ApplyStandardise(), {name: value.double() for name, value in extreme.items()}), (StandardiseOwn(), {})]
    party = preparer(twin())(0, {**TASK, "dtype": "float32", "prepared": True}, "cpu")
    tree = [{"op": op_config(one), "payload": payload} for one, payload in steps]
    preparations.admit(tree, party, TASK, None)
    assert [name for step in preparations.apply(tree, party) for name in step["payload"]] == ["mean", "std"] * 2
    assert bool(party.data.train("train")[0].isfinite().all())


class Picky(torch.nn.Module):
    """A model that fails on a sample with a positive feature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 50, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 0).any()):
            raise RuntimeError("a positive feature")
        return self.layer(x)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_whether_a_model_depends_on_positions_is_not_tried_on_samples(sign: float) -> None:
    objective = Objective(Picky, "cross_entropy", 0)
    rows = (X.abs() * sign)[:1], Y[:1]  # one sample: two made-up ones tell parameters per row
    party = Party(0, objective, SampleGateway(rows, rows), 0)
    check_rows(Evaluate(), party, {"model": objective.initial._asdict()}, {})


# ---- the owner's side ------------------------------------------------------------------------------------------------

STATED: dict[str, Any] = {
    "classes": ((X, Y),),
    "tests": ((X, Y), (X, Y + 3)),
    "numbers": ((X, Y / 3),),
    "whole floats": ((X, Y.double()),),
    "negative": ((X, Y - 1),),
    "none": (TableRows(X, None),),
    "empty": ((X[:0], Y[:0]),),
    "ids": (TableRows(X, None, np.array(list("abcdef"))),),
    "weights": (TableRows(X, Y, None, torch.ones(6)),),
    "missing": ((X.where(X > 0, torch.nan), Y),),
    "pictures": ((torch.zeros(6, 1, 4, 4, dtype=torch.uint8), Y),),
    "one-hot": ((X, torch.eye(6)),),
    "characters": ((torch.ones(6, 5).long(), torch.ones(6, 5).long()),),
    "columns": ((X, Y), None, ('a "target"', "größe\x7f", "b.c")),
}


@pytest.mark.parametrize("name", STATED)
def test_a_proposal_is_read_back_from_party_toml_and_fits_its_samples(name: str, tmp_path: Path) -> None:
    samples = PartySamples(*STATED[name])
    file = tmp_path / "party.toml"
    file.write_text("matches = 3\n[privacy]\nepsilon = 1.0\n")
    add_table(file, proposed(samples))
    policy = Policy.read(file)
    assert policy.matches == 3 and policy.privacy.epsilon == 1.0 and policy.data == proposed(samples)
    again = stated(samples, policy.data)
    assert stated(again, policy.data).statement == policy.data
    assert again.train[0].dtype == samples.train[0].dtype


def test_the_proposal_of_a_table_names_its_columns_words_and_labels(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("age,city,seen,none,ill\n30,Riga,2020-01-02,,no\n?,Riga,2020-01-03,NA,yes\n31,Köln,,,no\n")
    samples = read_samples(str(file), "ill", labels=("no", "yes"))
    statement = proposed(samples)
    assert statement.columns == {"age": "number", "city": "text", "seen": "date", "none": "empty"}
    assert (statement.target, statement.labels, statement.classes) == ("ill", ("no", "yes"), 2)
    assert statement.missing and {"?", "NA", ""} <= set(statement.words)
    add_table(tmp_path / "party.toml", statement)
    assert Policy.read(tmp_path / "party.toml").data == statement


TABLE = {"columns": {"age": "number", "city": "text"}, "target": "ill", "classes": 2, "missing": True}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"classes": 1}, "classes is 1 .from 0., and the targets are 0..1"),
        ({"missing": False}, "missing is false, and some features are missing"),
        ({"columns": {"age": "number", "city": "number"}}, "line 2, column 'city': expected a number, got 'Riga'"),
        ({"columns": {"age": "number", "town": "text"}}, "its columns lack 'town' and have besides 'city'"),
        ({"words": ["?"]}, "column 'age': expected a number, got 'NA'"),
        ({"target": "sick"}, "its target is the column 'ill', not 'sick'"),
        ({"columns": {}}, "columns is { *}, and the data have"),
        ({"tests": True}, "tests is true, and the data have false; correct the data, the option --test of"),
        ({"weights": True}, "weights is true"), ({"ids": True}, "ids is true"),
        ({"features": "whole"}, 'features is "whole", and the data have "real"'),
        ({"targets": "empty"}, "targets is 'empty', and there are samples"),
        ({"lowest_class": 1}, "from 1., and the targets are 0..1"),
        ({"target_shape": [2]}, r"a target has the shape \[\]"),
        ({"targets": "none", "classes": None}, 'targets is "none"'),
    ],
)  # fmt: skip
def test_data_that_contradict_the_statement_are_an_error_for_the_owner(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.csv"
    file.write_text("age,city,ill\n30,Riga,0\nNA,Köln,1\n")
    own = read_samples(str(file), "ill")
    fields = {"shape": (2,), "targets": "classes", **TABLE}
    assert stated(own, DataStatement(**fields)).statement is not None
    changed = {name: tuple(value) if isinstance(value, list) else value for name, value in change.items()}
    with pytest.raises(DataError, match=f"the data contradict the table .data. of party.toml: .*{why}"):
        stated(own, DataStatement(**{**fields, **changed}))


def test_the_log_names_the_columns_only_of_a_table_with_few() -> None:
    few, many = ({f"column {k}": "number" for k in range(n)} for n in (64, 65))
    assert facts(DataStatement((64,), "none", columns=few))["columns"] == few
    assert facts(DataStatement((65,), "none", columns=many))["columns"] == "the names and kinds of 65 columns"


def test_the_owner_may_state_more_than_the_data_have(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("age,city,ill\n30,Riga,0\nunknown,Köln,1\n")
    columns = {"age": "number", "city": "text"}
    wide = DataStatement((2,), "classes", classes=9, missing=True, words=("unknown",), target="ill", columns=columns)
    own = stated(read_samples(str(file), "ill"), wide)
    tree = {"columns": [["age", "number"], ["city", "text"]], "missing": ["?"], "labels": []}
    party: Party = preparer(own)(0, {**TASK, "model": None, "table": tree, "prepared": True}, "cpu")
    assert party.data.train("train")[0][:, 0].isnan().tolist() == [False, True]  # the owner's word, not the job's
    numbers = stated(PartySamples((X, Y)), DataStatement((2,), "numbers"))
    assert numbers.train[1].dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "why"),
    [("shape = [2]", "the field 'targets' is required"), ("shape = [2]\ntargets = 'class'", "did you mean 'classes'"),
     ("shape = [2]\ntargets = 'classes'", "classes is missing"), ("shape = [2]\ntargets = 'none'\nrows = 3", "'rows'"),
     ("shape = [0]\ntargets = 'none'", "shape: a sample has"),
     ("shape = [2]\ntargets = 'none'\ncolumns = { a = 'number' }", "1 are named"),
     ("shape = [2]\ntargets = 'whole'\nclasses = 2", "does not apply"),
     ("shape = [2]\ntargets = 'classes'\nclasses = 2\nlabels = ['a']", "labels names 1")],
)  # fmt: skip
def test_a_wrong_table_is_an_error_that_names_it(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "party.toml").write_text(f"[data]\n{text}\n")
    with pytest.raises(ConfigError, match=f"party.toml: data.*{why}"):
        Policy.read(tmp_path / "party.toml")


def test_a_file_that_changes_against_the_statement_is_not_used_and_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "own.csv"
    file.write_text("a,b,y\n1,2,0\n3,4,1\n")
    watched = WatchedSamples(lambda: read_samples(str(file), "y"), [file], tmp_path)
    assert watched.hold_to(None).classes == 2
    work = Work("job", "job", 0, 1, "round", 0, Blob("0" * 64, 1), Blob("0" * 64, 1), None, None, None, 1)
    for changed in ("a,b,y\n1,2,0\n3,4,7\n", "a,b,y\n1,2,0\n3,NA,1\n", "a,c,y\n1,2,0\n3,4,1\n"):
        file.write_text(changed)
        with pytest.raises(PartyError, match=r"^its data cannot be read at present; see the"):
            watched.look(work)
    assert "classes is 2 (from 0), and the targets are 0..7" in caplog.text
    file.write_text("a,b,y\n1,2,0\n3,5,1\n")
    assert watched.look(work) and watched.samples.train[0][1, 1] == 5


def test_a_statement_changes_at_the_next_start_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, file = PartyStore(tmp_path / "home"), tmp_path / "home" / "party.toml"
    store.policy = replace(store.policy, data=FIFTY)
    try:
        for text in ("min_rows = 2\n", "[data]\nshape = [2]\ntargets = 'numbers'\n"):
            file.write_text(text)
            PolicyReloader(store).reload()
            assert store.next_policy is not None and store.next_policy.data == FIFTY
            assert ("data: cannot change while the party runs" in caplog.text) == ("[data]" in text)
    finally:
        store.close()


@pytest.mark.slow
def test_join_proposes_the_table_and_refuses_data_that_contradict_it(
    found: Callable[..., League], tmp_path: Path
) -> None:
    league = found()
    party = JoinedParty(league, tmp_path)
    try:
        league.until(lambda: bool(league.queue.present([league.number("ann")])))
        (line,) = party.wait("every job may learn this of the data")
        assert line["shape"] == [3] and line["classes"] == 2 and line["columns"] == dict.fromkeys("abc", "number")
        statement = Policy.read(party.state / "party.toml").data
        assert statement is not None and statement.classes == 2 and len(party.said("party.toml has a new table")) == 1
    finally:
        party.process.terminate()
        party.process.wait(PATIENCE)
    (tmp_path / "ann.csv").write_text("a,b,c,label\n1,2,3,0\n1,2,3,2\n")
    command = [sys.executable, "-m", "hansa.cli", "join", "--state", str(party.state), "--data",
               str(tmp_path / "ann.csv")]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode != 0 and "classes is 2 (from 0), and the targets are 0..2" in ended.stderr
    assert "Traceback" not in ended.stderr
