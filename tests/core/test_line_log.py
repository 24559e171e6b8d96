"""Append-only files of lines (`disk.LineLog`), on a disk that is full for a while."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from hansa.plumbing import disk


def test_a_line_is_added_after_a_first_one_found_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = disk.LineLog(tmp_path / "lines")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "append", full)
        with pytest.raises(OSError, match="No space"):
            lines.add(b"first")
    lines.add(b"second")
    assert lines.read() == [b"second"]
