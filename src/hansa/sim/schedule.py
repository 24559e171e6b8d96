"""The batches of all parties of a stack, computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hansa.core.task import PartyShards
from hansa.local.solver import LocalSolver
from hansa.numerics import rng


class Shape:
    """The shapes of a stack's batches, from the parties' sizes; which samples they hold comes later."""

    def __init__(self, solvers: Sequence[LocalSolver], sizes: np.ndarray[Any, Any], device: torch.device) -> None:
        plans = [_plan(solver) for solver in solvers]  # one for all, or one per party
        epochs, steps, size = (np.array([plan[at] for plan in plans]) for at in range(3))
        drop_last = plans[0][3]
        batch = np.minimum(sizes, size)
        each = np.maximum(sizes // batch, 1) if drop_last else -(-sizes // batch)  # steps per epoch
        counts = np.where(steps > 0, steps, epochs * each)
        at = np.arange(counts.max())
        place = (at % each[:, None]) * batch[:, None]  # the start of each batch in its epoch [K, S]
        lengths = np.where(at < counts[:, None], np.minimum(batch[:, None], sizes[:, None] - place), 0)
        self.steps: list[int] = counts.tolist()
        self.widths, self.active, self.full = _look(lengths, counts)
        self.widest = int(sizes.max())
        self.epochs = int((-(-counts // each)).max())
        self.shuffles = bool((batch < sizes).any())  # otherwise each step takes all samples, in order
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
    """A solver's plan as numbers: steps is 0 if epochs are given; a very large batch means all samples."""
    epochs, steps, size, drop_last = solver.plan if solver.sampler == "shuffle" else (1, None, None, False)
    return epochs, steps or 0, size or np.iinfo(np.int64).max, drop_last


@dataclass
class BatchSchedule:
    """The batches of a stack of parties, sorted so that those with the most steps come first.

    `rows` [K, S, B] are row indices of the data; beyond a batch's length they repeat a row of the same party. `lengths`
    [K, S] are the batch lengths: 0 for a party that has finished, and for an empty Poisson batch.
    """

    rows: Tensor
    lengths: Tensor
    steps: list[int]
    widths: list[int]  # length of the longest batch of each step
    active: list[int]  # number of parties that take each step: the first n
    full: list[bool]  # whether those parties' batches all have that length

    @property
    def mask(self) -> Tensor:
        """Which rows count."""
        return mask(self.lengths, self.rows.shape[2])


def mask(lengths: Tensor, width: int) -> Tensor:
    """Which samples count [K, S, B], from the batches' lengths [K, S] and the padded width B."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def shares(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The weight of each sample in the mean loss of its party."""
    return mask(lengths, width).to(dtype) / lengths.clamp(min=1).to(dtype).unsqueeze(-1)


def regular(solver: LocalSolver) -> bool:
    """Whether a solver's batches follow from the parties' sizes: neither overridden nor Poisson-sampled."""
    return not solver.own_batches and solver.sampler != "poisson"


def schedule(solvers: Sequence[LocalSolver], shards: PartyShards, parties: list[int], seed: int, rounds: list[int],
             device: torch.device) -> BatchSchedule:  # fmt: skip
    """The batches that `solver.batches` returns for each of these parties, which must all have samples.

    `solvers` is one solver for all parties, or one per party; they may differ in the amount of work only. `rounds` is
    one round for all parties, or one per party.
    """
    if not regular(solvers[0]):
        return _listed(solvers, shards, parties, seed, rounds, device)
    ids = np.asarray(parties)
    shape = Shape(solvers, shards.sizes(ids), device)
    first, members = _send(device, shards.offsets[ids], ids)
    keys = members
    if shape.shuffles:
        base = torch.tensor([rng.key(seed, "shuffle", round) for round in rounds], device=device)
        keys = epoch_keys(base, members, shape.epochs)
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


def _listed(solvers: Sequence[LocalSolver], shards: PartyShards, parties: list[int], seed: int, rounds: list[int],
            device: torch.device) -> BatchSchedule:  # fmt: skip
    """As `schedule`, from the lists that the solvers' `batches` returns."""
    each = solvers if len(solvers) > 1 else [solvers[0]] * len(parties)
    at = rounds if len(rounds) > 1 else rounds * len(parties)
    batches = [solver.batches(shards.size(party), seed, round, party)
               for solver, party, round in zip(each, parties, at, strict=True)]  # fmt: skip
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
