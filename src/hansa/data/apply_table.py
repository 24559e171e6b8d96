"""Apply a learned table preparation: coded rows become features.

The payload of `ApplyTable` says all: the columns, and for each one how its values become features. It is saved with the
model. A party checks every field before it applies it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hansa.core.data_op import DataOp
from hansa.core.entries import FreeForm, Several, Sizes, Text, stated
from hansa.core.op import Party, Payload
from hansa.core.registry import register
from hansa.data.cells import canonical, missing_words, text_code
from hansa.data.column_options import MOST_BINS, MOST_CATEGORIES
from hansa.data.date_parts import checked_feature, numbers_of
from hansa.data.table import Table
from hansa.holdings.table_layout import TableLayout
from hansa.plumbing.errors import DataError, PartyError

WIDEST = 2**16  # features of a sample, at most
LARGEST = 2**31  # numbers of a party's prepared samples, at most


def _finite(*values: Any) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values)


def _texts(values: Any, most: int) -> bool:
    fits = isinstance(values, (list, tuple)) and len(values) <= most
    return fits and all(isinstance(value, str) and len(value) <= 256 for value in values)


def _rising(values: Any, sizes: range) -> bool:
    """Whether a value is a tuple of as many rising numbers as `sizes` allows."""
    fits = isinstance(values, tuple) and len(values) in sizes and _finite(*values)
    return fits and all(low <= high for low, high in itertools.pairwise(values))


def _fills(value: Any) -> bool:
    return value is None or _texts([value], 1)


@dataclass(frozen=True)
class Scaled:
    """A number, imputed by `fill`, cut to its bounds if there are any, shifted and divided."""

    column: int
    part: str
    fill: float
    centre: float
    scale: float
    bounds: tuple[float, ...] = ()
    indicator: bool = False

    def valid(self) -> bool:
        numbers = _finite(self.fill, self.centre, self.scale) and self.scale > 0
        return numbers and (self.bounds == () or _rising(self.bounds, range(2, 3)))

    def names(self, name: str) -> list[str]:
        return [f"{name}.{self.part}" if self.part else name]

    def features(self, x: Tensor) -> Tensor:
        values = numbers_of(x, self.column, self.part)
        values = torch.where(torch.isnan(values), self.fill, values)
        values = values.clamp(*self.bounds) if self.bounds else values
        return ((values - self.centre) / self.scale).unsqueeze(1)


@dataclass(frozen=True)
class Binned:
    """A number as one column per bin; `edges` are those between bins. A missing value is in no bin without a `fill`."""

    column: int
    edges: tuple[float, ...]
    fill: float | None = None
    indicator: bool = False

    def valid(self) -> bool:
        return _rising(self.edges, range(1, MOST_BINS)) and (self.fill is None or _finite(self.fill))

    def names(self, name: str) -> list[str]:
        ends = ["", *(f"{edge:g}" for edge in self.edges), ""]
        return [f"{name}={low}..{high}" for low, high in itertools.pairwise(ends)]

    def features(self, x: Tensor) -> Tensor:
        values = x[:, self.column].double()
        values = values if self.fill is None else torch.where(torch.isnan(values), self.fill, values)
        edges = torch.tensor(self.edges, dtype=torch.float64, device=x.device)
        bins = torch.bucketize(values.contiguous(), edges, right=True)
        return _one_hot(bins, torch.isnan(values), len(self.edges) + 1)


@dataclass(frozen=True)
class Categories:
    """A text as one column per category, and one for all others if `other` is set. Without it they are all 0."""

    column: int
    categories: tuple[str, ...]
    other: bool = False
    fill: str | None = None
    indicator: bool = False

    def valid(self) -> bool:
        return _texts(self.categories, MOST_CATEGORIES) and isinstance(self.other, bool) and _fills(self.fill)

    def names(self, name: str) -> list[str]:
        return [f"{name}={category}" for category in self.categories] + ([f"{name}=(other)"] if self.other else [])

    def features(self, x: Tensor) -> Tensor:
        codes, known = _filled(x, self.column, self.fill)
        wanted = sorted((text_code(canonical(category)), k) for k, category in enumerate(self.categories))
        sorted_codes = torch.tensor([code for code, _ in wanted] or [-1], dtype=torch.float64, device=x.device)
        order = torch.tensor([k for _, k in wanted] or [0], device=x.device)
        at = torch.searchsorted(sorted_codes, torch.nan_to_num(codes)).clamp(max=len(sorted_codes) - 1)
        found = sorted_codes[at] == codes
        width = len(self.categories) + self.other
        position = torch.where(found, order[at], len(self.categories))
        return _one_hot(position, ~known | (~found if not self.other else torch.zeros_like(found)), width)


@dataclass(frozen=True)
class Hashed:
    """A text as one of `buckets` columns, by its code."""

    column: int
    buckets: int
    fill: str | None = None
    indicator: bool = False

    def valid(self) -> bool:
        number = isinstance(self.buckets, int) and not isinstance(self.buckets, bool)
        return number and 2 <= self.buckets <= MOST_CATEGORIES and _fills(self.fill)

    def names(self, name: str) -> list[str]:
        return [f"{name}#{k}" for k in range(self.buckets)]

    def features(self, x: Tensor) -> Tensor:
        codes, known = _filled(x, self.column, self.fill)
        return _one_hot(torch.nan_to_num(codes).long() % self.buckets, ~known, self.buckets)


Step = Scaled | Binned | Categories | Hashed
FORMS: dict[str, type[Step]] = {"scaled": Scaled, "binned": Binned, "categories": Categories, "hashed": Hashed}


def _filled(x: Tensor, column: int, fill: str | None) -> tuple[Tensor, Tensor]:
    """The codes of a text column with missing ones filled, and which of them are known."""
    codes = x[:, column].double().contiguous()
    if fill is not None:
        codes = torch.where(torch.isnan(codes), float(text_code(canonical(fill))), codes)
    return codes, ~torch.isnan(codes)


def _one_hot(position: Tensor, none: Tensor, width: int) -> Tensor:
    """Rows with a 1 at a position; rows where `none` holds are 0."""
    out = torch.zeros(len(position), width, dtype=torch.float64, device=position.device)
    rows = (~none).nonzero().flatten()
    out[rows, position[rows]] = 1.0
    return out


@dataclass(frozen=True)
class TablePlan:
    """A learned preparation: the layout of the rows, the words for a missing value, and the steps."""

    layout: TableLayout
    missing: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def names(self) -> list[str]:
        """The names of the features."""
        names: list[str] = []
        for step in self.steps:
            column = self.layout.columns[step.column][0]
            names += step.names(column) + ([f"{column}=(missing)"] if step.indicator else [])
        return names

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.names)

    def features(self, x: Tensor) -> Tensor:
        """The features of coded rows, float64."""
        parts = []
        for step in self.steps:
            parts.append(step.features(x))
            if step.indicator:
                parts.append(torch.isnan(x[:, step.column]).double().unsqueeze(1))
        return torch.cat(parts, dim=1)

    def tree(self) -> dict[str, Any]:
        """The plan as plain data."""
        steps = [{"form": next(name for name, form in FORMS.items() if isinstance(step, form)), **_plain(step)}
                 for step in self.steps]  # fmt: skip
        return {"columns": self.layout.tree(), "missing": list(self.missing), "steps": steps}

    def about(self) -> dict[str, Any]:
        """What a saved model says about its samples: the columns of a table, and the features made of them."""
        return {"example": None, "columns": self.layout.tree(), "feature_names": self.names}

    @classmethod
    def of(cls, tree: Payload) -> TablePlan:
        """The plan of a message or a file; a PartyError if it is not a valid one."""
        try:
            layout = TableLayout.of(tree.get("columns"))
        except DataError as error:
            raise PartyError(str(error)) from None
        missing: Any = tree.get("missing")
        steps = tree.get("steps")
        if not _texts(missing, 1000) or not isinstance(steps, list) or not 0 < len(steps) <= WIDEST:
            raise PartyError("malformed table: expected the words for a missing value, and the steps")
        plan = cls(layout, tuple(missing), tuple(_step(step, layout) for step in steps))
        if plan.width > WIDEST:
            raise PartyError(f"the table would have {plan.width} features, and at most {WIDEST} are supported")
        return plan


def _plain(step: Step) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(step).items()}


def _step(tree: Any, layout: TableLayout) -> Step:
    """A step of a message; a PartyError if it is not a valid one."""
    form: Any = FORMS.get(str(tree.get("form"))) if isinstance(tree, dict) else None
    if form is None or set(tree) != {"form", *form.__dataclass_fields__} or not isinstance(tree["indicator"], bool):
        raise PartyError("malformed table: a step has an unknown form, or other fields than its form")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()}
    del fields["form"]
    if form in (Scaled, Binned):
        checked_feature([fields["column"], fields.get("part", "")], layout)
    elif not _is_text_column(fields["column"], layout):
        raise PartyError("malformed table: a step for texts names another column")
    step: Step = form(**fields)
    if not step.valid():
        raise PartyError(f"malformed table: the numbers or texts of the step {tree['form']!r} are invalid")
    return step


def _is_text_column(column: Any, layout: TableLayout) -> bool:
    inside = isinstance(column, int) and not isinstance(column, bool) and 0 <= column < len(layout.columns)
    return inside and layout.columns[column][1] == "text"


@register("apply-table")
@dataclass(frozen=True)
class ApplyTable(DataOp):
    """Make features of a table's rows: impute, scale, divide into bins, encode categories, take parts of dates."""

    entries = stated(
        columns=FreeForm(form=list, check="names and kinds of columns"),
        missing=Several(of=Text(shortest=0, longest=1000), longest=1000),
        steps=FreeForm(form=list, check="steps by column"),
    )

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        TablePlan.of(payload)

    def transform(self, x: Tensor, payload: Payload) -> Tensor:
        plan = TablePlan.of(payload)
        if x.dim() != 2 or x.shape[1] != len(plan.layout.columns):
            raise PartyError("the preparation has other columns than its samples have")
        return plan.features(x)

    def apply(self, party: Party, payload: Payload) -> None:
        """Prepare the party's samples. The public ones have been prepared by the aggregator."""
        plan = TablePlan.of(payload)
        table = party.data.table
        if table is None or table.columns != plan.layout.columns:
            raise PartyError("the preparation has other columns than the table of the job")
        if party.n * plan.width > LARGEST:
            raise PartyError(f"its prepared samples would have more than {LARGEST} numbers; use fewer categories")
        dtype = party.objective.dtype if party.objective.module is not None else torch.float64
        device = party.objective.device
        party.data.transform(lambda x: plan.features(x).to(device, dtype), plan.width)
        party.data.table, party.data.header = None, ("", *plan.names)  # the samples are features now

    def prepared(self, x: Any, payload: Payload, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """The features of a frame, of columns by name, of a list of rows by column name, or of coded rows."""
        plan = TablePlan.of(payload)
        if not isinstance(x, Tensor):
            x = Table.of(x).coded(plan.layout, missing_words(plan.missing))[0]
        if x.dtype != torch.float64 or x.dim() != 2 or x.shape[1] != len(plan.layout.columns):
            raise DataError(
                f"expected a table with the columns {', '.join(name for name, _ in plan.layout.columns)} (a pandas or "
                "polars frame, or columns by name)"
            )
        return plan.features(x.to(device)).to(dtype or torch.float64)
