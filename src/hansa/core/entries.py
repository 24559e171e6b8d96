"""Statements of what an op reads from its payload: names, types, shapes and limits of the entries.

A party compares a request with the statement before it reads a sample (`refuses_payload`), so a malformed entry is
refused with the reason, and an entry that the op does not state is refused by its name. The sizes that are public (the
model's, the sample's, the number of classes) have names: a shape may use them, and two shapes that use the same name
must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hansa.core.fields import MOST, Owner
from hansa.plumbing.errors import ConfigError, DataError, PartyError

if TYPE_CHECKING:
    from hansa.core.op import Op, Payload
    from hansa.holdings.gateway import SampleGateway
    from hansa.numerics.params import ParamSpec

Sizes = dict[str, Any]  # public sizes by name: "dim", "stats", "counts", "features", "classes"; "sample" is a shape
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT64, WHOLE, INT32 = (torch.float64,), (torch.int64,), (torch.int32,)
BYTES, FLAGS = (torch.uint8,), (torch.bool,)
ARCHITECTURE = "architecture"  # the entry that describes another model than the task's
LONGEST = 2**20  # entries of a list or a table, unless it states another limit
_TYPES = {
    REAL: "finite real numbers",
    FLOAT64: "finite real numbers (float64)",
    WHOLE: "whole numbers (int64)",
    INT32: "whole numbers (int32)",
    BYTES: "bytes (uint8)",
    FLAGS: "true or false",
}


@dataclass(frozen=True, kw_only=True)
class PayloadEntry:
    """Base of statements about one entry. `words` says what a value must be."""

    optional: bool = False

    @property
    def words(self) -> str:
        raise TypeError(f"{type(self).__name__} does not define words")

    def fits(self, value: Any, sizes: Sizes, values: bool) -> bool:
        """Whether a value is as stated. Names of sizes that are not known yet are added to `sizes`.

        Without `values` the numbers inside tensors are not looked at.
        """
        raise TypeError(f"{type(self).__name__} does not define fits()")

    def fault(self, value: Any, where: str, sizes: Sizes, values: bool) -> str | None:
        """Why a value is not as stated, or None."""
        return None if self.fits(value, sizes, values) else f"{where} must be {self.words}"


Entries = Mapping[str, PayloadEntry]
E = TypeVar("E", bound=PayloadEntry)


@dataclass(frozen=True, kw_only=True)
class Number(PayloadEntry):
    """A finite number from `least` to `most`, or above `above`; with `whole`, a whole number."""

    whole: bool = False
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    none: bool = False  # whether null is allowed too
    size: str = ""  # the public size that it must equal
    owner: Owner | None = None  # the owner's default range; without one the limits are enough

    @property
    def words(self) -> str:
        limits = [f"above {self.above:.12g}"] if self.above > -math.inf else []
        limits += [f"at least {self.least:.12g}"] if self.least > -math.inf else []
        limits += [f"at most {self.most:.12g}"] if self.most < math.inf else []
        limits += [f"equal to {self.size} of the party's task"] if self.size else []
        limits += ["or nothing"] if self.none else []
        return ", ".join(["a whole number" if self.whole else "a finite number", *limits])

    def fits(self, value: Any, sizes: Sizes, values: bool) -> bool:
        if value is None:
            return self.none
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        fits = self.least <= value <= self.most and self.above < value and abs(value) <= MOST
        return fits and (not self.size or sizes.setdefault(self.size, value) == value)


@dataclass(frozen=True, kw_only=True)
class Flag(PayloadEntry):
    """True or false."""

    words = "true or false"

    def fits(self, value: Any, sizes: Sizes, values: bool) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Text(PayloadEntry):
    """A text of `shortest` to `longest` characters; with `among`, one of these."""

    shortest: int = 1
    longest: int = 100
    among: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return (
            f"one of {', '.join(self.among)}"
            if self.among
            else f"a text of {self.shortest} to {self.longest} characters"
        )

    def fits(self, value: Any, sizes: Sizes, values: bool) -> bool:
        return isinstance(value, str) and (
            value in self.among if self.among else self.shortest <= len(value) <= self.longest
        )


@dataclass(frozen=True, kw_only=True)
class Shaped(PayloadEntry):
    """A tensor of one of some types, with finite numbers from `least` to `most`.

    A dimension of the shape is a number, the name of a size, or None for any. "sample" is the shape of a sample. With
    `rising`, the numbers of a vector ascend, without repetition.
    """

    types: tuple[torch.dtype, ...] = REAL
    shape: tuple[int | str | None, ...] | str = ()
    rising: bool = False
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    @property
    def words(self) -> str:
        sizes = self.shape if isinstance(self.shape, str) else [str(size or "any") for size in self.shape]
        shape = f"of the shape {sizes}" if isinstance(sizes, str) else f"of the shape [{', '.join(sizes)}]"
        limits = Number(least=self.least, most=self.most, above=self.above).words.removeprefix("a finite number")
        rising = ", ascending" if self.rising else ""
        return f"a tensor of {_TYPES.get(self.types, self.types)} {shape}{limits}{rising}"

    def fits(self, value: Any, sizes: Sizes, values: bool) -> bool:
        if not isinstance(value, Tensor) or value.dtype not in self.types:
            return False
        wanted = sizes.setdefault(self.shape, tuple(value.shape)) if isinstance(self.shape, str) else self.shape
        if len(wanted) != value.dim():
            return False
        for size, name in zip(value.shape, wanted, strict=True):
            if (sizes.setdefault(name, size) if isinstance(name, str) else size if name is None else name) != size:
                return False
        bounded = (self.least, self.above, self.most) != (-math.inf, -math.inf, math.inf)
        if not values or not value.numel() or not (bounded or self.rising or value.is_floating_point()):
            return True
        if self.rising and bool((value[1:] <= value[:-1]).any()):
            return False
        least, most = (float(number) for number in torch.aminmax(value))  # NaN if there is one
        return self.above < least >= self.least and most <= self.most and math.isfinite(least) and math.isfinite(most)


@dataclass(frozen=True, kw_only=True)
class Several(PayloadEntry):
    """A list of `fewest` to `longest` entries of one kind; with `keys`, a table with free names in place of a list.

    `keys` says what the names are.
    """

    of: PayloadEntry
    fewest: int = 0
    longest: int = LONGEST
    keys: str = ""

    @property
    def words(self) -> str:
        form = f"a table by {self.keys}" if self.keys else "a list"
        return f"{form} of {self.fewest} to {self.longest} entries, each {self.of.words}"

    def fits(self, value: Any, sizes: Sizes, values: bool) -> bool:
        ones = list(value.values()) if self.keys and isinstance(value, Mapping) else value
        fits = isinstance(ones, list) and bool(self.keys) == isinstance(value, Mapping)
        return fits and self.fewest <= len(ones) <= self.longest and all(self.of.fits(o, sizes, values) for o in ones)


@dataclass(frozen=True, kw_only=True)
class Nested(PayloadEntry):
    """A table with stated entries."""

    entries: Entries

    @property
    def words(self) -> str:
        return "a table with " + "; ".join(f"{name}: {entry.words}" for name, entry in self.entries.items())

    def fits(self, value: Any, sizes: Sizes, values: bool) -> bool:
        return self.fault(value, "", sizes, values) is None

    def fault(self, value: Any, where: str, sizes: Sizes, values: bool) -> str | None:
        if not isinstance(value, Mapping):
            return f"{where} must be {self.words}"
        return fault_in(self.entries, value, f"{where}.", sizes, values)


@dataclass(frozen=True, kw_only=True)
class FreeForm(PayloadEntry):
    """A list or a table that another check reads whole: `check` says which."""

    form: type = dict
    check: str = ""

    @property
    def words(self) -> str:
        return f"a {'table' if self.form is dict else 'list'} ({self.check})"

    def fits(self, value: Any, sizes: Sizes, values: bool) -> bool:
        return isinstance(value, Mapping if self.form is dict else self.form)


def model_of(w: tuple[int | str | None, ...] = ("dim",), **rest: Any) -> Nested:
    """The vectors of a model; `w` is the shape of its parameters."""
    vectors = {
        "w": Shaped(shape=w),
        "stats": Shaped(shape=("stats",)),
        "counts": Shaped(types=WHOLE, shape=("counts",)),
    }
    return Nested(entries=vectors, **rest)


MODEL = model_of()
ANY_MODEL = Nested(entries={"w": Shaped(shape=(None,)), "stats": Shaped(shape=(None,)),
                           "counts": Shaped(types=WHOLE, shape=(None,))})  # fmt: skip
WORK_ENTRY = Nested(optional=True, entries={
    "lr": Number(above=0, optional=True), "epochs": Number(whole=True, least=1, optional=True),
    "batch": Number(whole=True, least=1, none=True, optional=True),
    "steps": Number(whole=True, least=1, none=True, optional=True),
})  # fmt: skip
OTHER_MODEL = FreeForm(optional=True, check="the fields of a registered model")


def stated(**entries: PayloadEntry) -> Entries:
    """The statement of an op, for its class."""
    return MappingProxyType(entries)


def optional(entry: E) -> E:
    """The same entry, which a payload may leave out."""
    return replace(entry, optional=True)


def extended(base: Entries | None, /, *without: str, **own: PayloadEntry) -> Entries | None:
    """The entries of another op, but for some, and more entries; None if the other op does not state its own."""
    return None if base is None else stated(**({name: e for name, e in base.items() if name not in without} | own))


def fault_in(entries: Entries, payload: Mapping[Any, Any], where: str, sizes: Sizes, values: bool) -> str | None:
    """Why a table is not as stated, or None."""
    if ARCHITECTURE in payload:  # its own sizes, by which the model is checked when it is made
        sizes = {name: size for name, size in sizes.items() if name not in ("dim", "stats", "counts")}
    for name in payload:
        if name not in entries:
            return f"{where}{str(name)[:40]!r} is not read; expected {', '.join(entries) or 'no entries'}"
    for name, entry in entries.items():
        if name not in payload:
            if not entry.optional:
                return f"{where}{name} is missing; it must be {entry.words}"
            continue
        fault = entry.fault(payload[name], f"{where}{name}", sizes, values)
        if fault is not None:
            return fault
    return None


def sizes_of(spec: ParamSpec, data: SampleGateway, task: Mapping[str, Any]) -> Sizes:
    """The public sizes of a party's task, by name; `table` is the layout of its coded rows, if it has one.

    `classes` is 0 for a task without classes, and missing where it is not known.
    """
    counted = {"stats": sum(e.numel for e in spec.stats), "counts": sum(e.numel for e in spec.counts)}
    sizes: Sizes = {"dim": spec.dim, **counted, "sample": data.shape, "features": math.prod(data.shape)}
    sizes |= {} if data.table is None else {"table": data.table}
    classes = 0 if task.get("classes", "") is None else task.get("classes")
    return sizes | ({"classes": classes} if type(classes) is int else {})


def check_size(op: str, name: str, value: int, sizes: Sizes) -> None:
    """Raise a PartyError for a field that must equal a public size, and does not."""
    if sizes.get(name, value) != value:
        raise PartyError(f"{op} asks about {value} {name}, and the party's task has {sizes[name]}")


def check_columns(op: str, columns: Sequence[int], sizes: Sizes) -> None:
    """Raise a PartyError for a field that names columns which samples do not have."""
    if columns and not 0 <= min(columns) <= max(columns) < sizes.get("features", math.inf):
        raise PartyError(f"{op} asks about other columns than those of the samples")


def refuses_payload(op: Op, payload: Payload, sizes: Sizes | None = None, values: bool = True) -> str | None:
    """Why a payload is not as the op states, or None. Only the request and public sizes are looked at.

    Of an op without a statement only `work` is checked: it may make the payload of an op inside it.
    """
    if not isinstance(payload, Mapping):
        return "malformed ask: its payload is not a table"
    known, entries, named = dict(sizes or {}), op.entries, payload
    if entries is None:
        entries, named = {"work": WORK_ENTRY}, {name: value for name, value in payload.items() if name == "work"}
    fault = fault_in(entries, named, "", known, values)
    if fault is not None:
        return f"malformed ask: the payload of {op.name[:100]!r}: {fault}"[:1000]
    try:
        if op.entries is not None:
            op.check_ask(payload, known)
    except (PartyError, DataError, ConfigError) as error:
        return str(error)
    return None
