"""The releases of a party: where sums leave it under noise, and where its noise is drawn.

`watched` replaces these places, and nothing else, while twins are asked. No noise is drawn. Each sum is recorded with
the sensitivity that its noise is made for, and the second twin continues with the sums of the first: what differs
between the twins' answers is then no release. `drawers` finds every function of the package that draws noise, so that a
test fails if there is one that is not listed here.
"""

from __future__ import annotations

import ast
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hansa
from hansa.classical.trees import private
from hansa.classical.trees.private import PrivateHistograms
from hansa.core.op import Memory, Party, Payload, Reply
from hansa.holdings.gateway import SampleGateway
from hansa.kernel.grid import Grid
from hansa.local.context import Context
from hansa.net.party import policy, sessions
from hansa.net.party.worker import Worker
from hansa.net.transport.wire import Work

NOISE = {"discrete_gaussian", "secret_normal"}  # the functions that draw noise
DRAWERS = {  # the functions that call them, and why each is watched, or needs not be
    "hansa.kernel.grid.Grid.released": "watched",
    "hansa.local.context.Context.noise": "watched, with Context.clipped_sum",
    "hansa.classical.trees.private.PrivateHistograms.run": "watched",
    "hansa.kernel.grid.Grid.covered": "of sums at the aggregator (central differential privacy)",
    "hansa.secure.encoding.Encoding.encode": "a party's share of the noise of a secure sum, which hides the rest",
    "hansa.vertical.split_ops.SplitTrain._released": "an op without a budget: its activations are no sum",
}
BUDGETED = {"dp-sgd", "private-histograms"}  # ops and solvers that state a release of their own
SLACK = 1 + 1e-9


class Tape:
    """The releases of one ask: recorded at the first twin, compared and replayed at the second.

    `problems` has what is wrong with them, as (code, sentence). A replaced record may move a sum by `records` = 2 times
    the sensitivity, since one is removed and one is added. With `records` = 1 one is removed only: then the numbers of
    samples differ, which are public, and only the first sums begin at the same model.
    """

    def __init__(self, records: int = 2) -> None:
        self.sums: list[tuple[Tensor, float, bytes, Tensor]] = []
        self.problems: list[tuple[str, str]] = []
        self.records, self.moved = records, 0.0  # the largest change, in units of the sensitivity
        self._at: int | None = None

    def rewind(self) -> None:
        """Begin the second twin."""
        self._at = 0

    def release(self, exact: Tensor, sensitivity: float, secret: bytes, value: Tensor, place: str) -> Tensor:
        """Note a sum, of a stated sensitivity, under noise of a secret; `value` is released without the noise."""
        exact = exact.to(torch.float64)
        if self._at is None:
            if any(known == secret and not torch.equal(sum, exact) for sum, _, known, _ in self.sums
                   if sum.shape == exact.shape):  # fmt: skip
                self.problems.append(("noise", f"{place}: the same noise covers two different sums"))
            self.sums.append((exact.clone(), sensitivity, secret, value.clone()))
            return value
        if self._at >= len(self.sums):
            self.problems.append(("release", f"{place}: the second twin releases one sum more"))
            return value
        first, bound, known, released = self.sums[self._at]
        self._at += 1
        if first.shape != exact.shape or bound != sensitivity or known != secret:
            self.problems.append(("release", f"{place}: another shape, sensitivity or secret: {tuple(first.shape)} and "
                                  f"{tuple(exact.shape)}, {bound:g} and {sensitivity:g}"))  # fmt: skip
            return value
        if self.records == 1 and self._at > 1:
            return released.clone()
        moved = float(torch.linalg.vector_norm(exact - first)) / bound
        self.moved = max(self.moved, moved)
        if not moved <= self.records * SLACK:
            self.problems.append(("sensitivity", f"{place}: one record moves the sum by {moved:.6g} times the stated "
                                  f"sensitivity, and {self.records} times is the most"))  # fmt: skip
        return released.clone()


class Watch:
    """The tape of the present ask."""

    tape = Tape()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Record and replay releases. Draws and session keys are the same for both twins; nothing is logged."""
    clipped_sum, histograms, digest = Context.clipped_sum, PrivateHistograms.run, Worker._input_digest
    deviations: list[float] = []

    def no_noise(sigma: float, secret: bytes, count: int) -> Any:
        deviations.append(sigma)
        return np.zeros(count, dtype=np.int64)

    def released(self: Grid, total: Tensor, secret: bytes) -> Tensor:
        value = ((total + ((1 << self.shift) >> 1)) >> self.shift).to(torch.float64).mul_(self.step)
        return Watch.tape.release(total.to(torch.float64) * self.fine, self.clip, secret, value, "discrete sum")

    def clipped(self: Context, w: Tensor, batch: Any, key: Tensor, clip: float, *more: Any, **options: Any) -> Tensor:
        total = clipped_sum(self, w, batch, key, clip, *more, **options)
        return Watch.tape.release(total, clip, self.secret(key), total, "floating-point sum")

    def counted(self: PrivateHistograms, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        reply, memory = histograms(self, party, payload, memory)
        sums = reply.tensors["sums"]
        units = torch.tensor([2.0**-self.bits, 2.0**-self.bits, 1.0], dtype=torch.float64)[None, :, None]
        bound = deviations.pop() / self.sigma  # of counts, whose unit is one sample
        secret = party.private("tree sums", self.trees, self.ask)
        value = Watch.tape.release(sums * units, bound, secret, sums, "histograms")
        return Reply({**reply.tensors, "sums": value}, reply.weight, reply.maxima, reply.metrics), memory

    def input_digest(self: Worker, work: Work, memory: Memory) -> str:
        return f"{digest(self, work, {})} {work.tip}"  # the memory is the twins' own, and told apart by its ask

    with contextlib.ExitStack() as stack:
        for place, name, other in (
            (Grid, "released", released),
            (Context, "clipped_sum", clipped),
            (Context, "noise", lambda self, key: torch.zeros(self.spec.dim, dtype=torch.float64)),
            (PrivateHistograms, "run", counted),
            (private, "discrete_gaussian", no_noise),
            (SampleGateway, "digest", lambda self: "0" * 64),
            (Worker, "_input_digest", input_digest),
            (sessions, "secrets", SimpleNamespace(token_bytes=bytes)),
            (policy, "unsealed", lambda op: None),  # what a route seals is compared too
        ):
            stack.callback(setattr, place, name, vars(place)[name])
            setattr(place, name, other)
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        yield


def drawers() -> set[str]:
    """The functions of the package that call a function that draws noise."""
    root = Path(hansa.__file__).parent
    found: set[str] = set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        if any(name in text for name in NOISE):
            module = ".".join(("hansa", *path.relative_to(root).with_suffix("").parts))
            found |= {name for name in _callers(ast.parse(text), module) if name.rpartition(".")[2] not in NOISE}
    return found


def _callers(tree: ast.AST, place: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        yield from _callers(node, f"{place}.{node.name}" if named else place)  # type: ignore[attr-defined]
        if isinstance(node, ast.Name) and node.id in NOISE and isinstance(node.ctx, ast.Load):
            yield place
