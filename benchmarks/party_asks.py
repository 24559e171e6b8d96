"""Seconds per ask of a deployed party, and what the worker process adds to them.

    python benchmarks/party_asks.py [--rounds 40] [--repeats 3] [--parameters 100,1000000]
    python benchmarks/party_asks.py --handover         without network: the worker in a thread and in a process, in turn

By default: one party over loopback, one step of SGD per round. Everything but the step itself is overhead: polling,
fetching the model, the worker process, sending the reply, and the aggregator's round. To compare two versions, run this
script with each of them first in PYTHONPATH, in turn. `--handover` times the same asks in one process and across the
process boundary, which is steadier on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from deployment import Job, deployed

from hansa.core.ask import op_config
from hansa.local import SGD
from hansa.net.transport.wire import Blob, Work
from hansa.plumbing import codec

CLASSES = 10


def job(parameters: int, rounds: int) -> Job:
    """A linear model with about this many parameters, and one sample per class."""
    features = parameters // CLASSES - 1
    x = np.random.default_rng(6).random((CLASSES, features), dtype=np.float32)
    model = f'{{ name = "logistic", inputs = [{features}], outputs = {CLASSES} }}'
    return Job(model, [(x, np.arange(CLASSES))], rounds)


def handover(parameters: int, asks: int) -> dict[str, float]:
    """The median milliseconds of an ask, with the worker in a thread and in a process, each asked in turn."""
    from hansa.net.party.asks import AskFiles, WorkerThread
    from hansa.net.party.nursery import Nursery
    from hansa.net.party.samples import PartySamples, preparer
    from hansa.net.party.store import PartyStore
    from hansa.net.party.worker import Worker
    from hansa.net.party.worker_main import serve
    from hansa.net.party.worker_process import PartyWorkerProcess

    x, y = (torch.from_numpy(array) for array in job(parameters, 1).parties[0])
    features, empty = x.shape[1], torch.zeros(0)
    model = {"w": torch.zeros(CLASSES * (features + 1)), "stats": empty, "counts": empty.long()}
    task = {"model": "logistic", "dtype": "float32", "shape": [features], "outputs": CLASSES, "loss": "cross_entropy",
            "classes": CLASSES, "party_test": 0.0, "seed": 0, "bf16": False, "prepared": False}  # fmt: skip
    about = {"party": "p", "federation": "bench", "url": "https://localhost:1", "instance": "0" * 32}
    with tempfile.TemporaryDirectory(prefix="hansa-") as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        (folder / "party.json").write_text(json.dumps(about))
        store, prepare = PartyStore(folder), preparer(PartySamples((x, y)))
        ending.callback(store.close)
        nursery = ending.enter_context(contextlib.closing(Nursery(lambda link: serve(link, store, prepare))))
        files = AskFiles(folder / "message", folder / "task", folder / "reply")

        async def ask(runner: WorkerThread | PartyWorkerProcess, number: int) -> float:
            blobs = []
            for path, tree in (
                (files.message, {"op": op_config(SGD()), "payload": {"model": model}, "round": number}),
                (files.task, {"task": task, "preparations": []}),
            ):
                data = codec.encode(tree)
                path.write_bytes(data)
                blobs.append(Blob(hashlib.sha256(data).hexdigest(), len(data)))
            begun = time.perf_counter()
            outcome = await runner.begin(Work("job-1", "job", 0, number, "round", 0, *blobs, None, None, None, 1),
                                         files).done  # fmt: skip
            if outcome.why is not None:
                raise RuntimeError(outcome.why)
            return time.perf_counter() - begun

        async def main() -> dict[str, float]:
            with contextlib.closing(PartyWorkerProcess(store, nursery)) as process:
                runners = {"thread": WorkerThread(Worker(store, prepare)), "process": process}
                seconds: dict[str, list[float]] = {kind: [] for kind in runners}
                for number in range(asks + 2):
                    for kind, runner in runners.items():
                        seconds[kind].append(await ask(runner, number))
            return {kind: round(1000 * statistics.median(each[2:]), 2) for kind, each in seconds.items()}

        return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parameters", default="100,1000000", help="sizes of the model, by commas")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds per repeat")
    parser.add_argument("--handover", action="store_true", help="time the process boundary alone, without network")
    given = parser.parse_args()
    for size in map(int, given.parameters.split(",")):
        if given.handover:
            times = [handover(size, given.rounds) for _ in range(given.repeats)]
            print(json.dumps({"parameters": size, "median ms per ask": times}))
            continue
        medians = [statistics.median(deployed(job(size, given.rounds), given.limit)["rounds"])
                   for _ in range(given.repeats)]  # fmt: skip
        print(json.dumps({"parameters": size, "median ms per round": [round(1000 * each, 1) for each in medians]}))


if __name__ == "__main__":
    main()
