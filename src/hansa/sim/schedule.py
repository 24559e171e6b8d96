"""Which samples each party of a stack trains on at each step, worked out for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core import rng
from hansa.core.task import PartyShards
from hansa.local.solver import LocalSolver


class Shape:
    """What a stack's batches look like, given the parties' sizes: all but which samples they hold."""

    def __init__(self, solvers: Sequence[LocalSolver], sizes: np.ndarray[Any, Any], device: torch.device) -> None:
        plans = [_plan(solver) for solver in solvers]  # one for all, or one a party
        epochs, steps, size = (np.array([plan[at] for plan in plans]) for at in range(3))
        drop_last = plans[0][3]
        batch = np.minimum(sizes, size)
        each = np.maximum(sizes // batch, 1) if drop_last else -(-sizes // batch)  # steps of an epoch
        counts = np.where(steps > 0, steps, epochs * each)
        at = np.arange(counts.max())
        place = (at % each[:, None]) * batch[:, None]  # where in its epoch a batch begins [K, S]
        lengths = np.where(at < counts[:, None], np.minimum(batch[:, None], sizes[:, None] - place), 0)
        self.steps: list[int] = counts.tolist()
        self.widths, self.active, self.full = _look(lengths, counts)
        self.widest = int(sizes.max())
        self.epochs = int((-(-counts // each)).max())
        self.shuffles = bool((batch < sizes).any())  # else each step takes all samples, in order
        epoch = np.minimum(at // each[:, None], self.epochs - 1)
        self.sizes, self.batch, self.epoch, self.place, self.lengths = _send(
            device, sizes, batch, epoch, place, lengths
        )

    def rows(self, first: Tensor, keys: Tensor) -> Tensor:
        """The rows [K, S, B] of each step's samples, given each party's first row and its keys [K, epochs]."""
        across = torch.arange(max(self.widths), device=first.device)
        inside = mask(self.lengths, len(across))
        position = torch.where(inside, self.place.unsqueeze(-1) + across, 0)
        if self.shuffles:
            orders = rng.shuffles(keys, self.sizes.unsqueeze(1).expand(-1, self.epochs), self.widest)  # [K, E, n]
            straight = torch.arange(self.widest, device=first.device)
            orders = torch.where((self.batch < self.sizes).view(-1, 1, 1), orders, straight)
            flat = (self.epoch.unsqueeze(-1) * self.widest + position).flatten(1)
            position = torch.where(inside, orders.flatten(1).gather(1, flat).view(position.shape), 0)
        return first.view(-1, 1, 1) + position


def _plan(solver: LocalSolver) -> tuple[int, int, int, bool]:
    """A solver's plan in numbers: 0 steps where epochs count, a batch larger than any for the whole set."""
    epochs, steps, size, drop_last = solver.plan if solver.sampler == "shuffle" else (1, None, None, False)
    return epochs, steps or 0, size or np.iinfo(np.int64).max, drop_last


@dataclass
class BatchSchedule:
    """The batches of a stack of parties, sorted so that those with the most steps come first.

    `rows` [K, S, B] are rows of the data; beyond a batch's length they repeat a row of the party's own. `lengths`
    [K, S] are the batches' lengths: 0 once a party has finished, and for a batch that was drawn empty.
    """

    rows: Tensor
    lengths: Tensor
    steps: list[int]
    widths: list[int]  # of the widest batch of each step
    active: list[int]  # how many parties take each step: they are the first so many
    full: list[bool]  # whether the batches of all of those are as wide as the widest

    @property
    def mask(self) -> Tensor:
        """Which rows count."""
        return mask(self.lengths, self.rows.shape[2])


def mask(lengths: Tensor, width: int) -> Tensor:
    """Which samples of batches so wide count [K, S, B], by the batches' lengths [K, S]."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def shares(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The part of each sample in its party's mean loss."""
    return mask(lengths, width).to(dtype) / lengths.clamp(min=1).to(dtype).unsqueeze(-1)


def regular(solver: LocalSolver) -> bool:
    """Whether a solver's batches follow from the sizes of the parties: they are neither its own nor drawn."""
    return not solver.own_batches and solver.sampler != "poisson"


def schedule(solvers: Sequence[LocalSolver], shards: PartyShards, parties: list[int], seed: int, round: int,
             device: torch.device) -> BatchSchedule:  # fmt: skip
    """The batches that `solver.batches` gives each of these parties, which all have samples. `solvers` is one for all
    of them, or one a party, alike but for how much they do."""
    if not regular(solvers[0]):
        return _listed(solvers, shards, parties, seed, round, device)
    ids = np.asarray(parties)
    shape = Shape(solvers, shards.sizes(ids), device)
    first, members = _send(device, shards.offsets[ids], ids)
    keys = epoch_keys(rng.key(seed, "shuffle", round), members, shape.epochs) if shape.shuffles else members
    return BatchSchedule(shape.rows(first, keys), shape.lengths, shape.steps, shape.widths, shape.active, shape.full)


def epoch_keys(base: int | Tensor, parties: Tensor, epochs: int) -> Tensor:
    """Each party's key for each of its epochs [K, E]."""
    start = base if isinstance(base, Tensor) else torch.tensor(base, device=parties.device)
    return rng.fold(rng.fold(start, parties).unsqueeze(1), torch.arange(epochs, device=parties.device))


def _look(lengths: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> tuple[list[int], list[int], list[bool]]:
    widths, training = lengths.max(0).clip(1), np.arange(lengths.shape[1]) < counts[:, None]
    full = ((lengths == widths) | ~training).all(0)
    return widths.tolist(), training.sum(0).tolist(), full.tolist()


def _send(device: torch.device, *arrays: np.ndarray[Any, Any]) -> list[Tensor]:
    """Arrays of whole numbers as tensors on a device, in one copy."""
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]).astype(np.int64)).to(device)
    pieces = flat.split([array.size for array in arrays])  # type: ignore[no-untyped-call]
    return [piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]


def _listed(solvers: Sequence[LocalSolver], shards: PartyShards, parties: list[int], seed: int, round: int,
            device: torch.device) -> BatchSchedule:  # fmt: skip
    """The same from a solver's own lists."""
    each = solvers if len(solvers) > 1 else [solvers[0]] * len(parties)
    batches = [solver.batches(shards.size(party), seed, round, party)
               for solver, party in zip(each, parties, strict=True)]  # fmt: skip
    steps = [len(b) for b in batches]
    lengths = np.zeros((len(parties), max(steps)), dtype=np.int64)
    for k, b in enumerate(batches):
        lengths[k, : len(b)] = [len(rows) for rows in b]
    rows = np.zeros((*lengths.shape, max(1, lengths.max())), dtype=np.int64)  # a batch may be empty
    for k, (party, b) in enumerate(zip(parties, batches, strict=True)):
        for s, chosen in enumerate(b):
            rows[k, s, : len(chosen)] = chosen
        rows[k] += int(shards.offsets[party])
    widths, active, full = _look(lengths, np.array(steps))
    on_device = [torch.from_numpy(values).to(device) for values in (rows, lengths)]
    return BatchSchedule(on_device[0], on_device[1], steps, widths, active, full)
