"""How long an exchange of split learning takes between deployed parties, beside routes that are durable one by one.

An aggregator and three parties are processes on this machine, connected over mutual TLS. A job of few steps and one of
many steps differ by the time of their exchanges. One step of the vertical shape has two exchanges: activations of all
bottoms to the label holder, and gradients back.

    PYTHONPATH=src python benchmarks/split_exchanges.py [--steps 400] [--batch 64] [--width 64]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hansa import Split
from hansa.core.plain_data import to_config
from hansa.experiment.config import parse
from hansa.models.dense import Logistic
from hansa.net.aggregator.federation import init
from hansa.net.local import all_run, free_port, processes
from hansa.net.operator import Operator

NAMES = ("bank", "shop", "clinic")
PEOPLE, COLUMNS = 1024, 8


def party_rows() -> tuple[Any, Any, Any]:
    """The rows of one party; the environment has its number. The last party has the labels."""
    number = int(os.environ["HANSA_BENCHMARK_PARTY"])
    x = np.random.default_rng(number).normal(size=(PEOPLE, COLUMNS)).astype(np.float32)
    y = (np.arange(PEOPLE) % 2) if number == len(NAMES) - 1 else None
    return x, y, [f"person {k}" for k in range(PEOPLE)]


def timed(operator: Operator, batch: int, width: int, epochs: int, check: Any) -> float:
    """The seconds of the second round of a job; the first one also matches rows."""
    algorithm = Split(bottoms=(Logistic(outputs=width),), match="same", batch=batch, epochs=epochs, lr=0.01)
    tree = {"task": {"dataset": "breast-cancer", "loss": "cross_entropy"}, "partition": "columns",
            "algorithm": to_config(algorithm), "run": {"rounds": 2}}  # fmt: skip
    lines: list[dict[str, Any]] = []
    job, _ = operator.submit(parse(tree), f"split-{epochs}", min_parties=len(NAMES))
    ended = operator.wait(job, lines.append, check=check)
    assert ended["status"] == "finished", ended["reason"]
    assert all(line["replies"] == len(NAMES) for line in lines[1:]), lines
    return float(lines[1]["seconds"])


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--steps", type=int, default=400, help="Training steps of the long job.")
    words.add_argument("--batch", type=int, default=64, help="People per batch.")
    words.add_argument("--width", type=int, default=64, help="Activations per person and party.")
    given = words.parse_args()
    per_epoch = -(-PEOPLE // given.batch)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        federation = init(folder / "federation", "exchanges", NAMES, ["localhost"], free_port())
        serve = ["serve", str(folder / "federation")]
        commands: list[tuple[str, list[str], dict[str, str]]] = [("aggregator", serve, {})]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        for number, name in enumerate(NAMES):
            (folder / name).mkdir()
            (folder / name / "party.toml").write_text("matches = 1000\n")
            token = folder / "federation" / "tokens" / f"{name}.token"
            join = ["join", federation.url, "--token-file", str(token), "--data", "split_exchanges:party_rows",
                    "--state", str(folder / name)]  # fmt: skip
            commands.append((name, join, {"HANSA_BENCHMARK_PARTY": str(number), "PYTHONPATH": path}))
        with processes(commands, folder) as started:
            operator = Operator(federation)

            def check() -> None:
                all_run(started, folder)

            operator.wait_until_served(check=check)
            began = time.perf_counter()
            epochs = 1 + max(1, given.steps // per_epoch)
            short, long = (timed(operator, given.batch, given.width, count, check) for count in (1, epochs))
            steps = (epochs - 1) * per_epoch
            step = (long - short) / steps
            print(json.dumps({
                "parties": len(NAMES), "steps": steps, "ms_per_step": round(1000 * step, 2),
                "ms_per_exchange": round(500 * step, 2), "seconds": round(time.perf_counter() - began, 1),
            }))  # fmt: skip
            if 500 * step > 30:
                sys.exit("an exchange takes more than 30 ms")


if __name__ == "__main__":
    main()
