"""Stacks of parties on a GPU: one step is traced, compiled and recorded, then replayed for every step and round.

The step of all parties is traced to a flat list of tensor operations (`make_fx` over `vmap` over `grad`), compiled by
PyTorch's compiler and recorded as a CUDA graph over fixed buffers: parameters, the step's samples, and a counter that
the graph increments. A round fills the buffers and replays the graph, without work on the host between steps.
Stacks of equal parties have all steps of a round in one recording (`sim.recorded_round`).

Two rewrites make this fast. Convolutions become matrix products of patches, because filters per party would be grouped
convolutions, which are slow. For plain SGD each parameter has its own tensor, and large dense layers take their step
inside the matrix product that computes their gradient, so that no gradient is stored.

Recurrent layers, whose fused kernels do not support `vmap`, are unrolled to a loop over cells. They are recorded but
not compiled, which would take minutes. Random layers are not compiled either.

Models whose layers keep the card busy for one party alone train `apart`: each party's step by PyTorch's own kernels, on
a stream of its own, and the steps of all parties in one recording. `sim.trial` finds out which is faster.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hansa.core.op import Replies
from hansa.local.context import Batch, Context
from hansa.local.solver import LocalSolver
from hansa.sim.compiling import compiled
from hansa.sim.rewrite import Rewritten
from hansa.sim.stack import Stack

if TYPE_CHECKING:
    from hansa.sim.stacked import StackedEngine

SHRINK = 1.2  # factor between recorded stack sizes; finished parties idle until the next smaller size
STREAMS = 32  # that PyTorch has; more parties take turns
LARGE = 2**14  # weights per party from which a dense layer steps inside its product


class Program:
    """A step of K parties over fixed buffers, recorded for K and for smaller stacks, as parties finish."""

    def __init__(self, engine: StackedEngine, solver: LocalSolver, parties: int, width: int, padded: bool,
                 state: Any, apart: bool = False) -> None:  # fmt: skip
        self.engine, self.solver, self.parties, self.padded, self.apart = engine, solver, parties, padded, apart
        device, dtype = engine.objective.device, engine.objective.dtype
        self.state = pytree.tree_map(self._blank, state)
        self.fused = isinstance(self.state[0], dict)
        self.rows = torch.zeros(0, parties, width, dtype=torch.int64, device=device)
        self.share = torch.zeros(0, parties, width, dtype=dtype, device=device)
        self.keys = torch.zeros(0, parties, dtype=torch.int64, device=device)
        # samples, steps, first row, key, rate
        kinds = (dtype, dtype, torch.int64, torch.int64, dtype)
        self.of_party = tuple(torch.ones(parties, dtype=kind, device=device) for kind in kinds)
        self.round = torch.zeros((), dtype=torch.float64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        on_card = device.type == "cuda"
        self.streams = [torch.cuda.Stream() for _ in range(min(parties, STREAMS))] if apart and on_card else []  # type: ignore[no-untyped-call]
        self._traced: dict[int, Callable[[list[Tensor], list[Tensor]], list[Tensor]]] = {}
        self._recorded: dict[int, Callable[[], None]] = {}
        recurrent = any(isinstance(layer, nn.RNNBase) for layer in engine.objective.network().modules())
        # Random layers and noise hash with 64-bit integers, which the compiler treats as 32-bit: record only.
        self._compiles = engine.compiles and not recurrent and not engine.objective.draws and not solver.noisy

    def _blank(self, like: Tensor) -> Tensor:
        """Room for a part of the state of all parties; filters of parties apart lie as their convolutions read them."""
        shape = like.shape[1:]
        if self.apart and len(shape) == 4 and self.engine.objective.channels_last(self._samples[0]):
            out, channels, high, wide = shape
            return like.new_zeros(self.parties, out, high, wide, channels).permute(0, 1, 4, 2, 3)
        return like.new_zeros(self.parties, *shape)

    def make_room(self, steps: int) -> None:
        """Have buffers for this many steps. New buffers have new addresses, so old recordings are discarded."""
        if steps > len(self.rows):
            self.rows, self.share, self.keys = (v.new_zeros(steps, *v.shape[1:])
                                                for v in (self.rows, self.share, self.keys))  # fmt: skip
            self._recorded, self._traced = {}, {}

    def fill(self, stack: Stack, state: Any) -> None:
        """Copy a stack's samples and its first state into the buffers."""
        count, (_, steps, wide) = len(stack.members), stack.plan.rows.shape
        self.make_room(steps)
        self.share[:steps].zero_()
        self.rows[:steps, :count, :wide] = stack.plan.rows.transpose(0, 1)
        self.share[:steps, :count, :wide] = stack.share.transpose(0, 1)
        if self.engine.objective.draws or self.solver.noisy:
            self.keys[:steps, :count] = stack.keys.transpose(0, 1)
        if not self.fused:
            self.of_party[1].zero_()  # parties beyond the stack take no step
            for to, value in zip(self.of_party, stack.of_party, strict=False):
                to[:count] = value
        self.of_party[-1][:count] = stack.rate
        self.round.fill_(stack.round)
        pytree.tree_map(lambda to, value: to[:count].copy_(value), self.state, state)

    def replay(self, active: list[int]) -> None:
        """Take all steps, each with the smallest recorded stack that holds the parties still in training."""
        self.at.zero_()
        for count in active:
            size = min(level(count), self.parties)
            if size not in self._recorded:
                before = pytree.tree_map(torch.clone, (self.state, self.at))
                self._recorded[size] = recorded(self.step(size), self.at.device)
                pytree.tree_map(lambda to, value: to.copy_(value), (self.state, self.at), before)
            self._recorded[size]()

    def step(self, count: int) -> Callable[[], None]:
        """One step of the first `count` parties, on the buffers; increments the counter."""
        if self.apart:

            @torch.no_grad()
            def each() -> None:
                now = [v.index_select(0, self.at)[0] for v in (self.rows, self.share, self.keys)]
                self.advance_apart(count, [now])
                self.at.add_(1)

            return each
        advance = self.advance(count)
        state = pytree.tree_leaves(pytree.tree_map(lambda v: v[:count], self.state))

        @torch.no_grad()
        def step() -> None:
            now = [v.index_select(0, self.at)[0] for v in (self.rows, self.share, self.keys)]
            new = advance(state, now)
            changed = [(to, value) for to, value in zip(state, new, strict=True) if to is not value]
            torch._foreach_copy_([to for to, _ in changed], [value for _, value in changed])
            self.at.add_(1)

        return step

    def advance_apart(self, count: int, moments: list[list[Tensor]]) -> None:
        """Take steps of the first `count` parties, each on its stream; change the state in place.

        A moment has the rows, shares and keys of a step of all parties.
        """
        for stream in self.streams[:count]:
            stream.wait_stream(torch.cuda.current_stream())
        for k in range(count):
            state = pytree.tree_map(lambda v, k=k: v[k], self.state)
            of_party = [v[k] for v in self.of_party]
            with torch.cuda.stream(self.streams[k % STREAMS]) if self.streams else nullcontext():
                for moment in moments:
                    now = [v[k] for v in moment]
                    if self.fused:
                        self._descend_alone(state, now, of_party[-1])
                    else:
                        new = self._one(state, now, of_party, self.round, self.at, *self._samples)
                        pytree.tree_map(lambda to, value: to.copy_(value), state, new)
        for stream in self.streams[:count]:
            torch.cuda.current_stream().wait_stream(stream)

    @property
    def _samples(self) -> tuple[Tensor, Tensor]:
        samples = self.engine.holdings.train
        assert isinstance(samples.x, Tensor)  # the stacked engine records nothing else
        return samples.x, samples.targets

    def advance(self, count: int) -> Callable[[list[Tensor], list[Tensor]], list[Tensor]]:
        """A function that takes one step of the first `count` parties; traced once.

        It returns the next state, from the state (whose large layers it changes in place) and the step's rows, shares
        and keys.
        """
        if count not in self._traced:
            self._traced[count] = self._trace(count)
        return self._traced[count]

    def _trace(self, count: int) -> Callable[[list[Tensor], list[Tensor]], list[Tensor]]:
        from torch.fx.experimental.proxy_tensor import make_fx

        of_party = tuple(v[:count] for v in self.of_party)
        state, spec = pytree.tree_flatten(pytree.tree_map(lambda v: v[:count], self.state))
        fixed = (*of_party, self.round, self.at, *self._samples)
        body = self._descend if self.fused else self._general

        def traced(*leaves: Tensor) -> list[Tensor]:
            tree, rest = pytree.tree_unflatten(list(leaves[: len(state)]), spec), leaves[len(state) :]
            rows, share, keys, *per_party, round, at, x, y = rest
            new: list[Tensor] = pytree.tree_leaves(body(count, tree, rows, share, keys, per_party, round, at, x, y))
            return new

        def leaves(state: list[Tensor], now: list[Tensor]) -> list[Tensor]:
            return [*state, *(v[:count] for v in now), *fixed]

        key = count, self.rows.shape[2], self.fused or self  # plain SGD has one step for all rates and rounds
        if key not in self.engine.traces:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="There is a performance drop"
                )  # vmap, of the stack's slow ops
                graph = make_fx(traced)(*leaves(state, [v[0] for v in (self.rows, self.share, self.keys)]))
            self.engine.traces[key] = graph, lift_products(graph, len(self.state[0])) if self.fused else []
        graph, lifted = self.engine.traces[key]
        plain = [place for place in range(len(state)) if place not in lifted]
        run: Callable[..., Any] = compiled(graph, self.engine.complaints) if self._compiles else graph

        def advance(state: list[Tensor], now: list[Tensor]) -> list[Tensor]:
            outputs = list(run(*leaves(state, now)))
            new = list(state)
            for place, value in zip(plain, outputs, strict=False):
                new[place] = value
            for k, place in enumerate(lifted):  # a large layer steps inside the product
                left, right = outputs[len(plain) + 2 * k : len(plain) + 2 * k + 2]
                new[place].baddbmm_(left, right, alpha=-1.0)
            return new

        return advance

    def _descend(self, count: int, state: Any, rows: Tensor, share: Tensor, keys: Tensor, of_party: Any, round: Tensor,
                 at: Tensor, x: Tensor, y: Tensor) -> Any:  # fmt: skip
        """Plain SGD on one tensor per parameter. Finished parties have a share of 0, and so no gradient."""
        objective = self.engine.objective
        buffers = (objective.initial.stats, objective.initial.counts)

        def one(weights: dict[str, Tensor], rows: Tensor, share: Tensor, key: Tensor) -> Any:
            def loss(weights: dict[str, Tensor]) -> Tensor:
                with Rewritten(count):
                    losses, _ = objective.losses(weights, buffers, x[rows], y[rows], key)
                return (losses * share).sum()

            return torch.func.grad_and_value(loss)(weights)

        weights, seen = state
        gradients, losses = torch.func.vmap(one)(weights, rows, share, keys)
        rate = of_party[-1]
        new = {
            name: weight - gradients[name] * rate.view(-1, *[1] * (weight.dim() - 1))
            for name, weight in weights.items()
        }
        return new, seen + losses.to(torch.float64)

    def _descend_alone(self, state: Any, now: Sequence[Tensor], rate: Tensor) -> None:
        """As `_descend`, for one party, in place."""
        rows, share, key = now
        objective, (weights, seen), (x, y) = self.engine.objective, state, self._samples
        buffers = (objective.initial.stats, objective.initial.counts)
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        with torch.enable_grad():
            losses, _ = objective.losses(leaves, buffers, objective.laid_out(x[rows]), y[rows], key)
            loss = (losses * share).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        torch._foreach_sub_(list(weights.values()), torch._foreach_mul(gradients, rate))
        seen.add_(loss.detach())

    def _general(self, count: int, state: Any, rows: Tensor, share: Tensor, keys: Tensor, of_party: Any, round: Tensor,
                 at: Tensor, x: Tensor, y: Tensor) -> Any:  # fmt: skip
        """Any solver's step on the parameter vectors."""

        def one(state: Any, rows: Tensor, share: Tensor, key: Tensor, *of_party: Tensor) -> Any:
            with Rewritten(count):
                return self._one(state, (rows, share, key), of_party, round, at, x, y)

        return torch.func.vmap(one)(state, rows, share, keys, *of_party)

    def _one(self, state: Any, now: Sequence[Tensor], of_party: Sequence[Tensor], round: Tensor, at: Tensor, x: Tensor,
             y: Tensor) -> Any:  # fmt: skip
        """Any solver's step of one party. A party that has finished keeps its state."""
        objective, solver = self.engine.objective, self.solver
        w, carry, buffers, seen = state
        (rows, share, key), (n, steps, _, base, rate) = now, of_party

        def load() -> Batch:
            raise RuntimeError("a solver that looks at all samples at each step cannot be recorded")

        ctx = Context(objective, n, steps, round, rate, load, buffers, base, stacked=not self.apart,  # type: ignore[arg-type]
                      public=self.engine.holdings.public)  # fmt: skip
        alive = at[0] < steps
        mask = torch.where(alive, (share > 0).to(share.dtype), 1.0) if self.padded else None
        with torch.enable_grad():
            direction = solver.direction(ctx, w, Batch(x[rows], y[rows], mask), carry, key)
        new_w, new_carry = solver.step(ctx, w, direction, carry)
        loss = ctx.seen if ctx.seen is not None else w.new_zeros(())
        new = (new_w, new_carry, ctx.buffers, seen + loss.to(torch.float64))
        return pytree.tree_map(lambda a, b: torch.where(alive, a, b), new, state)


def level(count: int) -> int:
    """The recorded stack size for this many parties: one of few sizes, close to `count`, the same in every run."""
    size = 1
    while size < count:
        size = max(size + 1, int(size * SHRINK))
    return size


def roomy(solver: LocalSolver, n: int) -> int:
    """A width that Poisson batches of n samples rarely exceed: expected length plus six standard deviations."""
    size = solver.plan[2]
    return n if size is None else min(n, size + math.ceil(6 * math.sqrt(size)))


def lift_products(graph: torch.fx.GraphModule, weights: int) -> list[int]:
    """Take the steps of large dense layers out of a traced step: output a and rate * b for w - rate * (a @ b).

    Returns the positions of those weights among the outputs; the other outputs come first, then a and b of each.
    """
    aten = torch.ops.aten
    (out,) = [node for node in graph.graph.nodes if node.op == "output"]
    results = list(out.args[0])
    lifted: dict[int, tuple[Any, Any]] = {}
    for place, node in enumerate(results[:weights]):
        shape = node.meta["val"].shape
        if len(shape) != 3 or shape[1] * shape[2] < LARGE or node.target is not aten.sub.Tensor:
            continue
        old, scaled = node.args[:2]
        if old.op != "placeholder" or scaled.target is not aten.mul.Tensor:
            continue
        inner, rate = scaled.args
        flipped = False
        while inner.op == "call_function" and inner.target in (aten.transpose.int, aten._unsafe_view.default,
                                                               aten.view.default):  # fmt: skip
            if inner.target is aten.transpose.int:
                if {d % 3 for d in inner.args[1:3]} != {1, 2}:
                    break
                flipped = not flipped
            elif inner.meta["val"].shape != inner.args[0].meta["val"].shape:
                break
            inner = inner.args[0]
        if inner.op != "call_function" or inner.target is not aten.bmm.default:
            continue
        with graph.graph.inserting_before(out):
            left, right = inner.args
            if flipped:
                left, right = (graph.graph.call_function(aten.transpose.int, (v, 1, 2)) for v in (right, left))
            lifted[place] = (left, graph.graph.call_function(aten.mul.Tensor, (right, rate)))
    rest = [node for place, node in enumerate(results) if place not in lifted]
    out.args = ([*rest, *(part for pair in lifted.values() for part in pair)],)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return list(lifted)


def fuses(stack: Stack) -> bool:
    """Whether steps can use one tensor per parameter: plain SGD, no buffers, and no state but the parameters."""
    spec, rule = stack.engine.objective.spec, stack.solver.step_rule
    if rule is None or rule.clip is not None or rule.pull or spec.stats or spec.counts or stack.memory:
        return False
    return not stack.started[1]


def recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record work over fixed buffers as a CUDA graph. Recording itself does the work once or twice."""
    if device.type != "cuda":
        return work
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # an old recording that is deleted during a new one would break it
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            work()
    finally:
        if collects:
            gc.enable()
    return graph.replay


def train(stack: Stack) -> Replies:
    """Train a chunk of parties as `Stack.train` does, by a recorded program."""
    engine, solver, objective, plan = stack.engine, stack.solver, stack.engine.objective, stack.plan
    count = len(stack.members)
    fused = fuses(stack)
    start, carry, buffers = stack.started
    zero = torch.zeros(count, dtype=torch.float64, device=stack.device)
    state: Any = (objective.spec.split(start), zero) if fused else (start, carry, buffers, zero)
    layout = tuple((v.shape[1:], v.dtype) for v in pytree.tree_leaves(state))
    width = plan.rows.shape[2]
    padded = not all(plan.full) or len(set(plan.widths)) > 1  # every step is recorded as wide as the widest
    if solver.sampler == "poisson":  # batch lengths vary per round; one recording must fit them all
        width, padded = max(width, roomy(solver, max(stack.sizes))), True
    longest = max(*plan.steps, solver.count(int(np.diff(engine.holdings.train.offsets).max())))
    # The recorded size depends on this stack alone: earlier training must not change the bits.
    parties = count if len(set(plan.steps)) == 1 else level(count)
    key = (solver.kernel, parties, width, padded, fused, layout)
    program = engine.programs.get(key)
    if program is None:
        program = engine.programs[key] = Program(engine, solver, parties, width, padded, state, engine.apart)
        program.make_room(longest)  # for the longest party
    program.fill(stack, state)
    program.replay(plan.active)
    state = pytree.tree_map(lambda v: v[:count], program.state)  # which the next replay overwrites
    if fused:
        weights, seen = state
        return stack.finish(start, (objective.spec.stacked(weights), carry, buffers, seen.clone()))
    return stack.finish(start, pytree.tree_map(torch.clone, state))
