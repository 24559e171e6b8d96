"""The public surface is the recorded one, and the changelog names every change of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import public_surface
import pytest
from public_surface import CURRENT, RELEASED, ROOT, differences, newer_than, read, surface, unnamed

import hansa

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
HEADINGS = re.findall(r"^## (.+)$", CHANGELOG, re.M)


def test_the_recorded_surface_is_that_of_the_code() -> None:
    _, recorded = read(CURRENT)
    changed = differences(recorded, surface())
    assert not changed, f"run `make surface`, and name the changes in CHANGELOG.md: {changed}"


def test_the_changelog_names_every_change_since_the_last_release() -> None:
    version, released = read(RELEASED)
    missing = unnamed(released, read(CURRENT)[1], newer_than(version, CHANGELOG))
    assert not missing, f"CHANGELOG.md must name these in backticks, above {version}: {missing}"


def test_sections_of_the_changelog_have_a_version_and_a_date_newest_first() -> None:
    dated = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d)\)", heading) for heading in HEADINGS]
    assert HEADINGS.count("Unreleased") <= 1 and "Unreleased" not in HEADINGS[1:]
    kept = [found for heading, found in zip(HEADINGS, dated, strict=True) if heading != "Unreleased"]
    assert all(kept) and len(kept) >= 3
    order = [(*map(int, found.groups()[:3]), found[4]) for found in kept if found]
    assert order == sorted(order, reverse=True)
    assert [date for *_, date in order] == sorted((date for *_, date in order), reverse=True)


def test_the_last_released_surface_is_that_of_the_newest_dated_section() -> None:
    newest = next(heading.split()[0] for heading in HEADINGS if heading != "Unreleased")
    assert read(RELEASED)[0] == newest, "run `make surface RELEASED=1` when a section gets its date"


def test_the_version_is_the_same_everywhere() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == hansa.__version__
    assert read(CURRENT)[0] == hansa.__version__


OLD = {
    "cli run": "command",
    "cli run --set": "option, default None",
    "config local sgd": "part",
    "config local sgd lr": "a number, default 0.1",
    "python simulate": "(task)",
    "config [run] rounds": "a whole number, default 10",
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cli run --fast": "option"}, "- `hansa run --fast` is new."),
        ({"cli run --set": "option, default 1"}, "- `hansa run` has another default of `--set`."),
        ({"config local sgd lr": "a number, default 0.2"}, "| `sgd.lr` | 0.2 |"),
        ({"config local sgd lr": None}, "- Removed: the field `lr` of\n  the solver `sgd`."),
        ({"python simulate": "(task, seed)"}, "`hansa.simulate` takes `seed`."),
        ({"config [run] rounds": None}, "- `run.rounds` is gone."),
    ],
)
def test_an_entry_that_differs_must_be_named_in_one_item_of_the_changelog(
    change: dict[str, str | None], line: str
) -> None:
    new = {key: value for key, value in {**OLD, **change}.items() if value is not None}
    key = next(iter(change))
    assert [found.rpartition(" (")[0] for found in unnamed(OLD, new, "# Changelog\n\n- `other`\n")] == [key]
    assert unnamed(OLD, new, f"# Changelog\n\n## Unreleased\n\n{line}\n- `other`\n") == []
    assert unnamed(OLD, new, line.replace("`", "")), "a name counts only in backticks"
    assert unnamed(OLD, OLD, "") == []


def test_names_in_different_items_do_not_count_together() -> None:
    new = {**OLD, "config local sgd lr": "a number, default 0.2"}
    assert unnamed(OLD, new, "- `sgd` is fast.\n- `lr` of `adam` is 1.") == ["config local sgd lr (changed)"]


def test_a_part_of_a_longer_name_is_no_mention() -> None:
    new = {**OLD, "cli run --fast": "option"}
    assert unnamed(OLD, new, "- `hansa run --faster`, `hansa re-run --fast-er`, `--fast-`")


def test_what_is_inside_an_added_or_removed_entry_needs_no_line_of_its_own() -> None:
    new = {**OLD, "config fusion new": "part", "config fusion new f": "a whole number, default 1"}
    assert unnamed(OLD, new, "- The fusion `new`.") == []
    assert unnamed(new, OLD, "- `new` is gone.") == []
    changed = {**new, "config fusion new g": "a number, default 1"}
    assert unnamed(new, changed, "- The fusion `new`.") == ["config fusion new g (added)"]


def test_only_sections_above_the_last_release_count() -> None:
    log = "# Changelog\n\n## Unreleased\n\n- `a`\n\n## 0.2.0 (2026-11-17)\n\n- `b`\n"
    assert "`a`" in newer_than("0.2.0", log) and "`b`" not in newer_than("0.2.0", log)
    with pytest.raises(SystemExit, match="no section"):
        newer_than("0.3.0", log)


def test_a_release_is_not_recorded_while_the_changelog_lacks_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = tmp_path / "released.json"
    released.write_text(public_surface.text("0.2.0", OLD))
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0 (2026-11-17)\n")
    monkeypatch.setattr(public_surface, "ROOT", tmp_path)
    for name in ("RELEASED", "CURRENT", "SCHEMA"):
        monkeypatch.setattr(public_surface, name, tmp_path / f"{name.lower()}.json")
    monkeypatch.setattr(public_surface, "surface", lambda: {**OLD, "cli new": "command"})
    monkeypatch.setattr("sys.argv", ["public_surface.py", "--release"])
    with pytest.raises(SystemExit, match=r"must name, above 0\.2\.0: cli new \(added\)"):
        public_surface.main()
    assert read(released) == ("0.2.0", OLD)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n- `hansa new`\n\n## 0.2.0 (2026-11-17)\n")
    public_surface.main()
    assert read(released) == (hansa.__version__, {**OLD, "cli new": "command"})
