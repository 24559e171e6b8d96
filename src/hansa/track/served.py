"""A saved model as MLflow serves it: signature, example, and the code that a fresh process needs."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import hansa
from hansa.artifacts.saved_model import SavedModel
from hansa.core.errors import ConfigError

VERSION = hansa.__version__


def example(about: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Samples that show what goes in: of the aggregator's own test set, or zeros."""
    given, kind = about["example"], np.dtype(about["features"])
    return np.array(given, dtype=kind) if given else np.zeros((1, *about["shape"]), dtype=kind)


def signature(model: SavedModel, samples: np.ndarray[Any, Any]) -> Any:
    """Samples of one shape and type in, a row of numbers for each out; `party` where each has a model of its own."""
    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, ParamSpec, Schema, TensorSpec

    out = model.predict(samples, party=0 if model.personal else None).cpu().numpy()
    extra = ParamSchema([ParamSpec("party", "long", 0)]) if model.personal else None
    return ModelSignature(Schema([TensorSpec(samples.dtype, (-1, *samples.shape[1:]))]),
                          Schema([TensorSpec(out.dtype, (-1, *out.shape[1:]))]), extra)  # fmt: skip


def code_of(about: dict[str, Any], beside: str) -> list[str] | None:
    """The file, or the package, with the function that makes the model, where that is the user's own."""
    if not isinstance(about["model"], str):
        return None
    top = about["model"].partition(":")[0].partition(".")[0]
    if top == "hansa":
        return None
    for place in (os.getcwd(), beside):
        if place not in sys.path:
            sys.path.insert(0, place)
    found = importlib.util.find_spec(top)
    if found is None or found.origin is None:
        raise ConfigError(f"the module {top!r} has no file that could go with the model")
    origin = Path(found.origin)
    return [str(origin.parent if found.submodule_search_locations else origin)]
