"""Names of parties, jobs and federations: which are valid, and which are too alike to stand beside each other."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hansa.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def valid_name(name: str) -> str:
    """Return the name if a party, job or federation may have it; a ConfigError if not.

    Names become parts of file names, headers and certificates, so they are plain: 1 to 64 of the letters A to Z and
    a to z, digits, '.', '_' and '-', with a letter or digit first. Case is kept.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the name {name[:80]!r} cannot be used: a name is 1 to 64 of the letters A-Z and a-z, the digits, '.', "
            "'_' and '-', and begins with a letter or digit"
        )
    return name


def _folded(name: str) -> str:
    """What two names have in common that people, mail systems or file systems take for one."""
    return name.casefold().rstrip(".")


def check_distinct(names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuse new names that differ from each other, or from others, only in case or in dots at the end.

    Look-alikes from other alphabets are no valid names in the first place.
    """
    known = {_folded(other): other for other in others}
    for name in names:
        other = known.setdefault(_folded(name), name)
        if other != name:
            raise ConfigError(
                f"the party {name!r} cannot stand beside {other!r}: the two names differ only in upper and lower case "
                "or in dots at the end, and are easily taken for each other; choose another name"
            )
