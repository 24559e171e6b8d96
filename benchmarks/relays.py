"""Many parties behind relays beside the flat federation: memory and CPU of the root and of the relays.

    python benchmarks/relays.py [--parties 1000] [--relays 10] [--rounds 3] [--model 2nn]

The same job runs twice with `sums = "exact"`: with all parties connected to the root (`hansa serve`), and with the
parties divided evenly among relays (`hansa relay`), each its own process, over mutual TLS 1.3 on loopback. The parties
are those of `benchmarks/load.py`: light, each with its own key, certificate and connection; they do not train. For each
process the CPU seconds of the job (/proc/PID/stat) and its memory (/proc/PID/status). Both jobs must end
with the same model, bit for bit. The table goes to standard output, all results to benchmarks/results/relays.json.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "net")]

from crowd import Crowd, populate  # noqa: E402
from load import cpu, say, status  # noqa: E402

from hansa.experiment.config import parse  # noqa: E402
from hansa.net.aggregator.federation import FederationFolder, init  # noqa: E402
from hansa.net.local import free_port  # noqa: E402
from hansa.net.operator import Operator  # noqa: E402
from hansa.net.transport.pacing import RECONNECTS  # noqa: E402
from hansa.net.transport.process import run_loop  # noqa: E402

Group = tuple[Path, int, int, int]  # a folder, its port, and the numbers of its parties, from .. to


def crowds(groups: list[Group]) -> None:
    """Run the parties of all groups in this process, until standard input ends."""
    torch.set_num_threads(1)

    async def main() -> None:
        every = [Crowd(Path(folder), port, range(first, last)) for folder, port, first, last in groups]
        lines: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.readline()))
        count = sum(len(crowd.numbers) for crowd in every)
        for crowd in every:
            await crowd.come(2 * count / RECONNECTS)
        while await lines.get():
            failed = [why for crowd in every for why in crowd.failed()]
            print(json.dumps({"connected": sum(crowd.connected for crowd in every), "failed": failed}), flush=True)
        loop.remove_reader(sys.stdin.fileno())
        for crowd in every:
            await crowd.leave()

    run_loop(main())


class Measured:
    """One federation, flat or with relays, and its processes."""

    def __init__(self, folder: Path, parties: int, relays: int) -> None:
        self.folder, self.parties = folder, parties
        bounds = [parties * k // relays for k in range(relays + 1)] if relays else []
        spans = [(f"relay-{k:02}", bounds[k], bounds[k + 1]) for k in range(relays)]
        names = [f"p{number:05}" for number in range(parties)]
        init(folder / "root", "load", names, ["127.0.0.1"], free_port(),
             relays={name: names[first:last] for name, first, last in spans})  # fmt: skip
        groups: list[Group] = []
        if not relays:
            populate(folder / "root", parties)
        root = FederationFolder.open(folder / "root")
        if not relays:
            groups.append((root.folder, root.serve.port, 0, parties))
        self.operator = Operator(root)
        self.processes = {"root": self._run("root", "serve", str(root.folder))}
        self.operator.wait_until_served(300)
        for name, first, last in spans:
            init(folder / name, "load", names[first:last], ["127.0.0.1"], free_port())
            populate(folder / name, last - first, first)
            made, token = FederationFolder.open(folder / name), root.folder / "tokens" / f"{name}.token"
            self.processes[name] = self._run(name, "relay", str(made.folder), root.url, "--token-file", str(token))
            groups.append((made.folder, made.serve.port, first, last))
        for path, *_ in groups:
            Operator(FederationFolder.open(path)).wait_until_served(300)
        plain = [(str(folder), *rest) for folder, *rest in groups]
        self.crowd = subprocess.Popen([sys.executable, __file__, "--crowds", json.dumps(plain)], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True)  # fmt: skip

    def _run(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen([sys.executable, "-m", "hansa.cli", *words], stdout=log, stderr=log,
                                    env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip

    def connect(self) -> None:
        """Wait until the root knows that all parties are connected."""
        while sum(party["connected"] for party in self.operator.parties() if party["number"] >= 0) < self.parties:
            assert self.crowd.stdin is not None and self.crowd.stdout is not None
            self.crowd.stdin.write("\n")
            self.crowd.stdin.flush()
            seen = json.loads(self.crowd.stdout.readline())
            if seen["failed"]:
                raise SystemExit(f"parties failed: {seen['failed'][:3]}")
            time.sleep(1.0)

    def job(self, model: str, rounds: int) -> dict[str, Any]:
        """Run a job of all parties; returns its measurements."""
        tree = {"task": {"parties": ["their-own.csv"], "model": model}, "algorithm": {"name": "fedavg"},
                "run": {"rounds": rounds, "sums": "exact", "max_weight": 1000, "eval_parties": False}}  # fmt: skip
        before, began = {name: cpu(process.pid) for name, process in self.processes.items()}, time.perf_counter()
        id, _ = self.operator.submit(parse(tree), "job", self.parties)
        self.operator.wait(id)
        seconds, ended = time.perf_counter() - began, self.operator.job(id)
        if ended["status"] != "finished":
            raise SystemExit(f"the job failed: {ended['reason']}")
        replies = [line["replies"] for line in ended["rounds"]]
        assert replies == [self.parties] * rounds, replies
        model_file = self.operator.pull(id, self.folder / "model.safetensors")
        used = {
            name: {"cpu_s": round(cpu(process.pid) - before[name], 2), **_memory(process.pid)}
            for name, process in self.processes.items()
        }
        return {"seconds": round(seconds, 1), "model": hashlib.sha256(model_file.read_bytes()).hexdigest(),
                "processes": used}  # fmt: skip

    def close(self) -> None:
        assert self.crowd.stdin is not None
        self.crowd.stdin.close()
        self.crowd.wait()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait()


def _memory(pid: int) -> dict[str, int]:
    now = status(pid)
    return {"rss_mib": round(now["VmRSS"]), "peak_mib": round(now["VmHWM"])}


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--parties", type=int, default=1000)
    words.add_argument("--relays", type=int, default=10)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--model", default="2nn")
    words.add_argument("--crowds", help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.crowds is not None:
        crowds([tuple(group) for group in json.loads(given.crowds)])
        return 0
    found: dict[str, Any] = {"parties": given.parties, "relays": given.relays, "rounds": given.rounds,
                             "model": given.model, "cores": len(os.sched_getaffinity(0))}  # fmt: skip
    for name, relays in (("flat", 0), ("tree", given.relays)):
        with tempfile.TemporaryDirectory() as folder:
            measured = Measured(Path(folder), given.parties, relays)
            try:
                say(f"{name}: connecting")
                measured.connect()
                say(f"{name}: the job begins")
                found[name] = measured.job(given.model, given.rounds) | {"load_average": os.getloadavg()[0]}
            finally:
                measured.close()
        say(f"{name}: {found[name]['seconds']} s")
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "relays.json").write_text(json.dumps(found, indent=1))
    print(f"{given.parties} parties, {given.rounds} rounds, model {given.model}, {found['cores']} cores")
    print(f"{'process':24} {'CPU s':>8} {'memory MiB':>11} {'most MiB':>9}")
    tree = found["tree"]["processes"]
    relays = [used for name, used in tree.items() if name != "root"]
    mean = {key: round(sum(used[key] for used in relays) / len(relays), 1) for key in relays[0]}
    rows = {"flat: root": found["flat"]["processes"]["root"], f"tree: root, {given.relays} relays": tree["root"],
            "tree: mean of relays": mean}  # fmt: skip
    for name, used in rows.items():
        print(f"{name:24} {used['cpu_s']:8} {used['rss_mib']:11} {used['peak_mib']:9}")
    same = found["flat"]["model"] == found["tree"]["model"]
    print(f"seconds: flat {found['flat']['seconds']}, tree {found['tree']['seconds']}; the same bits: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
