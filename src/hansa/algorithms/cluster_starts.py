"""The first models of clusters: random ones, or models from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.core.algorithm import Problem
from hansa.numerics import rng
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError

MODEL = "model.safetensors"  # in a run folder


def drawn_starts(problem: Problem, clusters: int, restarts: int) -> list[Tensor]:
    """Random models [k, d] for each restart. The first model of all is the initial one, as in FedAvg."""
    if clusters * restarts == 1:
        return [problem.initial.w.unsqueeze(0).clone()]
    assert problem.drawn is not None
    draw = problem.drawn
    starts = [
        torch.stack([draw(rng.key(problem.seed, "cluster", restart, c)).w for c in range(clusters)])
        for restart in range(restarts)
    ]
    starts[0][0] = problem.initial.w
    if clusters > 1 and bool((starts[0] == starts[0][0]).all()):
        raise ConfigError(
            "start = 'random': the function that makes the model gives it the same values every time, so all clusters "
            "would be equal; use start = 'spread', or give the first models (starts)"
        )
    return starts


def read_starts(paths: tuple[str, ...], clusters: int, problem: Problem) -> Tensor:
    """The models [k, d] of files that runs have saved: one per cluster, or one file of a run with k clusters."""
    models = torch.cat([_read(Path(path), problem) for path in paths])
    if len(models) != clusters:
        raise ConfigError(f"starts: {len(paths)} files have {len(models)} models, and algorithm.clusters is {clusters}")
    return models


def _read(path: Path, problem: Problem) -> Tensor:
    path = path / MODEL if path.is_dir() else path
    try:
        tree: Any = codec.decode(path.read_bytes())
        stored = tree["payload"]["model"]["w"] if "payload" in tree else tree["params"]
        if isinstance(stored, dict):
            names = [entry.name for entry in problem.spec.weights]
            stored = torch.cat([stored[name].reshape(-1) for name in names])
        models: Tensor = stored.reshape(-1, problem.spec.dim).to(problem.initial.w)
    except OSError as error:
        raise ConfigError(f"starts: {path} cannot be read: {error.strerror or error}") from None
    except (DataError, KeyError, TypeError, AttributeError, RuntimeError):
        raise ConfigError(f"starts: {path} has no model of this task that a run has saved") from None
    if not bool(torch.isfinite(models).all()):
        raise ConfigError(f"starts: the model in {path} has numbers that are not finite")
    return models
