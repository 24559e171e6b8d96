"""The map of the packages on docs/architecture.md is the one that their imports give."""

from __future__ import annotations

import sys

import pytest
from docs_pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import package_map


@pytest.mark.slow
def test_the_map_is_drawn_from_the_imports_of_today() -> None:
    packages = package_map.graph()
    assert package_map.PICTURE.read_text() == package_map.picture(packages), "run: python docs/package_map.py"
    text = package_map.PAGE.read_text()
    assert text == package_map.page(text, packages), "run: python docs/package_map.py"


def test_every_package_is_on_the_map_and_in_the_tree_of_contributing() -> None:
    tree, packages = (ROOT / "CONTRIBUTING.md").read_text(), package_map.graph()
    picture = package_map.picture(packages)
    for name in packages:
        assert f">{name}<" in picture
        assert f"`{name.replace('.', '/')}/`" in tree, name


def test_a_line_that_follows_from_others_is_not_drawn() -> None:
    packages = {"core": frozenset[str](), "a": frozenset({"core"}), "b": frozenset({"a"}), "c": frozenset({"a", "b"})}
    assert package_map.drawn(packages) == [("b", "a"), ("c", "b")]
