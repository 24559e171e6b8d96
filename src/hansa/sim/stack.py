"""One chunk of parties under training, their parameter vectors stacked to [parties, d]."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hansa.core import rng
from hansa.core.op import Replies
from hansa.local import SGD
from hansa.local.solver import Batch, Bounded, Carry, Context, LocalSolver, step_noise
from hansa.sim.chain import Chain
from hansa.sim.engine import Block, Job
from hansa.sim.schedule import regular, schedule, shares

if TYPE_CHECKING:
    from hansa.sim.stacked import StackedEngine


def chain_gradient(chain: Chain, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The rule of a chain for a solver's gradients, inside vmap."""
    mask = torch.ones(len(batch.x), dtype=w.dtype) if batch.mask is None else batch.mask
    found: tuple[Tensor, Tensor] = ChainGradient.apply(w, batch.x, batch.y, mask / mask.sum(), chain)  # type: ignore[no-untyped-call]
    return found


class ChainGradient(torch.autograd.Function):
    """Gradient and loss of one party by a chain; under vmap, of the whole stack by batched products."""

    @staticmethod
    def forward(w: Tensor, x: Tensor, y: Tensor, share: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
        gradient, losses = chain.gradient(w.unsqueeze(0), x, y, share.unsqueeze(0))
        return gradient[0], losses.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], w: Tensor, x: Tensor, y: Tensor, share: Tensor,
             chain: Chain) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:  # fmt: skip
        """The stack's gradients."""
        k = info.batch_size
        w, x, y, share = (v.movedim(d, 0) if d is not None else v.expand(k, *v.shape)
                          for v, d in zip((w, x, y, share), dims[:4], strict=True))  # fmt: skip
        gradient, losses = chain.gradient(w, x.flatten(0, 1), y.flatten(0, 1), share)
        return (gradient, losses.sum(1)), (0, 0)


@dataclass
class Stack:
    """One chunk of parties under training, the longest first.

    `solvers` is one for all of them, or one a party, alike but for the rate and how much they do.
    """

    engine: StackedEngine
    solvers: list[LocalSolver]
    jobs: list[Job]
    round: int

    def __post_init__(self) -> None:
        engine = self.engine
        shards, self.device, self.dtype = engine.holdings.train, engine.objective.device, engine.objective.dtype
        self.solver = self.solvers[0]
        self.solver.prepare(engine.objective, shards.x, shards.y)
        if not regular(self.solver):  # its steps may depend on more than the size, by which the chunk was sorted
            each = self.solvers if len(self.solvers) > 1 else self.solvers * len(self.jobs)
            taken = [len(solver.batches(shards.size(job.party), engine.seed, self.round, job.party))
                     for solver, job in zip(each, self.jobs, strict=True)]  # fmt: skip
            order = sorted(range(len(taken)), key=lambda k: -taken[k])
            self.jobs, self.solvers = [self.jobs[k] for k in order], [each[k] for k in order]
        parties = [job.party for job in self.jobs]
        self.sizes = [shards.size(party) for party in parties]
        rates = [solver.rate(self.round) for solver in self.solvers]
        self.rate: float | Tensor = rates[0]
        if len(set(rates)) > 1:
            self.rate = torch.tensor(rates, dtype=self.dtype, device=self.device)
        plan = schedule(self.solvers, shards, parties, engine.seed, self.round, self.device)
        self.rows, self.steps, self.widths, self.active = plan.rows, plan.steps, plan.widths, plan.active
        self.mask = plan.mask
        self.full = plan.full
        self.share = shares(plan.lengths, self.rows.shape[2], self.dtype)

    @property
    def recordable(self) -> bool:
        """Whether every step has the same shape, or may be padded to it."""
        return self.engine.pads or all(width == self.widths[0] for width in self.widths)

    def block(self, tensors: dict[str, Tensor], buffers: tuple[Tensor, Tensor], seen: Tensor,
              memory: dict[str, Tensor], metrics: dict[str, Tensor] | None = None) -> Block:  # fmt: skip
        """The replies: what the solver sends, the model's buffers, and the mean loss over the steps."""
        spec = self.engine.objective.spec
        if spec.stats:
            tensors = {**tensors, "stats": buffers[0]}
        maxima = {"counts": buffers[1]} if spec.counts else {}
        numbers = {name: values.tolist() for name, values in (metrics or {}).items()}
        if self.solver.tells_loss:
            loss = [total / steps for total, steps in zip(seen.tolist(), self.steps, strict=True)]
            numbers = {"train_loss": loss} | numbers
        parties = [job.party for job in self.jobs]
        return Block(Replies(parties, tensors, self.sizes, maxima, numbers), memory)

    def descend(self, chain: Chain) -> Block:
        """Direct steps, each layer's taken inside the backward pass."""
        solver, shards, k = self.solver, self.engine.holdings.train, len(self.jobs)
        start, carry = self.models(), {}
        if not plain(solver):
            start, carry, _, _ = self.start()
        toward = self.engine.objective.spec.split(carry["toward"]) if "toward" in carry else {}
        # A tensor for each parameter: in one vector of all, matrices would lie where the machine reads them slowly.
        split = self.engine.objective.spec.split(start)
        weights = {name: view.clone(memory_format=torch.contiguous_format) for name, view in split.items()}
        views = weights
        bound, share, rate = solver.bounded, self.share, self.rate
        if bound is not None:
            share, rate = self.mask.to(self.dtype), self.rate / self._expected(bound)
        each = rate
        seen = torch.zeros(k, dtype=torch.float64)
        for s, (width, k) in enumerate(zip(self.widths, self.active, strict=True)):
            if k < len(views[next(iter(views))]):
                views, toward = ({name: view[:k] for name, view in part.items()} for part in (views, toward))
                each = rate if isinstance(rate, float) else rate[:k]
            index = self.rows[:k, s, :width].reshape(-1)
            x = self.engine.objective.laid_out(shards.x[index])
            losses = chain.descend(views, x, shards.y[index], share[:k, s, :width], each, solver.pull, toward, bound)
            seen[:k] += losses.sum(1)
            if bound is not None and bound.sigma:
                self._shake(views, self.keys[:k, s], each, bound.sigma * bound.clip)
        initial = self.engine.objective.initial
        flat = self.engine.objective.spec.stacked(weights)
        if bare(solver):
            metrics = reported(solver, carry, len(self.jobs))
            return self.block({"w": flat.sub_(start)}, (initial.stats, initial.counts), seen, {}, metrics)
        buffers = tuple(v.expand(len(self.jobs), -1) for v in (initial.stats, initial.counts))
        return self.finish(start, (flat, carry, buffers, seen))

    def _expected(self, bound: Bounded) -> Any:
        """The expected size of the parties' batches, one number where it is the same for all."""
        found = [bound.expected(n) for n in self.sizes]
        return found[0] if len(set(found)) == 1 else torch.tensor(found, dtype=self.dtype)

    def _shake(self, weights: dict[str, Tensor], keys: Tensor, rate: float | Tensor, scale: float) -> None:
        """Each party's noise of one step, as a step takes it."""
        spec = self.engine.objective.spec
        for k, key in enumerate(keys):
            times = -scale * float(rate[k] if isinstance(rate, Tensor) else rate)
            for name, part in spec.split(step_noise(key, spec)).items():
                weights[name][k].add_(part, alpha=times)

    def _own(self) -> bool:
        first = self.jobs[0].payload["model"]
        return any(job.payload["model"] is not first for job in self.jobs)

    def models(self) -> Tensor:
        """The models that the parties start from [K, d]."""
        if self._own():
            return torch.stack([job.payload["model"]["w"] for job in self.jobs])
        w: Tensor = self.jobs[0].payload["model"]["w"]
        return w.expand(len(self.jobs), -1)

    @functools.cached_property
    def of_party(self) -> tuple[Tensor, ...]:
        """Each party's number of samples, number of steps, first row and key; its rate where they differ."""
        offsets = self.engine.holdings.train.offsets
        first = [int(offsets[job.party]) for job in self.jobs]
        return (
            torch.tensor(self.sizes, dtype=self.dtype, device=self.device),
            torch.tensor(self.steps, dtype=self.dtype, device=self.device),
            torch.tensor(first, device=self.device),
            self.base_keys,
            *([self.rate] if isinstance(self.rate, Tensor) else []),
        )

    @functools.cached_property
    def base_keys(self) -> Tensor:
        """Each party's key of this round."""
        base = torch.tensor(rng.key(self.engine.seed, "step", self.round))
        return rng.fold(base, torch.tensor([job.party for job in self.jobs])).to(self.device)

    @functools.cached_property
    def keys(self) -> Tensor:
        """Each party's key at each step."""
        return rng.keys_of_steps(self.base_keys, self.rows.shape[1])

    def context(self, buffers: tuple[Tensor, Tensor], n: Tensor, steps: Tensor, first: Tensor, key: Tensor,
                *rate: Tensor) -> Context:  # fmt: skip
        """What a solver sees of one party, inside vmap."""
        shards, widest = self.engine.holdings.train, max(self.sizes)
        equal = min(self.sizes) == widest

        def load() -> Batch:
            at = torch.arange(widest, device=self.device)
            mask = None if equal else (at < n).to(self.dtype)
            index = first + (at if equal else torch.minimum(at, n.long() - 1))
            return Batch(shards.x[index], shards.y[index], mask)

        chain = self.engine.chain if self.engine.chain is not None and self.engine.chain.stacks else None
        rule = None if chain is None else functools.partial(chain_gradient, chain)
        return Context(self.engine.objective, n, steps, self.round, rate[0] if rate else self.rate, load, buffers, key,
                       stacked=True, rule=rule)  # fmt: skip

    @functools.cached_property
    def memory(self) -> dict[str, Tensor]:
        """What the parties remember of the solver, stacked."""
        zero = self.solver.remember(self.engine.objective.spec)
        return {name: torch.stack([job.memory.get(name, value).to(self.device) for job in self.jobs])
                for name, value in zero.items()}  # fmt: skip

    def start(self) -> Any:
        """The first state: parameters, carry, buffers, summed loss."""

        def one(payload: Any, buffers: Any, memory: Any, *of_party: Any) -> Any:
            extra = {name: value for name, value in payload.items() if name != "model"}
            ctx = self.context(buffers, *of_party)
            w, carry = self.solver.start(ctx, payload["model"]["w"], extra, memory)
            return w, carry, buffers, w.new_zeros((), dtype=torch.float64)

        payload, dims = stack_payloads([job.payload for job in self.jobs], self.dtype)
        buffers = tuple(  # one for each party: a model may write into them
            value if dims["model"][name] == 0 else value.expand(len(self.jobs), *value.shape).clone()
            for name, value in ((name, payload["model"][name]) for name in ("stats", "counts"))
        )
        in_dims = (dims, 0, 0, *[0] * len(self.of_party))
        return torch.func.vmap(one, in_dims=in_dims)(payload, buffers, self.memory, *self.of_party)

    def finish(self, start: Tensor, state: Any) -> Block:
        """The replies, from the first parameters and the last state."""

        def one(start: Tensor, w: Tensor, carry: Any, buffers: Any, memory: Any, *of_party: Any) -> Any:
            ctx = self.context(buffers, *of_party)
            tensors, after = self.solver.finish(ctx, start, w, carry, memory)
            return tensors, after, self.solver.report(carry)

        w, carry, buffers, seen = state
        tensors, after, metrics = torch.func.vmap(one)(start, w, carry, buffers, self.memory, *self.of_party)
        return self.block(tensors, buffers, seen, after, metrics)

    def train(self) -> Block:
        """Any solver, its pure functions mapped over the parties."""
        solver, shards = self.solver, self.engine.holdings.train

        def step(w: Tensor, carry: Any, buffers: Any, seen: Tensor, x: Tensor, y: Tensor, mask: Tensor | None,
                 key: Tensor, *of_party: Any) -> Any:  # fmt: skip
            ctx = self.context(buffers, *of_party)
            direction = solver.direction(ctx, w, Batch(x, y, mask), carry, key)
            new_w, new_carry = solver.step(ctx, w, direction, carry)
            loss = ctx.seen if ctx.seen is not None else w.new_zeros(())
            return new_w, new_carry, ctx.buffers, seen + loss.to(torch.float64)

        state = self.start()
        w0, finished = state[0], []
        for s, (width, k) in enumerate(zip(self.widths, self.active, strict=True)):
            if k < len(state[0]):
                finished.append(pytree.tree_map(lambda v, k=k: v[k:], state))
                state = pytree.tree_map(lambda v, k=k: v[:k], state)
            index = self.rows[:k, s, :width]
            mask = None if self.full[s] else self.mask[:k, s, :width].to(self.dtype)
            given = (shards.x[index], shards.y[index], mask, self.keys[:k, s], *(v[:k] for v in self.of_party))
            in_dims = (0, 0, 0, 0, 0, 0, None if mask is None else 0, 0, *[0] * len(self.of_party))
            state = torch.func.vmap(step, in_dims=in_dims)(*state, *given)
        return self.finish(w0, pytree.tree_map(lambda *v: torch.cat(v), state, *reversed(finished)))


def bare(solver: LocalSolver) -> bool:
    """Whether a solver sends the update alone and remembers nothing; it may report numbers."""
    return type(solver).finish is LocalSolver.finish and type(solver).remember is LocalSolver.remember


def plain(solver: LocalSolver) -> bool:
    """Whether a solver starts at the model, descends along the gradient alone, and sends the update alone."""
    ordinary = type(solver).start in (LocalSolver.start, SGD.start) and bare(solver)
    return solver.direct and not solver.pull and ordinary


def reported(solver: LocalSolver, carry: Carry, count: int) -> dict[str, Tensor]:
    """What a solver reports for each of `count` parties, from their stacked carry."""
    if type(solver).report is LocalSolver.report:
        return {}
    found: dict[str, Tensor] = torch.func.vmap(lambda carry, _: solver.report(carry))(carry, torch.zeros(count))
    return found


def stack_payloads(payloads: list[Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """Payloads as one tree, shared leaves as they are and others stacked, with the vmap dimension of each leaf."""
    flat = [pytree.tree_flatten(p, is_leaf=lambda leaf: leaf is None) for p in payloads]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("the parties are not sent values of the same names")
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
