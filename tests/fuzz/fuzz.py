"""Fuzz every parser of untrusted bytes and a party's worker, guided by code coverage (atheris), for CPU minutes in all.

    python tests/fuzz/fuzz.py --minutes 30 --jobs 2            all targets
    python tests/fuzz/fuzz.py --minutes 5 --target codec.decode
    python tests/fuzz/fuzz.py --minutes 10 --target party.asks --blind     without atheris, not guided
    python tests/fuzz/fuzz.py --target codec.decode --repeat runs/fuzz/codec.decode/crash-...

Inputs that reached new code stay in runs/fuzz, and the next campaign starts with them. An input is a failure if it
makes a parser raise anything but a HansaError, takes more than 10 seconds or needs more than 1 GiB; it is stored, and
the exit status is 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "net"), str(HERE.parents[1])]
TIMEOUT, MEMORY, LONGEST = 10, 1024, 16384  # seconds of an input, MiB of the process, bytes of an input
STARTING = 300.0  # seconds of the clock for a target's imports and its end
TOLD = 2.0  # seconds of CPU between two reports of progress
LIVE = ("http.raw", "http.whole")  # an aggregator's sockets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of CPU, over all targets")
    parser.add_argument("--jobs", type=int, default=1, help="targets at the same time")
    parser.add_argument("--target", action="append", help="only this one; may be given again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"), help="for what is reached and what fails")
    parser.add_argument("--repeat", type=Path, help="run one target on this input, and nothing else")
    blind = "without atheris: random inputs, which no coverage guides"
    parser.add_argument("--blind", action="store_true", help=blind)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # seconds of CPU
    given = parser.parse_args()
    if given.child is not None:
        run = blindly if given.blind else child
        return run(given.target[0], given.child, given.folder, given.seed)
    import targets

    names = [*targets.targets(), *LIVE]
    for name in given.target or ():
        if name not in names:
            parser.error(f"there is no target {name!r}; known: {', '.join(names)}")
    if given.repeat is not None:
        taken = target(given.target[0]).run(given.repeat.read_bytes())
        print("taken" if taken else "refused")
        return 0
    return campaign(given.target or names, given)


def campaign(names: list[str], given: argparse.Namespace) -> int:
    """Run every target in a process of its own; print each result on one line."""
    seconds = given.minutes * 60 / len(names)
    start, failed, runs = time.monotonic(), [], 0
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        doing = {name: pool.submit(fuzz, name, seconds, given) for name in names}
        for name, future in doing.items():
            count, used, wrong = future.result()
            runs += count
            print(f"{name:18} {count:>9} executions  {used:6.1f} s of CPU  {wrong or 'ok'}", flush=True)
            if wrong:
                failed.append(name)
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'ok'}: {len(names)} targets, {runs} executions in "
          f"{given.minutes:g} minutes of CPU, {time.monotonic() - start:.0f} s")  # fmt: skip
    return 1 if failed else 0


def fuzz(name: str, seconds: float, given: argparse.Namespace) -> tuple[int, float, str]:
    """Fuzz one target; returns the number of runs, the duration, and the failure if any."""
    folder: Path = given.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stats.json").unlink(missing_ok=True)
    before = set(folder.glob("*-*"))
    command = [sys.executable, str(HERE), "--target", name, "--child", str(seconds), "--folder", str(given.folder),
               "--seed", str(given.seed), *(["--blind"] if given.blind else [])]  # fmt: skip
    with open(folder / "output", "wb") as output:
        try:
            most = longest(seconds) + STARTING
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=most).returncode
        except subprocess.TimeoutExpired:  # it waits, which takes no CPU
            status = 124
    stats = json.loads((folder / "stats.json").read_text()) if (folder / "stats.json").exists() else {}
    wrong = ""
    if status != 0 or not stats:
        found = sorted(set(folder.glob("*-*")) - before)
        repeat = f"python tests/fuzz/fuzz.py --target {name} --repeat {found[0]}" if found else "no input was kept"
        wrong = f"FAILED with status {status}; {repeat}; see {folder / 'output'}"
    elif stats["seconds"] < seconds:
        wrong = f"FAILED: no more of {seconds:.0f} s of CPU in all the time that it had; something else takes it"
    return int(stats.get("runs", 0)), float(stats.get("seconds", 0.0)), wrong


def longest(seconds: float) -> int:
    """The most seconds of the clock for that much CPU time, in case other processes use the CPU."""
    return int(20 * seconds) + 60


def target(name: str) -> Any:
    """A target by name; targets with a server are started."""
    import targets

    if name not in LIVE:
        return targets.targets()[name]
    from surface import Surface

    return {found.name: found for found in Surface().targets()}[name]


def blindly(name: str, seconds: float, folder: Path, seed: int) -> int:
    """Run a target on random changes of its seeds for that much CPU time, in the memory that a campaign has."""
    import random
    import resource

    import torch

    torch.set_num_threads(1)
    found, place, draw = target(name), folder / name, random.Random(seed)
    limit = MEMORY * 2**20 + int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    runs, begun = 0, time.process_time()
    while (used := time.process_time() - begun) < seconds:
        data = bytearray(draw.choice(found.seeds))
        for _ in range(draw.randrange(6) if runs >= len(found.seeds) else 0):
            at = draw.randrange(len(data) + 1)
            data[at : at + draw.randrange(3)] = draw.choice(
                [b"", draw.choice(found.words or [b""]), draw.randbytes(24)]
            )
        started = time.process_time()
        try:
            found.run(bytes(data))
            assert time.process_time() - started < TIMEOUT, "an input took too long"
        except BaseException:
            (place / f"crash-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
            raise
        runs += 1
    (place / "stats.json").write_text(json.dumps({"runs": runs, "seconds": used}))
    return 0


def child(name: str, seconds: float, folder: Path, seed: int) -> int:
    """Fuzz in this process for that much CPU time."""
    import aiohttp.web
    import atheris
    import cryptography.x509
    import sklearn
    import torch

    del aiohttp, cryptography, sklearn  # these modules, and all that they import, are not instrumented
    torch.set_num_threads(1)
    with atheris.instrument_imports(include=["hansa"]):
        found = target(name)
    place = folder / name
    corpus, words = place / "corpus", place / "words"
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(found.seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in found.words if word))
    runs, begun, told = 0, time.process_time(), 0.0

    def once(data: bytes) -> None:
        nonlocal runs, told
        runs += 1
        if runs % 64 == 0 and (used := time.process_time() - begun) > min(seconds, told + TOLD):
            told = used
            (place / "stats.json").write_text(json.dumps({"runs": runs, "seconds": used}))
            if used > seconds:
                os._exit(0)
        found.run(data)

    known = [f"-dict={words}"] if found.words else []
    atheris.Setup(
        [sys.argv[0], str(corpus), *known, f"-artifact_prefix={place}/", f"-timeout={TIMEOUT}",
         f"-rss_limit_mb={MEMORY}", f"-max_len={LONGEST}", f"-seed={seed + 1}", f"-max_total_time={longest(seconds)}",
         f"-runs={2**31 - 1}", "-print_final_stats=1"],
        once, enable_python_coverage=True,
    )  # fmt: skip
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
