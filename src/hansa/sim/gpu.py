"""Stacks of parties on a GPU: one step is traced, compiled and recorded, then replayed for every step and round.

The step of all parties is traced to a flat list of tensor operations (`make_fx` over `vmap` over `grad`), compiled by
PyTorch's compiler and recorded as a CUDA graph over fixed buffers: parameters, the step's samples, and a counter that
the graph increments. A round fills the buffers and replays the graph, without work on the host between steps.

Two rewrites make this fast. Convolutions become matrix products of patches, because filters per party would be grouped
convolutions, which are slow. For plain SGD each parameter has its own tensor, and large dense layers take their step
inside the matrix product that computes their gradient, so that no gradient is stored.

Recurrent layers, whose fused kernels do not support `vmap`, are unrolled to a loop over cells. They are recorded but
not compiled, which would take minutes. Random layers are not compiled either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hansa.core import rng
from hansa.local.solver import Batch, Context, LocalSolver
from hansa.sim.engine import Block
from hansa.sim.rewrite import Rewritten
from hansa.sim.schedule import Shape, epoch_keys, regular, shares
from hansa.sim.stack import Stack

if TYPE_CHECKING:
    from hansa.sim.stacked import StackedEngine

log = logging.getLogger("hansa")
SHRINK = 1.2  # factor between recorded stack sizes; finished parties idle until the next smaller size
LARGE = 2**14  # weights per party from which a dense layer steps inside its product


class Program:
    """A step of K parties over fixed buffers, recorded for K and for smaller stacks, as parties finish."""

    def __init__(self, engine: StackedEngine, solver: LocalSolver, parties: int, width: int, padded: bool,
                 state: Any) -> None:  # fmt: skip
        self.engine, self.solver, self.parties, self.padded = engine, solver, parties, padded
        device, dtype = engine.objective.device, engine.objective.dtype
        self.state = pytree.tree_map(lambda v: v.new_zeros(parties, *v.shape[1:]), state)
        self.fused = isinstance(self.state[0], dict)
        self.rows = torch.zeros(0, parties, width, dtype=torch.int64, device=device)
        self.share = torch.zeros(0, parties, width, dtype=dtype, device=device)
        self.keys = torch.zeros(0, parties, dtype=torch.int64, device=device)
        # samples, steps, first row, key, rate
        kinds = (dtype, dtype, torch.int64, torch.int64, dtype)
        self.of_party = tuple(torch.ones(parties, dtype=kind, device=device) for kind in kinds)
        self.round = torch.zeros((), dtype=torch.float64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._traced: dict[int, Callable[[list[Tensor], list[Tensor]], list[Tensor]]] = {}
        self._recorded: dict[int, Callable[[], None]] = {}
        recurrent = any(isinstance(layer, nn.RNNBase) for layer in engine.objective.network().modules())
        # Random layers and noise hash with 64-bit integers, which the compiler treats as 32-bit: record only.
        self._compiles = engine.compiles and not recurrent and not engine.objective.draws and not solver.noisy

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

        samples = self.engine.holdings.train
        assert isinstance(samples.x, Tensor)  # the stacked engine records nothing else
        of_party = tuple(v[:count] for v in self.of_party)
        state, spec = pytree.tree_flatten(pytree.tree_map(lambda v: v[:count], self.state))
        fixed = (*of_party, self.round, self.at, samples.x, samples.targets)
        body = self._descend if self.fused else self._general

        def traced(*leaves: Tensor) -> list[Tensor]:
            tree, rest = pytree.tree_unflatten(list(leaves[: len(state)]), spec), leaves[len(state) :]
            rows, share, keys, *per_party, round, at, x, y = rest
            new: list[Tensor] = pytree.tree_leaves(body(count, tree, rows, share, keys, per_party, round, at, x, y))
            return new

        def leaves(state: list[Tensor], now: list[Tensor]) -> list[Tensor]:
            return [*state, *(v[:count] for v in now), *fixed]

        with torch.no_grad():
            graph = make_fx(traced)(*leaves(state, [v[0] for v in (self.rows, self.share, self.keys)]))
        lifted = lift_products(graph, len(self.state[0])) if self.fused else []
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

    def _general(self, count: int, state: Any, rows: Tensor, share: Tensor, keys: Tensor, of_party: Any, round: Tensor,
                 at: Tensor, x: Tensor, y: Tensor) -> Any:  # fmt: skip
        """Any solver's step on the parameter vectors. Finished parties keep their state."""
        objective, solver = self.engine.objective, self.solver

        def one(state: Any, rows: Tensor, share: Tensor, key: Tensor, n: Tensor, steps: Tensor, first: Tensor,
                base: Tensor, rate: Tensor) -> Any:  # fmt: skip
            w, carry, buffers, seen = state

            def load() -> Batch:
                raise RuntimeError("a solver that looks at all samples at each step cannot be recorded")

            ctx = Context(objective, n, steps, round, rate, load, buffers, base, stacked=True,  # type: ignore[arg-type]
                          public=self.engine.holdings.public)  # fmt: skip
            alive = at[0] < steps
            mask = torch.where(alive, (share > 0).to(share.dtype), 1.0) if self.padded else None
            with Rewritten(count):
                direction = solver.direction(ctx, w, Batch(x[rows], y[rows], mask), carry, key)
            new_w, new_carry = solver.step(ctx, w, direction, carry)
            loss = ctx.seen if ctx.seen is not None else w.new_zeros(())
            new = (new_w, new_carry, ctx.buffers, seen + loss.to(torch.float64))
            return pytree.tree_map(lambda a, b: torch.where(alive, a, b), new, state)

        return torch.func.vmap(one)(state, rows, share, keys, *of_party)


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


def compiled(graph: torch.fx.GraphModule, complaints: set[str]) -> Callable[..., Any]:
    """Compile a traced step. If the compiler fails, log the reason once and run the step as it was traced.

    Each step is tried separately, so that the choice does not depend on earlier training.
    """
    # The compiler may assume other strides for a concatenation than the GPU has, so that a view fails.
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    run: Callable[..., Any] = torch.compile(graph, fullgraph=True, dynamic=False)

    def step(*leaves: Tensor) -> Any:
        nonlocal run
        try:
            return run(*leaves)
        except Exception as error:
            if run is graph:
                raise
            reason = compiler_reason(error)
            if reason not in complaints:
                complaints.add(reason)
                log.warning("the compiler failed (%s); steps are recorded without it", reason)
            run = graph
            return run(*leaves)

    return step


def compiler_reason(error: Exception) -> str:
    """The first informative line of a compiler's error: not "backend='inductor' raised:"."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith("raised:")), type(error).__name__)[:300]


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
        views = objective.spec.split(objective.initial.w.expand(count, -1))
        seen = torch.zeros(count, dtype=torch.float64, device=device)
        width = max(self.shape.widths)
        self.program = Program(engine, solver, count, width, padded=True, state=(views, seen))
        steps = self.shape.lengths.shape[1]
        self.program.make_room(steps)
        self.program.share.copy_(shares(self.shape.lengths, width, objective.dtype).transpose(0, 1))
        self.offsets = torch.from_numpy(engine.holdings.train.offsets).to(device)
        self.w = torch.zeros_like(objective.initial.w)
        self.inputs = torch.zeros(count + 3, dtype=torch.int64, device=device)  # parties, two keys, the round
        self.result = self.seen = torch.zeros(0)
        self._replay: Callable[[], None] | None = None

    def run(self, parties: list[int], round: int, w: Tensor) -> tuple[Tensor, Tensor]:
        """The trained parameters [K, d] and the summed losses [K]; the next run overwrites both."""
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
        return self.result, self.seen

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
        state, spec = pytree.tree_flatten(program.state)
        advance = program.advance(self.count)
        for s in range(steps):
            state = advance(state, [program.rows[s], program.share[s], program.keys[s]])
        weights, self.seen = pytree.tree_unflatten(state, spec)
        self.result = layout.stacked(weights)


def train_alike(stack: Stack) -> Block:
    """Train a chunk of parties of one size by one recording."""
    engine, solver, count, size = stack.engine, stack.solver, len(stack.members), stack.sizes[0]
    key = (solver, count, size)
    if key not in engine.programs:
        engine.programs[key] = Epochs(engine, solver, count, size)
    program: Epochs = engine.programs[key]
    start, carry, buffers = stack.started
    w, seen = program.run([member.party for member in stack.members], stack.round, start[0])
    stack.steps = program.shape.steps
    return stack.finish(start, (w.clone(), carry, buffers, seen))


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
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def train(stack: Stack) -> Block:
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
        program = engine.programs[key] = Program(engine, solver, parties, width, padded, state)
        program.make_room(longest)  # for the longest party
    program.fill(stack, state)
    program.replay(plan.active)
    state = pytree.tree_map(lambda v: v[:count], program.state)
    if fused:
        weights, seen = state
        return stack.finish(start, (objective.spec.stacked(weights), carry, buffers, seen))
    return stack.finish(start, pytree.tree_map(torch.clone, state))
