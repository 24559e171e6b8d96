"""Digests of the user's own code, which is an input of a run besides its configuration."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import hansa
from hansa.core.registry import Part
from hansa.plumbing.errors import ConfigError
from hansa.plumbing.functions import double, is_function

MAIN = "__main__"  # a script or a notebook
CHUNK = 2**20
PACKAGES = {"site-packages", "dist-packages"}  # folders of installed packages
# Digest of each module when this process first read it, with the module spec at that time.
_known: dict[str, tuple[ModuleSpec | None, str | None]] = {}


def parts_of(value: Any) -> Iterator[Part]:
    """All parts in lists and dataclasses, at any depth."""
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from parts_of(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, Part):
            yield value
        for field in fields(value):
            yield from parts_of(getattr(value, field.name))


def code_of(parts: Any, functions: Iterable[Any]) -> dict[str, str | None]:
    """Digests of the modules outside Hansa that define these parts and functions, without a script or notebook."""
    modules = {type(part).__module__ for part in parts_of(parts)}
    for function in functions:
        while isinstance(function, partial):
            function = function.args[0] if function.func is double else function.func
        named = function.partition(":")[0] if is_function(function) else getattr(function, "__module__", None)
        modules |= {named} if isinstance(named, str) else set()
    return module_digests(name for name in modules if _own(sys.modules.get(name)) and name != MAIN)


def module_digests(names: Iterable[str]) -> dict[str, str | None]:
    """Digests of modules, and of the user's own modules that these import at top level."""
    return dict(_modules(set(names)))


def _modules(names: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    left, seen = sorted(names), set(names)
    while left:
        name = left.pop()
        module = sys.modules[name]
        yield name, _loaded(module)
        beside = {value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
                  for value in list(vars(module).values())}  # fmt: skip
        new = sorted(other for other in beside - seen - {MAIN} if _own(sys.modules.get(other)))
        left += new
        seen |= set(new)


def _own(module: ModuleType | None) -> bool:
    """Whether a module is the user's own: neither part of Hansa nor of an installed package.

    Packages may be installed in this environment or in one that it inherits from."""
    file = getattr(module, "__file__", None)
    if file is None or not PACKAGES.isdisjoint(Path(file).parts):
        return False
    return not any(Path(file).resolve().is_relative_to(place) for place in _installed())


@cache
def _installed() -> tuple[Path, ...]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (Path(hansa.__file__).parent.resolve(), *(Path(path).resolve() for path in paths))


def _loaded(module: ModuleType) -> str | None:
    """Digest of a module's file; an error if the file has changed since this process imported it."""
    file = getattr(module, "__file__", None)
    now = None if file is None else digest(file)
    spec, before = _known.setdefault(module.__name__, (module.__spec__, now))
    if spec is not module.__spec__:  # reloaded
        _known[module.__name__] = (module.__spec__, now)
    elif before != now:
        raise ConfigError(
            f"{file} has changed since this process imported it, so new runs would use the old code; restart "
            f"the process, or importlib.reload the module {module.__name__!r}"
        )
    return now


def digest(path: str | Path) -> str | None:
    """Hash of a file's bytes, cached while the file is unchanged; None if the file cannot be read."""
    try:
        about = os.stat(path)
        return _digest_of(os.path.realpath(path), about.st_ino, about.st_size, about.st_mtime_ns)
    except OSError:
        return None


@cache
def _digest_of(path: str, inode: int, size: int, changed: int) -> str:
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()[:20]
