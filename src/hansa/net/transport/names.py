"""Names of parties, jobs and federations: validity, and confusable names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hansa.plumbing.errors import ConfigError

NAME = r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,63}"


def valid_name(name: str) -> str:
    """Return the name if it is valid for a party, job or federation; a ConfigError if not.

    Names become parts of file names, headers and certificates. So a name is 1 to 64 of the letters A to Z and a to z,
    the digits, '.', '+', '_' and '-', and begins with a letter or digit. Every registered part's name is a valid name,
    for example `fedavg+`. Case is kept. In a URL's query a '+' must be quoted, because there it means a space.
    """
    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"invalid name {name[:80]!r}: a name is 1 to 64 of the letters A-Z and a-z, the digits, '.', "
            "'+', '_' and '-', and begins with a letter or digit"
        )
    return name


def _folded(name: str) -> str:
    """The form in which confusable names are equal: people, mail or file systems may take them for one."""
    return name.casefold().rstrip(".")


def check_distinct(names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuse names that differ from each other, or from `others`, only in case or in trailing dots.

    Look-alikes from other alphabets are invalid names anyway.
    """
    known = {_folded(other): other for other in others}
    for name in names:
        other = known.setdefault(_folded(name), name)
        if other != name:
            raise ConfigError(
                f"the party names {name!r} and {other!r} differ only in case or in trailing dots and are easily "
                "confused; choose another name"
            )
