"""A trained model without the run that made it: what `model.safetensors` needs beside it to predict, and that done.

`model.json` of a run's folder says how the model is made (a registered one by its fields, a function by its name), what
a sample looks like and, where the aggregator has a test set of its own, two samples of it; it has no party's samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hansa.core import codec
from hansa.core.errors import ConfigError, DataError
from hansa.core.federation import op_of
from hansa.core.objective import Objective
from hansa.core.op import DataOp, Payload
from hansa.core.params import Params
from hansa.core.predictor import Predictor
from hansa.core.registry import Part, build, from_config, to_config
from hansa.core.task import Known, Task
from hansa.run.config import double, load_function
from hansa.run.store import MODEL, PERSONAL, SERVING, read_json

EXAMPLES = 2  # samples that show what goes in
SMALL = 10_000  # numbers of them, at most


def describe(task: Task, objective: Objective, holdings: Known, seed: int) -> dict[str, Any]:
    """What a saved model needs beside its tensors, as plain data."""
    example = None
    if task.test is not None and math.prod(holdings.shape) * EXAMPLES <= SMALL:
        example = torch.as_tensor(task.test[0][:EXAMPLES]).tolist()
    features = holdings.test[0].dtype if holdings.test is not None else _features(holdings, objective)
    return {
        "model": named(task.model), "dtype": str(objective.dtype).removeprefix("torch."), "seed": seed,
        "loss": objective.loss if isinstance(objective.loss, str) else None, "bf16": objective.bf16,
        "shape": list(holdings.shape), "features": str(features).removeprefix("torch."),
        "classes": holdings.classes, "parties": len(holdings), "example": example,
    }  # fmt: skip


def _features(holdings: Known, objective: Objective) -> torch.dtype:
    train = getattr(holdings, "train", None)
    return objective.dtype if train is None else train.x.dtype  # type: ignore[no-any-return]


def named(model: Callable[[], nn.Module] | None) -> dict[str, Any] | str | None:
    """How another process can make a model: a registered one by its fields, a function of a module by its name; None
    where it cannot (a lambda, a function of a notebook), or where there is no model."""
    if isinstance(model, functools.partial) and model.func is double:
        model = model.args[0]
    if isinstance(model, Part):
        return to_config(model)
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "<")
    return None if module in (None, "__main__") or "<" in name or "." in name else f"{module}:{name}"


def predict(objective: Objective, predictor: Predictor, payload: Payload,
            preparation: tuple[DataOp, Payload] | None, x: Any) -> Tensor:  # fmt: skip
    """Outputs for samples as they came, which are prepared as in training."""
    samples = torch.as_tensor(x, device=objective.device)
    if samples.is_floating_point() and objective.module is not None:
        samples = samples.to(objective.dtype)
    if preparation is not None:
        op, learned = preparation
        samples = op.transform(samples, learned)
    return predictor.outputs(objective, payload, samples)


@dataclass
class Saved:
    """A model read back: `predict` gives what the run's own `result.predict` gives."""

    about: dict[str, Any]
    predictor: Predictor
    objective: Objective
    payload: Payload
    preparation: tuple[DataOp, Payload] | None
    memories: Mapping[str, Any]

    @property
    def personal(self) -> bool:
        return self.predictor.personal

    def predict(self, x: Any, party: int | None = None) -> Tensor:
        """Outputs (class scores, or values) for samples; `party` says whose model, where each has one of its own."""
        payload = self.payload
        if self.predictor.personal:
            if party is None or party not in range(self.about["parties"]):
                raise ConfigError(
                    f"each party has a model of its own: say whose, from party=0 to party={self.about['parties'] - 1}"
                )
            payload = self.predictor.own(self.objective, payload, dict(self.memories.get(str(party), {})))
        return predict(self.objective, self.predictor, payload, self.preparation, x)


def load(folder: str | Path, beside: str = ".") -> Saved:
    """The final model of a run's folder, or of one with its files of the model alone; functions that make models are
    looked for `beside` as well."""
    folder = Path(folder)
    about = read_json(folder / SERVING)
    try:
        tree = codec.decode((folder / MODEL).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {MODEL}: the run has not finished") from None
    except DataError as error:
        raise DataError(f"{folder / MODEL} is damaged: {error}") from None
    objective = Objective(_factory(about, tree, beside), about["loss"] or "mse", about["seed"], bf16=about["bf16"])
    payload = tree["payload"] if "payload" in tree else {"model": _params(objective, tree["params"])._asdict()}
    preparation = None
    if "preparation" in tree:
        op = op_of(tree["preparation"]["op"], "preparation")
        if not isinstance(op, DataOp):
            raise DataError(f"{folder / MODEL} is damaged: its preparation is no preparation")
        preparation = (op, tree["preparation"]["payload"])
    memories = codec.decode((folder / PERSONAL).read_bytes()) if (folder / PERSONAL).exists() else {}
    return Saved(about, build("predictor", tree["predictor"]), objective, payload, preparation, memories)


def _factory(about: dict[str, Any], tree: dict[str, Any], beside: str) -> Callable[[], nn.Module] | None:
    model = about["model"]
    if model is None:
        if "params" in tree or tree["predictor"] == "personal":
            raise ConfigError(
                "the model's function is a lambda, or of a notebook or script, so no other process can make the model; "
                "define it in a module of its own"
            )
        return None
    made: Callable[[], nn.Module]
    made = load_function(model, "model", beside) if isinstance(model, str) else from_config("model", model, "model")
    return functools.partial(double, made) if about["dtype"] == "float64" else made


def _params(objective: Objective, tensors: dict[str, Tensor]) -> Params:
    module = objective.network()
    module.load_state_dict({**module.state_dict(), **tensors})
    return objective.spec.flatten(module)
