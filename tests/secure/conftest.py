"""Each power of large numbers is computed once per test process: the tests repeat the same keys and messages."""

from __future__ import annotations

import builtins
import functools
import sys

import hansa.secure.functional
import hansa.secure.paillier
import hansa.secure.threshold  # noqa: F401

_power = functools.lru_cache(2**17)(builtins.pow)
for _name in ("functional", "paillier", "threshold"):
    sys.modules[f"hansa.secure.{_name}"].pow = _power  # type: ignore[attr-defined]
