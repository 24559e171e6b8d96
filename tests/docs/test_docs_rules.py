"""docs/rules.md lists the rules of today."""

from __future__ import annotations

import sys

from docs_pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import rules_page


def test_the_page_of_rules_is_written_from_the_table() -> None:
    assert rules_page.PAGE.read_text() == rules_page.page(), "run: python docs/rules_page.py"


def test_no_field_of_a_sentence_is_left_on_the_page() -> None:
    assert "{found" not in rules_page.page() and ".name" not in rules_page.page()
    assert "Task(models={...})" in rules_page.page()
