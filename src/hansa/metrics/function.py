"""Metrics of the user's own: a function of targets and predictions, or a metric class, named as "my_module:name"."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hansa.core.metric_ranges import MOST
from hansa.core.registry import read_values, register
from hansa.metrics.metric import Combines, Metric, Takes, ratio
from hansa.metrics.predictions import Predictions
from hansa.plumbing.errors import ConfigError, DataError, HansaError, PartyError
from hansa.plumbing.functions import is_function, load_function

MAIN = "__main__"


@register("function")
@dataclass(frozen=True)
class FunctionMetric(Metric):
    """A function of your own, called with two arrays: the targets and the predictions.

    `function` is its name, "my_module:function"; "sklearn.metrics:cohen_kappa_score" works too. `gives` says what the
    predictions are: "classes" (for numbers, the numbers), or "scores" (the probability of class 1; with more classes a
    row of probabilities per sample). `better` says whether a "higher" or a "lower" value is better. Over a federation
    the metric is the mean of the parties' values, weighted by their test samples. A party where the function raises a
    ValueError, or gives no finite number (one class alone, say), is left out of the mean.
    """

    combines: ClassVar[Combines] = "mean"
    limits: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    function: str = ""
    gives: Literal["classes", "scores"] = "classes"
    better: Literal["higher", "lower"] = "higher"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_function(self.function):
            raise ConfigError(f"function must be named as 'my_module:function', got {self.function!r}")

    @property
    def higher(self) -> bool:  # type: ignore[override]
        return self.better == "higher"

    @property
    def takes(self) -> Takes:  # type: ignore[override]
        return "probabilities" if self.gives == "scores" else "any"

    @property
    def key(self) -> str:
        if self.label is not None:
            return super().key
        name = self.function.partition(":")[2].replace(".", "_")
        return super().key.replace(self.name, name, 1)

    @property
    def counted(self) -> str:
        return f"{self.function} of {self.gives}"

    def shape(self, classes: int) -> tuple[int, ...]:
        return (2,)

    def counts(self, predictions: Predictions) -> Tensor:
        value = self._called(predictions)
        if value is None or not math.isfinite(value):
            return torch.zeros(2, dtype=torch.float64)
        n = float(len(predictions))
        return torch.tensor([value * n, n], dtype=torch.float64)

    def _called(self, predictions: Predictions) -> float | None:
        if not len(predictions):
            return None
        given = predictions.scores if self.gives == "scores" else predictions.predicted
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # scikit-learn warns of what is undefined for one class
                value = loaded(self.function)(predictions.target.cpu().numpy(), given.cpu().numpy())
        except HansaError:
            raise
        except ValueError:  # undefined for these samples, as scikit-learn says it
            return None
        except Exception as error:  # the user's own function: its message may quote samples
            raise PartyError(f"the metric {self.function!r} failed: {type(error).__name__}") from error
        try:
            return None if value is None else float(value + 0)  # a text of a number is no number
        except (TypeError, ValueError):
            raise PartyError(
                f"the metric {self.function!r} must return one number, and returned {type(value).__name__}"
            ) from None

    def samples(self, counts: Tensor) -> float:
        if float(counts[1]) < 0 or abs(float(counts[0])) > MOST:
            raise DataError("its values are impossible")
        return float(counts[1])

    def value(self, counts: Tensor) -> float | None:
        return ratio(float(counts[0]), float(counts[1]))


@functools.cache
def loaded(reference: str) -> Callable[..., Any]:
    """The function of that name."""
    module, _, name = reference.partition(":")
    if module == MAIN:  # a script or a notebook
        function = getattr(sys.modules[MAIN], name, None)
        if function is None:
            raise ConfigError(f"run.metrics: this script has no function {name!r}")
        return function  # type: ignore[no-any-return]
    return load_function(reference, "run.metrics", os.getcwd())


def functions(metrics: tuple[Metric, ...]) -> list[str]:
    """The functions that metrics name."""
    return [metric.function for metric in metrics if isinstance(metric, FunctionMetric)]


def distinct(metrics: tuple[Metric, ...], where: str) -> None:
    """Raise a ConfigError for two metrics of the same name."""
    keys = [metric.key for metric in metrics]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: two metrics are called {twice!r}; give one of them a label")


@read_values("metric")
def _read(value: Any) -> Any:
    """A function of the user's own, or its name, as a table; a metric class as a part."""
    if inspect.isclass(value) and issubclass(value, Metric):
        return value()
    if callable(value) and not isinstance(value, Metric):
        value = _reference(value)
    return {"name": "function", "function": value} if is_function(value) else value


def _reference(function: Any) -> str:
    """The name by which other processes find a function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module is None or "<" in name or getattr(sys.modules.get(module), name, None) is not function:
        raise ConfigError(
            f"the metric {function!r} must be a function of a module, so that other processes find it by name"
        )
    return f"{module}:{name}"
