"""Train a CNN on samples larger than memory: resident memory, and speed as a ratio to samples in memory.

    python benchmarks/large_data.py --gigabytes 5 --folder /tmp

The script writes one folder of arrays per party (uint8 pictures, 3 x 32 x 32, drawn at random), trains the same number
of steps on them and on a part of them in memory, each in a process of its own, in turn, and deletes the files.

Memory is the largest sum of RssAnon and RssShmem (/proc/PID/status) of the process and its children, looked at every
20 ms: memory that the kernel cannot drop. Pages of the memory-mapped files are page cache (RssFile) and are printed
beside it. Speed is steps per second after a first round that is not timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

SHAPE, BATCH, CLASSES = (3, 32, 32), 32, 10
PERIOD = 0.02  # seconds between two looks at the memory
STEPS, ROUNDS = 40, 4  # per party and round; the first round is not timed


def write(folder: Path, gigabytes: float, parties: int) -> int:
    """Write the parties' arrays; returns the number of samples of a party."""
    each = int(gigabytes * 1e9 / np.prod(SHAPE) / parties)
    drawn = np.random.default_rng(0)
    for party in range(parties):
        place = folder / f"party{party}"
        place.mkdir()
        x = np.lib.format.open_memmap(place / "x.npy", "w+", np.uint8, (each, *SHAPE))
        for first in range(0, each, 8192):
            rows = min(8192, each - first)
            x[first : first + rows] = drawn.integers(0, 256, (rows, *SHAPE), dtype=np.uint8)
        x.flush()
        del x
        np.save(place / "y.npy", drawn.integers(0, CLASSES, each))
    return each


def resident(pid: int) -> tuple[int, int]:
    """Bytes of a process that cannot be dropped, and bytes of mapped files."""
    sizes = {"RssAnon": 0, "RssShmem": 0, "RssFile": 0}
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in sizes:
                sizes[name] = int(value.split()[0]) * 1024
    except OSError:  # it has just ended
        pass
    return sizes["RssAnon"] + sizes["RssShmem"], sizes["RssFile"]


def family(pid: int) -> list[int]:
    """A process and its children."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        listed = []
    return [pid, *(each for child in listed for each in family(int(child)))]


def child(kind: str, folder: Path, share: float, engine: str, device: str) -> None:
    """Train, and print the seconds of the timed rounds as JSON; in a process of its own."""
    import torch

    import hansa
    from hansa.data import load_party_folder
    from hansa.models import Cnn

    torch.set_num_threads(1)
    parties, names = load_party_folder(folder)
    if kind == "memory":
        counts = [max(BATCH, int(share * len(y))) for _, y in parties]
        parties = [(x[:count], y[:count]) for (x, y), count in zip(parties, counts, strict=True)]
    task = hansa.Task(Cnn(SHAPE, CLASSES), parties=parties, names=names, classes=CLASSES)
    times: list[float] = []
    solver = hansa.SGD(lr=0.01, batch=BATCH, steps=STEPS)
    hansa.simulate(hansa.FedAvg(local=solver), task, rounds=ROUNDS, engine=engine, device=device,
                   on_round=lambda line: times.append(time.perf_counter()), progress=False)  # fmt: skip
    print(json.dumps({"seconds": times[-1] - times[-ROUNDS], "steps": STEPS * len(parties) * (ROUNDS - 1)}))


def measured(kind: str, arguments: argparse.Namespace, folder: Path, share: float) -> dict[str, float]:
    """Run a child; returns its speed and its largest memory."""
    command = [sys.executable, __file__, "--child", kind, "--folder", str(folder), "--share", str(share), "--engine",
               arguments.engine, "--device", arguments.device]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = [0, 0]

    def look() -> None:
        while process.poll() is None:
            found = [resident(pid) for pid in family(process.pid)]
            peak[0] = max(peak[0], sum(own for own, _ in found))
            peak[1] = max(peak[1], sum(files for _, files in found))
            time.sleep(PERIOD)

    watching = threading.Thread(target=look)
    watching.start()
    out = process.communicate()[0]
    watching.join()
    if process.returncode:
        raise SystemExit(f"the {kind} run ended with {process.returncode}")
    line = json.loads(out.splitlines()[-1])
    return {"steps_per_second": line["steps"] / line["seconds"], "memory": peak[0], "files": peak[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0, help="size of the samples in files")
    parser.add_argument("--parties", type=int, default=4)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the files are written, then deleted")
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind, in turn; the best counts")
    parser.add_argument("--child", choices=("stored", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, Path(arguments.folder), arguments.share, arguments.engine, arguments.device)
        return
    room = shutil.disk_usage(arguments.folder).free
    if room < 1.2e9 * arguments.gigabytes:
        raise SystemExit(f"{arguments.folder} has {room / 1e9:.1f} GB free, too little for {arguments.gigabytes} GB")
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="hansa-large-"))
    try:
        each = write(folder, arguments.gigabytes, arguments.parties)
        share = min(1.0, 0.25 / arguments.gigabytes)  # in memory as float32: 1 GB
        best: dict[str, dict[str, float]] = {}
        for _ in range(arguments.repeats):
            for kind in ("memory", "stored"):
                line = measured(kind, arguments, folder, share)
                if kind not in best or line["steps_per_second"] > best[kind]["steps_per_second"]:
                    best[kind] = {**line, "memory": max(line["memory"], best.get(kind, line)["memory"])}
    finally:
        shutil.rmtree(folder)
    print(f"{arguments.parties} parties, {each} pictures each, {arguments.gigabytes:g} GB in files, {arguments.engine}")
    for kind, line in best.items():
        print(f"{kind:7} {line['steps_per_second']:8.1f} steps/s  memory {line['memory'] / 1e9:5.2f} GB  "
              f"mapped files {line['files'] / 1e9:5.2f} GB")  # fmt: skip
    print(f"speed ratio {best['stored']['steps_per_second'] / best['memory']['steps_per_second']:.3f}")


if __name__ == "__main__":
    main()
