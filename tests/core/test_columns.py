"""Vertical data: parties hold different columns of the same people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hansa
from hansa import Algorithm, Federation, State, Task, register
from hansa.core.algorithm import Problem
from hansa.core.columns import ColumnLayout, held_out, ids_of
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.shapes import UpTo
from hansa.data import Preparation, held
from hansa.experiment.config import parse
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import AlgorithmError, ConfigError, DataError
from hansa.sim.choice import fastest
from hansa.sim.engine import EngineInputs, ReferenceEngine

READS = {
    "features": lambda party: party.data.features("train"),
    "samples": lambda party: party.samples("train")[0],
    "test features": lambda party: party.data.test_features("evaluate"),
}


@register("test-columns-read")
@dataclass(frozen=True)
class Read(Op):
    """Send the features that a party reads, and its ids as numbers."""

    what: str = "features"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        x = READS[self.what](party).double()
        return Reply({"x": x, "ids": torch.tensor([int(text) for text in party.ids.tolist()])}), memory

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {"x": ((UpTo(9), payload["width"]), torch.float64), "ids": ((UpTo(9),), torch.int64)}


@register("test-columns")
@dataclass(frozen=True)
class Columnar(Algorithm):
    """Read what the parties hold."""

    what: str = "features"
    trains: ClassVar[bool] = False
    data: ClassVar[Literal["rows", "columns"]] = "columns"

    @property
    def verbs(self) -> frozenset[str]:
        return frozenset({"gather"})

    def init(self, problem: Problem) -> State:
        assert problem.layout is not None and problem.shape == ()
        return State(Params.none(), slots={"widths": [shape[0] for shape in problem.layout.shapes if shape],
                                           "holders": list(problem.layout.label_holders)})  # fmt: skip

    async def round(self, fed: Federation, state: State) -> State:
        each = {party: {"width": width} for party, width in enumerate(state.slots["widths"])}
        got = await fed.gather(Read(self.what), {}, parties=fed.parties, each=each)
        return state.replace(read={str(p): r.tensors for p, r in zip(got.parties, got.replies, strict=True)})


@register("test-columns-evaluated")
@dataclass(frozen=True)
class Evaluated(Columnar):
    """Read what the parties hold, and evaluate."""

    async def evaluate(self, fed: Federation, state: State) -> dict[str, float]:
        return {"accuracy": 0.25}


def task(**changes: Any) -> Task:
    parties = [(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])), (torch.ones(4, 3), None)]
    given: dict[str, Any] = {"parties": parties, "ids": [[7, 17, 3], ["17", " 4", "5", "3 "]], **changes}
    return Task(**given)


TESTS = {
    "party_tests": [(torch.ones(1, 2), torch.zeros(1).long()), (torch.ones(2, 3), None)],
    "test_ids": [[8], [8, 9]],
}


def test_parties_have_columns_roles_and_ids_of_their_own() -> None:
    done = hansa.simulate(Columnar(), task(), rounds=1)
    assert done.state.slots["widths"] == [2, 3] and done.state.slots["holders"] == [0]
    read = done.state.slots["read"]
    assert torch.equal(read["0"]["x"], torch.arange(6.0).reshape(3, 2).double()) and read["1"]["x"].shape == (4, 3)
    assert read["0"]["ids"].tolist() == [7, 17, 3] and read["1"]["ids"].tolist() == [17, 4, 5, 3]
    assert "different columns of the same people" in repr(task())


def test_an_op_that_needs_targets_is_refused_by_a_party_without_labels() -> None:
    line = hansa.simulate(Columnar("samples"), task(), rounds=1).history[0]
    assert line["missing"] == {"1": "it has no labels, and this ask needs them"} and line["replies"] == 1


def test_rows_without_test_samples_are_refused() -> None:
    tests = {**TESTS, "test_ids": [[8], []], "party_tests": [TESTS["party_tests"][0], (torch.ones(0, 3), None)]}
    line = hansa.simulate(Evaluated("test features"), task(**tests), rounds=1).history[0]
    assert line["missing"] == {"1": "it has no test samples"} and line["accuracy"] == 0.25


LONG = [(torch.zeros(2, 1), torch.zeros(2))]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"ids": [[7, 7, 3], [1, 2, 3, 4]]}, r"ids\[0\]: two rows have the same id; an id names one row of a party"),
    ({"ids": [[7, 17], [1, 2, 3, 4]]}, r"ids\[0\]: 2 ids for 3 rows"),
    ({"ids": [[7, 17, 3]]}, "ids: expected one array of ids per party, 2 in all; got 1"),
    ({"ids": 5}, "ids: expected one array of ids per party, 2 in all; got no list"),
    ({"ids": [[0.5, 1.5, 2.5], [1, 2, 3, 4]]}, r"ids\[0\]: ids must be whole numbers or texts, got float64"),
    ({"ids": [["a", "", "b"], [1, 2, 3, 4]]}, r"ids\[0\]: a row has no id"),
    ({"ids": [[True, False, True], [1, 2, 3, 4]]}, "whole numbers or texts, got bool"),
    ({"ids": [[[7], [17], [3]], [1, 2, 3, 4]]}, r"the ids have the shape \(3, 1\)"),
    ({"parties": [(torch.ones(3, 2), None), (torch.ones(4, 3), None)]}, "none of them has labels"),
    ({"parties": [(torch.ones(3, 2), torch.ones(2)), (torch.ones(4, 3), None)]}, r"parties\[0\]: x has shape \(3, 2\)"),
    ({"parties": [torch.ones(3, 2), torch.ones(4, 3)]}, r"parties\[0\]: expected a pair \(x, y\)"),
    ({"parties": [(torch.ones(3, 2), torch.tensor([0, 1, 0.5])), (torch.ones(4, 3), None)]}, "whole class numbers"),
    ({"parties": [(torch.full((3, 2), torch.nan), torch.zeros(3)), (torch.ones(4, 3), None)]}, "missing values"),
    ({"parties": (torch.ones(3, 2), torch.ones(3), [0, 3])}, r"parties: give a list of \(x, y\), or \(x, None\)"),
    ({"model": lambda: nn.Linear(2, 2)}, "model: one model needs all columns"),
    ({"test": (torch.ones(3, 5), torch.zeros(3))}, "test: a central test set would need all columns"),
    ({"trusted": (torch.ones(3, 5), torch.zeros(3))}, "trusted: the aggregator's own samples would need all columns"),
    ({"party_tests": TESTS["party_tests"]}, "party_tests and test_ids belong together"),
    ({**TESTS, "test_ids": [[7], [8, 9]]}, r"party_tests\[0\]: a test row has the id of a training row"),
    ({**TESTS, "party_tests": [(torch.ones(1, 4), torch.zeros(1)), (torch.ones(2, 3), None)]}, "test samples are"),
    ({**TESTS, "party_tests": [(torch.ones(1, 2), None), (torch.ones(2, 3), None)]}, "labels for its training"),
    ({"ids": None}, r"parties\[1\] y is None; only parties with different columns \(ids=...\) may have no labels"),
    ({"ids": None, "parties": LONG, "test_ids": [[1]]}, "test_ids: only parties with different columns have them"),
    ({"classes": 2, "parties": [(torch.ones(3, 2), torch.tensor([0, 1, 2])), (torch.ones(4, 3), None)]}, "party '0'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "reason"), BAD)
def test_bad_vertical_data_get_one_sentence(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        task(**changes).holdings(Objective(None, "cross_entropy", 0))


def test_a_method_over_rows_refuses_columns_and_the_reverse() -> None:
    with pytest.raises(
        ConfigError, match=r"^fedavg trains on parties with the same columns, and these parties hold diff"
    ):
        hansa.simulate(hansa.FedAvg(), task())
    with pytest.raises(
        ConfigError, match=r"^test-columns trains on parties with different columns .* hold different rows"
    ):
        hansa.simulate(Columnar(), Task(parties=[(torch.ones(3, 2), torch.zeros(3))]))
    dataset = {"dataset": "breast-cancer"}
    with pytest.raises(ConfigError, match=r"^naive-bayes trains on parties with the same columns"):
        parse({"task": dataset, "algorithm": "naive-bayes", "partition": "columns"})
    with pytest.raises(ConfigError, match=r"^naive-bayes trains on parties with the same columns"):
        parse({"task": {"parties": ["a.csv"], "ids": "who"}, "algorithm": "naive-bayes"})
    for tables in ({}, {"partition": "iid"}):
        with pytest.raises(ConfigError, match=r"^test-columns trains on .*; use the partition 'columns', or give ids"):
            parse({"task": dataset, "algorithm": "test-columns", **tables})
    assert parse({"task": dataset, "algorithm": "test-columns", "partition": "columns"}).partition is not None

    @dataclass(frozen=True)
    class Training(Columnar):
        trains: ClassVar[bool] = True

    with pytest.raises(AlgorithmError, match="no common model to train; set trains = False"):
        hansa.simulate(Training(), task())


TREE: dict[str, Any] = {
    "task": {"dataset": "breast-cancer"},
    "algorithm": "test-columns-evaluated",
    "partition": "columns",
}


@pytest.mark.parametrize(
    ("table", "fields", "reason"),
    [("task", {"model": "logistic"}, "task.model: one model needs all columns"),
     ("task", {"trusted": 5}, "task.trusted: the aggregator's own samples"),
     ("task", {"ids": "who"}, "ids applies to parties as files"),
     ("adversary", {"name": "sign-flip"}, "adversary: attacks are simulated on parties with the same columns")],
)  # fmt: skip
def test_settings_that_need_all_columns_are_refused(table: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse({**TREE, table: {**TREE.get(table, {}), **fields}})


def test_a_data_set_with_a_test_set_needs_no_party_test() -> None:
    with pytest.raises(ConfigError, match=r"task.party_test: this data set has a test set, which is divided"):
        parse({**TREE, "task": {**TREE["task"], "party_test": 0.2}}).build_task()


def test_attacks_and_engines_for_equal_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match="adversary: attacks are simulated on parties with the same columns"):
        hansa.simulate(Columnar(), task(), adversary="sign-flip")
    for engine in ("stacked", "workers"):
        with pytest.raises(ConfigError, match=f"run.engine: '{engine}' is for parties with the same columns"):
            hansa.simulate(Columnar(), task(), rounds=1, engine=engine)
    with pytest.raises(AlgorithmError, match="no joined samples"):
        _ = task().holdings(Objective(None, "cross_entropy", 0)).train.x


def test_test_samples_that_no_method_would_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"test-columns does not evaluate its model \(Algorithm.evaluate\)"):
        hansa.simulate(Columnar(), task(**TESTS))
    done = hansa.simulate(Evaluated(), task(**TESTS), rounds=2, target=0.2, metric="accuracy")
    assert len(done.history) == 1 and not [name for name in done.history[0] if name.startswith("party_")]
    with pytest.raises(ConfigError, match="target, patience and keep need a test set"):
        hansa.simulate(Columnar(), task(), target=0.9)


def columns_of(name: str, done: hansa.Result) -> Tensor:
    tensor: Tensor = done.state.slots["read"][name]["x"]
    return tensor


def test_each_party_scales_its_own_columns_by_its_training_rows() -> None:
    x = torch.tensor([[1.0, 5.0, torch.nan], [3.0, 5.0, 2.0], [torch.nan, 5.0, 6.0], [5.0, 5.0, 4.0]])
    parties = [(torch.arange(6.0).reshape(3, 2), torch.zeros(3)), (x, None)]
    tests = {**TESTS, "party_tests": [TESTS["party_tests"][0], (torch.tensor([[3.0, 6.0, 4.0]] * 2), None)]}
    given = task(parties=parties, prepare=hansa.data.Standardise(), **tests)
    done = hansa.simulate(Evaluated(), given, rounds=1)
    z = (1.5) ** 0.5
    expected = torch.tensor([[-z, 0.0, 0.0], [0.0, 0.0, -z], [0.0, 0.0, z], [z, 0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(columns_of("1", done), expected, atol=1e-6)
    assert torch.allclose(columns_of("0", done).std(0, correction=0), torch.ones(2).double(), atol=1e-6)
    tested = hansa.simulate(Evaluated("test features"), given, rounds=1)
    assert torch.allclose(columns_of("1", tested), torch.tensor([[0.0, 1.0, 0.0]] * 2).double(), atol=1e-6)
    assert done.history[0]["bytes_up"] > 0


def test_a_preparation_for_equal_columns_is_refused() -> None:
    @dataclass(frozen=True)
    class Rows(Preparation):
        name: ClassVar[str] = "test-rows-only"

    with pytest.raises(
        ConfigError, match=r"task.prepare: 'test-rows-only' is learned by parties with the same columns"
    ):
        hansa.simulate(Columnar(), task(prepare=Rows()), rounds=1)


def test_a_run_with_other_ids_is_another_run(tmp_path: Path) -> None:
    def run(ids: Any, folder: str, **more: Any) -> hansa.Result:
        return hansa.simulate(Columnar(), task(ids=ids), run_dir=tmp_path / folder, rounds=1, **more)

    first = [[1, 2, 3], [1, 2, 3, 4]]
    run(first, "a")
    assert len(run(first, "a", resume=True).history) == 1
    with pytest.raises(ConfigError, match="data"):
        run([[1, 2, 4], [1, 2, 3, 4]], "a", resume=True)


def test_all_parties_hold_out_the_same_people() -> None:
    people = ids_of(np.arange(2000), 2000, "ids")
    mine, other = people[:1500], people[500:][::-1]
    chosen = set(mine[held_out(mine, 0.3, 4)].tolist())
    assert {one for one in other[held_out(other, 0.3, 4)].tolist() if int(one) < 1500} == {
        one for one in chosen if int(one) >= 500
    }
    assert len(chosen) == pytest.approx(450, abs=60)
    assert chosen != set(mine[held_out(mine, 0.3, 5)].tolist())


def files(tmp_path: Path, **changes: Any) -> Any:
    (tmp_path / "bank.csv").write_text("who,income,default\n" + "".join(f"{k},{k},{k % 2}\n" for k in range(8)))
    (tmp_path / "shop.csv").write_text("spent,items,who\n" + "".join(f"{k},1,{k}\n" for k in range(4, 14)))
    table = {"parties": ["bank.csv", "shop.csv"], "ids": "who", "target": "default", **changes}
    return parse({"task": table, "algorithm": "test-columns-evaluated"}, str(tmp_path))


def test_files_with_ids_make_parties_with_different_columns(tmp_path: Path) -> None:
    experiment = files(tmp_path, party_test=0.4)
    made = experiment.build_task()
    holdings = made.holdings(Objective(None, made.loss, 0))
    assert holdings.layout == ColumnLayout(((1,), (2,)), (0,)) and holdings.classes == 2
    assert [holdings.name(party) for party in range(2)] == ["bank", "shop"]
    train, tests = ([set(own.tolist()) for own in ids] for ids in (made.ids, made.test_ids))
    assert train[0] | tests[0] == {str(k) for k in range(8)} and not train[0] & tests[1] and not train[1] & tests[0]
    with pytest.raises(
        DataError, match=r"no file of task.parties has labels: none has the column 'churn' \(task.target\)"
    ):
        files(tmp_path, target="churn").build_task()
    tree = {**files(tmp_path).tree["task"]}
    del tree["target"]
    with pytest.raises(DataError, match=r"has labels: set task.target to the column that has them, one of .*default"):
        parse({"task": tree, "algorithm": "test-columns-evaluated"}, str(tmp_path)).build_task()


def test_vertical_data_have_a_picture_of_sizes_alone() -> None:
    rows, targets = held(task())
    assert [len(own) for own in rows] == [3, 4] and set(targets.tolist()) == {0.0}


def test_the_reference_engine_runs_columns_by_default() -> None:
    objective = Objective(None, "cross_entropy", 0)
    assert type(fastest(EngineInputs(objective, task().holdings(objective), 0))) is ReferenceEngine


def test_a_hash_of_the_samples_covers_the_ids() -> None:
    def digest(ids: Any) -> str:
        return task(ids=ids).holdings(Objective(None, "cross_entropy", 0)).gateway(1).copy().digest()

    assert digest([[7, 17, 3], [17, 4, 5, 3]]) == digest(task().ids) != digest([[7, 17, 3], [17, 4, 5, 33]])
