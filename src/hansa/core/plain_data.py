"""Conversion between parts and plain data, which files, `--set` and messages hold.

The type of a field says which values it takes. Dotted names reach fields of parts within parts.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hansa.core.applies import idle
from hansa.core.fields import MOST, LimitError, check_limits, plain, stated_types, statements
from hansa.core.registry import Part, lookup, nameless, noun, readers, registered
from hansa.plumbing.errors import ConfigError, nearest

NONE = "none"  # how a file or `--set` writes the value None, which TOML lacks; a field of texts is left out instead
_hints: dict[type[Any], dict[str, Any]] = {}  # types of fields, without what they state


def build(kind: str, name: str, **fields: Any) -> Any:
    """Make a part by name; dotted names set nested fields: `build("algorithm", "fedavg", **{"local.lr": 1})`."""
    return from_config(kind, {"name": name, **nest(fields)}, where=kind)


def nest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted names to nested mappings: `{"local.lr": 1}` becomes `{"local": {"lr": 1}}`."""
    out: dict[str, Any] = {}
    for dotted, value in fields.items():
        *path, last = dotted.split(".")
        at = out
        for step in path:
            inner = at.setdefault(step, {})
            if isinstance(inner, str):  # a part is set by name, and one of its fields is set too
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
    """Make a part from plain data: its name, or a mapping with its `name` and fields.

    A mapping without a name changes fields of `default`.
    """
    value = readers[kind](value) if kind in readers else value
    if isinstance(value, Part):
        if value.kind != kind:
            raise ConfigError(f"{where}: expected a {noun(kind)}, got the {noun(value.kind)} {value.name!r}")
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a {noun(kind)} by name or as a table, got {value!r}")
    if "name" not in value and default is None:
        registered(kind)  # loads the module that reads such tables
        value = (nameless[kind](value) if kind in nameless else None) or value
    fields = dict(value)
    name = fields.pop("name", default.name if default is not None else None)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: the {noun(kind)} needs a name, one of {', '.join(registered(kind))}")
    cls = lookup(kind, name, where)
    base = default if type(default) is cls else None
    return fill(cls, fields, where=f"{where} ({name})", base=base)


def fill(cls: type[Any], values: Mapping[str, Any], where: str, base: Any = None) -> Any:
    """Make the dataclass `cls` from plain data and check names and types; other fields come from `base`."""
    hints = stated_types(cls)
    fields: dict[str, Any] = {f.name: getattr(base, f.name) for f in dataclasses.fields(cls)} if base else {}
    if getattr(cls, "kind", None) == "algorithm":
        values = _with_part_fields(cls, values, fields, where)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown field {key!r}{nearest(key, hints)}")
        before = fields[key] if key in fields else field_default(cls, key)
        fields[key] = convert(value, hints[key], f"{where}.{key}", before)
    if base is not None:  # what comes from the base gives way to what is set here
        for name in idle(cls, fields):
            if name not in values:
                fields[name] = field_default(cls, name)
    for f in dataclasses.fields(cls):
        if f.name not in fields and field_default(cls, f.name) is dataclasses.MISSING:
            raise ConfigError(f"{where}: the field {f.name!r} is required ({type_name(plain(hints[f.name]))})")
    try:
        return cls(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:
        if cls.__module__.partition(".")[0] == "hansa":
            raise
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error  # the user's own part


def _with_part_fields(
    cls: type[Any], values: Mapping[str, Any], base: Mapping[str, Any], where: str
) -> Mapping[str, Any]:
    """Move fields that only one part of an algorithm has into that part: `mu` of fedprox becomes `local.mu`."""
    out, hints = dict(values), field_types(cls)
    parts = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Part)}

    def class_of(name: str) -> type[Any] | None:
        part, default = out.get(name), base.get(name, field_default(cls, name))
        if isinstance(part, Part):
            return type(part)
        named = part.get("name") if isinstance(part, Mapping) else part
        if named is None:
            return type(default)
        return lookup(parts[name].kind, named, where) if isinstance(named, str) else None  # `convert` will refuse it

    for key in [key for key in values if key not in hints]:
        owners = [name for name in parts if dataclasses.is_dataclass(at := class_of(name)) and key in field_types(at)]
        if len(owners) > 1:
            raise ConfigError(
                f"{where}: {' and '.join(owners)} have a field {key!r}; say which, as in {owners[0]}.{key}"
            )
        if owners:
            part = out.get(owners[0], {})
            part = {"name": part} if isinstance(part, str) else to_config(part) if isinstance(part, Part) else part
            out[owners[0]] = {**part, key: out.pop(key)}
    return out


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The type of each field of a dataclass, by name."""
    if cls not in _hints:
        _hints[cls] = {name: plain(hint) for name, hint in stated_types(cls).items()}
    return _hints[cls]


def field_default(cls: type[Any], name: str) -> Any:
    """The default of a field, or dataclasses.MISSING."""
    f = next(f for f in dataclasses.fields(cls) if f.name == name)
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return f.default


def type_name(hint: Any) -> str:
    """The words for a type, for messages."""
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
        return f"the {noun(hint.kind)} {hint.name!r}" if ":" not in hint.name else f"a {noun(hint.kind)}"
    if dataclasses.is_dataclass(hint):
        return "a table"
    return {float: "a number", int: "a whole number", str: "a text", bool: "true or false", dict: "a table"}.get(
        hint, str(hint)
    )


def convert(value: Any, hint: Any, where: str, default: Any = None) -> Any:
    """Check and convert a value for a field's type: integers to floats, lists to tuples, tables to parts."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *stated = get_args(hint)
        number = convert(value, inner, where, default)
        check_limits(number, tuple(stated), where)
        return number
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if (value is None and type(None) in options) or (value == NONE and says_none(options)):
            return None
        parts = [o for o in options if isinstance(o, type) and issubclass(o, Part)]
        if parts and isinstance(value, (str, Mapping, Part)):
            return convert(value, parts[0], where, default)
        for option in options:
            whole = isinstance(value, int) and int in map(plain, options) and not isinstance(value, bool)
            if plain(option) is float and whole:
                continue  # keep an integer if both types are allowed
            try:
                return convert(value, option, where, default)
            except LimitError:
                raise
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
    elif hint in (int, float) and isinstance(value, int) and abs(value) > MOST:
        raise LimitError(f"{where}: the whole number is too large; at most {MOST:g} is allowed")
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif hint is Any or (isinstance(hint, type) and isinstance(value, hint)):
        return value
    raise ConfigError(f"{where}: expected {type_name(plain(hint))}, got {value!r}")


def says_none(options: tuple[Any, ...]) -> bool:
    """Whether the word `NONE` means None for a field of these types, and is not a value of its own."""
    words = str in options or any(NONE in get_args(option) for option in options if get_origin(option) is Literal)
    return type(None) in options and not words


def _nested(value: Any, hint: type[Part], where: str, default: Any) -> Any:
    """A part as the field of another part. A field for ops accepts a local solver too if the table has its `kind`."""
    kind = hint.kind
    if isinstance(value, Part):
        kind = value.kind
    elif isinstance(value, Mapping) and "kind" in value:
        value = dict(value)
        kind = value.pop("kind")
    part = from_config(kind, value, where, default if isinstance(default, Part) else None)
    innermost: Any = part
    while not isinstance(innermost, hint):  # a wrapper is allowed where its inner part is
        innermost = getattr(innermost, "inner", None)
        if innermost is None:
            raise ConfigError(f"{where}: expected {type_name(hint)}, got the {noun(part.kind)} {part.name!r}")
    return part


def to_config(part: Part) -> dict[str, Any]:
    """A part as plain data; `from_config` makes an equal part of it."""
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


def check_fields(record: Any, hints: Mapping[str, Any]) -> None:
    """Check fields of a dataclass by their types, and convert them, as for a message or a file."""
    for name, hint in hints.items():
        value = getattr(record, name)
        checked = convert(value, hint, f"{type(record).__name__}.{name}")
        if checked is not value:
            object.__setattr__(record, name, checked)


def check_numbers(record: Any) -> None:
    """Check those fields of a dataclass, which is no part, whose types state limits of numbers."""
    hints = stated_types(type(record))
    check_fields(record, {name: hint for name, hint in hints.items() if any(s for _, s in statements(hint))})
