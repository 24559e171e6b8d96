"""Load functions and classes that users name as `"my_module:name"`.

Modules are searched in the folder of the experiment file, in the working folder, and among the installed packages. A
process that reads names from messages allows only those that its owner has listed (`only`): a message never makes it
import anything else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hansa.plumbing.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import nn

REFERENCE = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")
_folder: ContextVar[str | None] = ContextVar("folder", default=None)
_only: ContextVar[tuple[frozenset[str], str] | None] = ContextVar("only", default=None)


def is_function(value: Any) -> bool:
    """Whether a setting names the user's own function or class."""
    return isinstance(value, str) and ":" in value


def reference_of(value: Any) -> str | None:
    """The `"my_module:name"` of a setting, or of a table with that `name`; None for any other setting."""
    name = value.get("name") if isinstance(value, Mapping) else value
    return str(name) if is_function(name) else None


@contextlib.contextmanager
def searching(folder: str) -> Iterator[None]:
    """Search modules in this folder first, which is that of an experiment file."""
    before = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(before)


def experiment_folder() -> str:
    """The folder from which files of a configuration are looked for: that of the experiment file, if one is read."""
    return _folder.get() or os.getcwd()


@contextlib.contextmanager
def only(references: Collection[str], reason: str) -> Iterator[None]:
    """Load these references and no others; `reason` goes on after the name of one that is not listed."""
    before = _only.set((frozenset(references), reason))
    try:
        yield
    finally:
        _only.reset(before)


def load(reference: str, where: str, folder: str | None = None) -> Any:
    """What `"my_module:name"` names; modules in `folder` and in the working folder are found too."""
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(f"{where}: {reference!r} is not of the form 'my_module:name', as in 'mine:net'")
    listed = _only.get()
    if listed is not None and reference not in listed[0]:
        raise ConfigError(f"{where}: {reference!r} {listed[1]}")
    module_name, path = match.groups()
    thing = _import(module_name, where, folder or experiment_folder())
    for name in path.split("."):
        if not hasattr(thing, name) or not hasattr(thing, "__dict__"):
            names = [other for other, value in vars(thing).items() if callable(value) and not other.startswith("_")
                     and getattr(value, "__module__", None) == module_name]  # fmt: skip
            raise ConfigError(f"{where}: the module {module_name!r} has no {path!r}{nearest(name, names)}")
        thing = getattr(thing, name)
    return thing


def _import(name: str, where: str, folder: str) -> Any:
    """A module by name, from the folder, the working folder, or the installed packages."""
    places = list(dict.fromkeys(os.path.abspath(place) for place in (folder, os.getcwd())))
    for place in reversed(places):
        if place not in sys.path:
            sys.path.insert(0, place)
    top = name.partition(".")[0]
    _check_same_file(top, where, places)
    if name not in sys.modules:
        importlib.invalidate_caches()  # the file may have just been written
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            # The sender of a message does not learn the folders of this machine.
            looked = " and ".join(places) if _only.get() is None else "the working folder"
            raise ConfigError(
                f"{where}: there is no module {error.name!r}; looked in {looked}, and among the installed packages"
            ) from None
        raise ConfigError(f"{where}: cannot import {name!r}: {error}") from error
    except Exception as error:  # the user's own module: quote its error
        raise ConfigError(f"{where}: cannot import {name!r}: {type(error).__name__}: {error}") from error


def _check_same_file(name: str, where: str, places: list[str]) -> None:
    """Refuse a module that was imported before from another file than the one in these folders."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return
    here = next((path for place in places for path in (Path(place) / f"{name}.py", Path(place) / name / "__init__.py")
                 if path.exists()), None)  # fmt: skip
    if here is not None and here.resolve() != Path(file).resolve():
        raise ConfigError(
            f"{where}: this process has already imported the module {name!r} from {file}, and the one here is {here}; "
            "rename one of them, or use a process for each"
        )


def load_function(reference: str, where: str, folder: str | None = None) -> Callable[..., Any]:
    """The function or class that `"my_module:name"` names."""
    function = load(reference, where, folder)
    if not callable(function):
        raise ConfigError(
            f"{where}: {reference!r} is of the type {type(function).__name__!r}, neither a function nor a class"
        )
    return function  # type: ignore[no-any-return]


def bind(function: Callable[..., Any], fields: Mapping[str, Any], reference: str, where: str) -> Callable[..., Any]:
    """A function of the user with these arguments; a ConfigError if it does not take them, or needs others."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return functools.partial(function, **fields)
    names = [name for name, parameter in signature.parameters.items()
             if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]  # fmt: skip
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for field in fields:
        if field not in names and not free:
            takes = f"it takes {', '.join(names)}" if names else "it takes no arguments"
            raise ConfigError(f"{where}: {reference!r} has no argument {field!r}; {takes}{nearest(field, names)}")
    needed = [name for name, parameter in signature.parameters.items()
              if parameter.default is parameter.empty and name not in fields
              and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)]  # fmt: skip
    if needed:
        table = ", ".join(f"{name} = ..." for name in needed)
        raise ConfigError(
            f"{where}: {reference!r} needs {', '.join(needed)}; give a table: {{ name = {reference!r}, {table} }}"
        )
    return functools.partial(function, **fields) if fields else function


def double(factory: Callable[[], nn.Module]) -> nn.Module:
    """The model of a factory, in float64."""
    return factory().double()
