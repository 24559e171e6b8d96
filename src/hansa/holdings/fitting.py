"""Samples as users give them become tensors that fit the model and the loss; a DataError says what does not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hansa.holdings.stored_rows import ArrayRows, Features, StoredRows, blocks, joined, stored, whole
from hansa.numerics.objective import Objective, kept_generator
from hansa.plumbing.errors import DataError, HansaError
from hansa.plumbing.functions import is_function

F = TypeVar("F", Tensor, Features)


def kept_features(values: Any, where: str) -> Features:
    """Features as a tensor; a memory-mapped array stays in its file."""
    if stored(values):
        return values if isinstance(values, StoredRows) else StoredRows([ArrayRows(values, where)])
    return tensor_of(values, where)


def tensor_of(values: Any, where: str) -> Tensor:
    """Convert an array of numbers to a tensor; a DataError for anything else. Rows in files are read."""
    if isinstance(values, StoredRows):
        return whole(values)
    if isinstance(values, Tensor):
        return values.detach()
    if values is None:
        raise DataError(f"{where} is None; only parties with different columns (ids=...) may have no labels")
    try:
        values = np.array(values) if isinstance(values, np.memmap) else np.asarray(values)
        text = values.dtype.kind in "USO" and values.size and isinstance(values.flat[0], str)
        if text and where.endswith("y"):
            raise DataError(
                f"{where}: the targets are strings such as {str(values.flat[0])[:40]!r}; give class numbers from 0, "
                "the same at every party"
            )
        return torch.from_numpy(np.ascontiguousarray(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: not an array of numbers ({error})") from None


def cast(x: Any, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Samples as a user has them, on a device; features with fractions in a model's type, if it has one."""
    samples = torch.as_tensor(x, device=device)
    return samples.to(dtype) if samples.is_floating_point() and dtype is not None else samples


def check_pair(x: Features, y: Tensor, where: str) -> None:
    """Raise a DataError if x and y do not have one row per sample each."""
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        raise DataError(f"{where}: x has shape {tuple(x.shape)} and y {tuple(y.shape)}; both need one row per sample")


@torch.no_grad()
def output_of(module: nn.Module, x: Tensor) -> Any:
    """The output of a model for samples; None if the model fails on them."""
    training = module.training
    try:
        with kept_generator():
            return module.eval()(x)
    except HansaError:
        raise
    except Exception:  # the user's own model: training will raise its error
        return None
    finally:
        module.train(training)


def check_outputs(objective: Objective, x: Tensor, classes: int | None) -> None:
    """Raise a DataError if the model has fewer outputs per sample than there are classes."""
    if objective.loss != "cross_entropy" or classes is None or objective.module is None or len(x) == 0:
        return
    output = output_of(objective.module, x)
    if isinstance(output, Tensor) and output.dim() > 1 and output.shape[-1] < classes:
        raise DataError(
            f"the model gives {output.shape[-1]} outputs for a sample, and there are {classes} classes; give it one "
            "output per class, or number the classes from 0 without gaps"
        )


def join_targets(tensors: list[Tensor], where: str) -> Tensor:
    """The targets of all parties, one after another."""
    return torch.cat(_fitting(tensors, where))


def join_features(parts: list[Features], where: str) -> Features:
    """The features of all parties, one after another; in files if those of some party are."""
    rows = _fitting(parts, where)
    tensors = [part for part in rows if isinstance(part, Tensor)]
    return torch.cat(tensors) if len(tensors) == len(rows) else joined(rows, where)


def _fitting(parts: list[F], where: str) -> list[F]:
    """The samples of the parties that have some; a DataError if their shapes differ."""
    rows = [part for part in parts if len(part)] or parts[:1]
    shapes = {tuple(part.shape[1:]) for part in rows}
    if len(shapes) > 1:
        raise DataError(f"{where}: parties disagree on the shape of a sample: {sorted(shapes)}")
    return rows


def fit_samples(x: F, y: Tensor, objective: Objective, where: str, prepared: bool,
         owner: Callable[[int], str] = lambda row: "") -> tuple[F, Tensor]:  # fmt: skip
    """Features in the model's type and targets in the loss's type, on the objective's device.

    Without a model, targets that are numbers take the type of the features, so that they lose no digits. Integer
    features (such as characters) stay integers if the model takes them, unless a preparation changes them.
    `owner` names the party that holds a row, for error messages.
    """
    module, real = objective.module, x.is_floating_point()
    if module is not None:
        if real or x.dtype == torch.uint8 or prepared:
            x = x.to(objective.dtype)
        elif len(x):
            check_whole_features(objective, torch.zeros_like(x[:1]), where)
    if real:
        checked = 0
        for block in blocks(x):
            check_features(block, where, prepared, functools.partial(_later, owner, checked))
            checked += len(block)
    y = fit_targets(y, objective, where, owner, x.dtype if real and module is None else None)
    if objective.loss == "cross_entropy" and y.dim() == 2 and len(x) and looks_one_hot(y):
        output = None if module is None else output_of(module, x[:1].to(objective.device))
        if not isinstance(output, Tensor) or output.shape[:-1].numel() != y.shape[1]:
            raise DataError(f"{where}: the targets {ONE_HOT}")
    return x.to(objective.device), y.to(objective.device)


def check_whole_features(objective: Objective, x: Tensor, where: str) -> None:
    """Raise a DataError if the model takes samples like this one, of whole numbers, as real numbers alone."""
    module, first = objective.module, x.to(objective.device)
    assert module is not None
    if output_of(module, first) is None and output_of(module, first.to(objective.dtype)) is not None:
        raise DataError(f"{where}: the model takes no whole numbers as features; give them as floating-point numbers")


def clamped(x: F, dtype: torch.dtype) -> F:
    """Numbers in another type; those beyond its largest finite one become that one. NaN stays."""
    if not x.is_floating_point() or torch.finfo(x.dtype).max <= torch.finfo(dtype).max:
        return x.to(dtype)
    most = torch.finfo(dtype).max
    return (x.clamp(-most, most) if isinstance(x, Tensor) else x.then(lambda rows: rows.clamp(-most, most))).to(dtype)


def _later(owner: Callable[[int], str], first: int, row: int) -> str:
    """`owner` of a row of a block that begins with the row `first`."""
    return owner(first + row)


ONE_HOT = "look one-hot; give the class number of each sample, as in y.argmax(1)"


def looks_one_hot(y: Tensor) -> bool:
    """Whether each row of a matrix has a single 1 among zeros."""
    return y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())


def check_features(x: Tensor, where: str, prepared: bool, owner: Callable[[int], str]) -> None:
    """Raise a DataError for infinite features, and for missing ones (NaN) without a preparation that fills them in."""
    if x.numel() == 0 or all(bool(torch.isfinite(end)) for end in torch.aminmax(x)):
        return
    bad = x.isinf().flatten(1).any(1) if x.dim() > 1 else x.isinf()
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise DataError(
            f"{where}: the features{owner(row)} have values that are infinite or too large for {str(x.dtype)[6:]}; "
            "correct them, or mark them as missing (NaN)"
        )
    if not prepared:
        row = int((x.isnan().flatten(1).any(1) if x.dim() > 1 else x.isnan()).nonzero()[0, 0])
        raise DataError(
            f"{where}: the features{owner(row)} have missing values (NaN); give the task prepare=Standardise() "
            "(task.prepare = 'standardise')"
        )


def fit_targets(y: Tensor, objective: Objective, where: str, owner: Callable[[int], str] = lambda row: "",
                dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """Targets in the type of the loss; a column of targets becomes a vector. Numbers have `dtype`, or the model's."""
    loss, dtype = objective.loss, dtype or objective.dtype
    if y.is_floating_point() and y.numel() and not bool(torch.isfinite(y).all()):
        bad = ~torch.isfinite(y).flatten(1).all(1) if y.dim() > 1 else ~torch.isfinite(y)
        raise DataError(
            f"{where}: targets{owner(int(bad.nonzero()[0, 0]))} are NaN or infinite; leave those samples out"
        )
    if loss == "cross_entropy" and y.is_floating_point() and not torch.equal(y, y.round()):
        raise DataError(f"{where}: cross_entropy needs whole class numbers as targets")
    y = typed_targets(y, objective, dtype)
    if loss == "bce" and y.numel() and not bool(((y >= 0) & (y <= 1)).all()):
        raise DataError(f"{where}: bce needs targets from 0 to 1; for more classes use cross_entropy")
    return y


def typed_targets(y: Tensor, objective: Objective, dtype: torch.dtype | None = None) -> Tensor:
    """As `fit_targets`, for targets that are known to fit the loss: no check depends on a value."""
    loss, dtype = objective.loss, dtype or objective.dtype
    if not isinstance(loss, str) or is_function(loss):
        return clamped(y, dtype) if y.is_floating_point() else y
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    return y.to(torch.int64) if loss == "cross_entropy" else clamped(y, dtype)


def typed_samples(x: F, y: Tensor, objective: Objective, prepared: bool) -> tuple[F, Tensor]:
    """As `fit_samples`, for samples that are known to fit: no check depends on a value; large numbers are clamped."""
    module, real = objective.module, x.is_floating_point()
    if module is not None and (real or x.dtype == torch.uint8 or prepared):
        x = clamped(x, objective.dtype)
    y = typed_targets(y, objective, x.dtype if real and module is None else None)
    return x.to(objective.device), y.to(objective.device)
