"""Seconds of a private set intersection of two parties: Hansa compared with OpenMined's PSI.

    python benchmarks/psi.py [--people 100000 ...] [--repeats 3] [--peer PYTHON]

Both parties work on this machine, one after the other, so a time is the work of both. Half of the people are common.
Hansa's time ends with the rows of both parties in a common order; sealing and transport are not in it. OpenMined's PSI
(elliptic curve P-256) uses one core, Hansa all of them; the column "cpu" is the time of all cores. It has its own
environment (created by `make bench-psi`), and is left out where that is missing. The contestants take turns; the table
has medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hansa.core.op import Party
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.numerics.objective import Objective
from hansa.vertical import psi_group
from hansa.vertical.psi_ops import PsiAlign, PsiAnswer, PsiAsk

HERE = Path(__file__).resolve().parent
PEER = HERE / ".envs/openmined/bin/python"


def party(number: int, start: int, people: int) -> Party:
    ids = np.array([f"person-{person}" for person in range(start, start + people)])
    return Party(number, Objective(None, "mse", None), SampleGateway(TableRows(torch.zeros(people, 1), None, ids)), 0)


def ours(people: int) -> dict[str, float]:
    """The whole protocol, from ids to rows in a common order."""
    leader, other = party(0, 0, people), party(1, people // 2, people)
    payload = {"sizes": {"0": people, "1": people}}
    begin, worked = time.perf_counter(), time.process_time()
    asked, memory = PsiAsk().send(leader, payload, (1,), {})
    _, own = PsiAsk().receive(other, payload, {0: asked[1]}, {})
    answer, own = PsiAnswer().send(other, payload, (0,), own)
    _, memory = PsiAnswer().receive(leader, payload, {1: answer[0]}, memory)
    told, memory = PsiAlign().send(leader, payload, (1,), memory)
    _, own = PsiAlign().receive(other, payload, {0: told[1]}, own)
    times = {"wall": time.perf_counter() - begin, "cpu": time.process_time() - worked}
    assert len(memory["rows"]) == people - people // 2
    assert torch.equal(memory["rows"], own["rows"] + people // 2)
    return times


def theirs(python: Path, people: int) -> dict[str, Any]:
    command = [str(python), str(HERE / "peers/openmined/intersect.py"), str(people)]
    out: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--people", type=int, nargs="+", default=[100_000], help="of each party")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", type=Path, default=PEER, help="Python with openmined.psi")
    given = parser.parse_args()
    ours(1000)  # imports, and the first use of every function
    version = ""
    print(f"{psi_group.cores()} cores, medians of {given.repeats}")
    print("| people of each party | Hansa, s | Hansa, cpu s | OpenMined, s | ratio |")
    print("|---:|---:|---:|---:|---:|")
    for people in given.people:
        rows: list[dict[str, float]] = []
        peers: list[dict[str, Any]] = []
        for _ in range(given.repeats):
            rows.append(ours(people))
            if given.peer.exists():
                peers.append(theirs(given.peer, people))
                version = peers[-1]["version"]
        wall, cpu = (statistics.median(row[name] for row in rows) for name in ("wall", "cpu"))
        cells = ["", ""]
        if peers:
            ratio = statistics.median(a["wall"] / b["wall"] for a, b in zip(rows, peers, strict=True))
            cells = [f"{statistics.median(row['wall'] for row in peers):.1f}", f"{ratio:.2f}"]
        print(f"| {people:,} | {wall:.1f} | {cpu:.1f} | {cells[0]} | {cells[1]} |", flush=True)
    print(f"openmined.psi {version}" if version else "OpenMined's PSI is left out: it is not installed")


if __name__ == "__main__":
    main()
