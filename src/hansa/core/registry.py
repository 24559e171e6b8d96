"""The registry of parts: everything that files, the command line and messages refer to by name.

A part is a frozen dataclass with a `kind`. Its fields are its hyper-parameters and nothing else, so the list of fields
is the configuration schema of Python, TOML, `--set` and messages. Parts nest (an algorithm has a local solver), and
dotted names reach nested fields.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import math
import threading
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from hansa.core.applies import Applies, check_applies, idle
from hansa.core.fields import LimitError, check_limits, plain, stated_types
from hansa.plumbing.errors import ConfigError, nearest
from hansa.plumbing.functions import REFERENCE, bind, load, load_function, reference_of

KINDS = ("algorithm", "local", "server", "fusion", "select", "transform", "adversary", "model", "dataset", "partition",
         "prepare", "predictor", "op", "schedule", "pace", "staleness", "devices", "distribution", "availability",
         "engine", "tracker", "secure", "dp", "finetune", "metric", "attestation", "topology", "drift",
         "detector", "relays")  # fmt: skip


_NOUNS = {"local": "local solver", "server": "server optimiser", "select": "selector", "dataset": "data set",
          "prepare": "preparation", "staleness": "staleness function", "devices": "description of devices",
          "availability": "kind of availability", "engine": "simulation engine", "secure": "secure sum",
          "relays": "tree of relays",
          "dp": "kind of differential privacy", "finetune": "fine-tuning",
          "attestation": "attestation verifier", "detector": "detector of drift"}  # fmt: skip


NONE = "none"  # how a file or `--set` writes the value None, which TOML lacks; a field of texts is left out instead

# Metadata of a field that is a table of free names: the dataclass of its entries, and words in place of an entry.
ENTRIES, WORDS = "entries", "words"


def noun(kind: str) -> str:
    """The noun for a kind of part, for messages."""
    return _NOUNS.get(kind, kind)


class Part:
    """Base of all parts; subclasses are frozen dataclasses.

    The constructor checks the fields and converts plain data to parts: `FedAvg(local="sgd")` works, and
    `SGD(lr="fast")` is a ConfigError. A part that is not registered has the name `"my_module:MyPart"`, by which files
    and messages name it.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    applies: ClassVar[Applies] = {}  # the fields that have an effect only beside certain values of others

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in vars(cls):
            cls.name = f"{cls.__module__}:{cls.__qualname__}"  # not that of a base; `register` replaces it
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            def check_first(self: Any) -> None:
                Part.__post_init__(self)
                own(self)

            cls.__post_init__ = check_first  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        for name, hint in stated_types(type(self)).items():
            value = getattr(self, name)
            checked = convert(value, hint, f"{type(self).__name__}.{name}")
            if checked is not value:
                object.__setattr__(self, name, checked)
        check_applies(self)


P = TypeVar("P", bound=type[Part])

_parts: dict[str, dict[str, type[Part]]] = {kind: {} for kind in KINDS}
_providers: dict[str, list[str]] = {kind: [] for kind in KINDS}
Table = Mapping[str, Any]
_nameless: dict[str, Callable[[Table], Table | None]] = {}  # how a table without a name is read, by kind
_readers: dict[str, Callable[[Any], Any]] = {}  # how a value is read before it is a name or a table, by kind
_refused: dict[tuple[str, str], str] = {}  # (kind, name): why the name is refused
_loaded: set[str] = set()
_installed: set[type[Part]] = set()  # parts of entry points, which other processes find by name


class _Loading(threading.local):
    """The kinds that this thread is importing: a module may look up a part of its own kind."""

    kinds: frozenset[str] = frozenset()


_loading = _Loading()
_hints: dict[type[Any], dict[str, Any]] = {}  # without statements


def register(name: str) -> Callable[[P], P]:
    """Class decorator: register a part under `name` within its kind."""

    def add(cls: P) -> P:
        known = _parts[cls.kind]
        other = known.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"two {cls.kind}s are called {name!r}: {other.__module__} and {cls.__module__}")
        cls.name = name
        known[name] = cls
        return cls

    return add


def refuse(kind: str, name: str, reason: str) -> None:
    """Refuse `name` within a kind of part; `reason` goes on after the name and says which names are right."""
    _refused[kind, name] = reason


def read_nameless(kind: str) -> Callable[[Callable[[Table], Table | None]], Callable[[Table], Table | None]]:
    """Decorator: a function that turns a table without a `name` into one with a name, or returns None."""

    def add(read: Callable[[Table], Table | None]) -> Callable[[Table], Table | None]:
        _nameless[kind] = read
        return read

    return add


def read_values(kind: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Decorator: a function that turns a value of another form into a name, a table or a part; others stay."""

    def add(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        _readers[kind] = read
        return read

    return add


def reads_nameless(kind: str) -> bool:
    """Whether a table of this kind may have no name."""
    return bool(registered(kind)) and kind in _nameless


def check_name(kind: str, name: str, where: str = "") -> None:
    """Raise the ConfigError for a name that is refused."""
    if (kind, name) in _refused:
        at = f"{where}: " if where and where != kind else ""
        raise ConfigError(f"{at}{name!r} {_refused[kind, name]}")


def provide(kind: str, *modules: str) -> None:
    """Declare modules that register parts of `kind`; they are imported when the kind is first needed."""
    _providers[kind].extend(modules)


def registered(kind: str) -> dict[str, type[Part]]:
    """All parts of a kind by name, including those of entry points (group `hansa.<kind>`)."""
    if kind not in _parts:
        raise ConfigError(f"unknown kind of part {kind!r}{nearest(kind, KINDS)}")
    if kind not in _loaded and kind not in _loading.kinds:
        _loading.kinds |= {kind}
        try:
            _load(kind)
        finally:
            _loading.kinds -= {kind}
        _loaded.add(kind)  # only now: until then other threads import too, and Python makes them wait for this one
    return dict(sorted(_parts[kind].items()))


def _load(kind: str) -> None:
    """Import all modules and entry points that register parts of a kind."""
    for module in _providers[kind]:
        importlib.import_module(module)
    for entry in importlib.metadata.entry_points(group=f"hansa.{kind}"):
        part = entry.load()
        if isinstance(part, type) and issubclass(part, Part) and entry.name not in _parts[kind]:
            register(entry.name)(part)
            _installed.add(part)


def lookup(kind: str, name: str, where: str = "") -> type[Part]:
    """The part class registered under `name`, or the user's own class that `"my_module:MyPart"` names."""
    if REFERENCE.fullmatch(name):
        return _own_part(kind, name, where or kind)
    known = _parts.get(kind, {}).get(name) or registered(kind).get(name)
    if known is None:
        check_name(kind, name, where)
        at = f"{where}: " if where and where != kind else ""
        raise ConfigError(f"{at}unknown {noun(kind)} {name!r}{nearest(name, registered(kind))}")
    return known


def _own_part(kind: str, reference: str, where: str) -> type[Part]:
    """The user's own part that a reference names. It takes that name in records and messages."""
    cls = load(reference, where)
    bases = (base for part in registered(kind).values() for base in part.__mro__ if "kind" in vars(base))
    base = next(bases, Part)
    right = f"every {noun(kind)} is a class that derives from {base.__module__}.{base.__name__}"
    if not isinstance(cls, type) or not issubclass(cls, Part):
        wrong = "a class of another kind" if isinstance(cls, type) else f"of the type {type(cls).__name__!r}"
        raise ConfigError(f"{where}: {reference!r} is {wrong}; {right}")
    if cls.kind != kind:
        raise ConfigError(f"{where}: {reference!r} is of the kind {noun(cls.kind)!r}; {right}")
    params = vars(cls).get("__dataclass_params__")
    if params is None or not params.frozen:
        raise ConfigError(f"{where}: {reference!r} is no frozen dataclass; write @dataclass(frozen=True) above it")
    if cls.__module__.partition(".")[0] != "hansa" and cls not in _installed:
        cls.name = f"{cls.__module__}:{cls.__qualname__}"  # other processes do not know the name of its `register`
    return cls


def own_function(setting: Any, where: str, folder: str | None = None) -> Callable[..., Any] | None:
    """The user's function that a setting names, `"my_module:name"` or a table with that name and its arguments.

    None if the setting names a part, registered or the user's own.
    """
    reference = reference_of(setting)
    if reference is None:
        return None
    function = load_function(reference, where, folder)
    if isinstance(function, type) and issubclass(function, Part):
        return None
    fields = {} if isinstance(setting, str) else {name: value for name, value in setting.items() if name != "name"}
    return bind(function, fields, reference, where)


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
    value = _readers[kind](value) if kind in _readers else value
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
        value = (_nameless[kind](value) if kind in _nameless else None) or value
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


def summary(cls: type[Part]) -> tuple[str, str]:
    """The first line of a part's docstring, and the rest of it."""
    doc = (cls.__doc__ or "").strip()
    head, _, rest = doc.partition("\n")
    paragraphs = [" ".join(block.split()) for block in rest.strip().split("\n\n")]
    return head.strip(), "\n\n".join(paragraphs)
