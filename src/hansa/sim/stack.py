"""A stack: one chunk of parties in training, with parameters [parties, d]."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hansa.core.op import Payload, Replies
from hansa.local.context import Batch, Context, step_noise
from hansa.local.solver import Carry, LocalSolver
from hansa.local.step_rule import ClipRule, StepRule
from hansa.numerics import rng
from hansa.sim.chain import Chain
from hansa.sim.engine import PartyWork
from hansa.sim.schedule import BatchSchedule, regular, schedule, shares

if TYPE_CHECKING:
    from hansa.sim.stacked import StackedEngine


def chain_gradient(chain: Chain, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A chain's gradient and loss for one party, inside vmap."""
    mask = torch.ones(len(batch.x), dtype=w.dtype) if batch.mask is None else batch.mask
    result: tuple[Tensor, Tensor] = ChainGradient.apply(w, batch.x, batch.y, mask / mask.sum(), chain)  # type: ignore[no-untyped-call]
    return result


class ChainGradient(torch.autograd.Function):
    """Gradient and loss of one party by a chain; under vmap, of the whole stack by batched products."""

    @staticmethod
    def forward(w: Tensor, x: Tensor, y: Tensor, share: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
        gradient, losses = chain.gradient(w.unsqueeze(0), x, y, share.unsqueeze(0))
        return gradient[0], losses.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: there is no second derivative."""

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], w: Tensor, x: Tensor, y: Tensor, share: Tensor,
             chain: Chain) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:  # fmt: skip
        """The stack's gradients."""
        k = info.batch_size
        w, x, y, share = (v.movedim(d, 0) if d is not None else v.expand(k, *v.shape)
                          for v, d in zip((w, x, y, share), dims[:4], strict=True))  # fmt: skip
        gradient, losses = chain.gradient(w, x.flatten(0, 1), y.flatten(0, 1), share)
        return (gradient, losses.sum(1)), (0, 0)


class Differs(Exception):
    """A hook that was called once for all parties read a value that differs between them."""


class CommonContext(Context):
    """What a solver may see where one call holds for all parties of a stack; any other value raises `Differs`."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("n", "steps", "load", "buffers", "key"):
            raise Differs(name)
        value = super().__getattribute__(name)
        if name in ("rate", "round") and isinstance(value, Tensor):
            raise Differs(name)
        return value


class DeferredNumbers(Sequence[float]):
    """Numbers that a GPU is still computing; the first look at one waits for them."""

    def __init__(self, read: Callable[[], list[float]]) -> None:
        self._read = functools.cache(read)

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, at: Any) -> Any:
        return self._read()[at]


_NO_BUFFERS = (torch.zeros(0), torch.zeros(0))


def _no_samples() -> Batch:
    return Batch(*_NO_BUFFERS, None)


@dataclass
class Stack:
    """One chunk of parties under training, the longest first.

    `solvers` is one for all parties, or one per party; they may differ in rate and amount of work only.
    """

    engine: StackedEngine
    solvers: list[LocalSolver]
    members: list[PartyWork]
    round: int

    def __post_init__(self) -> None:
        engine = self.engine
        shards, self.device, self.dtype = engine.holdings.train, engine.objective.device, engine.objective.dtype
        self.solver = self.solvers[0]
        some = shards.x if isinstance(shards.x, Tensor) else shards.x[:1]
        self.solver.prepare(engine.objective, some, shards.targets)
        if not regular(self.solver):  # its steps may depend on more than the size
            each = self.solvers if len(self.solvers) > 1 else self.solvers * len(self.members)
            taken = [self._count(solver, m) for solver, m in zip(each, self.members, strict=True)]
            order = sorted(range(len(taken)), key=lambda k: -taken[k])
            self.members, self.solvers = [self.members[k] for k in order], [each[k] for k in order]
        self.sizes: list[int] = shards.sizes(np.array([member.party for member in self.members])).tolist()
        self.rounds = [member.in_round(self.round) for member in self.members]
        if len(set(self.rounds)) == 1:  # one round for all: that of the ask, or of the tickets
            self.round, self.rounds = self.rounds[0], self.rounds[:1]
        if len(self.solvers) == 1:
            rates = [self.solver.rate(round) for round in self.rounds]
        else:
            rounds = self.rounds if len(self.rounds) > 1 else self.rounds * len(self.solvers)
            rates = [solver.rate(round) for solver, round in zip(self.solvers, rounds, strict=True)]
        self.rate: float | Tensor = rates[0]
        if len(set(rates)) > 1:
            self.rate = torch.tensor(rates, dtype=self.dtype, device=self.device)

    def _count(self, solver: LocalSolver, member: PartyWork) -> int:
        """The number of steps of a party whose batches are listed."""
        size, engine = self.engine.holdings.train.size(member.party), self.engine
        if not solver.own_batches:
            return solver.count(size)
        return len(solver.batches(size, engine.seed, member.in_round(self.round), member.party))

    @functools.cached_property
    def plan(self) -> BatchSchedule:
        """Which samples the parties take at each step."""
        parties, train = [member.party for member in self.members], self.engine.holdings.train
        return schedule(self.solvers, train, parties, self.engine.seed, self.rounds, self.device)

    @functools.cached_property
    def steps(self) -> list[int]:
        """The number of steps of each party."""
        return self.plan.steps

    @functools.cached_property
    def share(self) -> Tensor:
        """The weight of each sample in the mean loss of its party [K, S, B]."""
        return shares(self.plan.lengths, self.plan.rows.shape[2], self.dtype)

    @property
    def recordable(self) -> bool:
        """Whether every step has the same shape, or may be padded to the same shape."""
        return self.engine.pads or len(set(self.plan.widths)) == 1

    def block(self, tensors: dict[str, Tensor], buffers: tuple[Tensor, Tensor], seen: Tensor,
              memory: dict[str, Tensor], metrics: dict[str, Tensor] | None = None) -> Replies:  # fmt: skip
        """The replies: the solver's tensors, the model's buffers, and the mean loss over the steps."""
        spec = self.engine.objective.spec
        if spec.stats:
            tensors = {**tensors, "stats": buffers[0]}
        maxima = {"counts": buffers[1]} if spec.counts else {}
        numbers: dict[str, Sequence[float]] = {name: values.tolist() for name, values in (metrics or {}).items()}
        if self.solver.tells_loss:
            steps = self.steps

            def loss() -> list[float]:
                return [total / taken for total, taken in zip(seen.tolist(), steps, strict=True)]

            numbers = {"train_loss": DeferredNumbers(loss) if self.engine.records else loss()} | numbers
        parties = [member.party for member in self.members]
        return Replies(parties, tensors, self.sizes, maxima, numbers, memory=memory)

    def descend(self, chain: Chain, rule: StepRule) -> Replies:
        """Train by a chain: each layer takes its step inside the backward pass, as the solver's StepRule says."""
        spec, shards, clip = self.engine.objective.spec, self.engine.holdings.train, rule.clip
        start, carry, buffers = self.started
        seen = torch.zeros(len(self.members), dtype=torch.float64)
        toward = spec.split(carry[rule.toward]) if rule.toward in carry else {}
        masks = {} if rule.mask is None else spec.split(carry[rule.mask])
        weights = self.engine.weights(len(self.members))
        for name, view in spec.split(start).items():
            weights[name].copy_(view)
        views, plan, rate = weights, self.plan, self.rate
        if clip is None:
            share = self.share
        else:
            share, rate = plan.mask.to(self.dtype), self.rate / self._expected(clip)
        each, count = rate, len(self.members)
        for s, (width, k) in enumerate(zip(plan.widths, plan.active, strict=True)):
            if k < count:
                views, toward, masks = (
                    {name: view[:k] for name, view in part.items()} for part in (views, toward, masks)
                )
                each, count = rate if isinstance(rate, float) else rate[:k], k
            index = plan.rows[:k, s, :width].reshape(-1)
            x = self.engine.objective.laid_out(shards.x[index])
            losses = chain.descend(views, x, shards.targets[index], share[:k, s, :width], each, rule, toward)
            seen[:k] += losses.sum(1)
            for name, mask in masks.items():
                views[name].mul_(mask)
            if clip is not None and clip.sigma:
                self._add_noise(views, self.keys[:k, s], each, clip.sigma * clip.bound)
        return self.finish(start, (spec.stacked(weights), carry, buffers, seen))

    def _expected(self, clip: ClipRule) -> Any:
        """The expected batch size of each party, as one number where all are equal."""
        sizes = [clip.expected(n) for n in self.sizes]
        return sizes[0] if len(set(sizes)) == 1 else torch.tensor(sizes, dtype=self.dtype)

    def _add_noise(self, weights: dict[str, Tensor], keys: Tensor, rate: float | Tensor, scale: float) -> None:
        """Add each party's noise of one step, times its rate."""
        spec = self.engine.objective.spec
        for k, key in enumerate(keys):
            times = -scale * float(rate[k] if isinstance(rate, Tensor) else rate)
            for name, part in spec.split(step_noise(key, spec)).items():
                weights[name][k].add_(part, alpha=times)

    @functools.cached_property
    def of_party(self) -> tuple[Tensor, ...]:
        """Samples, steps, first row and key per party; and rates and rounds, if they differ."""
        offsets = self.engine.holdings.train.offsets
        first = [int(offsets[member.party]) for member in self.members]
        return (
            torch.tensor(self.sizes, dtype=self.dtype, device=self.device),
            torch.tensor(self.steps, dtype=self.dtype, device=self.device),
            torch.tensor(first, device=self.device),
            self.base_keys,
            *([self.rate] if isinstance(self.rate, Tensor) else []),
            *([self.each_round] if len(self.rounds) > 1 else []),
        )

    @property
    def each_round(self) -> Tensor:
        """The round of each party, as a tensor."""
        return torch.tensor(self.rounds, dtype=self.dtype, device=self.device)

    @functools.cached_property
    def base_keys(self) -> Tensor:
        """Each party's key of this round."""
        base = torch.tensor([rng.key(self.engine.seed, "step", round) for round in self.rounds])
        return rng.fold(base, torch.tensor([member.party for member in self.members])).to(self.device)

    @functools.cached_property
    def keys(self) -> Tensor:
        """Each party's key at each step."""
        return rng.keys_of_steps(self.base_keys, self.plan.rows.shape[1])

    def context(self, buffers: tuple[Tensor, Tensor], n: Tensor, steps: Tensor, first: Tensor, key: Tensor,
                *differing: Tensor) -> Context:  # fmt: skip
        """The context of one party, inside vmap."""
        rate = differing[0] if isinstance(self.rate, Tensor) else self.rate
        round: Any = differing[-1] if len(self.rounds) > 1 else self.round
        shards, widest = self.engine.holdings.train, max(self.sizes)
        equal = min(self.sizes) == widest

        def load() -> Batch:
            at = torch.arange(widest, device=self.device)
            mask = None if equal else (at < n).to(self.dtype)
            index = first + (at if equal else torch.minimum(at, n.long() - 1))
            return Batch(shards.x[index], shards.targets[index], mask)

        chain = self.engine.chain if self.engine.chain is not None and self.engine.chain.stacks else None
        rule = None if chain is None else functools.partial(chain_gradient, chain)
        return Context(self.engine.objective, n, steps, round, rate, load, buffers, key,
                       stacked=True, rule=rule, public=self.engine.holdings.public)  # fmt: skip

    @functools.cached_property
    def memory(self) -> dict[str, Tensor]:
        """The parties' memories of the solver, stacked."""
        objective = self.engine.objective
        fresh = self.solver.remember(objective.spec, objective.initial)
        if not fresh:
            return {}
        return {name: torch.stack([member.memory.get(name, value).to(self.device) for member in self.members])
                for name, value in fresh.items()}  # fmt: skip

    @functools.cached_property
    def started(self) -> tuple[Tensor, Carry, tuple[Tensor, Tensor]]:
        """The parties' first parameters [K, d], carry and buffers, from the solver's `start`.

        Where all parties get the same payload and remember nothing, `start` is called once for all of them, unless it
        reads a value that differs between parties.
        """
        count, first = len(self.members), self.members[0].payload
        if (
            not self.memory
            and all(member.payload is first for member in self.members)
            and type(self.solver) not in self.engine.differ
        ):
            try:
                w, carry = self.solver.start(self._common(), first["model"]["w"], without_model(first), {})
            except Differs:
                self.engine.differ.add(type(self.solver))
            else:
                buffers = first["model"]["stats"].expand(count, -1), first["model"]["counts"].expand(count, -1)
                if carry:
                    carry = {name: value.expand(count, *value.shape) for name, value in carry.items()}
                return w.expand(count, -1), carry, (buffers[0].clone(), buffers[1].clone())

        def one(payload: Any, buffers: Any, memory: Any, *of_party: Any) -> Any:
            return self.solver.start(self.context(buffers, *of_party), payload["model"]["w"], without_model(payload),
                                     memory)  # fmt: skip

        payload, dims = stack_payloads([member.payload for member in self.members], self.dtype)
        buffers = tuple(  # a copy per party: a model may write into its buffers
            value if dims["model"][name] == 0 else value.expand(count, *value.shape).clone()
            for name, value in ((name, payload["model"][name]) for name in ("stats", "counts"))
        )
        in_dims = (dims, 0, 0, *[0] * len(self.of_party))
        w, carry = torch.func.vmap(one, in_dims=in_dims)(payload, buffers, self.memory, *self.of_party)
        return w, carry, buffers

    def finish(self, start: Tensor, state: Any) -> Replies:
        """The replies, from the first parameters and the last state, by the solver's `finish` and `report`."""
        w, carry, buffers, seen = state
        if not self.solver.own_finish:  # the base version works on a whole stack too
            tensors, after = self.solver.finish(self._common(), start, w, carry, self.memory)
            return self.block(tensors, buffers, seen, after, self.solver.report(carry))

        def one(start: Tensor, w: Tensor, carry: Any, buffers: Any, memory: Any, *of_party: Any) -> Any:
            tensors, after = self.solver.finish(self.context(buffers, *of_party), start, w, carry, memory)
            return tensors, after, self.solver.report(carry)

        tensors, after, metrics = torch.func.vmap(one)(start, w, carry, buffers, self.memory, *self.of_party)
        return self.block(tensors, buffers, seen, after, metrics)

    def _common(self) -> Context:
        """The context for a hook that is called once for all parties."""
        round: Any = self.each_round if len(self.rounds) > 1 else self.round
        return CommonContext(self.engine.objective, 0, 0, round, self.rate, _no_samples, _NO_BUFFERS, stacked=True)

    def train(self) -> Replies:
        """Train by any solver, with its hooks mapped over the parties by vmap."""
        solver, shards = self.solver, self.engine.holdings.train

        def step(w: Tensor, carry: Any, buffers: Any, seen: Tensor, x: Tensor, y: Tensor, mask: Tensor | None,
                 key: Tensor, *of_party: Any) -> Any:  # fmt: skip
            ctx = self.context(buffers, *of_party)
            direction = solver.direction(ctx, w, Batch(x, y, mask), carry, key)
            new_w, new_carry = solver.step(ctx, w, direction, carry)
            loss = ctx.seen if ctx.seen is not None else w.new_zeros(())
            return new_w, new_carry, ctx.buffers, seen + loss.to(torch.float64)

        plan, counts = self.plan, self.plan.mask
        state: Any = (*self.started, torch.zeros(len(self.members), dtype=torch.float64, device=self.device))
        w0, finished = state[0], []
        for s, (width, k) in enumerate(zip(plan.widths, plan.active, strict=True)):
            if k < len(state[0]):
                finished.append(pytree.tree_map(lambda v, k=k: v[k:], state))
                state = pytree.tree_map(lambda v, k=k: v[:k], state)
            index = plan.rows[:k, s, :width]
            mask = None if plan.full[s] else counts[:k, s, :width].to(self.dtype)
            inputs = (shards.x[index], shards.targets[index], mask, self.keys[:k, s], *(v[:k] for v in self.of_party))
            in_dims = (0, 0, 0, 0, 0, 0, None if mask is None else 0, 0, *[0] * len(self.of_party))
            state = torch.func.vmap(step, in_dims=in_dims)(*state, *inputs)
        return self.finish(w0, pytree.tree_map(lambda *v: torch.cat(v), state, *reversed(finished)))


def without_model(payload: Payload) -> Payload:
    """A payload without the model."""
    return {name: value for name, value in payload.items() if name != "model"}


def stack_payloads(payloads: list[Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """Merge payloads into one tree, shared leaves unchanged and others stacked; and each leaf's vmap dimension."""
    flat = [pytree.tree_flatten(p, is_leaf=lambda leaf: leaf is None) for p in payloads]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("the payloads of the parties have different names")
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
