"""What a party brings to a federation: its data, from a file or a function of its own, and the models it has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hansa.core.errors import ConfigError, DataError, HansaError, PartyError
from hansa.core.functions import is_function, load_function
from hansa.core.objective import Objective, count_numbers
from hansa.core.op import Party
from hansa.core.task import Known, PartyShards, check_outputs, tensor_of
from hansa.data.party_files import Header, aligned, read_party_file
from hansa.experiment.tasks import hold_out_one, make_model


class PartySamples(NamedTuple):
    """A party's samples: to train on, its own test, and the names of a CSV file's columns."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None = None
    header: Header = ()


NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool)  # fmt: skip


def read_samples(reference: str, target: str | None = None, test: str | None = None) -> PartySamples:
    """A party's samples: of a CSV or NPZ file, or of `"my_data:load"`, a function that returns (x, y) or, with a test
    set of the party's own, ((x, y), (x, y)). `test` is a file of test samples."""
    if test is not None:
        train, own, header = read_samples(reference, target)
        if own is not None:
            raise ConfigError(f"--test: {reference!r} returns test samples already; leave --test out")
        x, y, names = read_party_file(test, target)
        held = (aligned(x, names, header, f"--test: {test}: "), y)
        if held[0].shape[1:] != train[0].shape[1:]:
            raise DataError(
                f"--test: the samples of {test} are {tuple(held[0].shape[1:])}, and those of {reference} "
                f"{tuple(train[0].shape[1:])}"
            )
        return PartySamples(train, held, header)
    if Path(reference).suffix in (".csv", ".npz", ".gz") or ":" not in reference:
        x, y, header = read_party_file(reference, target)
        return PartySamples((x, y), None, header)
    if target is not None:
        raise ConfigError("--target names a column of a CSV file; a function returns x and y")
    function = load_function(reference, "--data", os.getcwd())
    try:
        given = function()
    except HansaError:
        raise
    except Exception as error:  # the party's own function: say what it said
        raise ConfigError(f"--data: {reference!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise DataError(f"--data: {reference!r} must return (x, y), or ((x, y), (test x, test y))")
    if isinstance(given[0], tuple) and len(given[0]) == 2 and _dimensions(given[0][0]) >= 2:
        return PartySamples(_pair(given[0], reference), _pair(given[1], reference))
    return PartySamples(_pair(given, reference))


def _dimensions(values: Any) -> int:
    """How many dimensions an array has; 0 for what is none."""
    try:
        return torch.as_tensor(values).dim()
    except (TypeError, ValueError, RuntimeError):
        return 0


def _pair(given: Any, reference: str) -> tuple[Tensor, Tensor]:
    try:
        x, y = (torch.as_tensor(values) for values in given)
    except (TypeError, ValueError, RuntimeError) as error:
        tensor_of(given[1], f"--data: {reference!r} y")  # which says what texts should be
        raise DataError(f"--data: {reference!r} returned something else than two arrays: {error}") from None
    if x.dim() < 2 or y.dim() < 1 or len(x) != len(y):
        raise DataError(
            f"--data: {reference!r} returned x {tuple(x.shape)} and y {tuple(y.shape)}; both need a row a sample"
        )
    for name, values in (("x", x), ("y", y)):
        if values.dtype not in NUMBERS:
            kind = str(values.dtype).removeprefix("torch.")
            raise DataError(
                f"--data: {reference!r} returned {name} as {kind}; give floating-point numbers, or whole ones as int64"
            )
    return x, y


def preparer(samples: PartySamples, parameters: int | None = None) -> Callable[[int, dict[str, Any], str], Party]:
    """Makes the party that a task describes, with these samples; each task sees them anew. A registered model, whose
    fields the job chooses, may have so many `parameters`: a larger one is refused before it takes memory."""

    def prepare(number: int, task: dict[str, Any], device: str) -> Party:
        train, test, header = PartySamples(*samples)
        if not task:  # before the task is settled: a party that can only describe its data
            return Party(number, Objective(None, "mse", 0), train, test, 0, header=header)
        wanted = tuple(task.get("header", ()))
        train = (aligned(train[0], header, wanted, ""), train[1])
        test = (aligned(test[0], header, wanted, ""), test[1]) if test is not None else None
        if task["party_test"] > 0 and test is None:
            train, test = hold_out_one(train, task["party_test"], task["seed"], number)
        shape = tuple(task["shape"])
        if tuple(train[0].shape[1:]) != shape:
            raise DataError(f"its samples are {tuple(train[0].shape[1:])}, and the job's {shape}")
        model = make_model(task["model"], task["dtype"], os.getcwd(), shape, task["outputs"])
        if model is not None and parameters is not None and not is_function(task["model"]):
            size = count_numbers(model)
            if size > parameters:
                raise PartyError(
                    f"its policy allows models of up to {parameters} parameters (limits.parameters in party.toml), and "
                    f"this one has {size}"
                )
        objective = Objective(model, task["loss"], task["seed"], device, task["bf16"])
        if "frozen" in task:  # as the aggregator has them: a model's function may read them from a file
            objective.take_frozen(task["frozen"])
        held = PartyShards([train], objective, "data", task["prepared"]).of(0)
        own = PartyShards([test], objective, "test data", task["prepared"]).of(0) if test is not None else None
        known = Known(1, None, shape, task["classes"])
        known.check_targets(held[1], "its ", tell=False)  # the aggregator reads the reason, and chooses the classes
        if own is not None:
            known.check_targets(own[1], "of its test samples, the ", tell=False)
        for x, y in (held, *([own] if own is not None else [])):
            whole = y.numel() > 0 and not y.is_floating_point()
            check_outputs(objective, torch.zeros_like(x[:1]), int(y.max()) + 1 if whole else task["classes"])
        return Party(number, objective, held, own, task["seed"])

    return prepare
