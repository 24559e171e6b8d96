"""Check the locked requirements for known vulnerabilities (pip-audit): python release/audit.py OUT LOCK TORCH

The result is one line and the exit status. A package without an answer from the advisory service counts as a failure:
pip-audit by itself passes an audit in which the service knew none of the packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HOW = (["--require-hashes"], ["--no-deps"])  # the lock has hashes, torch has none
ELSE = "run the audit where the advisory service can be reached, or set AUDIT=skip"


def verdict(dependencies: list[dict[str, Any]]) -> tuple[bool, str]:
    """Return whether the audit passed, and the line to print."""
    skipped = [found for found in dependencies if "skip_reason" in found]
    known = [
        f"{found['name']} {found['version']}: {one['id']}" for found in dependencies for one in found.get("vulns", ())
    ]
    if known:
        return False, f"known vulnerabilities: {'; '.join(known)}"
    if skipped or not dependencies:
        why = f" ({skipped[0]['skip_reason']})" if skipped else ""
        return False, (
            f"the audit could not be made: {len(skipped)} of {len(dependencies)} packages could not be looked up{why}; "
            f"{ELSE}"
        )
    return True, f"{len(dependencies)} packages, no known vulnerability"


def main(out: Path, files: list[str]) -> int:
    dependencies: list[dict[str, Any]] = []
    for file, how in zip(files, HOW, strict=True):
        part = out.with_suffix(".part")
        part.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pip_audit", "-r", file, *how, "--disable-pip", "--progress-spinner", "off",
                   "-f", "json", "-o", str(part)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not part.exists():  # pip-audit writes the file with or without vulnerabilities
            said = (done.stderr.strip().splitlines() or ["pip-audit printed no message"])[-1]
            print(f"the audit could not be made: {said}; {ELSE}")
            return 1
        dependencies += json.loads(part.read_text())["dependencies"]
        part.unlink()
    good, said = verdict(dependencies)
    out.write_text(json.dumps({"verdict": said, "dependencies": dependencies}, indent=1) + "\n")
    print(said)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
