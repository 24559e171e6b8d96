"""What a party states about its own samples: the table `[data]` of `party.toml`.

These facts may leave the party. A task is compared with them and never with samples, so no refusal depends on a sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hansa.data.cells import MISSING
from hansa.holdings.table_layout import KINDS as TABLE_KINDS
from hansa.plumbing.errors import ConfigError, nearest

FEATURES = ("real", "whole", "bytes")
TARGETS = ("classes", "whole", "numbers", "none", "empty")
KINDS = (*TABLE_KINDS, "empty")  # of columns; empty: no value is known, so that any kind fits
CLASSES = 2**20  # at most
NUMBERS = 2**31  # of a sample, at most


@dataclass(frozen=True)
class DataStatement:
    """Facts about a party's training samples and test samples.

    A sample has the shape `shape`. Its features are "real", "whole" numbers or "bytes" (of pictures). `missing` says
    that features may be missing; in a table, the cells in `words` are. `target` and `columns` are the names of columns,
    each feature with its kind.

    Targets are "classes" (0 to `classes` - 1), "whole" numbers that are no classes, "numbers", "none" (no labels), or
    "empty" (no samples yet). Numbers with `classes` may serve as classes too. `labels` are the names of the classes of
    texts. Class numbers begin at `lowest_class`; `occurring_classes` of them occur, by default all. `target_shape` is
    the shape of one target. `unit`: all targets lie in 0..1. `one_hot`: each target has a single 1 among zeros.

    `tests`, `ids` and `weights` say whether there are test samples, ids of rows, and weights of samples.
    """

    shape: tuple[int, ...]
    targets: str
    features: str = "real"
    missing: bool = False
    words: tuple[str, ...] = MISSING
    target: str = ""
    columns: dict = field(default_factory=dict)  # type: ignore[type-arg]
    classes: int | None = None
    labels: tuple[str, ...] = ()
    lowest_class: int = 0
    occurring_classes: int | None = None
    target_shape: tuple[int, ...] = ()
    unit: bool = False
    one_hot: bool = False
    tests: bool = False
    ids: bool = False
    weights: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("features", self.features, FEATURES),
            ("targets", self.targets, TARGETS),
            *((f"columns.{name}", kind, KINDS) for name, kind in self.columns.items()),
        ):
            if value not in known:
                raise ConfigError(f"{name}: {value!r} is unknown{nearest(str(value), known)}")
        if min((*self.shape, *self.target_shape), default=1) < 1 or math.prod(self.shape) > NUMBERS:
            raise ConfigError(
                f"shape: a sample has 1 to {NUMBERS} numbers, got {list(self.shape)} and targets of "
                f"{list(self.target_shape)}"
            )
        if self.columns and self.shape != (len(self.columns),):
            raise ConfigError(f"columns: {len(self.columns)} are named, and shape is {list(self.shape)}")
        if self.targets == "classes" and self.classes is None:
            raise ConfigError("classes is missing: state the number of classes, from 0")
        if self.targets in ("none", "whole") and self.classes is not None:
            raise ConfigError(f"classes does not apply to targets = {self.targets!r}; leave it out")
        if self.classes is not None and not 0 <= self.lowest_class < self.classes <= CLASSES:
            raise ConfigError(f"classes must be above lowest_class and at most {CLASSES}, got {self.classes}")
        if self.classes is not None and not 1 <= self.distinct <= self.classes - self.lowest_class:
            raise ConfigError(f"occurring_classes must lie in 1..{self.classes - self.lowest_class}")
        if self.labels and len(self.labels) != self.classes:
            raise ConfigError(f"labels names {len(self.labels)} classes, and classes is {self.classes}")

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns, the target's first; none for samples without names."""
        return (self.target, *self.columns) if self.columns else ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the feature columns."""
        return tuple(self.columns.values())

    @property
    def distinct(self) -> int:
        """The number of classes that occur."""
        known = (self.classes or 0) - self.lowest_class
        return known if self.occurring_classes is None else self.occurring_classes

    def refuses_loss(self, loss: str) -> str | None:
        """Why the targets do not fit a loss, or None."""
        if self.targets in ("none", "empty"):
            return None
        if loss == "cross_entropy" and self.classes is None:
            hint = "; for whole numbers that are no classes, set task.loss = 'mse'" if self.targets == "whole" else ""
            return f"its targets are not whole class numbers from 0, which cross_entropy needs{hint}"
        if loss == "bce" and not self.unit:
            return "its targets do not all lie in 0..1, which bce needs; for more classes use cross_entropy"
        return None
