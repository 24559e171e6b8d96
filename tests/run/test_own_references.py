"""Parts of the user's own, named as "my_module:name" in files, in Python and in studies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hansa
from hansa.core.plain_data import build, from_config, to_config
from hansa.core.registry import lookup
from hansa.experiment.config import parse, read
from hansa.plumbing.errors import ConfigError
from hansa.plumbing.functions import only, searching
from hansa.run.resume import execute, resume

CODE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import hansa
from hansa import register
from hansa.core.quantities import ColumnValue
from hansa.data import Data
from hansa.data.dataset import Dataset
from hansa.data.partition import Partition, Iid
from hansa.fusion import WeightedMean
from hansa.local import SGD
from hansa.models.model import Model
from hansa.select import Uniform
from hansa.server import Descent
from hansa.transforms import Transform
from hansa.transforms.clip import Clip

CONSTANT = 3

@dataclass(frozen=True)
class Alg(hansa.FedAvg):
    """FedAvg under another name."""
    extra: int = 1

@register("local-of-references")
@dataclass(frozen=True)
class Local(SGD):
    """SGD under another name."""
    twist: ColumnValue = 1.0

    def __post_init__(self):
        if self.twist < 0:
            raise ValueError("twist is negative")

@dataclass(frozen=True)
class Fuse(WeightedMean):
    """The mean."""

@dataclass(frozen=True)
class Serve(Descent):
    """Descent."""

@dataclass(frozen=True)
class Select(Uniform):
    """Uniform."""

@dataclass(frozen=True)
class Pack(Clip):
    """Clip."""

@dataclass(frozen=True)
class Divide(Iid):
    """Iid."""

@dataclass(frozen=True)
class Rows(Dataset):
    """Rows of numbers."""
    rows: int = 60

    def load(self, data_dir=None):
        return load(self.rows)

@dataclass(frozen=True)
class Net(Model):
    """A linear model."""
    inputs: tuple[int, ...]
    outputs: int

    def __call__(self):
        return nn.Linear(self.inputs[0], self.outputs)

class NotAPart:
    pass

class NotFrozen(SGD):
    """SGD."""
    twist: float = 1.0

class Wide(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)

def load(rows=60):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    return Data(x=x, y=y, test=(x[:20], y[:20]), classes=2, parties=None, party_names=None, loss="cross_entropy")

def net():
    return nn.Linear(3, 2)

def doubled(output, target):
    return 2 * nn.functional.cross_entropy(output, target, reduction="none")
'''
NAMES: dict[str, Any] = {
    "task": {"dataset": "{m}:load", "model": "{m}:net"},
    "partition": {"name": "iid", "parties": 3},
    "algorithm": {"name": "fedavg", "local": {"name": "sgd", "lr": 0.5}},
    "run": {"rounds": 2, "engine": "reference"},
}


@pytest.fixture
def mine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A module of the user's beside the experiment, with a name of its own per test."""
    name = f"mine_{abs(hash(request.node.nodeid)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(CODE.replace("local-of-references", f"local-of-{name}"))
    before = list(sys.path)
    yield name
    sys.modules.pop(name, None)
    sys.path[:] = before


def tree(name: str, **tables: Any) -> dict[str, Any]:
    return json.loads(json.dumps({**NAMES, **tables}).replace("{m}", name))


def weights(experiment: hansa.experiment.config.Experiment, **more: Any) -> torch.Tensor:
    settings = {**experiment.settings(), **more}
    result = hansa.simulate(experiment.algorithm, experiment.build_task(), **settings)
    return torch.cat([value.flatten() for value in result.params.values()])


def test_every_kind_of_part_may_be_named_and_gives_the_bits_of_the_part_it_copies(mine: str, tmp_path: Path) -> None:
    plain = tree(mine, run={"rounds": 2, "engine": "reference", "compress": {"name": "clip", "clip": 0.5}})
    own = tree(
        mine,
        task={"dataset": {"name": "{m}:Rows", "rows": 60}, "model": "{m}:Net"},
        partition={"name": "{m}:Divide", "parties": 3},
        algorithm={"name": "{m}:Alg", "extra": 2, "local": {"name": "{m}:Local", "lr": 0.5}, "fusion": "{m}:Fuse",
                   "server": "{m}:Serve"},
        run={"rounds": 2, "engine": "reference", "select": "{m}:Select",
             "compress": {"name": "{m}:Pack", "clip": 0.5}},
    )  # fmt: skip
    experiment = parse(own, str(tmp_path))
    assert torch.equal(weights(parse(plain, str(tmp_path))), weights(experiment))
    config = to_config(experiment.algorithm)
    assert config["name"] == f"{mine}:Alg" and config["local"]["name"] == f"{mine}:Local" and config["extra"] == 2
    assert from_config("algorithm", json.loads(json.dumps(config)), "algorithm") == experiment.algorithm


def test_every_engine_takes_named_parts(mine: str, tmp_path: Path) -> None:
    experiment = parse(tree(mine, algorithm={"name": "{m}:Alg", "local": "{m}:Local"}), str(tmp_path))
    reference = weights(experiment)
    for engine in ("workers", "stacked"):
        assert torch.allclose(weights(experiment, engine=engine), reference, atol=1e-6)


def test_a_loss_may_be_named_and_counts_in_training_and_evaluation(mine: str, tmp_path: Path) -> None:
    table = {"dataset": "{m}:load", "model": "{m}:net"}
    run = {"rounds": 1, "engine": "reference"}
    slow = parse(tree(mine, task=table, run=run), str(tmp_path))
    fast = parse(tree(mine, task={**table, "loss": "{m}:doubled"}, run=run), str(tmp_path))
    half = parse(tree(mine, task=table, run=run, algorithm={"name": "fedavg", "local": {"name": "sgd", "lr": 1.0}}),
                 str(tmp_path))  # fmt: skip
    assert torch.allclose(weights(fast), weights(half)) and not torch.allclose(weights(fast), weights(slow))
    one, two = (hansa.simulate(e.algorithm, e.build_task(), **e.settings()).history[-1] for e in (half, fast))
    assert two["loss"] == pytest.approx(2 * one["loss"]) and two["accuracy"] == one["accuracy"]


def test_a_class_of_modules_takes_arguments_from_its_table_and_is_loaded_again(mine: str, tmp_path: Path) -> None:
    named = {"name": "{m}:Wide", "width": 5}
    path = tmp_path / "experiment.toml"
    path.write_text(
        f'[task]\ndataset = "{mine}:load"\nmodel = {{ name = "{mine}:Wide", width = 5 }}\n'
        '[partition]\nname = "iid"\nparties = 2\n[run]\nrounds = 1\n'
    )
    result = execute(read(path), tmp_path / "run")
    assert result.params["layers.0.weight"].shape == (5, 3)
    x = torch.ones(2, 3)
    assert torch.equal(hansa.load(tmp_path / "run").predict(x), result.predict(x))
    assert named["width"] == 5


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"task": {"dataset": "nowhere_at_all:load", "model": "logistic"}},
         r"task\.dataset: there is no module 'nowhere_at_all'; looked in .*, and among the installed packages"),
        ({"task": {"dataset": "{m}:laod", "model": "logistic"}}, "has no 'laod'; did you mean 'load'?"),
        ({"task": {"dataset": "{m}:CONSTANT", "model": "logistic"}}, "is of the type .int., neither a"),
        ({"task": {"dataset": {"name": "{m}:load", "row": 3}, "model": "logistic"}},
         "has no argument 'row'; it takes rows; did you mean 'rows'?"),
        ({"task": {"dataset": "{m}:load", "model": "{m}:Wide"}}, "needs width; give a table"),
        ({"task": {"dataset": "{m}:load", "model": "{m}:Fuse"}}, r"is of the kind .fusion.; every model is a class"),
        ({"algorithm": "{m}:NotAPart"}, "is a class of another kind; every algorithm is a class"),
        ({"algorithm": {"name": "fedavg", "local": "{m}:NotFrozen"}}, "is no frozen dataclass"),
        ({"algorithm": {"name": "fedavg", "local": {"name": "{m}:Local", "twist": -1}}}, "ValueError: twist is neg"),
        ({"algorithm": {"name": "fedavg", "local": {"name": "{m}:Local", "twits": 1}}}, "did you mean 'twist'?"),
        ({"algorithm": "{m}:a:b"}, "unknown algorithm"),
        ({"run": {"select": "{m}:Fuse"}}, "is of the kind .fusion.; every selector is a class"),
        ({"task": {"dataset": "{m}:load", "model": "logistic", "loss": "{m}:los"}}, "has no 'los'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(mine: str, tmp_path: Path, tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        weights(parse(tree(mine, **tables), str(tmp_path)))


def test_a_module_of_the_same_name_in_another_folder_is_refused(mine: str, tmp_path: Path) -> None:
    parse(tree(mine, algorithm="{m}:Alg"), str(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{mine}.py").write_text(CODE)
    with pytest.raises(ConfigError, match="has already imported the module"):
        parse(tree(mine, algorithm="{m}:Alg"), str(tmp_path / "other"))


def test_nothing_is_imported_that_is_not_listed(mine: str, tmp_path: Path) -> None:
    with searching(str(tmp_path)), only((f"{mine}:Local",), "is not listed"):
        for kind, name in (("local", f"{mine}:NotFrozen"), ("fusion", f"{mine}:Fuse"), ("op", "antigravity:fly")):
            with pytest.raises(ConfigError, match="is not listed"):
                lookup(kind, name)
        assert mine not in sys.modules and "antigravity" not in sys.modules
        assert build("local", f"{mine}:Local", twist=2).twist == 2.0


def test_a_part_in_python_needs_no_registration_and_does_not_take_its_bases_name() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Mine(hansa.SGD):
        """SGD."""

    assert Mine().name.endswith("Mine") and ":" in Mine().name and hansa.SGD().name == "sgd"


def test_a_run_records_the_code_and_resume_says_that_it_changed(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiment.toml").write_text(
        f'[task]\ndataset = "{mine}:load"\nmodel = "{mine}:net"\n[partition]\nname = "iid"\nparties = 2\n'
        f'[algorithm]\nname = "{mine}:Alg"\n[run]\nrounds = 2\n'
    )

    def stop(line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(read(tmp_path / "experiment.toml"), tmp_path / "run", stop)
    record = json.loads((tmp_path / "run" / "experiment.json").read_text())
    assert record["algorithm"]["name"] == f"{mine}:Alg" and set(record["code"]) == {mine}
    source = tmp_path / f"{mine}.py"
    source.write_text(source.read_text() + "\n# another line\n")
    sys.modules.pop(mine)
    with pytest.raises(ConfigError, match=f"begun with another code .{mine} was"):
        resume(tmp_path / "run")
    source.write_text(source.read_text().removesuffix("\n# another line\n"))
    sys.modules.pop(mine)
    assert resume(tmp_path / "run").history[-1]["round"] == 2


def test_a_study_compares_named_algorithms(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = hansa.compare(
        ["fedavg", f"{mine}:Alg", {"name": f"{mine}:Alg", "extra": 3, "local": f"{mine}:Local"}],
        dataset=f"{mine}:load", model=f"{mine}:net", partitions=[f"{mine}:Divide"], rounds=1, seeds=1, jobs=1,
        folder=tmp_path / "study",
    )  # fmt: skip
    assert [row["algorithm"] for row in results.rows()][:2] == ["fedavg", f"{mine}:Alg"]
