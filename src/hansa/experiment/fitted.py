"""Fit the transforms of a run to its model."""

from __future__ import annotations

import dataclasses

from hansa.core.algorithm import Algorithm
from hansa.experiment.settings import Run
from hansa.numerics.params import ParamSpec
from hansa.plumbing.errors import ConfigError
from hansa.transforms import Transform


def fitted(algorithm: Algorithm, run: Run, spec: ParamSpec) -> Run:
    """The run with transforms for the layers of its model; a ConfigError if they do not fit the model."""
    layers = algorithm.sent_layers(spec)
    changed: dict[str, Transform] = {}
    for setting in ("compress", "compress_down"):
        transform = getattr(run, setting)
        if transform is not None and algorithm.trains:
            try:
                changed[setting] = transform.of_model(layers)
            except ConfigError as error:
                raise ConfigError(f"run.{setting}: {error}") from None
    return dataclasses.replace(run, **changed) if changed else run  # type: ignore[arg-type]
