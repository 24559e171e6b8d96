"""Standard errors and p-values of linear models, from the sums that trained them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import ndtr, stdtr
from torch import Tensor

from hansa.classical.newton import about_zero


class Coefficient(NamedTuple):
    """A line of the table of coefficients. `error`, `statistic` and `p` are NaN where they are not defined.

    `outcome` is the class whose odds the coefficient changes, against class 0; None for a number as target.
    """

    outcome: int | None
    name: str
    value: float
    error: float
    statistic: float
    p: float


def facts(w: Tensor, centre: Tensor, information: Tensor, count: int, free: Tensor,
          residual: float | None) -> dict[str, Any]:  # fmt: skip
    """Coefficients, standard errors and degrees of freedom of a model without penalties.

    `w` and `information`, the Hessian of the summed loss, are of features about a centre; the result is of features
    about zero. With `residual`, the sum of squared residuals, the model is least
    squares: its variance is estimated, and statistics have Student's distribution. Without, they are normal. A model
    with a row for each class is described by the differences of its rows from the row of class 0.
    """
    rows, width = w.shape
    at = free.flatten().nonzero().flatten()
    inverse = torch.full_like(information, math.nan)
    inverse[at[:, None], at] = _about_zero(_inverse(information[at][:, at]), at // width, at % width, centre)
    variance, freedom = 1.0, math.inf
    if residual is not None:
        freedom = float(count - int(free[0].sum()))
        variance = max(residual, 0.0) / freedom if freedom > 0 else math.nan
    values, covariance = (
        about_zero(w, centre),
        inverse.view(rows, width, rows, width).diagonal(dim1=1, dim2=3),
    )  # [rows, rows, width]
    squares = covariance.diagonal(dim1=0, dim2=1).T  # [rows, width]
    if rows > 1:
        values = values[1:] - values[:1]
        squares = squares[1:] + squares[:1] - 2 * covariance[0, 1:]
    errors = (variance * squares).clamp(min=0).sqrt()
    return {"coefficients": values, "errors": errors, "freedom": freedom}


def _about_zero(covariance: Tensor, rows: Tensor, columns: Tensor, centre: Tensor) -> Tensor:
    """The covariance of weights for features about zero; `rows` and `columns` say where each weight stands in W."""
    of_intercept = (columns == 0)[:, None] & (rows[:, None] == rows)
    moved = torch.eye(len(rows), dtype=covariance.dtype) - torch.where(of_intercept, centre[columns], 0.0)
    return moved @ covariance @ moved.T


def _inverse(matrix: Tensor) -> Tensor:
    """The inverse of a positive definite matrix, scaled to a unit diagonal; NaN if it has none."""
    scale = matrix.diagonal().clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
    factor, failed = torch.linalg.cholesky_ex(matrix * scale[:, None] * scale)
    if int(failed):
        return torch.full_like(matrix, math.nan)
    return torch.cholesky_inverse(factor) * scale[:, None] * scale


def coefficients(model: Mapping[str, Any], columns: Sequence[str] | None = None) -> list[Coefficient]:
    """The table of a linear model's coefficients, from `result.saved_model()`; `columns` names the columns."""
    payload = model["payload"]
    features, found, classes = payload["features"], payload["facts"], payload["classes"]
    values = found["coefficients"] if found else payload["w"]
    errors = found["errors"] if found else torch.full_like(values, math.nan)
    statistics = (values / errors).numpy()
    freedom = found["freedom"] if found else math.inf
    tail = ndtr(-np.abs(statistics)) if math.isinf(freedom) else stdtr(freedom, -np.abs(statistics))
    named = list(columns) if columns is not None else [f"x{k}" for k in range(values.shape[1] - features["intercept"])]
    names = [*(["intercept"] if features["intercept"] else []), *named]
    return [
        Coefficient(None if classes is None else row + (len(values) < classes), names[k], float(values[row, k]),
                    float(errors[row, k]), float(statistics[row, k]), float(2 * tail[row, k]))
        for row in range(len(values)) for k in range(len(names))
    ]  # fmt: skip
