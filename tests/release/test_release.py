"""Requirements on a release: pinned tools, and an audit that cannot pass without findings."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "release"))
import check_dist  # noqa: E402
from audit import verdict  # noqa: E402

FINE = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "X-1"}, {"id": "X-2"}]}
UNKNOWN = {"name": "c", "skip_reason": "nobody knows it"}


@pytest.mark.parametrize(
    ("found", "good", "said"),
    [
        ([FINE, FINE], True, "2 packages, no known vulnerability"),
        ([FINE, BAD, UNKNOWN], False, "known vulnerabilities: b 2: X-1; b 2: X-2"),
        ([FINE, UNKNOWN], False, "1 of 2 packages could not be looked up (nobody knows it)"),
        ([], False, "the audit could not be made"),
    ],
)
def test_an_audit_is_good_only_if_every_package_was_looked_up(found: list[dict], good: bool, said: str) -> None:
    assert verdict(found)[0] is good and said in verdict(found)[1]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.removesuffix(" \\").split("==") for line in lines if re.match(r"[a-z0-9].*==", line))


@pytest.mark.parametrize("name", ("release", "extras"))
def test_what_comes_on_top_of_the_lock_is_pinned_with_hashes_and_agrees_with_it(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    asked = re.findall(r"^[a-z][a-z0-9-]*", (ROOT / "requirements" / f"{name}.in").read_text(), re.M)
    added, locked = pins(f"{name}.txt"), pins("lock.txt")
    assert asked and set(asked) <= set(added)
    assert all(f"{package}=={version} \\\n    --hash=sha256:" in text for package, version in added.items())
    assert all(locked[package] == version for package, version in added.items() if package in locked)
    assert "://" not in text, "no registry is named"


def test_files_of_the_package_that_are_no_python_are_named_for_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = ROOT / "src" / "hansa"
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    folders = {name: ROOT.joinpath("src", *name.split(".")) for name in patterns}
    named = {path for name, some in patterns.items() for pattern in some for path in folders[name].glob(pattern)}
    assert len(others) > 5 and others == named


def test_the_extras_of_the_package_are_those_that_are_locked() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {line for line in (ROOT / "requirements" / "extras.in").read_text().splitlines() if line[:1].isalpha()}
    assert {need for name, needs in extras.items() if name != "all" for need in needs} <= asked


@pytest.mark.parametrize("more", ("", "src/hansa/left_over.py", "tests/more.py", "tests/ca.key"))
def test_a_release_holds_the_package_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setattr(check_dist, "package", lambda: {"hansa/__init__.py"})
    monkeypatch.setattr(check_dist, "installed", lambda wheel, version: [])
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    with zipfile.ZipFile(tmp_path / f"hansa-{found[1]}-py3-none-any.whl", "w") as wheel:
        for name in ("hansa/__init__.py", f"hansa-{found[1]}.dist-info/LICENSE"):
            wheel.writestr(name, "")
    with tarfile.open(tmp_path / f"hansa-{found[1]}.tar.gz", "w:gz") as sdist:
        folder = tarfile.TarInfo(f"hansa-{found[1]}/src/hansa/net")
        folder.type = tarfile.DIRTYPE
        sdist.addfile(folder)
        for name in filter(None, ("src/hansa/__init__.py", more)):
            sdist.addfile(tarfile.TarInfo(f"hansa-{found[1]}/{name}"), io.BytesIO())
    wrong = {
        "src/hansa/left_over.py": ["the sdist has beside the package hansa/left_over.py"],
        "tests/ca.key": ["a release must not have tests/ca.key"],
    }
    assert check_dist.check(tmp_path) == wrong.get(more, [])


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_release_simulates_as_many_worlds_as_its_figure_says() -> None:
    said = subprocess.run(["make", "-n", "release", "CAMPAIGNS=power dst"], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout  # fmt: skip
    assert " test-products power dst:SEEDS=100000\n" in said
    assert "`make dst SEEDS=100000`" in (ROOT / "docs" / "reliability.md").read_text()
