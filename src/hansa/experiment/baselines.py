"""Baselines of a run: the same model trained by each party alone, and on all training samples in one place.

*local-only*: each party trains the task's model on its own samples and shares nothing; it is `fedper` whose head is the
whole model. *centralised*: one place has all training samples (`task.pooled`), as no federation may. Both do as many
rounds as the run, with the local solver's learning rate, batch and epochs in each round, from the same initial model,
with the same preparation, and are measured on the same held-out samples. Both are simulations without attackers,
privacy, compression and selection.
"""

from __future__ import annotations

from typing import Any, Literal

from hansa.core.algorithm import Algorithm
from hansa.core.plain_data import build, field_types, to_config
from hansa.core.registry import lookup
from hansa.core.wrapper import unwrap
from hansa.plumbing.errors import ConfigError

Baseline = Literal["local-only", "centralised"]
BASELINES: tuple[Baseline, ...] = ("local-only", "centralised")
POOLED = "centralised"
PLAIN = ("sgd", "adam")  # local solvers that mean the same without a federation
EVERY_LAYER = 2**20  # more layers than a model has
# Settings of a run that its baselines share.
KEPT = ("rounds", "seed", "eval_every", "eval_parties", "metrics", "metric", "engine", "device", "precision", "compile",
        "reply_memory", "checkpoint_seconds")  # fmt: skip


def baseline(name: str, algorithm: Algorithm) -> Algorithm:
    """The algorithm of a baseline of an algorithm; a ConfigError if its parties train no common model."""
    local: Any = algorithm.parts().local
    if local is None or not algorithm.trains or algorithm.models == "several":
        raise ConfigError(
            f"baselines: the parties of {algorithm.name} train no common model, so none of them could train it alone; "
            "leave baselines out"
        )
    solver = unwrap(local)[1]
    if solver.name not in PLAIN:
        own, plain = field_types(type(solver)), field_types(lookup("local", "sgd"))
        solver = build("local", "sgd", **{field: getattr(solver, field) for field in plain if field in own})
    table = to_config(solver)
    made: Algorithm = (
        build("algorithm", "fedavg", local=table)
        if name == POOLED
        else build("algorithm", "fedper", local=table, layers=EVERY_LAYER)
    )
    return made
