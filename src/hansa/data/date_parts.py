"""Numbers from the coded columns of a table: a column of numbers itself, or a part of its dates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.entries import FreeForm, Several
from hansa.data.column_options import PARTS
from hansa.holdings.table_layout import COLUMNS, TableLayout
from hansa.plumbing.errors import PartyError

Array = np.ndarray[Any, Any]
_FAR = 3e6  # days: dates of the years -6000 to 10000
NAMED = Several(
    of=FreeForm(form=list, check="a column and a part of its dates"), fewest=1, longest=COLUMNS * len(PARTS)
)
Feature = tuple[int, str]  # a column's position, and a part of its dates ("" for a column of numbers)


def checked_features(values: Any, layout: TableLayout) -> list[Feature]:
    """The features that a message names; a PartyError if they are not columns of numbers or parts of dates."""
    if not isinstance(values, list) or not 0 < len(values) <= COLUMNS * len(PARTS):
        raise PartyError("the payload names no columns")
    return [(int(column), part) for column, part in (checked_feature(value, layout) for value in values)]


def checked_feature(value: Any, layout: TableLayout) -> Feature:
    """A feature that a message names; a PartyError if it is not a column of numbers or a part of a date."""
    if isinstance(value, list) and len(value) == 2 and _is_column(value[0], layout):
        kind = layout.columns[value[0]][1]
        if (kind == "number" and value[1] == "") or (kind == "date" and value[1] in PARTS):
            return value[0], value[1]
    raise PartyError("the payload names a column that is not a number or a part of a date")


def _is_column(value: Any, layout: TableLayout) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(layout.columns)


def number_columns(x: Tensor, features: Sequence[Feature]) -> Tensor:
    """The values of features, one column each; NaN where a value is missing."""
    return torch.stack([numbers_of(x, column, part) for column, part in features], dim=1)


def numbers_of(x: Tensor, column: int, part: str) -> Tensor:
    """The values of one feature."""
    values = x[:, column].double()
    return values if part in ("", "days") else torch.from_numpy(_part(values.cpu().numpy(), part)).to(x.device)


def _part(days: Array, part: str) -> Array:
    """A part of dates that are given in days since 1970-01-01."""
    known = ~np.isnan(days)
    moments = np.clip(np.where(known, days, 0.0), -_FAR, _FAR)
    whole = np.floor(moments).astype(np.int64)
    dates = whole.astype("datetime64[D]")
    months = dates.astype("datetime64[M]").astype(np.int64)
    if part == "year":
        values = dates.astype("datetime64[Y]").astype(np.int64) + 1970
    elif part == "month":
        values = months % 12 + 1
    elif part == "day":
        values = (dates - dates.astype("datetime64[M]")).astype(np.int64) + 1
    elif part == "weekday":
        values = (whole + 3) % 7  # 1970-01-01 was a Thursday; Monday is 0
    else:
        values = np.floor(np.round((moments - whole) * 86_400) / 3600).astype(np.int64) % 24
    return np.where(known, values.astype(np.float64), np.nan)
