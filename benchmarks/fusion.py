"""Seconds and memory of each fusion: Hansa compared with Flower's functions and hand-written baselines.

    python benchmarks/fusion.py [--repeats 7] [--only RULE ...]      100 updates of 1,000,000 float32 on two cores
    python benchmarks/fusion.py --gpu                                the same matrix on a GPU
    python benchmarks/fusion.py --out-of-core [--folder FOLDER]      64 updates of 25,000,000 float32 in a file

On the CPU each contestant is a separate process, Flower in its own environment (created by `make bench-fusion`). Each
contestant has the updates in its preferred form before the timing starts. For each rule the contestants take turns. The
table has the medians of all turns except the first (which loads libraries), their range, and the largest rise of
resident memory during a call. The script compares the results of the contestants. Out of core, the memory is all that
the process held (anonymous memory and pages of files), sampled every 5 ms. Before that, the script checks on a small
matrix that every rule gives the same bits out of core as in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from updates import SEED, matrix, measured, resident_mb

HERE = Path(__file__).resolve().parent
FLOWER = HERE / ".envs/flower/bin/python"
CONTESTANTS = {
    "ours": (Path(sys.executable), "fusion_rules.py"),
    "flower": (FLOWER, "peers/flower/fusion.py"),
    "by hand": (Path(sys.executable), "floors/fusion.py"),
}
CORES = 2


class Contestant:
    """A process that fuses on request."""

    def __init__(self, python: Path, script: str, rows: int, columns: int, keep: Path) -> None:
        path = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
        command = [str(python), str(HERE / script), "--rows", str(rows), "--columns", str(columns), "--keep", str(keep)]
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.keep = keep
        about = self._answer()
        self.rules, self.versions = about["rules"], about["versions"]

    def fuse(self, rule: str) -> dict[str, float]:
        assert self.process.stdin is not None
        print(rule, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self.process.args))} ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def on_two_cores(given: argparse.Namespace) -> dict[str, Any]:
    """Run all rules of all contestants, in turns."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        contestants = {}
        for name, (python, script) in CONTESTANTS.items():
            if python.exists():
                contestants[name] = Contestant(python, script, given.rows, given.columns, Path(folder, name))
            else:
                say(f"{name} is left out: `make bench-fusion` makes its environment")
        everything = list(dict.fromkeys(rule for one in contestants.values() for rule in one.rules))
        for rule in sorted(everything, key=lambda rule: everything.index(plain(rule))):
            if given.only and plain(rule) not in given.only:
                continue
            say(rule)
            turns: dict[str, list[dict[str, float]]] = {n: [] for n, one in contestants.items() if rule in one.rules}
            for _ in range(given.repeats + 1):
                for name, answers in turns.items():
                    answers.append(contestants[name].fuse(rule))
            found[rule] = {name: summary(answers) for name, answers in turns.items()}
            for name in turns:
                found[rule][name]["differs"] = difference(contestants["ours"].keep, contestants[name].keep, rule)
        versions = {name: one.versions for name, one in contestants.items()}
        for one in contestants.values():
            one.end()
    return {"rules": found, "versions": versions}


def summary(answers: list[dict[str, float]]) -> dict[str, Any]:
    seconds = [answer["seconds"] for answer in answers[1:]]
    return {"seconds": statistics.median(seconds), "low": min(seconds), "high": max(seconds),
            "extra_mb": max(answer["extra_mb"] for answer in answers[1:]), "all": answers}  # fmt: skip


def difference(ours: Path, theirs: Path, rule: str) -> float | None:
    """Return the largest difference between our result and theirs."""
    a, b = (np.load(file) if file.exists() else None for file in (ours / f"{plain(rule)}.npy", theirs / f"{rule}.npy"))
    return None if a is None or b is None else float(np.abs(a.astype(np.float64) - b).max())


def plain(rule: str) -> str:
    """Return the rule of which this is a variant."""
    return rule.partition(",")[0]


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = ["| rule | contestant | ms | range | extra memory, MB | times ours | largest difference |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for rule, contestants in found.items():
        base = found.get(plain(rule), {}).get("ours")
        for name, one in contestants.items():
            ms, low, high = (1e3 * one[key] for key in ("seconds", "low", "high"))
            ratio = f"{one['seconds'] / base['seconds']:.1f}" if base else ""
            apart = "" if name == "ours" or one["differs"] is None else f"{one['differs']:.1g}"
            lines.append(f"| {rule} | {name} | {ms:.0f} | {low:.0f} to {high:.0f} | {one['extra_mb']:.0f} "
                         f"| {ratio} | {apart} |")  # fmt: skip
    return "\n".join(lines)


def on_gpu(given: argparse.Namespace) -> dict[str, Any]:
    """Run all rules on a GPU, and PyTorch's own mean and median."""
    import torch
    from fusion_rules import rules

    if not torch.cuda.is_available():
        sys.exit("no usable GPU here")
    updates = torch.from_numpy(matrix(given.rows, given.columns)).cuda()
    ways = {**rules(updates), "mean, torch": lambda: updates.mean(0), "median, torch": lambda: updates.median(0).values}
    found: dict[str, Any] = {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| rule | ms | range | extra memory, MB |\n"
          "|---|---|---|---|")  # fmt: skip
    for name, rule in ways.items():
        if given.only and plain(name) not in given.only:
            continue
        times = []
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(given.repeats + 1):
            begun = time.perf_counter()
            rule()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begun))
        extra = (torch.cuda.max_memory_allocated() - before) / 2**20
        found[name] = {"ms": statistics.median(times[1:]), "all": times, "extra_mb": extra}
        print(f"| {name} | {found[name]['ms']:.1f} | {min(times[1:]):.1f} to {max(times[1:]):.1f} | {extra:.0f} |",
              flush=True)  # fmt: skip
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rules": found}


class Watch(threading.Thread):
    """Sample the resident memory of this process until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.005):
            private, file = resident_mb("RssAnon"), resident_mb("RssFile") + resident_mb("RssShmem")
            self.peak = max(self.peak, (private + file, private, file))

    def stop(self) -> tuple[float, float, float]:
        self._over.set()
        self.join()
        return self.peak


def out_of_core(given: argparse.Namespace) -> dict[str, Any]:
    """Run all rules on updates in a file, after checking that each gives the same bits as in memory."""
    import torch
    from fusion_rules import rules

    from hansa.numerics.rows import MappedRows

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        file = Path(folder, "updates")
        small = matrix(given.rows, 100_003)
        file.write_bytes(small.tobytes())
        mapped = rules(MappedRows.open(file, *small.shape))
        for name, rule in rules(torch.from_numpy(small)).items():
            if not torch.equal(rule(), mapped[name]()):
                sys.exit(f"{name} gives other bits out of core than in memory")
        say("every rule gives the same bits as in memory")
        random = np.random.default_rng(SEED)
        with open(file, "wb") as out:
            for k in range(given.rows):
                row = random.standard_normal(given.columns, dtype=np.float32)
                row *= np.float32(0.5 + k / given.rows)
                row.tofile(out)
        del row, small, mapped
        say(f"{file.stat().st_size / 1e9:.1f} GB written")
        found: dict[str, Any] = {}
        print("| rule | s | peak resident memory, MB | of it anonymous | of it pages of files |\n|---|---|---|---|---|")
        for name, rule in rules(MappedRows.open(file, given.rows, given.columns)).items():
            if given.only and name not in given.only:
                continue
            watch = Watch()
            watch.start()
            _, seconds, _ = measured(rule)
            peak, private, pages = watch.stop()
            found[name] = {"seconds": seconds, "peak_mb": peak, "private_mb": private, "pages_mb": pages}
            print(f"| {name} | {seconds:.1f} | {peak:.0f} | {private:.0f} | {pages:.0f} |", flush=True)
    return {"rules": found}


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", action="store_true", help="on a GPU")
    where.add_argument("--out-of-core", action="store_true", help="updates in a file")
    parser.add_argument("--folder", type=Path, help="where that file goes for a while (the system's temporary folder)")
    parser.add_argument("--rows", type=int, help="updates (100; out of core 64)")
    parser.add_argument("--columns", type=int, help="numbers in each (1,000,000; out of core 25,000,000)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", metavar="RULE", help="some of the rules")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder for the results")
    given = parser.parse_args()
    given.rows = given.rows or (64 if given.out_of_core else 100)
    given.columns = given.columns or (25_000_000 if given.out_of_core else 1_000_000)
    if given.gpu:
        name, record = "fusion_gpu", on_gpu(given)
    elif given.out_of_core:
        name, record = "fusion_out_of_core", out_of_core(given)
    else:
        name, record = "fusion", on_two_cores(given)
        print(table(record["rules"]))
        print("\n" + "; ".join(f"{one}: {versions}" for one, versions in record["versions"].items()))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{name}.json").write_text(json.dumps({"rows": given.rows, "columns": given.columns, **record}) + "\n")


if __name__ == "__main__":
    main()
