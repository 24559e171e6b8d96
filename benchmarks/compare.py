"""Seconds per round, launch time and memory of Hansa, hand-written baselines and other frameworks on a CPU.

    python benchmarks/compare.py [--model 2nn|cnn] [--rounds 20] [--repeats 3] [--peers] [--nvflare] [--only NAME ...]

Each contestant runs the workload of `workload.py` in its own process; peers have their own environments (created by
`make bench-peers`). Each contestant first runs once to measure memory; the times of this run are not used. Then all
contestants run in turn, `--repeats` times, without memory sampling. The table has the median over all timed rounds, the
range of the medians of the repeats, the time from launch to the end of the first round, and the peak memory: the
proportional set size (PSS: a page shared by n processes counts 1/n in each) summed over the contestant's processes,
sampled every 50 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workload import MODELS

HERE = Path(__file__).resolve().parent
OURS = "ours"


@dataclass(frozen=True)
class Contestant:
    """A script, the environment it runs in (None: ours) and the models it knows."""

    script: str
    options: tuple[str, ...] = ()
    environment: str | None = None
    models: tuple[str, ...] = MODELS

    @property
    def python(self) -> Path:
        return HERE / ".envs" / self.environment / "bin/python" if self.environment else Path(sys.executable)


CONTESTANTS = {
    OURS: Contestant("ours.py"),
    "ours, another solver": Contestant("ours.py", ("--solver", "proximal")),
    "loop, 2 threads": Contestant("floors/loop.py"),
    "loop, 2 processes": Contestant("floors/processes.py"),
    "batched by hand": Contestant("floors/batched.py", models=("2nn",)),
    "matrix products alone": Contestant("floors/peak.py"),
}
ENGINES = {
    "ours, reference": Contestant("ours.py", ("--engine", "reference")),
    "ours, workers": Contestant("ours.py", ("--engine", "workers")),
}
PEERS = {
    "pfl": Contestant("peers/pfl/fedavg.py", environment="pfl"),
    "fedjax": Contestant("peers/fedjax/fedavg.py", environment="fedjax"),
    "flower": Contestant("peers/flower/fedavg.py", environment="flower"),
}
NVFLARE = {"nvflare": Contestant("peers/nvflare/fedavg.py", environment="nvflare")}


@dataclass
class Found:
    """Results of one contestant."""

    repeats: list[list[float]] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    peak_mb: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    failure: str | None = None

    def seconds(self) -> float:
        return statistics.median(s for repeat in self.repeats for s in repeat)

    def spread(self) -> tuple[float, float]:
        medians = [statistics.median(repeat) for repeat in self.repeats]
        return min(medians), max(medians)

    def record(self) -> dict[str, Any]:
        if self.failure:
            return {"failure": self.failure}
        low, high = self.spread()
        return {
            "seconds_a_round": self.seconds(), "low": low, "high": high, "launch_to_first_round": self.launch(),
            "peak_pss_mb": self.peak_mb, "versions": self.versions, "rounds": self.repeats,
        }  # fmt: skip

    def launch(self) -> float | None:
        return statistics.median(self.launches) if self.launches else None


def descendants(of: int | None = None) -> list[int]:
    """Return the descendants of a process (default: this one). This process adopts orphans, so none is missed."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                after_name = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(after_name[1]), []).append(int(entry))
    found, queue = [], [of or os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def pss_mb(pid: int) -> float:
    """Return the proportional set size of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
    except OSError:
        return 0.0


class MemoryWatch(threading.Thread):
    """Sample the memory of all descendants of this process until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb, self._over = 0.0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            self.peak_mb = max(self.peak_mb, sum(map(pss_mb, descendants())))

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.peak_mb


def launch(contestant: Contestant, options: Sequence[str], limit: float) -> tuple[float, dict[str, Any]]:
    """Run a contestant to its end; return its launch time and its report."""
    command = [str(contestant.python), str(HERE / contestant.script), *contestant.options, *options]
    path = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    with tempfile.TemporaryFile("w+") as output:  # not a pipe: a process left behind would hold it open
        begun = time.time()
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {limit:.0f} s") from None
        finally:
            clear_away()
        output.seek(0)
        said = output.read().splitlines()
    lines = [line for line in said if line.startswith("RESULT ")]
    if process.returncode or not lines:
        raise RuntimeError(f"ended with {process.returncode}:\n" + "\n".join(said[-15:]))
    return begun, json.loads(lines[-1].removeprefix("RESULT "))


def answer_for_all() -> None:
    """Make this process adopt orphaned descendants, and end all descendants on SIGTERM."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)


def clear_away() -> None:
    """End every descendant of this process, so that the next contestant runs alone."""
    while left := descendants():  # one that is not ended yet may start another
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # a child of a child: it comes to this one first
                os.waitpid(pid, 0)


def take_part(name: str, contestant: Contestant, found: Found, given: argparse.Namespace, watch: bool) -> None:
    """Run one contestant once and record the result in `found`."""
    say(f"{name}: {'memory' if watch else f'repeat {len(found.repeats) + 1}'}")
    memory = MemoryWatch() if watch else None
    try:
        if memory is not None:
            memory.start()
        rounds = min(given.rounds, 3) if watch else given.rounds
        begun, report = launch(contestant, ("--model", given.model, "--rounds", str(rounds)), given.limit)
    except RuntimeError as error:
        found.failure = str(error)
        say(f"{name} {error}")
        return
    finally:
        if memory is not None:
            found.peak_mb = memory.stop()
    if watch:
        return
    found.repeats.append(report["rounds"])
    found.versions = report["versions"]
    if report.get("first_round_ended"):
        found.launches.append(report["first_round_ended"] - begun)
    else:
        found.peak_mb = None  # a calculation, not a run


def table(results: dict[str, Found]) -> str:
    """Format the results as a Markdown table."""
    ours = results.get(OURS)
    base = ours.seconds() if ours and ours.repeats else None
    lines = [
        "| contestant | s per round | range | launch to end of round 1, s | peak memory, MB | times ours |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        if found.failure:
            lines.append(f"| {name} | failed: {found.failure.splitlines()[0]} | | | | |")
            continue
        low, high = found.spread()
        start, peak = found.launch(), found.peak_mb
        cells = [
            name, f"{found.seconds():.4f}", f"{low:.4f} to {high:.4f}", f"{start:.1f}" if start else "",
            f"{peak:.0f}" if peak else "", f"{found.seconds() / base:.2f}" if base else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Describe the machine and the versions."""
    about = Path("/proc/cpuinfo").read_text().splitlines()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": next((line.partition(":")[2].strip() for line in about if line.startswith("model name")), "unknown"),
        "cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory / 2**30), "system": platform.platform(),
        "load_before": os.getloadavg()[0],
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }  # fmt: skip


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def chosen(given: argparse.Namespace) -> dict[str, Contestant]:
    """Return the contestants, ours first; print and skip those whose environment is missing."""
    known = {**CONTESTANTS, **ENGINES, **PEERS, **NVFLARE}
    if given.only:
        wanted = {name: known[name] for name in known if name in given.only}
    else:
        wanted = {**CONTESTANTS, **(ENGINES if given.engines else {}), **(PEERS if given.peers else {}),
                  **(NVFLARE if given.nvflare else {})}  # fmt: skip
    for name, contestant in list(wanted.items()):
        if not contestant.python.exists():
            say(f"{name} is left out: {contestant.python.relative_to(HERE)} is missing; `make bench-peers` makes it")
            del wanted[name]
    return {name: contestant for name, contestant in wanted.items() if given.model in contestant.models}


def main() -> None:
    everyone = [*CONTESTANTS, *ENGINES, *PEERS, *NVFLARE]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="2nn")
    parser.add_argument("--rounds", type=int, help="timed rounds per repeat (20; 5 for the CNN)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", action="store_true", help="also each of our engines")
    parser.add_argument("--peers", action="store_true", help="also Flower, pfl and FedJAX")
    parser.add_argument("--nvflare", action="store_true", help="also NVFLARE (slow)")
    parser.add_argument("--only", nargs="+", choices=everyone, metavar="NAME", help=f"some of: {'; '.join(everyone)}")
    parser.add_argument("--limit", type=float, default=600, help="seconds a run may take")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder for the results")
    given = parser.parse_args()
    given.rounds = given.rounds or (20 if given.model == "2nn" else 5)
    answer_for_all()
    about = machine()
    if about["load_before"] > 0.5:
        say(f"this machine is busy (load {about['load_before']:.1f}): the times will be those of a busy machine")
    contestants = chosen(given)
    results = {name: Found() for name in contestants}
    for turn in range(given.repeats + 1):
        for name, contestant in contestants.items():
            if results[name].failure is None:
                take_part(name, contestant, results[name], given, watch=turn == 0)
    print(f"FedAvg, {given.model}, {about['cores']} cores of {about['cpu']}, {about['date'][:10]}; "
          f"{given.repeats} repeats of {given.rounds} rounds\n\n{table(results)}")  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{given.model}.json"
    record = {"machine": about, "model": given.model, "rounds": given.rounds, "repeats": given.repeats,
              "contestants": {name: found.record() for name, found in results.items()}}  # fmt: skip
    file.write_text(json.dumps(record, indent=1) + "\n")
    say(f"written to {file}")
    if results and all(found.failure for found in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
