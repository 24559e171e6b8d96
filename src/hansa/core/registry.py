"""The registry of parts: everything that files, the command line and messages refer to by name.

A part is a frozen dataclass with a `kind`. Its fields are its hyper-parameters and nothing else, so the list of fields
is the configuration schema of Python, TOML, `--set` and messages. Parts nest (an algorithm has a local solver).
`core.plain_data` makes parts of plain data.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from hansa.core.applies import Applies, check_applies
from hansa.core.fields import stated_types
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
        from hansa.core.plain_data import check_fields  # makes parts itself, so it imports this module

        check_fields(self, stated_types(type(self)))
        check_applies(self)


P = TypeVar("P", bound=type[Part])

_parts: dict[str, dict[str, type[Part]]] = {kind: {} for kind in KINDS}
_providers: dict[str, list[str]] = {kind: [] for kind in KINDS}
Table = Mapping[str, Any]
nameless: dict[str, Callable[[Table], Table | None]] = {}  # how a table without a name is read, by kind
readers: dict[str, Callable[[Any], Any]] = {}  # how a value is read before it is a name or a table, by kind
_refused: dict[tuple[str, str], str] = {}  # (kind, name): why the name is refused
_loaded: set[str] = set()
_installed: set[type[Part]] = set()  # parts of entry points, which other processes find by name


class _Loading(threading.local):
    """The kinds that this thread is importing: a module may look up a part of its own kind."""

    kinds: frozenset[str] = frozenset()


_loading = _Loading()


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
        nameless[kind] = read
        return read

    return add


def read_values(kind: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Decorator: a function that turns a value of another form into a name, a table or a part; others stay."""

    def add(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        readers[kind] = read
        return read

    return add


def reads_nameless(kind: str) -> bool:
    """Whether a table of this kind may have no name."""
    return bool(registered(kind)) and kind in nameless


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


def summary(cls: type[Part]) -> tuple[str, str]:
    """The first line of a part's docstring, and the rest of it."""
    doc = (cls.__doc__ or "").strip()
    head, _, rest = doc.partition("\n")
    paragraphs = [" ".join(block.split()) for block in rest.strip().split("\n\n")]
    return head.strip(), "\n\n".join(paragraphs)
