"""The page that maps the sources' cards to code: it lists every card once, and its files exist."""

from __future__ import annotations

import re
from collections import Counter

from docs_pages import ROOT

PAGE = (ROOT / "docs/sources.md").read_text()
# The numbers of the specification's sections and cards.
CARDS = [
    *(f"C0.{k}" for k in range(1, 11)),
    *(f"{section}.{k}" for section, last in (
        (1, 11), (2, 5), (3, 6), (4, 8), (6, 4), (7, 5), (8, 5), (9, 5), (10, 6), (11, 6)
    ) for k in range(1, last + 1)),
    "5", "13", "14", "15",
]  # fmt: skip
ROW = re.compile(r"^\| (?P<number>C?\d+(?:\.\d+)?) \| (?P<what>[^|]+) \| (?P<module>[^|]*) \|(?:(?P<test>[^|]*)\|)?$")


def rows() -> list[re.Match[str]]:
    return [found for line in PAGE.splitlines() if (found := ROW.match(line))]


def test_every_card_is_listed_once() -> None:
    counted = Counter(row["number"] for row in rows())
    attacks = counted.pop("12")
    assert counted == Counter(CARDS)
    assert attacks == 8


def test_a_card_has_a_module_and_a_test_or_is_said_to_be_missing() -> None:
    for row in rows():
        if row["number"] in ("14", "15"):
            continue
        modules = re.findall(r"\]\(\.\./(src/hansa/[\w/]+\.py)\)", row["module"])
        tests = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", row["test"] or "")
        assert (modules and tests) or "not yet" in row["module"], row[0]
        assert bool(modules) == bool(tests), row[0]


def test_every_file_that_the_page_names_exists_under_the_name_that_it_shows() -> None:
    links = re.findall(r"\[`([^`]+)`\]\(\.\./([^)#]+)\)", PAGE)
    assert len(links) > 80
    for shown, path in links:
        assert (ROOT / path).is_file(), path
        assert path.endswith(shown), (shown, path)


def test_every_algorithm_fusion_and_attack_module_is_on_the_page() -> None:
    for folder in ("algorithms", "fusion", "adversary", "bayes", "trees"):
        for path in (ROOT / "src/hansa" / folder).glob("*.py"):
            registers = "@register(" in path.read_text()
            assert not registers or f"src/hansa/{folder}/{path.name}" in PAGE, path.name
