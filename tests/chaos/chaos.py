"""`make chaos`: kill a federation's processes at random moments, many times, and check the invariants after each job.

The seed decides which process is killed and after how long. What the process is doing at that moment depends on the
machine, so it may take several runs with the same seed to repeat a failure. After a failure, the folder with all logs
and the database stays.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

from chaos_kit import campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("hansa").addHandler(logging.NullHandler())
    folder, began = Path(tempfile.mkdtemp(prefix="hansa-chaos-")), time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    tell(f"{given.kills} kills, seed {given.seed}, in {folder}")
    try:
        jobs = campaign(folder, given.kills, given.seed, tell)
    except BaseException:
        print(
            f"failed; see {folder}, and repeat with: make chaos KILLS={given.kills} SEED={given.seed}", file=sys.stderr
        )
        raise
    tell(f"{len(jobs)} jobs, {given.kills} kills: nothing lost, nothing counted twice, the same bits")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
