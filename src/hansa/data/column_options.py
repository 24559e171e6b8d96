"""How each column of a table becomes features: the `columns` of the preparation `table`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from hansa.core.plain_data import check_numbers, fill
from hansa.core.quantities import Count
from hansa.data.cells import parsed_date
from hansa.holdings.table_layout import Kind, TableLayout
from hansa.plumbing.errors import ConfigError

DROP = "drop"
MEAN = "mean"
MOST_FREQUENT = "most_frequent"
# The parts of a date, with their bounds; None where only the user knows them.
PARTS: dict[str, tuple[float, float] | None] = {
    "days": None, "year": None, "month": (1.0, 12.0), "day": (1.0, 31.0), "weekday": (0.0, 6.0), "hour": (0.0, 23.0),
}  # fmt: skip
MOST_BINS = 1024
MOST_CATEGORIES = 4096
CategoryLimit = Annotated[int, Meta(ge=1, le=MOST_CATEGORIES)]
OF_KIND = {
    "number": ("impute", "scale", "bounds", "bins", "spacing", "indicator"),
    "text": ("impute", "categories", "min_count", "limit", "hash", "indicator"),
    "date": ("impute", "scale", "bounds", "parts", "reference", "indicator"),
}


@dataclass(frozen=True)
class ColumnOptions:
    """How one column becomes features.

    `kind` is "number", "text" or "date"; by default the values decide. `indicator` adds a column that is 1 where the
    value is missing. Numbers and dates: `impute` is "mean" or a number; `scale` is "standardise", "bounds" or "none";
    `bounds` are the lowest and the highest value, beyond which values are cut; `bins` is the number of bins, each a
    column of its own, with edges at quantiles or evenly spaced (`spacing`). Texts: `impute` is "most_frequent" or a
    category (by default a missing text is no category: all its columns are 0); `categories` lists the categories
    instead of learning them; categories of fewer than `min_count` samples become one column "other"; more than `limit`
    categories are refused; `hash` is a number of columns among which the texts are divided by their hash. Dates:
    `parts` are some of days, year, month, day, weekday and hour; days are counted from `reference`.
    """

    kind: Literal["number", "text", "date"] | None = None
    impute: str | float | None = None
    scale: Literal["standardise", "bounds", "none"] | None = None
    bounds: tuple[float, ...] = ()
    bins: Annotated[int, Meta(ge=2, le=MOST_BINS)] | None = None
    spacing: Literal["quantile", "uniform"] | None = None
    indicator: bool = False
    categories: tuple[str, ...] = ()
    min_count: Count | None = None
    limit: CategoryLimit | None = None
    hash: Annotated[int, Meta(ge=2, le=MOST_CATEGORIES)] | None = None
    parts: tuple[str, ...] = ()
    reference: str | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.bounds and (len(self.bounds) != 2 or self.bounds[0] >= self.bounds[1]):
            raise ConfigError(f"bounds must be the lowest and the highest value, got {list(self.bounds)}")
        if self.bins is not None and not self.bounds:
            raise ConfigError("bins needs bounds, the lowest and the highest value, such as bounds = [0, 100]")
        if self.bins is not None and self.scale is not None:
            raise ConfigError("scale does not apply to bins; leave one of them out")
        if self.spacing is not None and self.bins is None:
            raise ConfigError("spacing is about the edges of bins; set bins too, or leave it out")
        if self.bounds and self.scale in ("standardise", "none"):
            raise ConfigError(f"bounds scale a column to -1..1; scale = {self.scale!r} would ignore them")
        if self.scale == "bounds" and not self.bounds and self.kind != "date" and not self.parts:
            raise ConfigError("scale = 'bounds' needs bounds, such as bounds = [0, 100]")
        if len(self.categories) > MOST_CATEGORIES:
            raise ConfigError(f"a column can have at most {MOST_CATEGORIES} categories")
        if len(set(self.categories)) < len(self.categories):
            raise ConfigError("categories must be distinct")
        if self.categories and (self.min_count is not None or self.limit is not None):
            raise ConfigError("categories are listed, so min_count and limit have no effect; leave them out")
        if self.hash is not None and (self.categories or self.min_count is not None or self.limit is not None):
            raise ConfigError("hash learns no categories; leave categories, min_count and limit out")
        if self.hash is not None and self.impute == MOST_FREQUENT:
            raise ConfigError("hash learns no categories, so none is the most frequent; impute a text, or leave it out")
        if self.categories and isinstance(self.impute, str) and self.impute not in (*self.categories, MOST_FREQUENT):
            raise ConfigError(f"impute is {self.impute!r}, which is not one of the categories")
        for part in self.parts:
            if part not in PARTS:
                raise ConfigError(f"{part!r} is not a part of a date; use {', '.join(PARTS)}")
        if len(set(self.parts)) < len(self.parts):
            raise ConfigError("parts must be distinct")
        if self.reference is not None and parsed_date(self.reference) is None:
            raise ConfigError(f"reference must be a date such as 2000-01-01, got {self.reference!r}")
        if self.kind is not None:
            self.check(self.kind)

    def check(self, kind: Kind) -> None:
        """Refuse options that do not apply to a kind of column."""
        default = ColumnOptions()
        for name in (name for names in OF_KIND.values() for name in names):
            if name not in OF_KIND[kind] and getattr(self, name) != getattr(default, name):
                raise ConfigError(f"{name} does not apply to a column of {kind}s; leave it out")
        if kind != "text" and isinstance(self.impute, str) and self.impute != MEAN:
            raise ConfigError(f"impute must be 'mean' or a number for a column of {kind}s, got {self.impute!r}")
        if kind == "text" and not isinstance(self.impute, (str, type(None))):
            raise ConfigError(f"impute must be a text for a column of texts, got {self.impute!r}")
        if kind == "number" and self.scale == "bounds" and not self.bounds:
            raise ConfigError("scale = 'bounds' needs bounds, such as bounds = [0, 100]")
        if kind == "date" and self.scaled_by_bounds:
            open_parts = [part for part in self.date_parts if PARTS[part] is None]
            if bool(open_parts) != bool(self.bounds) or len(open_parts) > 1:
                raise ConfigError(
                    "bounds of a date are those of its year, or of its days; name one of them in parts, such as "
                    "parts = ['year', 'month']"
                )

    @property
    def scaled_by_bounds(self) -> bool:
        """Whether values are scaled by bounds that the user knows, without statistics."""
        return self.scale == "bounds" or (bool(self.bounds) and self.bins is None)

    @property
    def date_parts(self) -> tuple[str, ...]:
        """The parts of a date that become features."""
        return self.parts or ("year", "month", "weekday")

    def bounds_of(self, part: str) -> tuple[float, float]:
        """The bounds of a number (part ""), or of a part of a date."""
        known = PARTS.get(part)
        return known if known is not None else (self.bounds[0], self.bounds[1])


def parse_columns(columns: Mapping[str, Any]) -> tuple[dict[str, ColumnOptions], list[str]]:
    """The options by column, and the columns that are dropped.

    A column is a table of options, a kind, or "drop".
    """
    options: dict[str, ColumnOptions] = {}
    dropped: list[str] = []
    for name, value in columns.items():
        if value == DROP:
            dropped.append(name)
        elif isinstance(value, (str, Mapping)):
            fields = {"kind": value} if isinstance(value, str) else value
            options[name] = fill(ColumnOptions, fields, where=f"columns.{name}")
        else:
            raise ConfigError(f"columns.{name}: expected a table of options, a kind or 'drop', got {value!r}")
    return options, dropped


def declared_kinds(options: Mapping[str, ColumnOptions]) -> dict[str, Kind]:
    """The kinds of columns that options decide: by `kind`, or by an option that only one kind has."""
    kinds: dict[str, Kind] = {}
    for name, one in options.items():
        own = [kind for kind, names in OF_KIND.items() if any(_only(kind, field, one) for field in names)]
        if one.kind is not None or own:
            kinds[name] = one.kind or own[0]  # type: ignore[assignment]
    return kinds


def _only(kind: str, field: str, options: ColumnOptions) -> bool:
    elsewhere = any(field in names for other, names in OF_KIND.items() if other != kind)
    return not elsewhere and getattr(options, field) != getattr(ColumnOptions(), field)


def fitted_options(layout: TableLayout, options: Mapping[str, ColumnOptions]) -> list[ColumnOptions]:
    """The options of a layout's columns; a ConfigError names the column whose options do not fit its kind."""
    fitted = []
    for name, kind in layout.columns:
        one = options.get(name, ColumnOptions())
        try:
            one.check(kind)
        except ConfigError as error:
            raise ConfigError(f"task.prepare.columns.{name}: {error}") from None
        fitted.append(one)
    return fitted
