"""Seconds and bytes per tree of SecureBoost: 32,561 x 123 (Adult, one-hot as LIBSVM's a9a), two parties.

    python benchmarks/secureboost.py [--trees 3] [--depth 6] [--key-bits 2048] [--data-dir shared/data]

The parties are two processes. They run the generators of the op and exchange its messages, encoded, through a pipe.
Matching is left out. On a machine with other work, "on two free cores" is the column to compare: it is computed from
the processor time of each process and the order of messages. Each run ends with the comparison with boosting on the
joined columns, in bits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

import hansa
from hansa.core.op import Memory, Party
from hansa.core.session_op import Receive
from hansa.data.adult import ADULT_FEATURES, Adult
from hansa.holdings.gateway import SampleGateway, TableRows
from hansa.numerics.objective import Objective
from hansa.plumbing import codec
from hansa.secure.big_integers import GMP
from hansa.vertical.psi_ops import ROWS
from hansa.vertical.split_ops import Roles
from hansa.vertical.tree_bins import TreeBins
from hansa.vertical.tree_ops import BoostTrees, stored_trees

NUMBERS = {"age": 5, "fnlwgt": 5, "education-num": 5, "capital-gain": 2, "capital-loss": 2, "hours-per-week": 5}


def one_hot(data_dir: str | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Adult as 123 columns of 0 and 1: numbers in two or five groups, categories without those of missing values."""
    loaded = Adult().load(data_dir)
    x, y = np.asarray(loaded.x, dtype=np.float64), np.asarray(loaded.y)
    columns = []
    for name, column in zip(ADULT_FEATURES, x.T, strict=True):
        if name in NUMBERS:
            groups = NUMBERS[name]
            edges = [0.0] if groups == 2 else np.quantile(column, np.arange(1, groups) / groups)
            place = np.searchsorted(edges, column, side="left")
            columns += [(place == k).astype(np.float64) for k in range(groups)]
        elif not name.endswith("=?"):
            columns.append(column)
    return np.stack(columns, 1), y


class Counted:
    """A pipe that counts the bytes of messages, and the time that the party would need on a core of its own.

    `time` advances by the processor time of this process; at a message it waits for the sender's time, as a process
    does that has to wait for nothing but messages.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.up, self.messages = pipe, 0, 0
        self._time, self._cpu = 0.0, time.process_time()

    @property
    def time(self) -> float:
        now = time.process_time()
        self._time, self._cpu = self._time + now - self._cpu, now
        return self._time

    def send(self, message: dict[str, torch.Tensor]) -> None:
        data = codec.encode(message)
        self.up, self.messages = self.up + len(data), self.messages + 1
        self.pipe.send_bytes(struct.pack("d", self.time) + data)

    def receive(self) -> dict[str, torch.Tensor]:
        data = self.pipe.recv_bytes()
        self._time = max(self.time, *struct.unpack("d", data[:8]))
        return codec.decode(data[8:])  # type: ignore[no-any-return]


def run_party(here: int, pipe: Connection, out: Any, x: Any, y: Any, args: argparse.Namespace) -> None:
    """One party: its bins, then all trees."""
    torch.set_num_threads(1)
    rows = TableRows(torch.from_numpy(x), None if y is None else torch.from_numpy(y))
    party = Party(here, Objective(None, "cross_entropy", 0), SampleGateway(rows), 0)
    widths = (args.columns, 123 - args.columns)
    roles = Roles({k: (width,) for k, width in enumerate(widths)}, 0, 0, len(x), 2)
    memory: Memory = {ROWS: torch.arange(len(x))}
    reply, memory = TreeBins(args.bins).run(party, roles.tree(), memory)
    link = Counted(pipe)
    if here:
        link.pipe.send(int(reply.tensors["sums"]))
    sums = int(reply.tensors["sums"]) if here else link.pipe.recv()
    op = BoostTrees(max_depth=args.depth, most_bins=args.bins + 1, key_bits=args.key_bits)
    lines = []
    for number in range(args.trees):
        party.round = number
        start, cpu, own, up = time.perf_counter(), time.process_time(), link.time, (link.up, link.messages)
        talk, message = op.talk(party, {**roles.tree(), "sums": {"1": sums}}, memory), None
        try:
            while True:
                step = talk.send(message)
                message = link.receive() if isinstance(step, Receive) else link.send(step.message)
        except StopIteration as done:
            memory = done.value[1]
        lines.append((time.perf_counter() - start, time.process_time() - cpu, link.up - up[0], link.messages - up[1],
                      link.time - own))  # fmt: skip
    trees = {name: value for name, value in memory.items() if name.startswith("trees/table/")}
    out.put((here, lines, {name: value.numpy() for name, value in trees.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", type=int, default=3)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--bins", type=int, default=32)
    parser.add_argument("--columns", type=int, default=61, help="of the party with the labels")
    parser.add_argument("--key-bits", type=int, default=2048)
    parser.add_argument("--data-dir", default=None)
    args = parser.parse_args()
    x, y = one_hot(args.data_dir)
    assert x.shape == (32561, 123), x.shape
    context = multiprocessing.get_context("spawn")
    ends, out = context.Pipe(), context.Queue()
    parts = [(x[:, : args.columns], y), (x[:, args.columns :], None)]
    processes = [context.Process(target=run_party, args=(k, ends[k], out, *parts[k], args)) for k in range(2)]
    for process in processes:
        process.start()
    found = sorted((out.get() for _ in processes), key=lambda item: item[0])
    for process in processes:
        process.join()
    print(f"gmpy2: {'yes' if GMP else 'no'}; key of {args.key_bits} bits; depth {args.depth}")
    print("tree  seconds  on two free cores  CPU active  CPU passive  MB to passive  MB back  messages")
    for number, (active, passive) in enumerate(zip(found[0][1], found[1][1], strict=True)):
        print(f"{number:>4} {active[0]:>8.2f} {active[4]:>18.2f} {active[1]:>11.2f} {passive[1]:>12.2f} "
              f"{active[2] / 1e6:>14.2f} {passive[2] / 1e6:>8.2f} {active[3] + passive[3]:>9}")  # fmt: skip
    task = hansa.Task(None, "cross_entropy", [(torch.from_numpy(x), torch.from_numpy(y))])
    own = hansa.Boosting(cuts="exact", bins=args.bins, max_depth=args.depth)
    start = time.perf_counter()
    joined = hansa.simulate(own, task, rounds=args.trees, progress=False).state.slots["trees"]
    print(f"joined columns, no encryption: {(time.perf_counter() - start) / args.trees:.2f} s per tree")
    trees = stored_trees({name: torch.from_numpy(value) for name, value in found[0][2].items()}, 1).payload()
    same = all(torch.equal(trees[name], joined[name]) for name in joined)
    print(f"splits, leaves and counts equal those of the joined columns: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
