"""What a number in a field is: its limits and its owner's default range, said once, by the type of the field.

    lr: Rate = 0.1          # with Rate = Annotated[float, Meta(gt=0), Owner(0, 1e6)]
    batch: Batch | None = 32

The constructor of a part, files, messages, the JSON schema, `hansa parts` and the table `[ranges]` of a party all
follow from the statement. A part of a request whose numbers say nothing cannot be registered (`check_stated`).
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from msgspec import Meta

from hansa.plumbing.errors import ConfigError

SIGNS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("above", lambda value, bound: value > bound),
    "ge": ("at least", lambda value, bound: value >= bound),
    "lt": ("below", lambda value, bound: value < bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "multiple_of": ("a multiple of", lambda value, bound: value % bound == 0),
}

MOST = sys.float_info.max  # of a whole number too, where it may become a float
REQUESTED = ("op", "local", "transform", "schedule", "metric", "fusion")  # the kinds of parts of a request


class LimitError(ConfigError):
    """A number of the right type lies outside its limits."""


@dataclass(frozen=True)
class Owner:
    """The range that a party allows in a request unless its owner sets another one (`[ranges]` in party.toml).

    `harmless` says why a field needs no range: then no number of it can make a request ask about few samples, ask for
    too much work, or overflow.
    """

    least: float = 0.0
    most: float = 0.0
    harmless: str = ""


@dataclass(frozen=True)
class Advice:
    """What the message about a number outside its limits says last: which other setting may be meant."""

    text: str


def stated_types(cls: type[Any]) -> dict[str, Any]:
    """The type of each field of a dataclass with its statements, by name."""
    if cls not in _stated:
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except NameError as error:
            raise ConfigError(f"the types of the fields of {cls.__name__} cannot be read: {error}") from None
        _stated[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
        if getattr(cls, "kind", None) in REQUESTED:
            check_stated(cls)
    return _stated[cls]


_stated: dict[type[Any], dict[str, Any]] = {}


def plain(hint: Any) -> Any:
    """A type without its statements."""
    return typing._strip_annotations(hint)  # type: ignore[attr-defined]


def statements(hint: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The numbers that a type holds, each as its type and its statements."""
    if get_origin(hint) is Annotated:
        inner, *stated = get_args(hint)
        for number, more in statements(inner):
            yield number, (*stated, *more)
    elif hint in (int, float):
        yield hint, ()
    else:
        for inner in get_args(hint):
            yield from statements(inner)


def owner_of(hint: Any) -> Owner | None:
    """What a type says about its owner's range; None if it says nothing."""
    owners = (each for _, stated in statements(hint) for each in stated if isinstance(each, Owner))
    return next(owners, None)


def words(stated: tuple[Any, ...]) -> str:
    """The limits of a number in words: "above 0 and at most 1"."""
    bounds = [f"{word} {bound:.12g}" for meta in stated if isinstance(meta, Meta)
              for sign, (word, _) in SIGNS.items() if (bound := getattr(meta, sign)) is not None]  # fmt: skip
    return " and ".join(bounds)


def limits_of(hint: Any) -> str:
    """The limits of the numbers of a type in words; a type of several numbers may have several."""
    return " or ".join(dict.fromkeys(text for _, stated in statements(hint) if (text := words(stated))))


def range_of(cls: type[Any], hint: Any) -> str:
    """The owner's default range of a field of a part in words, or why it needs none; empty if no request has it."""
    owner = owner_of(hint) if getattr(cls, "kind", None) in REQUESTED else None
    if owner is None:
        return ""
    return f"none: {owner.harmless}" if owner.harmless else f"{owner.least:.12g} to {owner.most:.12g}"


def check_limits(value: Any, stated: tuple[Any, ...], where: str) -> None:
    """Raise a ConfigError for a number outside its limits."""
    for meta in stated:
        if isinstance(meta, Meta) and isinstance(value, (int, float)):
            for sign, (_, holds) in SIGNS.items():
                bound = getattr(meta, sign)
                if bound is not None and not holds(value, bound):
                    advice = "".join(f"; {each.text}" for each in stated if isinstance(each, Advice))
                    raise LimitError(f"{where} must be {words(stated)}, got {value:.12g}{advice}")


def schema(stated: tuple[Any, ...]) -> dict[str, Any]:
    """The limits of a number as keywords of JSON schema."""
    keywords = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum",
                "multiple_of": "multipleOf"}  # fmt: skip
    return {key: getattr(meta, sign) for meta in stated if isinstance(meta, Meta)
            for sign, key in keywords.items() if getattr(meta, sign) is not None}  # fmt: skip


def check_stated(cls: type[Any]) -> None:
    """Raise a ConfigError for a part of a request with a number that says nothing."""
    for name, hint in stated_types(cls).items():
        for number, stated in statements(hint):
            if not any(isinstance(each, Owner) for each in stated):
                raise ConfigError(
                    f"{cls.__name__}.{name} is a bare {number.__name__}: say what it is by its type, such as Rate or "
                    "Count of hansa.core.quantities"
                )
