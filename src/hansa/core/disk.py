"""What must be on the disk, and who may write there."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from hansa.core.errors import ConfigError


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lock(path: Path, taken: str) -> BinaryIO:
    """Keep other processes out as long as the file is open; it closes when this one ends, however it ends. Where
    another has it, that is a ConfigError which says `taken`."""
    file = open(path, "ab")  # noqa: SIM115 (held by the caller)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(taken) from None
    except BaseException:
        file.close()
        raise
    return file
