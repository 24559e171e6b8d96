"""Load functions that users name as `"my_module:function"`."""

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
    """Load `"my_module:function"`; modules in the working folder and in `folder` are found too."""
    module_name, _, name = reference.partition(":")
    for path in (os.getcwd(), folder):
        if path not in sys.path:
            sys.path.insert(0, path)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except AttributeError:
        raise ConfigError(f"{where}: the module {module_name!r} has no function {name!r}") from None
    except Exception as error:  # the user's own module: quote its error
        raise ConfigError(f"{where}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{where}: {reference!r} is not a function")
    return function  # type: ignore[no-any-return]


def double(factory: Callable[[], nn.Module]) -> nn.Module:
    """The model of a factory, in float64."""
    return factory().double()
