"""`make test-night`: run make targets one after another, go on after a failure, and print one table.

A target may be followed by settings, as in dst:SEEDS=1000.

The output of each target is in build/night/TARGET.log.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

LOGS = Path(__file__).parents[1] / "build" / "night"


def main() -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    table = []
    for words in sys.argv[1:]:
        target, *settings = words.split(":")
        began, log = time.monotonic(), LOGS / f"{target}.log"
        print(f"==> {target} ({log})", flush=True)
        with log.open("wb") as output:
            status = subprocess.run(
                [os.environ.get("MAKE", "make"), "--no-print-directory", target, *settings],
                stdout=output,
                stderr=output,
            )
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
        table.append((target, status.returncode, (time.monotonic() - began) / 60, lines[-1]))
    print(f"{'target':16} {'result':8} {'minutes':>8}  last line")
    for target, code, minutes, last in table:
        print(f"{target:16} {'failed' if code else 'passed':8} {minutes:8.1f}  {last[:100]}")
    return int(any(code for _, code, _, _ in table))


if __name__ == "__main__":
    raise SystemExit(main())
