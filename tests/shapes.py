"""Algorithms of one shape send the same kinds of messages: one of each runs where every job is dear."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from hansa.core.registry import registered

STATEMENTS = ("data", "models", "participation", "uses_public", "packs", "whole", "clustered", "trains", "trusts")


def shape(name: str) -> tuple[Any, ...]:
    """What an algorithm declares about its messages: verbs, cohort, and the kind of update."""
    part: Any = registered("algorithm")[name]
    return (frozenset(part().verbs), *(getattr(part, statement) for statement in STATEMENTS))


def by_shape(names: Iterable[str]) -> list[Any]:
    """Cases of a test: the first algorithm of each shape; others at night."""
    cases, seen = [], set()
    for name in names:
        cases.append(pytest.param(name, marks=pytest.mark.night if shape(name) in seen else ()))
        seen.add(shape(name))
    return cases
