"""Small experiments on handwritten digits, as files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hansa.report import toml


def digits(parties: int = 4, model: str = "logistic", partition: Mapping[str, Any] | None = None,
           algorithm: Mapping[str, Any] | None = None, **run: Any) -> str:  # fmt: skip
    """The text of an experiment; FedAvg unless the fields of an algorithm are given."""
    tree = {"task": {"dataset": "digits", "model": model},
            "partition": {"name": "iid", "parties": parties, **(partition or {})},
            "algorithm": {"name": "fedavg", **(algorithm or {})}, "run": run}  # fmt: skip
    return toml.dumps(tree)
