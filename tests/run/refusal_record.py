"""What is refused beside what: every algorithm with every setting, when a run begins and when a job is submitted.

    python tests/run/refusal_record.py    write the record anew, after a rule was added or dropped on purpose

`refusals.txt` has a line per setting and moment with the algorithms that are refused. The test compares it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import hansa.run.simulate
from every_op import quick
from hansa.core.registry import registered
from hansa.experiment.config import parse
from hansa.experiment.tasks import load_data
from hansa.net.aggregator.order import check_order
from hansa.net.transport.wire import Order
from hansa.plumbing.errors import HansaError
from hansa.testing.experiments import TREE, experiment_for

RECORD = Path(__file__).with_name("refusals.txt")
PARTIES = ["0", "1", "2", "3"]
FUNCTIONS = (
    "refusal_record:same",
    "refusal_record:normed",
    "hansa.testing:public_samples",
    "hansa.testing:public_pairs",
)
SMALL = {"key_bits": 1024}  # of encrypted sums


def same(sample: Any, key: Any) -> Any:
    return sample


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


class Begun(Exception):
    """The run passed all checks."""


def parts(kind: str) -> list[str]:
    """The parts of a kind that come with this package."""
    return [name for name, part in registered(kind).items() if part.__module__.startswith("hansa.")]


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings that are tried with each algorithm, by a name: tables that are merged into the experiment's."""

    def run(name: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return f"run {name}", {"run": fields}

    yield "nothing", {}
    for secure in parts("secure"):
        if secure == "ckks" and importlib.util.find_spec("tenseal") is None:
            continue
        small = SMALL if "paillier" in secure else {}
        yield f"secure {secure}", {"privacy": {"secure": {"name": secure, **small}}}
    central = {"name": "central", "sigma": 1.0, "clip": 1.0, "delta": 1e-5}
    plain = {"task": {"prepare": None}}
    alone = {"eval_parties": False}
    yield "central prepare", {"privacy": {"dp": central}, "run": alone}
    yield "central evaluated", {"privacy": {"dp": central}, **plain}
    yield "central", {"privacy": {"dp": central}, **plain, "run": alone}
    hidden = {"dp": {**central, "noise": "parties"}, "secure": "masking"}
    yield "central masking", {"privacy": hidden, **plain, "run": alone}
    yield "central quantile", {"privacy": {"dp": {**central, "quantile": 0.5}}, **plain, "run": alone}
    yield "central compress", {"privacy": {"dp": central}, **plain, "run": {**alone, "compress": "top-k"}}
    yield "dp-sgd", {"algorithm": {"local": {"name": "dp-sgd", "sigma": 1.0}}, **plain, "run": alone}
    yield "bound", {"privacy": {"bound": 1.0}}
    yield "bound masking", {"privacy": {"bound": 1.0, "secure": "masking"}}
    yield "bound compress", {"privacy": {"bound": 1.0}, "run": {"compress": "int8"}}
    yield "masking active", {"privacy": {"secure": {"name": "masking", "active": True}}}
    for name in parts("transform"):
        table: Any = name
        if name == "by-layer":
            table = {"name": name, "patterns": ["*weight", "*"], "transforms": ["int8", "identity"]}
        yield run(f"compress {name}", compress=table)
        yield run(f"compress_down {name}", compress_down=table)
        yield f"masking compress {name}", {"run": {"compress": table}, "privacy": {"secure": "masking"}}
    for name in parts("select"):
        yield run(f"select {name}", select=name)
        yield f"masking select {name}", {"run": {"select": name}, "privacy": {"secure": "masking"}}
    for kind in ("fusion", "local", "server"):
        for name in parts(kind):
            yield f"{kind} {name}", {"algorithm": {kind: name}}
    for name in parts("adversary"):
        yield f"adversary {name}", {"adversary": {"kind": name, "fraction": 0.25}}
    yield "drift noise", {"drift": {"name": "noise", "start": 2, "fraction": 0.5, "std": 0.1}}
    yield "drift leave", {"drift": {"name": "leave", "start": 2, "parties": [0]}}
    for prepare in parts("prepare"):
        yield f"prepare {prepare}", {"task": {"prepare": prepare}}
    for name, table in {
        "pooled": {"pooled": True}, "balanced": {"class_weight": "balanced"},
        "weighted classes": {"class_weight": [1.0, 2.0]},
        "augment": {"augment": "refusal_record:same"}, "public": {"public": 20}, "no trusted": {"trusted": None},
        "no party test": {"party_test": 0.0},
        "several models": {"model": None, "models": {"a": "logistic", "b": "2nn"}},
        "batch norm": {"model": "refusal_record:normed"}, "mse": {"loss": "mse"},
    }.items():  # fmt: skip
        yield f"task {name}", {"task": table}
    for name, fields in {
        "exact": {"sums": "exact"}, "half": {"cohort": 0.5}, "min_cohort": {"min_cohort": 3}, "quorum": {"quorum": 4},
        "quorum of half": {"cohort": 0.5, "quorum": 3}, "over_select": {"cohort": 0.5, "over_select": 0.5},
        "deadline": {"deadline": 5.0}, "max_norm": {"max_norm": 3.0}, "max_weight": {"max_weight": 50},
        "max_stats": {"max_stats": 1.0}, "worst": {"metric": "party_accuracy_mean", "target": 0.5},
        "membership": {"metric": "membership_auc"}, "forgetting": {"metric": "forgetting"},
        "patience": {"patience": 2}, "best": {"keep": "best"}, "alone": {"eval_parties": False, "patience": 2},
        "finetune": {"finetune": {"epochs": 1}}, "relays": {"devices": {"relays": {"name": "relays", "counts": [2]}}},
        "detect": {"detect": "page-hinkley"}, "local-only": {"baselines": ["local-only"]},
        "centralised": {"baselines": ["centralised"]}, "own": {"own": {PARTIES[0]: {"epochs": 2}}},
        "adacomm": {"pace": {"name": "adacomm", "tau0": 4, "interval": 2}},
        "random": {"pace": {"name": "random", "least": 1, "most": 2}},
        "late": {"deadline": 5.0, "late": "drop"},
        "by group": {"metrics": [{"name": "accuracy", "by": 0, "edges": [0.0]}]},
    }.items():  # fmt: skip
        yield run(name, **fields)


@functools.cache
def data() -> Any:
    return load_data(parse(TREE))


def begun(tree: dict[str, Any]) -> None:
    """All checks of a simulation before its first round."""
    experiment = parse(tree)
    hansa.simulate(experiment.algorithm, experiment.build_task(data()), **experiment.settings(), progress=False)


def submitted(tree: dict[str, Any]) -> None:
    """The checks of a job before its parties have described their data."""
    check_order(Order("job", tree), FUNCTIONS, PARTIES)


MOMENTS = {"begun": begun, "submitted": submitted}


def refusals(algorithms: list[str], every: int = 1) -> Iterator[tuple[str, str, str, str]]:
    """The setting, the moment, the algorithm and the sentence of every refusal.

    With `every`, each algorithm is tried with one of so many settings, another one than its neighbours.
    """

    def stop(*_: Any) -> Any:
        raise Begun

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["hansa.run.simulate"], "_train", stop)
        for number, name in enumerate(algorithms):
            base = experiment_for(quick(registered("algorithm")[name])).tree
            for setting, tables in list(settings())[number % every :: every]:
                tree = {k: {**base[k], **tables.get(k, {})} if k in base else tables[k] for k in {**base, **tables}}
                tree["task"] = {key: value for key, value in tree["task"].items() if value is not None}
                for moment, check in MOMENTS.items():
                    try:
                        check(tree)
                    except Begun:
                        pass
                    except HansaError as error:
                        yield setting, moment, name, str(error)


def ours() -> list[str]:
    """The algorithms of the record: those of this package that run with the installed extras."""
    missing = "hansa.vertical." if importlib.util.find_spec("rbcl") is None else "none"
    parts = registered("algorithm").items()
    return [
        name for name, part in parts if part.__module__.startswith("hansa.") and not part.__module__.startswith(missing)
    ]


def read() -> set[tuple[str, str, str]]:
    """The record: setting, moment and algorithm of every refusal; without what needs extras that are not here."""
    lines, known = (line.split(": ") for line in RECORD.read_text().splitlines()), {name for name, _ in settings()}
    every = {(setting, moment, name) for setting, moment, names in lines for name in names.split()}
    return {refusal for refusal in every if refusal[0] in known and refusal[2] in ours()}


if __name__ == "__main__":
    refused: dict[tuple[str, str], list[str]] = defaultdict(list)
    for setting, moment, name, _ in refusals(ours()):
        refused[setting, moment].append(name)
    RECORD.write_text("".join(f"{': '.join(key)}: {' '.join(sorted(names))}\n" for key, names in refused.items()))
