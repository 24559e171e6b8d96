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
from hansa.plumbing.errors import ConfigError
from hansa.plumbing.functions import reference_of

VERSION = hansa.__version__


ROW = {"number": 0.0, "text": "", "date": "1970-01-01"}  # an example of a table's row
TYPES = {"number": "double", "text": "string", "date": "string"}


def example(about: dict[str, Any]) -> Any:
    """Example inputs: samples of the aggregator's own test set, or zeros; for a table, a frame with one row."""
    if "columns" in about:
        import pandas as pd

        return pd.DataFrame({name: [ROW[kind]] for name, kind in about["columns"]})
    samples, dtype = about["example"], np.dtype(about["features"])
    return np.array(samples, dtype=dtype) if samples else np.zeros((1, *about["shape"]), dtype=dtype)


def signature(model: SavedModel, samples: Any) -> Any:
    """The signature: samples in, a row of numbers per sample out, and `party` if each party has its own model.

    Samples are an array, or a table with named columns, in which any value may be missing.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema, TensorSpec

    out = model.predict(samples, party=0 if model.personal else None).cpu().numpy()
    extra = ParamSchema([ParamSpec("party", "long", 0)]) if model.personal else None
    inputs = (
        [TensorSpec(samples.dtype, (-1, *samples.shape[1:]))]
        if "columns" not in model.about
        else [ColSpec(TYPES[kind], name, required=False) for name, kind in model.about["columns"]]
    )
    return ModelSignature(Schema(inputs),
                          Schema([TensorSpec(out.dtype, (-1, *out.shape[1:]))]), extra)  # fmt: skip


def code_of(about: dict[str, Any], beside: str) -> list[str] | None:
    """The files or packages with the functions that make the models, if they are the user's own."""
    named = (*about.get("models", {"": about["model"]}).values(), about.get("loss"))
    references = [reference for setting in named if (reference := reference_of(setting)) is not None]
    tops = dict.fromkeys(reference.partition(":")[0].partition(".")[0] for reference in references)
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
