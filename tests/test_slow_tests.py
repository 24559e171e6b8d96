"""The list of slow tests names tests that exist."""

from __future__ import annotations

from pathlib import Path

from slow_tests import CASES, FILES

HERE = Path(__file__).parent


def test_every_entry_of_the_list_is_a_test() -> None:
    assert [path for path in FILES | CASES.keys() if not (HERE / path).is_file()] == []
    for path, functions in CASES.items():
        source = (HERE / path).read_text()
        assert [name for name in functions if f"def {name}(" not in source] == [], path
