"""Memory and time of an aggregator's fusion over stored replies, by model size and number of parties.

    python benchmarks/aggregator_memory.py --mib 100,1024 --parties 4,50 [--folder DIR]

Replies are files as parties upload them (safetensors). The code of a deployed round reads, checks and sums them
(`StoredReply.read`, `combine`); then the server optimiser of `FedAvg` applies the mean. Each case is a process whose
memory is sampled: anonymous pages, which the system cannot reclaim, and pages of files, which it can. Four different
files are written; the replies of further parties are links to them, because fifty files of 1 GiB would take 50 GiB of
disk. The amount read at once does not depend on which file holds a row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from hansa.core.ask import Ask, Reduced
from hansa.core.op import Reply
from hansa.core.round_record import Record
from hansa.core.sums import StoredReply
from hansa.local import SGD
from hansa.plumbing import codec
from hansa.replies.replies import combine
from hansa.replies.reply_checks import Rules

FILES = 4


def resident() -> tuple[int, int]:
    """Anonymous and file pages of this process, in MiB."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(int(fields[name].split()[0]) // 1024 for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def write(folder: Path, dim: int) -> None:
    """Write the files of several replies to one round of training."""
    for k in range(FILES):
        update = torch.full((dim,), float(k + 1))
        update[:: dim // 1000 + 1] = torch.randn(len(update[:: dim // 1000 + 1]))
        reply = Reply({SGD().update: update}, weight=k + 1, metrics={"train_loss": 0.5})
        with open(folder / str(k), "wb") as file:
            for piece in codec.pieces(reply.tree()):
                file.write(piece)


def fuse(folder: Path, dim: int, parties: int) -> dict[str, float]:
    """Fuse once; return the peak memory above that of a process that holds only the model."""
    model = {"w": torch.zeros(dim), "stats": torch.zeros(0), "counts": torch.zeros(0, dtype=torch.int64)}
    ask = Ask("reduce", 0, "round", 0, SGD(), {"model": model}, tuple(range(parties)))
    before, peak, done = resident(), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            for k, (now, then) in enumerate(zip(resident(), before, strict=True)):
                peak[k] = max(peak[k], now - then)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    outcomes = ((party, StoredReply.read(folder / str(party % FILES))) for party in range(parties))
    answer = combine(ask, outcomes, Rules(), Record())
    assert isinstance(answer, Reduced)
    model["w"] += answer.mean(SGD().update, torch.float32)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    return {"seconds": seconds, "anonymous_mib": peak[0], "file_mib": peak[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="100,1024")
    parser.add_argument("--parties", default="4,50")
    parser.add_argument("--folder", type=Path, help="where replies are written; by default a temporary folder")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        folder, dim, parties = given.case
        print(json.dumps(fuse(Path(folder), int(dim), int(parties))))
        return
    print("| model | parties | anonymous memory above the model | pages of files | seconds |\n|---|---|---|---|---|")
    for mib in map(int, given.mib.split(",")):
        dim = mib * 2**18
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            write(Path(folder), dim)
            for parties in map(int, given.parties.split(",")):
                words = [sys.executable, __file__, "--case", folder, str(dim), str(parties)]
                out = subprocess.run(words, check=True, capture_output=True, text=True, env=dict(os.environ)).stdout
                found = json.loads(out.splitlines()[-1])
                print(f"| {mib} MiB | {parties} | {found['anonymous_mib']:.0f} MiB | {found['file_mib']:.0f} MiB | "
                      f"{found['seconds']:.1f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
