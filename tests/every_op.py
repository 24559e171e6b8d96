"""Simulations that together run every registered op that reads samples, on small data."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hansa
from hansa.core.op import Memory, Op, Party, Payload
from hansa.core.plain_data import to_config
from hansa.core.registry import registered
from hansa.data.describe import Describe
from hansa.data.statement import DataStatement
from hansa.experiment.config import parse
from hansa.holdings.gateway import SampleGateway
from hansa.models import Logistic
from hansa.numerics.objective import Objective
from hansa.sim.engine import Outcome, PartyWork, ReferenceEngine
from hansa.testing import TREE
from hansa.testing.experiments import COLUMN_TREE

HAS_RBCL = importlib.util.find_spec("rbcl") is not None  # without it, people cannot be matched
QUICK = {"key_bits": 1024, "max_depth": 2, "bins": 4, "trees": 4, "per_round": 2}  # settings of dear algorithms


def quick(part: Any) -> Any:
    """An algorithm with defaults, but for few and small trees and short keys."""
    return part(**{name: value for name, value in QUICK.items() if name in part.__dataclass_fields__})


def exercise(watch: Callable[[Op, Party, Payload, Memory], Outcome]) -> None:
    """Simulate all algorithms, selectors, preparations and masked sums; `watch` runs each op at each party."""

    def one(self: ReferenceEngine, op: Op, job: PartyWork, round: int) -> Outcome:
        return watch(op, self.party(job.party, round), job.payload, dict(job.memory))

    def simulate(**tables: Any) -> None:
        run = {"rounds": 1, "seed": 3, "engine": "reference", **tables.pop("run", {})}
        experiment = parse({**TREE, "algorithm": "fedavg", **tables, "run": run})
        hansa.simulate(experiment.algorithm, experiment.build_task(), **experiment.settings(), progress=False)

    plain = {name: value for name, value in TREE["task"].items() if name != "prepare"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceEngine, "one", one)
        for part in registered("algorithm").values():
            if getattr(part, "data", "rows") == "columns":
                if part.__module__.startswith("hansa.") and HAS_RBCL:
                    simulate(**COLUMN_TREE, algorithm=to_config(quick(part)))
            elif part.__module__.startswith("hansa."):
                kind = "public_pairs" if getattr(part, "public_targets", False) else "public_samples"
                public = {"public": f"hansa.testing:{kind}"} if getattr(part, "uses_public", False) else {}
                deep = {"model": {"name": "2nn", "hidden": 4}} if getattr(part, "models", "one") == "widths" else {}
                rounds = {"rounds": 3} if deep else {}  # FedMA sends the shares of classes in its last stage
                simulate(task={**TREE["task"], **public, **deep}, algorithm=to_config(part()), run=rounds)
        simulate(algorithm={"name": "boosting", "cuts": "sketch", "held_out": 0.3})
        simulate(algorithm={"name": "boosting", "cuts": "extents"})
        simulate(algorithm={"name": "boosting", "cuts": "pax"})
        simulate(task=plain, algorithm={"name": "boosting", "cuts": "public", "span": [-1, 1], "sigma": 1.0})
        simulate(algorithm={"name": "random-forest", "growth": "local", "trees": 10})
        numbers = hansa.Task(None, "mse", [(torch.tensor([[0.0, 1], [1, 2], [1, 3]]), torch.rand(3))] * 2)
        hansa.simulate(hansa.Boosting(categorical=(0,)), numbers, rounds=1, engine="reference", progress=False)
        simulate(algorithm={"name": "fsvrg", "form": "full"})
        simulate(algorithm={"name": "fednova", "local": {"name": "sgd"}})
        simulate(algorithm={"name": "prunefl", "interval": 1}, run={"rounds": 3})
        if HAS_RBCL:
            two = {**COLUMN_TREE["partition"], "parties": 2}
            simulate(**{**COLUMN_TREE, "partition": two}, algorithm={"name": "psi", "count": True})
        whole = {**COLUMN_TREE["partition"], "overlap": 1.0}
        simulate(**{**COLUMN_TREE, "partition": whole}, algorithm={"name": "split", "match": "same"})
        simulate(privacy={"bound": 1.0})
        simulate(run={"compress": "int8"})
        simulate(task={**TREE["task"], "class_weight": "balanced"})
        simulate(run={"finetune": {"epochs": 1}})
        simulate(run={"metrics": ["f1", {"name": "recall", "by": 0, "edges": [0]}]})
        for selector in ("power-of-choice", "weighted", "tiers"):
            simulate(run={"select": selector, "cohort": 0.75})
        for local in ("adam", "dp-sgd", "gradient"):
            simulate(task=plain, algorithm={"name": "fedavg", "local": {"name": local}})
        simulate(privacy={"secure": {"name": "masking"}})
        columns = {"a": [1.0, 2.0, 4.0], "b": ["x", "y", "x"], "c": [1.0, 2.0, 4.0]}
        options = {"b": {"min_count": 1}, "c": {"bins": 2, "bounds": [0, 4]}}
        table = hansa.Task(Logistic((3,), 2), parties=[(columns, [0, 1, 0])] * 2,
                           prepare=hansa.ColumnTransformer(columns=options))  # fmt: skip
        hansa.simulate(hansa.FedAvg(), table, rounds=1, engine="reference", progress=False)
        simulate(
            task=plain, privacy={"dp": {"name": "central", "sigma": 1.0, "clip": 1.0}}, run={"eval_parties": False}
        )
    x = torch.ones(4, 2)
    describes = Party(0, Objective(None, "mse", 0), SampleGateway((x, x[:, 0]), (x, x[:, 0])), 0)
    describes.data.stated = DataStatement((2,), "numbers", tests=True)
    watch(Describe(), describes, {}, {})
