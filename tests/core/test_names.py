"""No class name is used twice in the package, so that a name in a message or in a review has one meaning."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import hansa

ROOT = Path(hansa.__file__).parent
CLASS = re.compile(r"^[ \t]*class (\w+)\b *[\[(:]", re.M)


def class_names(root: Path) -> dict[str, list[str]]:
    """The files that define each class name, nested classes included."""
    files = defaultdict[str, list[str]](list)
    for path in sorted(root.rglob("*.py")):
        for found in CLASS.finditer(path.read_text()):
            files[found[1]].append(str(path.relative_to(root)))
    return files


def test_no_class_name_is_used_twice() -> None:
    assert {name: files for name, files in class_names(ROOT).items() if len(files) > 1} == {}


def test_the_search_for_class_names_finds_nested_ones(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Model:\n    class Layer: ...\n")
    (tmp_path / "two.py").write_text("def make():\n    class Layer: ...\n")
    assert class_names(tmp_path) == {"Model": ["one.py"], "Layer": ["one.py", "two.py"]}
