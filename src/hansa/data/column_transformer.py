"""The preparation of tables: imputation, scaling, bins, categories and dates, learned by sums of whole numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hansa.core.data_op import DataOp
from hansa.core.declared_ops import DeclaredOps, OpenOp
from hansa.core.federation import Federation
from hansa.core.quantities import Count
from hansa.core.registry import ENTRIES, WORDS, register
from hansa.data.apply_table import WIDEST, ApplyTable, Binned, Categories, Hashed, Scaled, Step, TablePlan
from hansa.data.cells import MISSING, canonical, parsed_date
from hansa.data.column_options import (
    DROP,
    MEAN,
    MOST_FREQUENT,
    CategoryLimit,
    ColumnOptions,
    declared_kinds,
    fitted_options,
    parse_columns,
)
from hansa.data.date_parts import Feature
from hansa.data.prepare import SPACING, Preparation
from hansa.data.table_categories import Counted, learn_categories
from hansa.data.table_ops import CELLS, EXPONENTS, TableHistogram, TableMagnitudes, TableSums, joined_sums
from hansa.holdings.table_layout import KINDS, Kind, TableLayout
from hansa.plumbing.errors import ConfigError

log = logging.getLogger("hansa")


OPS = ("table-magnitudes", "table-sums", "table-histogram", "table-categories", "table-names", "apply-table")


@dataclass(frozen=True)
class Moments:
    """What a federation learned of a number: rows, known values, mean of the known ones, squares about that mean."""

    rows: int
    count: int
    mean: float
    squares: float

    def filled(self, fill: float) -> tuple[float, float]:
        """Mean and standard deviation of all rows, with missing values filled."""
        rows, missing, apart = max(self.rows, 1), self.rows - self.count, fill - self.mean
        squares = self.squares + apart**2 * self.count * missing / rows
        return self.mean + apart * missing / rows, (squares / rows) ** 0.5


@register("table")
@dataclass(frozen=True)
class ColumnTransformer(Preparation):
    """Features from a table of numbers, texts and dates, as scikit-learn's ColumnTransformer makes them of pooled data.

    By default missing numbers become the mean and numbers are standardised, texts become one column per category, and
    dates become standardised years, months and weekdays. `columns` has other options by column (a table of
    `ColumnOptions`, a kind, or "drop"); with `only` all other columns are dropped. Categories of fewer than `min_count`
    samples of the federation become "other"; a column with more than `limit` categories is refused. `missing` are the
    words for a missing value, in upper or lower case. All statistics are sums of whole numbers, so a secure sum changes
    no bit of them.
    """

    columns: dict = field(default_factory=dict, metadata={ENTRIES: ColumnOptions, WORDS: (*KINDS, DROP)})  # type: ignore[type-arg]
    only: bool = False
    min_count: Count = 5
    limit: CategoryLimit = 256
    missing: tuple[str, ...] = MISSING

    ops: ClassVar[DeclaredOps] = tuple(map(OpenOp, OPS))

    def __post_init__(self) -> None:
        parse_columns(self.columns)

    def kinds(self) -> tuple[dict[str, Kind], list[str]]:
        """The kinds of columns that the options decide, and the columns that are dropped."""
        options, dropped = parse_columns(self.columns)
        return declared_kinds(options), dropped

    def kept(self, names: Sequence[str]) -> list[str]:
        """The columns that become features."""
        options, dropped = parse_columns(self.columns)
        return [name for name in names if name not in dropped and (not self.only or name in options)]

    def check_group(self, by: str | int) -> None:
        """Refuse groups of test samples by a feature whose values the user cannot know: scaled numbers, positions."""
        options, _ = parse_columns(self.columns)
        unscaled = {name for name, one in options.items() if one.scale == "none"}
        if isinstance(by, str) and ("=" in by or "#" in by or {by, by.rpartition(".")[0]} & unscaled):
            return
        raise ConfigError(
            f"run.metrics: by = {by!r}: a table has groups by its features, and numbers are scaled; name a category, "
            "as in by = 'sex=Female', or set bins or scale = 'none' for the column in task.prepare.columns"
        )

    def asks(self, layout: TableLayout) -> list[str]:
        """The columns of which statistics must be learned from the parties; none if the user gives all numbers."""
        return [name for (name, kind), one in zip(layout.columns, self._options(layout), strict=True)
                if _learned(kind, one)]  # fmt: skip

    def _options(self, layout: TableLayout) -> list[ColumnOptions]:
        return fitted_options(layout, parse_columns(self.columns)[0])

    async def learn_table(self, fed: Federation, layout: TableLayout) -> tuple[DataOp, dict[str, Any]]:
        """Learn the preparation of a table with these columns: the op that applies it, and its payload."""
        options = self._options(layout)
        numbers = _numbers(layout, options)
        moments = await _moments(fed, layout, [feature for feature, one in numbers if _has_moments(one)])
        edges = await _edges(fed, [(feature[0], one) for feature, one in numbers if _has_quantiles(one)])
        texts = {k: one for k, one in enumerate(options) if _learns_categories(layout.columns[k][1], one)}
        forced = {k: one.impute for k, one in texts.items() if one.impute not in (None, MOST_FREQUENT)}
        counted = await learn_categories(
            fed, layout, {k: one.min_count or self.min_count for k, one in texts.items()},
            {k: one.limit or self.limit for k, one in texts.items()},
            {k: str(text) for k, text in forced.items()},
        ) if texts else {}  # fmt: skip
        steps: list[Step] = []
        for k, (name, kind) in enumerate(layout.columns):
            if kind == "text":
                steps.append(self._text_step(k, options[k], counted.get(k)))
                continue
            for part in options[k].date_parts if kind == "date" else ("",):
                steps.append(_number_step(name, k, part, options[k], moments.get((k, part)), edges.get(k)))
        steps = _one_indicator(steps)
        plan = TablePlan(layout, self.missing, tuple(steps))
        if plan.width > WIDEST:
            raise ConfigError(f"task.prepare: the table would have {plan.width} features, and {WIDEST} are the most")
        return ApplyTable(), plan.tree()

    def _text_step(self, column: int, options: ColumnOptions, counted: Counted | None) -> Step:
        fill = options.impute if options.impute not in (None, MOST_FREQUENT) else None
        if options.hash is not None:
            return Hashed(column, options.hash, fill, options.indicator)  # type: ignore[arg-type]
        if counted is None:
            return Categories(column, options.categories, False, fill, options.indicator)  # type: ignore[arg-type]
        counts = dict(counted.counts)
        listed = {text: count for text, count in counts.items() if text in (options.categories or counts)}
        if options.impute == MOST_FREQUENT and listed:
            fill = min(listed, key=lambda text: (-listed[text], text))
        if fill is not None:
            counts[canonical(str(fill))] = counts.get(canonical(str(fill)), 0) + counted.missing
        least = options.min_count or self.min_count
        kept = tuple(options.categories) or tuple(sorted(text for text, count in counts.items() if count >= least))
        known = counted.known + (counted.missing if fill is not None else 0)
        other = not options.categories and known > sum(counts[text] for text in kept)
        return Categories(column, kept, other, fill, options.indicator)  # type: ignore[arg-type]


def _learned(kind: Kind, options: ColumnOptions) -> bool:
    if kind == "text":
        return _learns_categories(kind, options)
    return _has_moments(options) or _has_quantiles(options)


def _learns_categories(kind: Kind, options: ColumnOptions) -> bool:
    frequent = options.impute == MOST_FREQUENT
    return kind == "text" and options.hash is None and (not options.categories or frequent)


def _has_moments(options: ColumnOptions) -> bool:
    """Whether a number's mean must be learned."""
    if options.bins is not None or options.scaled_by_bounds:
        return options.impute == MEAN
    return options.scale != "none" or options.impute in (None, MEAN)


def _has_quantiles(options: ColumnOptions) -> bool:
    return options.bins is not None and options.spacing != "uniform"


def _numbers(layout: TableLayout, options: Sequence[ColumnOptions]) -> list[tuple[Feature, ColumnOptions]]:
    """The numbers of a table: columns of numbers, and parts of dates."""
    return [((k, part), options[k]) for k, (_, kind) in enumerate(layout.columns) if kind != "text"
            for part in (options[k].date_parts if kind == "date" else ("",))]  # fmt: skip


async def _moments(fed: Federation, layout: TableLayout, features: list[Feature]) -> dict[Feature, Moments]:
    """Rows, known values, means and squares of numbers, from three exchanges of whole numbers.

    The first finds the power of two that bounds each column, the second a point near the mean, the third the sums and
    squares about this point. They are moved to the mean: both moments are then those of the parties that answered last.
    """
    if not features:
        return {}
    payload = {"features": [list(feature) for feature in features]}
    cells = (await fed.reduce(TableMagnitudes(), payload)).sums["counts"]
    for k, (column, _) in enumerate(features):
        if int(cells[k, EXPONENTS - 2]) > 0:
            raise ConfigError(
                f"task.prepare: the column {layout.columns[column][0]!r} has values of 2^63 or more; correct them, or "
                "give its bounds"
            )
    scale = torch.tensor([_scale(row) for row in cells], dtype=torch.float64)
    zero = torch.zeros(len(features), dtype=torch.float64)
    first = (await fed.reduce(TableSums(), {**payload, "centre": zero, "scale": scale})).sums
    centre = joined_sums(first["hi"], first["lo"])[:, 0] * scale / first["count"].double().clamp(min=1)
    second = (await fed.reduce(TableSums(squares=True), {**payload, "centre": centre, "scale": scale})).sums
    sums, squares = joined_sums(second["hi"], second["lo"]).unbind(1)
    shift = sums / second["count"].double().clamp(min=1)
    mean, squares = centre + shift * scale, (squares - sums * shift).clamp(min=0) * scale**2
    rows = int(second["rows"])
    return {feature: Moments(rows, int(second["count"][k]), float(mean[k]), float(squares[k]))
            for k, feature in enumerate(features)}  # fmt: skip


def _scale(cells: Tensor) -> float:
    """The power of two above all values of a column; 1 if all are zero or missing."""
    used = cells[: EXPONENTS - 1].nonzero().flatten()
    return 2.0 ** (int(used[-1]) - 63) if len(used) else 1.0


async def _edges(fed: Federation, columns: list[tuple[int, ColumnOptions]]) -> dict[int, tuple[float, ...]]:
    """The edges between bins at quantiles, exact to 1/4096 of the distance between the bounds."""
    if not columns:
        return {}
    low, high = (torch.tensor([one.bounds[k] for _, one in columns], dtype=torch.float64) for k in (0, 1))
    payload = {"features": [[column, ""] for column, _ in columns], "low": low, "high": high}
    counts = (await fed.reduce(TableHistogram(), payload)).sums["counts"]
    return {column: _quantiles(counts[k], one) for k, (column, one) in enumerate(columns)}


def _quantiles(counts: Tensor, options: ColumnOptions) -> tuple[float, ...]:
    assert options.bins is not None
    low, high = options.bounds
    total, reached = int(counts.sum()), counts.cumsum(0)
    edges = []
    for k in range(1, options.bins):
        cell = int(torch.searchsorted(reached, torch.tensor(-(-total * k // options.bins)))) if total else 0
        edges.append(low + (min(cell, CELLS - 1) + 1) * (high - low) / CELLS)
    return tuple(dict.fromkeys(edges))  # equal edges would make empty bins


def _number_step(name: str, column: int, part: str, options: ColumnOptions, moments: Moments | None,
                 edges: tuple[float, ...] | None) -> Step:  # fmt: skip
    """How a number becomes features."""
    constant = float(options.impute) if isinstance(options.impute, (int, float)) else None
    fill = constant if constant is not None else None if moments is None else moments.mean
    if options.bins is not None:
        low, high = options.bounds
        even = (low + (high - low) * k / options.bins for k in range(1, options.bins))
        return Binned(column, edges if edges is not None else tuple(even), fill, options.indicator)
    if options.scaled_by_bounds:
        low, high = options.bounds_of(part)
        middle = (low + high) / 2
        return Scaled(column, part, middle if fill is None else fill, middle, (high - low) / 2, (low, high),
                      options.indicator)  # fmt: skip
    assert fill is not None
    if options.scale == "none":
        reference = parsed_date(options.reference) if options.reference is not None and part == "days" else None
        return Scaled(column, part, fill, reference or 0.0, 1.0, (), options.indicator)
    assert moments is not None
    mean, deviation = moments.filled(fill)
    if deviation > abs(mean) * SPACING:
        return Scaled(column, part, fill, mean, deviation, (), options.indicator)
    shown = f"{name}.{part}" if part else name
    reason = "is constant over the federation" if moments.count else "has no value at any party"
    log.warning("the column %r %s: it becomes 0", shown, reason)
    return Scaled(column, part, fill, mean, 1.0, (), options.indicator)


def _one_indicator(steps: Sequence[Step]) -> list[Step]:
    """Steps with the indicator of a column at its last step only: a date has several steps."""

    def adjusted() -> Iterator[Step]:
        for k, step in enumerate(steps):
            last = k + 1 == len(steps) or steps[k + 1].column != step.column
            yield step if last or not step.indicator else type(step)(**{**vars(step), "indicator": False})

    return list(adjusted())
