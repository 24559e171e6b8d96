"""Conformance checks for fusions.

    from hansa.testing import check_fusion
    check_fusion(MyFusion())

The checks call the fusion on small matrices of updates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.core.plain_data import from_config, to_config
from hansa.fusion.fusion import Fused, Fusion
from hansa.numerics.rows import FileRows, MappedRows, Rows
from hansa.plumbing import codec
from hansa.plumbing.errors import HansaError

PARTIES, DIM = 11, 300
TOLERANCE = 1e-9
Known = Callable[[Tensor], Mapping[str, Any]]  # what a fusion is told beside the updates


def check_fusion(fusion: Fusion, known: Known | None = None) -> None:
    """Raise AssertionError with the first promise that a fusion breaks.

    `known` gives, for a matrix of updates, the keyword arguments that `fuse` needs beside them (the server's own
    update, say).
    """
    check = _FusionCheck(fusion, known)
    check.config()
    check.finite()
    check.order()
    check.single()
    check.storage()
    check.weights()
    check.memory()


class _FusionCheck:
    """The checks of one fusion."""

    def __init__(self, fusion: Fusion, known: Known | None) -> None:
        self.fusion, self.name = fusion, fusion.name
        self._known = known
        draws = torch.Generator().manual_seed(0)
        self.updates = torch.randn(PARTIES, DIM, generator=draws, dtype=torch.float64)

    def fuse(self, updates: Tensor | Rows, weights: Tensor | None = None, like: Tensor | None = None) -> Fused:
        matrix = updates if isinstance(updates, Tensor) else like
        known = {} if self._known is None else self._known(self.updates if matrix is None else matrix)
        return self.fusion.examine(updates, weights, **known)

    def differ(self, a: Tensor, b: Tensor) -> bool:
        return not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)

    def config(self) -> None:
        """The configuration of a fusion gives an equal fusion."""
        again = from_config("fusion", to_config(self.fusion), "check_fusion")
        assert again == self.fusion, f"{self.name}: its configuration gives another fusion: {again}"

    def finite(self) -> None:
        """Finite updates give a finite vector, and one update that is not finite cannot change that."""
        fused = self.fuse(self.updates).w
        assert fused.shape == (DIM,), f"{self.name}: it gives the shape {tuple(fused.shape)}, and not ({DIM},)"
        assert fused.dtype == self.updates.dtype, f"{self.name}: it changes the type of the updates"
        assert bool(torch.isfinite(fused).all()), f"{self.name}: finite updates give values that are not finite"
        for bad in (torch.nan, torch.inf):
            spoiled = torch.cat([self.updates, torch.full((1, DIM), bad, dtype=torch.float64)])
            try:
                fused = self.fuse(spoiled, like=self.updates).w
            except HansaError:
                continue
            assert bool(torch.isfinite(fused).all()), f"{self.name}: one update of {bad} gets into the result"

    def order(self) -> None:
        """The order of the parties does not matter."""
        order = torch.arange(PARTIES).roll(4)
        first, other = self.fuse(self.updates), self.fuse(self.updates[order])
        assert not self.differ(first.w, other.w), f"{self.name}: another order of the parties gives another result"
        shares = torch.tensor(first.shares, dtype=torch.float64)[order]
        there = torch.tensor(other.shares, dtype=torch.float64)
        assert not self.differ(shares, there), f"{self.name}: another order of the parties gives other shares"

    def single(self) -> None:
        """The update of a single party gives a multiple of itself, or is refused."""
        update = self.updates[:1]
        try:
            fused = self.fuse(update).w
        except HansaError:
            return
        along = update[0] * (fused @ update[0]) / (update[0] @ update[0])
        assert not self.differ(fused, along), f"{self.name}: a single update does not give a multiple of itself"

    def storage(self) -> None:
        """Updates in memory, in one file and in a file per party give the same bits."""
        expected = self.fuse(self.updates)
        mapped = MappedRows.temporary(PARTIES, DIM, self.updates.dtype)
        for k, row in enumerate(self.updates):
            mapped.write(k, row)
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / str(k) for k in range(PARTIES)]
            for path, row in zip(paths, self.updates, strict=True):
                path.write_bytes(row.numpy().tobytes())
            files = FileRows([(path, 0) for path in paths], DIM, self.updates.dtype)
            for where, rows in (("in one file", mapped), ("in a file per party", files)):
                try:
                    fused = self.fuse(rows, like=self.updates)
                except (HansaError, IndexError, RuntimeError, ValueError) as error:
                    raise AssertionError(f"{self.name}: updates {where} cannot be fused: {error}") from error
                same = codec.encode((fused.w, fused.shares)) == codec.encode((expected.w, expected.shares))
                assert same, f"{self.name}: updates in memory and {where} give other bits"

    def weights(self) -> None:
        """A fusion uses the weights that its result names, and no others."""
        weights = torch.arange(1, PARTIES + 1, dtype=torch.float64)
        plain, fused = self.fuse(self.updates), self.fuse(self.updates, weights)
        used = fused.weights
        if used is None or bool((used == used[0]).all()):
            assert torch.equal(fused.w, plain.w), f"{self.name}: its result names no weights, and depends on them"
            return
        assert not self.differ(used / used.sum(), weights / weights.sum()), (
            f"{self.name}: the weights that its result names are not those of the parties"
        )
        assert self.differ(fused.w, plain.w), f"{self.name}: its result names weights, and does not depend on them"
        for other, same in ((3 * weights, fused.w), (torch.full_like(weights, 2.0), plain.w)):
            assert not self.differ(self.fuse(self.updates, other).w, same), (
                f"{self.name}: it depends on the sum of the weights"
            )

    def memory(self) -> None:
        """A memory survives a checkpoint, and fusing does not change the memory that it was given."""
        if not self.fusion.remembers:
            return
        layers, kept = [("first", 100), ("second", DIM - 100)], None
        for number in range(4):
            updates = self.updates.roll(number, 0)
            told: dict[str, Any] = {"layers": layers, "parties": range(PARTIES)}
            before = codec.encode({"memory": kept})
            fused = self.fusion.examine(updates, memory=kept, **told)
            assert codec.encode({"memory": kept}) == before, f"{self.name}: it changes the memory that it is given"
            again = self.fusion.examine(updates, memory=codec.decode(before)["memory"], **told)
            assert torch.equal(fused.w, again.w), f"{self.name}: a memory from a checkpoint gives another result"
            kept = fused.memory
