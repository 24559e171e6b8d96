"""The small experiment on which the conformance checks run, and comparisons of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hansa.core.algorithm import Algorithm
from hansa.core.plain_data import to_config
from hansa.experiment.config import Experiment, parse
from hansa.experiment.tasks import load_data
from hansa.plumbing import codec
from hansa.run.result import Result
from hansa.run.simulate import simulate

PARTIES = 4
TREE: dict[str, Any] = {
    "task": {"dataset": "breast-cancer", "model": "logistic", "prepare": "standardise", "party_test": 0.2,
             "dtype": "float64", "trusted": 40},
    "partition": {"name": "quantity", "parties": PARTIES, "alpha": 1.0, "min_size": 20},
    "run": {"rounds": 3, "seed": 3,
            "devices": {"compute": {"name": "exponential", "mean": 0.1}, "latency": "exponential"}},
}  # fmt: skip
# The experiment for algorithms over columns: half of the rows are at all parties.
COLUMN_TREE: dict[str, Any] = {
    "task": {"dataset": "breast-cancer", "prepare": "standardise"},
    "partition": {"name": "columns", "parties": PARTIES, "overlap": 0.5},
    "run": TREE["run"],
}


def experiment_for(algorithm: Algorithm, **run: Any) -> Experiment:
    """The experiment of the checks with an algorithm; `run` replaces fields of its `[run]` table.

    An algorithm for several models gets two, which differ in their widths alone where it needs that. One that needs
    public samples gets some, and one over columns gets parties with different columns.
    """
    tree = COLUMN_TREE if algorithm.data == "columns" else TREE
    task = dict(tree["task"])
    if algorithm.models == "widths":
        del task["model"]
        task["models"] = {"small": {"name": "2nn", "hidden": 4}, "large": {"name": "2nn", "hidden": 6}}
    if algorithm.models == "several":
        del task["model"]
        task["models"] = {"small": "logistic", "large": {"name": "2nn", "hidden": 6}}
    if algorithm.uses_public:
        task["public"] = f"hansa.testing:{'public_pairs' if algorithm.public_targets else 'public_samples'}"
    return parse({**tree, "task": task, "algorithm": to_config(algorithm), "run": {**tree["run"], **run}})


def public_samples() -> Tensor:
    """The public samples of the checks, without targets."""
    return load_data(parse(TREE)).x[::20]


def public_pairs() -> tuple[Tensor, Tensor]:
    """The same samples with their targets."""
    data = load_data(parse(TREE))
    return data.x[::20], data.y[::20]


def simulated(experiment: Experiment, **settings: Any) -> Result:
    """Simulate an experiment; `settings` replace arguments of `hansa.simulate`."""
    return simulate(experiment.algorithm, experiment.build_task(), **{**experiment.settings(), **settings})


def published(result: Result) -> dict[str, Any]:
    """The final state of a run as a tree."""
    return result.state.tree()


def measured(history: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The metrics of each round."""
    times = ("seconds", "simulated_seconds")
    return [{k: v for k, v in line.items() if isinstance(v, float) and k not in times} for line in history]


def leaves(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [leaf for value in values for leaf in leaves(value)]


def finite(tree: Any) -> bool:
    """Whether all floating-point numbers of a tree are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in leaves(tree) if tensor.is_floating_point())


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees are equal to the last bit."""
    return codec.encode(a) == codec.encode(b)


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Whether the tensors of two trees have the same shapes and differ by at most `tolerance`."""
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=0, atol=tolerance) for x, y in pairs)
