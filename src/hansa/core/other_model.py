"""Models of another architecture than the task's, as methods make them that match neurons (PFNM, FedMA).

Such a model is a registered model part and its parameters. The part's fields travel with the parameters, so that every
place that evaluates, saves or loads the model can build it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hansa.core.plain_data import from_config, to_config
from hansa.core.registry import Part
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params
from hansa.plumbing.errors import ConfigError, DataError
from hansa.plumbing.functions import double

ARCHITECTURE = "architecture"  # in a payload: the fields of the model part


@dataclass(frozen=True)
class OtherModel:
    """A trained model that is not the task's: a registered part of the kind "model", and its parameters."""

    architecture: Part
    params: Params

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, Part) or self.architecture.kind != "model":
            raise ConfigError(f"OtherModel: expected a registered model, got {self.architecture!r:.80}")

    @classmethod
    def of(cls, architecture: Part, tensors: Mapping[str, torch.Tensor]) -> OtherModel:
        """The model with these tensors by name: parameters and buffers, as in `nn.Module.state_dict`."""
        config = to_config(cls(architecture, Params.none()).architecture)
        objective = _objective(config, "mse", "cpu", False, _dtype(tensors))
        spec = objective.spec
        groups = (spec.weights, spec.stats, spec.counts)
        expected = {entry.name: entry.shape for group in groups for entry in group}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected:
            raise ConfigError(f"OtherModel: the model {architecture.name!r} has the tensors {expected}, got {shapes}")
        vectors = [
            spec.joined(group, dict(tensors), like) for group, like in zip(groups, objective.initial, strict=True)
        ]
        return cls(architecture, Params(*vectors))

    def payload(self) -> dict[str, Any]:
        """The payload of the predictor "network"."""
        return {"model": self.params._asdict(), ARCHITECTURE: to_config(self.architecture)}

    def objective(self, task: Objective) -> Objective:
        """The objective of this model, with the loss and the device of the task."""
        return objective_of(task, self.payload())


def described(payload: Any) -> Iterator[Any]:
    """The architectures that a payload describes: its own, and those of the payloads inside it (of `finetuned`)."""
    while isinstance(payload, Mapping):
        if ARCHITECTURE in payload:
            yield payload[ARCHITECTURE]
        payload = payload.get("payload")


def objective_of(task: Objective, payload: Mapping[str, Any]) -> Objective:
    """The objective for a payload: the task's, or that of another architecture.

    A DataError if the parameters do not fit the architecture.
    """
    if ARCHITECTURE not in payload:
        return task
    config, params = payload[ARCHITECTURE], Params(**payload["model"])
    if not isinstance(config, Mapping):
        raise DataError("invalid architecture: expected the fields of a registered model")
    objective = _objective(config, task.loss, str(task.device), task.bf16, params.w.dtype)
    if [vector.shape for vector in params] != [vector.shape for vector in objective.initial]:
        raise DataError(f"the parameters do not fit the model {config.get('name')!r}: {len(params.w)} parameters")
    return objective


def _objective(config: Mapping[str, Any], loss: Any, device: str, bf16: bool, dtype: torch.dtype) -> Objective:
    part: Callable[[], nn.Module] = from_config("model", config, where=ARCHITECTURE)
    make = functools.partial(double, part) if dtype == torch.float64 else part
    objective = Objective(make, loss, 0, device, bf16)
    if objective.spec.frozen:
        raise ConfigError(f"{ARCHITECTURE}: a model with frozen parameters must be the task's model")
    return objective


def _dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type of the parameters."""
    return next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
