"""All steps of a stack of equal parties as one recording, which is replayed for every round."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hansa.core.op import Replies
from hansa.local.solver import LocalSolver
from hansa.numerics import rng
from hansa.sim.gpu import Program, fuses, recorded
from hansa.sim.schedule import Shape, epoch_keys, regular, shares
from hansa.sim.stack import Stack

if TYPE_CHECKING:
    from hansa.sim.stacked import StackedEngine


def repeats(stack: Stack) -> bool:
    """Whether one recording can train the stack: parties of equal size that start from the same model."""
    solver, sizes = stack.solver, stack.sizes
    if len(stack.solvers) > 1 or not regular(solver) or not stack.engine.pads or len(set(sizes)) > 1:
        return False
    return fuses(stack) and (len(sizes) == 1 or stack.started[0].stride(0) == 0)


class Epochs:
    """All steps of a stack of equal parties as one recording, from the choice of samples to the trained parameters.

    A round writes the parties' ids and the model into buffers and replays the recording.
    """

    def __init__(self, engine: StackedEngine, solver: LocalSolver, count: int, size: int) -> None:
        objective = engine.objective
        device = objective.device
        self.engine, self.count = engine, count
        self.solver = solver
        self.shape = Shape([solver], np.full(count, size), device)
        width = max(self.shape.widths)
        self.program = Program(engine, solver, count, width, True, plain_state(engine, count), engine.apart)
        steps = self.shape.lengths.shape[1]
        self.program.make_room(steps)
        self.program.share.copy_(shares(self.shape.lengths, width, objective.dtype).transpose(0, 1))
        self.offsets = torch.from_numpy(engine.holdings.train.offsets).to(device)
        self.w = torch.zeros_like(objective.initial.w)
        self.inputs = torch.zeros(count + 3, dtype=torch.int64, device=device)  # parties, two keys, the round
        self.result = self.seen = torch.zeros(0)
        self._replay: Callable[[], None] | None = None

    def run(self, parties: list[int], round: int, w: Tensor) -> tuple[Tensor, Tensor]:
        """The trained parameters [K, d] and the summed losses [K]."""
        seed = self.engine.seed
        self.inputs.copy_(
            torch.tensor([*parties, rng.key(seed, "shuffle", round), rng.key(seed, "step", round), round]),
            non_blocking=True,
        )
        self.w.copy_(w)
        self.program.of_party[-1].fill_(self.solver.rate(round))
        if self._replay is None:
            self._replay = recorded(self._all, self.inputs.device)
        self._replay()
        return self.result.clone(), self.seen.clone()  # the next replay overwrites both

    @torch.no_grad()
    def _all(self) -> None:
        program, parties = self.program, self.inputs[: self.count]
        steps = len(program.rows)
        keys = epoch_keys(self.inputs[self.count], parties, self.shape.epochs)
        program.rows.copy_(self.shape.rows(self.offsets[parties], keys).transpose(0, 1))
        if self.engine.objective.draws:
            of_parties = rng.fold(self.inputs[self.count + 1], parties)
            program.keys.copy_(rng.keys_of_steps(of_parties, steps).transpose(0, 1))
        program.round.copy_(self.inputs[self.count + 2])
        weights, seen = program.state
        layout = self.engine.objective.spec
        for name, view in layout.split(self.w.expand(self.count, -1)).items():
            weights[name].copy_(view)
        seen.zero_()
        moments = [[v[s] for v in (program.rows, program.share, program.keys)] for s in range(steps)]
        if program.apart:
            program.advance_apart(self.count, moments)
        else:
            state, spec = pytree.tree_flatten(program.state)
            advance = program.advance(self.count)
            for moment in moments:
                state = advance(state, moment)
            weights, seen = pytree.tree_unflatten(state, spec)
        self.result, self.seen = layout.stacked(weights), seen


def plain_state(engine: StackedEngine, count: int) -> Any:
    """The state of a step of plain SGD: one tensor per parameter, and the summed losses."""
    objective = engine.objective
    seen = torch.zeros(count, dtype=torch.float64, device=objective.device)
    return objective.spec.split(objective.initial.w.expand(count, -1)), seen


def train_alike(stack: Stack) -> Replies:
    """Train a chunk of parties of one size by one recording."""
    engine, solver, count, size = stack.engine, stack.solver, len(stack.members), stack.sizes[0]
    key = (solver, count, size)
    if key not in engine.programs:
        engine.programs[key] = Epochs(engine, solver, count, size)
    program: Epochs = engine.programs[key]
    start, carry, buffers = stack.started
    w, seen = program.run([member.party for member in stack.members], stack.round, start[0])
    stack.steps = program.shape.steps
    return stack.finish(start, (w, carry, buffers, seen))
