"""The stacked engine: a chunk of parties trains at once, parameters stacked to [parties, ...], by `torch.func.vmap`.

Parties of unequal size are padded and masked; a party that has finished keeps its parameters while others go on.
Models that mix the rows of a batch (BatchNorm) get no padding rows: only parties of equal size are stacked. What cannot
be stacked falls back to one party at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from hansa.core import rng
from hansa.core.errors import ConfigError, HansaError, PartyError
from hansa.core.objective import Objective
from hansa.core.op import Op, unwrap
from hansa.core.params import Params
from hansa.core.task import Holdings
from hansa.local import SGD
from hansa.local.solver import Batch, Context, LocalSolver, local_reply
from hansa.sim import fused
from hansa.sim.engine import Job, Outcome, ReferenceEngine, first_line, one_thread

log = logging.getLogger("hansa")
WINDOW = 256  # parties sorted by size together; a multiple of the block of replies.BlockSum


class StackedEngine(ReferenceEngine):
    """Many parties at once where the model allows it, one at a time where it does not."""

    name = "vmap"

    def __init__(self, objective: Objective, holdings: Holdings, seed: int, chunk: int | None = None) -> None:
        super().__init__(objective, holdings, seed)
        room = 2**30 // max(1, 8 * objective.spec.dim * objective.dtype.itemsize)
        self.chunk = chunk or max(1, min(32, room))
        self._pads = True
        self._dense: bool | None = None
        self._refused: str | None = None
        self._probed = False

    def plan(self) -> dict[str, Any]:
        return {"engine": self.name, "threads": 1, "chunk": self.chunk}

    def run(self, op: Op, jobs: list[Job], round: int) -> Iterator[tuple[int, Outcome]]:
        layers, inner = unwrap(op)
        if not isinstance(inner, LocalSolver) or not (self._fuses(inner) or self._stackable()):
            yield from super().run(op, jobs, round)
            return
        for at in range(0, len(jobs), WINDOW):
            window = jobs[at : at + WINDOW]
            outcomes: dict[int, Outcome] = {}
            ready: list[Job] = []
            given: dict[int, list[Any]] = {}  # the payload that each layer was given
            for job in window:
                payload = job.payload
                try:
                    party = self.party(job.party, round)
                    party.samples()
                    given[job.party] = []
                    for layer in layers:
                        given[job.party].append(payload)
                        payload = layer.before(party, payload, job.memory)
                    ready.append(Job(job.party, payload, job.memory))
                except PartyError as reason:
                    outcomes[job.party] = str(reason)
            with one_thread():  # two threads collapse as soon as another process wants a core
                outcomes |= self._train(inner, ready, round)
            for job in window:
                outcome = outcomes.pop(job.party)
                try:
                    if not isinstance(outcome, str):
                        for layer, payload in zip(reversed(layers), reversed(given[job.party]), strict=True):
                            outcome = layer.after(self.party(job.party, round), payload, *outcome)
                except PartyError as reason:
                    outcome = str(reason)
                yield job.party, outcome

    def _train(self, solver: LocalSolver, jobs: list[Job], round: int) -> dict[int, Outcome]:
        """Chunks of parties that take about as many steps, so that little is padded."""
        planned = [
            (job, solver.batches(self.holdings.train.size(job.party), self.seed, round, job.party)) for job in jobs
        ]
        planned.sort(key=lambda item: (len(item[1]), self.holdings.train.size(item[0].party), item[0].party))
        out: dict[int, Outcome] = {}
        at = 0
        while at < len(planned):
            end = at + 1
            while end < len(planned) and end - at < self.chunk and self._fits(planned[at], planned[end]):
                end += 1
            stack = Stack(self, solver, planned[at:end], round)
            try:
                out |= fused.train(stack) if self._fuses(solver) else stack.train()
            except HansaError:
                raise
            except Exception as error:
                # A failure has one author: train the chunk's parties alone, which names the party or succeeds.
                log.warning("a chunk could not be trained at once (%s); its parties train one at a time", error)
                out |= {job.party: self.one(solver, job, round) for job, _ in planned[at:end]}
            at = end
        return out

    def _fuses(self, solver: LocalSolver) -> bool:
        """Whether the solver is plain SGD and the model one whose steps can be fused into the backward pass."""
        if self._dense is None:
            self._pads = not mixes_rows(self.objective, self.holdings)
            self._dense = self._pads and fused.fusable(self.objective, self.holdings)
        return self._dense and type(solver) is SGD

    def _fits(self, first: tuple[Job, Any], other: tuple[Job, Any]) -> bool:
        return self._pads or self.holdings.train.size(first[0].party) == self.holdings.train.size(other[0].party)

    def _stackable(self) -> bool:
        if not self._probed:
            self._probed = True
            self._refused = obstacle(self.objective, self.holdings)
            if self._refused:
                log.warning("parties train one at a time: %s", self._refused)
        return self._refused is None


@dataclass
class Stack:
    """One chunk of parties under training."""

    engine: StackedEngine
    solver: LocalSolver
    planned: list[tuple[Job, list[np.ndarray[Any, Any]]]]
    round: int

    def train(self) -> dict[int, Outcome]:
        engine, solver, objective = self.engine, self.solver, self.engine.objective
        shards, device, dtype = engine.holdings.train, objective.device, objective.dtype
        jobs = [job for job, _ in self.planned]
        sizes = [shards.size(job.party) for job in jobs]
        rows, masks, active = self.index(device)
        n = torch.tensor(sizes, dtype=dtype, device=device)
        steps = torch.tensor([len(batches) for _, batches in self.planned], dtype=dtype, device=device)
        keys = torch.stack([
            rng.step_keys(rng.key(engine.seed, "step", self.round, job.party), rows.shape[1]) for job in jobs
        ]).to(device)  # fmt: skip
        first = torch.tensor([int(shards.offsets[job.party]) for job in jobs], device=device)
        widest = max(sizes)
        equal = min(sizes) == widest

        def context(buffers: tuple[Tensor, Tensor], n: Tensor, steps: Tensor, first: Tensor) -> Context:
            def load() -> Batch:
                at = torch.arange(widest, device=device)
                mask = None if equal else (at < n).to(dtype)
                index = first + (at if equal else torch.minimum(at, n.long() - 1))
                return Batch(shards.x[index], shards.y[index], mask)

            return Context(objective, n, steps, self.round, load, buffers, stacked=True)

        def start(payload: Any, memory: Any, *of_party: Any) -> Any:
            model = Params(*(payload["model"][name] for name in Params._fields))
            extra = {name: value for name, value in payload.items() if name != "model"}
            ctx = context((model.stats, model.counts), *of_party)
            w, carry = solver.start(ctx, model.w, extra, memory)
            return w, carry, (model.stats, model.counts), w.new_zeros((), dtype=torch.float64)

        def step(w: Tensor, carry: Any, buffers: Any, seen: Tensor, x: Tensor, y: Tensor, mask: Tensor | None,
                 alive: Tensor | None, key: Tensor, *of_party: Any) -> Any:  # fmt: skip
            ctx = context(buffers, *of_party)
            direction = solver.direction(ctx, w, Batch(x, y, mask), carry, key)
            new_w, new_carry = solver.step(ctx, w, direction, carry)
            loss = ctx.seen if ctx.seen is not None else w.new_zeros(())
            new = (new_w, new_carry, ctx.buffers, seen + loss.to(torch.float64))
            if alive is None:
                return new
            return pytree.tree_map(lambda a, b: torch.where(alive, a, b), new, (w, carry, buffers, seen))

        def finish(start: Tensor, w: Tensor, carry: Any, buffers: Any, memory: Any, *of_party: Any) -> Any:
            return solver.finish(context(buffers, *of_party), start, w, carry, memory)

        of_party = (n, steps, first)
        zero = solver.remember(objective.spec)
        memory = {name: torch.stack([job.memory.get(name, value) for job in jobs]) for name, value in zero.items()}
        payload, dims = stack_payloads([job.payload for job in jobs], dtype)
        begun = vmap(start, in_dims=(dims, 0, 0, 0, 0))(payload, memory, *of_party)
        w0, carry, buffers, seen = begun
        w = w0
        for s, width in enumerate(masks.sum(2).max(0).values.tolist()):  # the widest batch of each step
            index = rows[:, s, :width]
            mask = None if bool(masks[:, s, :width].all()) else masks[:, s, :width].to(dtype)
            alive = None if bool(active[:, s].all()) else active[:, s]
            given = (shards.x[index], shards.y[index], mask, alive, keys[:, s], *of_party)
            in_dims = (0, 0, 0, 0, 0, 0, None if mask is None else 0, None if alive is None else 0, 0, 0, 0, 0)
            w, carry, buffers, seen = vmap(step, in_dims=in_dims)(w, carry, buffers, seen, *given)
        tensors, after = vmap(finish)(w0, w, carry, buffers, memory, *of_party)
        loss = (seen / steps.to(torch.float64)).tolist()
        out: dict[int, Outcome] = {}
        for k, job in enumerate(jobs):
            own = {name: value[k] for name, value in tensors.items()}
            kept = {name: value[k].clone() for name, value in after.items()}
            reply = local_reply(objective, own, (buffers[0][k], buffers[1][k]), sizes[k], loss[k])
            out[job.party] = reply, {**job.memory, **kept}
        return out

    def index(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Row of each sample of each step [parties, steps, batch], which of them count, and who still trains."""
        batches = [b for _, b in self.planned]
        shape = (len(batches), max(map(len, batches)), max(len(rows) for b in batches for rows in b))
        index = np.empty(shape, dtype=np.int64)
        mask = np.zeros(shape, dtype=bool)
        active = np.zeros(shape[:2], dtype=bool)
        for k, (job, steps) in enumerate(self.planned):
            first = int(self.engine.holdings.train.offsets[job.party])
            index[k] = first  # padding repeats a row of the party's own
            for s, rows in enumerate(steps):
                index[k, s, : len(rows)] = first + rows
                mask[k, s, : len(rows)] = True
            active[k, : len(steps)] = True
        mask[~active, 0] = True  # a step that will be discarded still needs a sample to divide by
        return (
            torch.from_numpy(index).to(device),
            torch.from_numpy(mask).to(device),
            torch.from_numpy(active).to(device),
        )


def stack_payloads(payloads: list[Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """Payloads as one tree, shared leaves as they are and others stacked, with the vmap dimension of each leaf."""
    flat = [pytree.tree_flatten(p, is_leaf=lambda leaf: leaf is None) for p in payloads]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ConfigError("per-party payloads must have the same names for every party")
    leaves: list[Any] = []
    dims: list[int | None] = []
    for values in zip(*(f[0] for f in flat), strict=True):
        if all(v is values[0] for v in values) or (not isinstance(values[0], Tensor) and len(set(values)) == 1):
            leaves.append(values[0])
            dims.append(None)
        elif isinstance(values[0], Tensor):
            leaves.append(torch.stack(list(values)))
            dims.append(0)
        else:
            leaves.append(torch.tensor(values, dtype=dtype))
            dims.append(0)
    spec = flat[0][1]
    return pytree.tree_unflatten(leaves, spec), pytree.tree_unflatten(dims, spec)


def mixes_rows(objective: Objective, holdings: Holdings) -> bool:
    """Whether a sample's loss or a buffer depends on other rows of the batch, as under BatchNorm. Found by trying."""
    x, y = holdings.train.x[:3], holdings.train.y[:3]
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    if objective.module is None or len(x) < 3 or any(isinstance(m, norms) for m in objective.module.modules()):
        return True
    if x.is_floating_point():  # rows that differ, whatever the data
        x = rng.normal(torch.ones((), dtype=torch.int64, device=x.device), x.shape).to(x.dtype)
    draw = rng.normal(torch.zeros((), dtype=torch.int64, device=x.device), objective.initial.w.shape)
    w = objective.initial.w + 0.1 * draw.to(objective.dtype)  # a layer that starts at zero would hide the others
    buffers = (objective.initial.stats, objective.initial.counts)
    key = torch.zeros((), dtype=torch.int64, device=objective.device)
    try:
        with torch.no_grad():
            weights = objective.spec.split(w)
            two, (stats_two, _) = objective.losses(weights, buffers, x[:2], y[:2], key)
            three, (stats_three, _) = objective.losses(weights, buffers, x, y, key)
    except HansaError:
        raise
    except Exception:  # training itself will say what is wrong
        return True
    tight = objective.dtype == torch.float64
    rtol, atol = (1e-9, 1e-12) if tight else (1e-3, 1e-5)
    pairs = ((two, three[:2]), (stats_two, stats_three))
    return not all(torch.allclose(a, b, rtol, atol, equal_nan=True) for a, b in pairs)


def obstacle(objective: Objective, holdings: Holdings) -> str | None:
    """Why the model cannot be stacked, naming the layer, or None. Found by trying two copies on two samples."""
    module = objective.network()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            return f"{type(layer).__name__} at {name!r} cannot be batched over parties"
    rows = torch.arange(min(2, len(holdings.train.x)), device=objective.device).repeat(2, 1)
    inside: list[str] = []
    hooks = []
    for name, layer in module.named_modules():
        enter = f"{type(layer).__name__} at {name!r}" if name else type(layer).__name__
        hooks.append(layer.register_forward_pre_hook(lambda *_, enter=enter: inside.append(enter)))
        hooks.append(layer.register_forward_hook(lambda *_: inside.pop() and None))
    initial = objective.initial
    keys = torch.zeros(2, dtype=torch.int64, device=objective.device)

    def one(w: Tensor, stats: Tensor, counts: Tensor, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        ctx = Context(objective, 2, 1, 0, lambda: Batch(x, y, None), (stats, counts), stacked=True)
        return ctx.gradient(w, Batch(x, y, None), key)

    try:
        stacked = [v.expand(2, *v.shape) for v in initial]
        vmap(one)(stacked[0], stacked[1], stacked[2], holdings.train.x[rows], holdings.train.y[rows], keys)
    except HansaError:
        raise
    except Exception as error:
        where = inside[-1] if inside else "the loss"
        return f"{where} cannot be batched over parties ({first_line(error)[:160]})"
    finally:
        for hook in hooks:
            hook.remove()
    return None
