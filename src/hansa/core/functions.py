"""Functions that users name as `"my_module:function"`, and models made by them in float64."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from hansa.core.errors import ConfigError


def is_function(value: Any) -> bool:
    return isinstance(value, str) and ":" in value


def load_function(reference: str, where: str, folder: str) -> Callable[[], Any]:
    """The function that `"my_module:function"` names; modules are found beside the experiment file as well."""
    module_name, _, name = reference.partition(":")
    for place in (os.getcwd(), folder):
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except AttributeError:
        raise ConfigError(f"{where}: the module {module_name!r} has no function {name!r}") from None
    except Exception as error:  # the user's own module: say what it said
        raise ConfigError(f"{where}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{where}: {reference!r} is not a function")
    return function  # type: ignore[no-any-return]


def double(factory: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64."""
    return factory().double()
