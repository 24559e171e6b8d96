"""`make dst SEEDS=100000`: many worlds, each from its seed; a failure prints the seed and how to repeat it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


PATIENCE = 600.0  # seconds in which a world ends, or another one does
RELAYED = 3  # of every four seeds, the one whose world has a relay


def live(seed: int) -> tuple[int, list[str], str, int, float]:
    """Run one world: its seed, the failures, how its job ended, the number of deaths, and the simulated seconds."""
    from relayed_world import RelayedWorld
    from world import World

    try:
        world = (RelayedWorld if seed % 4 == RELAYED else World)(seed).run()
    except Exception as error:
        return seed, [f"{type(error).__name__}: {error}"], "broken", 0, 0.0
    return seed, world.broken, str(world.ended), world.deaths, world.loop.now


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    words.add_argument("--first", type=int, default=0, help="the first seed")
    words.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = words.parse_args()
    if given.seeds < 1 or given.jobs < 1:
        words.error("--seeds and --jobs are positive")
    began, ends, deaths, simulated, broken = time.monotonic(), Counter[str](), 0, 0.0, 0
    seeds = range(given.first, given.first + given.seeds)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(min(given.jobs, given.seeds)) as pool:
        worlds = pool.imap_unordered(live, seeds)
        for done in range(1, given.seeds + 1):
            try:
                seed, faults, end, died, seconds = worlds.next(PATIENCE)
            except multiprocessing.TimeoutError:  # a process hangs, or was killed
                raise SystemExit(f"no world ended in {PATIENCE:g} s; {done - 1} of {given.seeds} have ended") from None
            ends[end] += 1
            deaths, simulated = deaths + died, simulated + seconds
            for fault in faults:
                print(f"seed {seed}: {fault}\n  again: python tests/dst/dst.py --first {seed} --seeds 1", flush=True)
            broken += bool(faults)
            if done % 5000 == 0:
                print(f"{done} of {given.seeds} worlds, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{given.seeds} worlds from seed {given.first}: {broken} broke; {ends['finished']} jobs finished, "
        f"{ends['failed']} had no round with a quorum; {deaths} deaths, {simulated / 86400:.1f} simulated days, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
