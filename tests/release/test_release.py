"""What a release is held to: pinned tools, and an audit that cannot pass by finding nothing out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "release"))
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


def test_the_tools_of_a_release_are_pinned_with_hashes_and_agree_with_the_lock() -> None:
    text = (ROOT / "requirements" / "release.txt").read_text()
    tools, locked = pins("release.txt"), pins("lock.txt")
    assert {"atheris", "cyclonedx-bom", "pip-audit"} <= set(tools)
    assert all(f"{name}=={version} \\\n    --hash=sha256:" in text for name, version in tools.items())
    assert all(locked[name] == version for name, version in tools.items() if name in locked)
    assert "://" not in text, "no registry is named"
