"""Lazy imports: a package imports each of its names when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def exports(package: str, modules: Mapping[str, str], renamed: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A `__getattr__` for a package; `modules` maps each name to its module (".cell" is relative to the package).

    `renamed` maps each name that was removed to a sentence that names its successors.
    """

    def load(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name], package), name)
        hint = f": {renamed[name]}" if renamed and name in renamed else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    return load
