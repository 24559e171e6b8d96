"""What MLflow needs to serve a saved model: signature, example, and the user's own code."""

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
    """Example inputs: samples of the aggregator's own test set, or zeros."""
    samples, dtype = about["example"], np.dtype(about["features"])
    return np.array(samples, dtype=dtype) if samples else np.zeros((1, *about["shape"]), dtype=dtype)


def signature(model: SavedModel, samples: np.ndarray[Any, Any]) -> Any:
    """The signature: samples in, a row of numbers per sample out, and `party` if each party has its own model."""
    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, ParamSpec, Schema, TensorSpec

    out = model.predict(samples, party=0 if model.personal else None).cpu().numpy()
    extra = ParamSchema([ParamSpec("party", "long", 0)]) if model.personal else None
    return ModelSignature(Schema([TensorSpec(samples.dtype, (-1, *samples.shape[1:]))]),
                          Schema([TensorSpec(out.dtype, (-1, *out.shape[1:]))]), extra)  # fmt: skip


def code_of(about: dict[str, Any], beside: str) -> list[str] | None:
    """The files or packages with the functions that make the models, if they are the user's own."""
    models = about.get("models", {"": about["model"]}).values()
    tops = dict.fromkeys(model.partition(":")[0].partition(".")[0] for model in models if isinstance(model, str))
    for folder in (os.getcwd(), beside):
        if folder not in sys.path and tops:
            sys.path.insert(0, folder)
    return [_file_of(top) for top in tops if top != "hansa"] or None


def _file_of(top: str) -> str:
    """The file of a module, or the folder of a package."""
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the module {top!r} has no file to store with the model")
    origin = Path(spec.origin)
    return str(origin.parent if spec.submodule_search_locations else origin)
