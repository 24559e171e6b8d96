"""Write the list of the rules: `python docs/rules_page.py` updates docs/rules.md from the table of rules."""

from __future__ import annotations

import re
from pathlib import Path

from hansa.experiment.rules import TABLE

PAGE = Path(__file__).resolve().parent / "rules.md"
FIELD = re.compile(r"(?<!\{)\{([a-z_.0-9\[\]]+)(?:!r)?\}(?!\})")
HEAD = """# Rules

What excludes what is one table of rules (`hansa.experiment.rules`). It is evaluated when an experiment
file is read, when a job is submitted, and before the first round, each time with more that is known.
The first rule that is broken, in the order of this page, refuses the run. `hansa explain FILE` says
which rules concern a file, and whether they are met, broken or decided later.

A word in capitals stands for the name of a part or for a setting, `...` for what the rule has found.
`python docs/rules_page.py` writes this page.
"""


def shown(field: re.Match[str]) -> str:
    """A field of a sentence as a reader sees it."""
    words = [word for word in field[1].split(".") if word != "name"]
    return "..." if words[0].startswith("found") else words[-1].upper().replace("_", " ")


def cell(text: str) -> str:
    """A sentence as a cell of a table."""
    return FIELD.sub(shown, text).replace("{{", "{").replace("}}", "}").replace("|", "\\|")


def page() -> str:
    """The page."""
    out = [HEAD]
    for theme, rules in TABLE.items():
        rows = [f"| {rule.name} | {cell(rule.why)} | {cell(rule.instead)} |" for rule in rules]
        out += [f"## {theme}", "", "| rule | why | instead |", "|---|---|---|", *rows, ""]
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{sum(map(len, TABLE.values()))} rules: {PAGE.name}")
