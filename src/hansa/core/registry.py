"""Named parts: everything that a configuration file, the command line or the wire may mention by name.

A part is a frozen dataclass with a `kind`. Its fields are its hyper-parameters and nothing else, so the list of fields
*is* the configuration schema: Python, TOML, `--set` and the wire share it. Parts nest (an algorithm has a local
solver), and dotted names reach nested fields.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import math
import threading
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from hansa.core.errors import ConfigError, nearest

KINDS = ("algorithm", "local", "server", "fusion", "select", "transform", "adversary", "model", "dataset", "partition",
         "prepare", "predictor", "op", "schedule", "pace", "devices", "distribution", "availability",
         "tracker", "secure", "dp")  # fmt: skip


_NOUNS = {"local": "local solver", "server": "server optimiser", "select": "selector", "dataset": "data set",
          "prepare": "preparation", "devices": "description of devices",
          "availability": "kind of availability", "secure": "secure sum",
          "dp": "kind of differential privacy"}  # fmt: skip


def noun(kind: str) -> str:
    """A kind of part as a user would say it."""
    return _NOUNS.get(kind, kind)


class Part:
    """Base of everything that is registered; subclasses are frozen dataclasses.

    Fields are checked, and plain data made into parts, however a part is made: `FedAvg(local="sgd")` works, and
    `SGD(lr="fast")` is a ConfigError.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            def check_first(self: Any) -> None:
                Part.__post_init__(self)
                own(self)

            cls.__post_init__ = check_first  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():
            value = getattr(self, name)
            checked = convert(value, hint, f"{type(self).__name__}.{name}")
            if checked is not value:
                object.__setattr__(self, name, checked)


P = TypeVar("P", bound=type[Part])

_parts: dict[str, dict[str, type[Part]]] = {kind: {} for kind in KINDS}
_providers: dict[str, list[str]] = {kind: [] for kind in KINDS}
_loaded: set[str] = set()


class _Loading(threading.local):
    """The kinds that this thread is importing: a module may ask for a part of its own kind."""

    kinds: frozenset[str] = frozenset()


_loading = _Loading()
_hints: dict[type[Any], dict[str, Any]] = {}


def register(name: str) -> Callable[[P], P]:
    """Class decorator: make the part known under `name` within its kind."""

    def add(cls: P) -> P:
        known = _parts[cls.kind]
        other = known.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"two {cls.kind}s are called {name!r}: {other.__module__} and {cls.__module__}")
        cls.name = name
        known[name] = cls
        return cls

    return add


def provide(kind: str, *modules: str) -> None:
    """Say which modules register parts of `kind`; they are imported when the kind is first asked for."""
    _providers[kind].extend(modules)


def registered(kind: str) -> dict[str, type[Part]]:
    """All parts of a kind by name, third-party ones (entry-point group `hansa.<kind>`) included."""
    if kind not in _parts:
        raise ConfigError(f"unknown kind of part {kind!r}{nearest(kind, KINDS)}")
    if kind not in _loaded and kind not in _loading.kinds:
        _loading.kinds |= {kind}
        try:
            _load(kind)
        finally:
            _loading.kinds -= {kind}
        _loaded.add(kind)  # only now: until then other threads import too, and Python has them wait for this one
    return dict(sorted(_parts[kind].items()))


def _load(kind: str) -> None:
    """Import all modules that register parts of a kind."""
    for module in _providers[kind]:
        importlib.import_module(module)
    for entry in importlib.metadata.entry_points(group=f"hansa.{kind}"):
        part = entry.load()
        if isinstance(part, type) and issubclass(part, Part) and entry.name not in _parts[kind]:
            register(entry.name)(part)


def lookup(kind: str, name: str, where: str = "") -> type[Part]:
    """The part class registered under `name`."""
    known = _parts.get(kind, {}).get(name) or registered(kind).get(name)
    if known is None:
        at = f"{where}: " if where and where != kind else ""
        raise ConfigError(f"{at}unknown {noun(kind)} {name!r}{nearest(name, registered(kind))}")
    return known


def build(kind: str, name: str, **fields: Any) -> Any:
    """Make a registered part; dotted names reach nested fields: `build("algorithm", "fedavg", **{"local.lr": 1})`."""
    return from_config(kind, {"name": name, **nest(fields)}, where=kind)


def nest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into nested mappings: `{"local.lr": 1}` becomes `{"local": {"lr": 1}}`."""
    out: dict[str, Any] = {}
    for dotted, value in fields.items():
        *path, last = dotted.split(".")
        at = out
        for step in path:
            inner = at.setdefault(step, {})
            if isinstance(inner, str):  # a part named beside one of its fields
                inner = at[step] = {"name": inner}
            elif isinstance(inner, Part):
                inner = at[step] = to_config(inner)
            if not isinstance(inner, dict):
                raise ConfigError(f"{dotted!r} reaches into {step!r}, which is already set to {inner!r}")
            at = inner
        if isinstance(at.get(last), dict):
            if not isinstance(value, (str, dict)):
                raise ConfigError(f"{dotted!r} is a table with fields of its own; it cannot be {value!r}")
            at[last].update({"name": value} if isinstance(value, str) else value)
        else:
            at[last] = value
    return out


def from_config(kind: str, value: Any, where: str, default: Part | None = None) -> Any:
    """Read a part from plain data: its name, or a mapping of its `name` and fields.

    A mapping without a name changes fields of `default`.
    """
    if isinstance(value, Part):
        if value.kind != kind:
            raise ConfigError(f"{where}: expected a {noun(kind)}, got the {noun(value.kind)} {value.name!r}")
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a {noun(kind)} by name or as a table, got {value!r}")
    given = dict(value)
    name = given.pop("name", default.name if default is not None else None)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: the {noun(kind)} needs a name, one of {', '.join(registered(kind))}")
    cls = lookup(kind, name, where)
    base = default if isinstance(default, cls) and default.name == name else None
    return fill(cls, given, where=f"{where} ({name})", base=base)


def fill(cls: type[Any], given: Mapping[str, Any], where: str, base: Any = None) -> Any:
    """Make the dataclass `cls` from plain data, checking names and types; fields not given come from `base`."""
    hints = field_types(cls)
    fields: dict[str, Any] = {f.name: getattr(base, f.name) for f in dataclasses.fields(cls)} if base else {}
    if getattr(cls, "kind", None) == "algorithm":
        given = _homed(cls, given, fields, where)
    for key, value in given.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown field {key!r}{nearest(key, hints)}")
        before = fields[key] if key in fields else field_default(cls, key)
        fields[key] = convert(value, hints[key], f"{where}.{key}", before)
    for f in dataclasses.fields(cls):
        if f.name not in fields and field_default(cls, f.name) is dataclasses.MISSING:
            raise ConfigError(f"{where}: the field {f.name!r} is required ({type_name(hints[f.name])})")
    try:
        return cls(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _homed(cls: type[Any], given: Mapping[str, Any], base: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Fields of an algorithm with those that only one of its parts has moved there: `mu` of fedprox is `local.mu`."""
    out, hints = dict(given), field_types(cls)
    parts = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Part)}

    def home_of(name: str) -> type[Any] | None:
        part, default = out.get(name), base.get(name, field_default(cls, name))
        if isinstance(part, Part):
            return type(part)
        named = part.get("name") if isinstance(part, Mapping) else part
        if named is None:
            return type(default)
        return lookup(parts[name].kind, named, where) if isinstance(named, str) else None  # refused where it is made

    for key in [key for key in given if key not in hints]:
        homes = [name for name in parts if dataclasses.is_dataclass(at := home_of(name)) and key in field_types(at)]
        if len(homes) > 1:
            raise ConfigError(f"{where}: {' and '.join(homes)} have a field {key!r}; say which, as in {homes[0]}.{key}")
        if homes:
            part = out.get(homes[0], {})
            part = {"name": part} if isinstance(part, str) else to_config(part) if isinstance(part, Part) else part
            out[homes[0]] = {**part, key: out.pop(key)}
    return out


def field_types(cls: type[Any]) -> dict[str, Any]:
    """Name and type of each field of a dataclass."""
    if cls not in _hints:
        try:
            hints = typing.get_type_hints(cls)
        except NameError as error:
            raise ConfigError(f"the types of the fields of {cls.__name__} cannot be read: {error}") from None
        _hints[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}
    return _hints[cls]


def field_default(cls: type[Any], name: str) -> Any:
    """The default of a field, or dataclasses.MISSING."""
    f = next(f for f in dataclasses.fields(cls) if f.name == name)
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return f.default


def type_name(hint: Any) -> str:
    """A type as a user would say it."""
    if hint is type(None):
        return "nothing"
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(a) for a in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(hint))
    if origin is tuple:
        return f"a list of {type_name(get_args(hint)[0])}"
    if isinstance(hint, type) and issubclass(hint, Part):
        return f"the {noun(hint.kind)} {hint.name!r}" if "name" in vars(hint) else f"a {noun(hint.kind)}"
    return {float: "a number", int: "a whole number", str: "a text", bool: "true or false", dict: "a table"}.get(
        hint, str(hint)
    )


def convert(value: Any, hint: Any, where: str, default: Any = None) -> Any:
    """Check `value` against a field's type; whole numbers pass as numbers, lists as tuples, tables as parts."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        parts = [o for o in options if isinstance(o, type) and issubclass(o, Part)]
        if parts and isinstance(value, (str, Mapping, Part)):
            return convert(value, parts[0], where, default)
        for option in options:
            if option is float and isinstance(value, int) and int in options and not isinstance(value, bool):
                continue  # keep a whole number whole where both are allowed
            try:
                return convert(value, option, where, default)
            except ConfigError:
                continue
    elif origin is Literal:
        if value in get_args(hint) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            choices = [str(a) for a in get_args(hint)]
            raise ConfigError(f"{where}: {value!r} is not {type_name(hint)}{nearest(value, choices)}")
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            inner = get_args(hint)[0]
            return tuple(convert(v, inner, f"{where}[{i}]") for i, v in enumerate(value))
    elif isinstance(hint, type) and issubclass(hint, Part):
        return _nested(value, hint, where, default)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint is Any or (isinstance(hint, type) and isinstance(value, hint)):
        return value
    raise ConfigError(f"{where}: expected {type_name(hint)}, got {value!r}")


def _nested(value: Any, hint: type[Part], where: str, default: Any) -> Any:
    """A part as the field of another. A field for any op takes local solvers too: its table then says the kind."""
    kind = hint.kind
    if isinstance(value, Part):
        kind = value.kind
    elif isinstance(value, Mapping) and "kind" in value:
        value = dict(value)
        kind = value.pop("kind")
    part = from_config(kind, value, where, default if isinstance(default, Part) else None)
    inside: Any = part
    while not isinstance(inside, hint):  # a wrapper around a part may stand where the part may
        inside = getattr(inside, "inner", None)
        if inside is None:
            raise ConfigError(f"{where}: expected {type_name(hint)}, got the {noun(part.kind)} {part.name!r}")
    return part


def to_config(part: Part) -> dict[str, Any]:
    """A part as plain data; `from_config` gives an equal part back."""
    out: dict[str, Any] = {"name": part.name}
    for name, hint in field_types(type(part)).items():
        out[name] = _plain(getattr(part, name), hint)
    return out


def _plain(value: Any, hint: Any = None) -> Any:
    if isinstance(value, Part):
        config = to_config(value)
        declared = isinstance(hint, type) and issubclass(hint, Part) and hint.kind != value.kind
        return {"kind": value.kind, **config} if declared else config
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def summary(cls: type[Part]) -> tuple[str, str]:
    """First line and the rest of a part's docstring (the paper is cited there)."""
    doc = (cls.__doc__ or "").strip()
    head, _, rest = doc.partition("\n")
    paragraphs = [" ".join(block.split()) for block in rest.strip().split("\n\n")]
    return head.strip(), "\n\n".join(paragraphs)
