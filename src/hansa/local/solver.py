"""Base of local solvers: pure functions over the parameter vector of one party.

A solver never loops over batches, moves data or knows how many parties train with it. An engine does that, for one
party at a time or for many at once (`torch.func.vmap`). `LocalSolver.run` is the reference implementation, which a
deployed party runs too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from hansa.core.entries import MODEL, WORK_ENTRY, Entries, Number, stated
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape, like
from hansa.core.plain_data import fill
from hansa.holdings.augment import augmented
from hansa.holdings.stored_rows import whole
from hansa.kernel.secret_draws import poisson_sample
from hansa.local.context import Batch, Context, Rule
from hansa.local.step_rule import StepRule
from hansa.numerics import rng
from hansa.numerics.objective import Objective
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError, NotAdmitted
from hansa.plumbing.stopping import go_on

Carry = dict[str, Tensor]  # state of a solver between the steps of one round
Sampler = Literal["shuffle", "full", "poisson"]  # how the samples of a step are selected
AGE = Number(whole=True, least=0, optional=True)  # the age of a model, which its sender recognises in the answer
LEAST_NOISE = 0.3  # the noise multiplier of DP-SGD below which a small batch hides almost nothing
WORK = ("lr", "batch", "epochs", "steps")  # fields that an ask may set for a single party


class LocalSolver(Op):
    """Base of local solvers. Subclasses are frozen dataclasses and override what differs from plain descent.

    By default a step is w <- w - rate * (gradient + pull * w - toward): `pull` is a number, `toward` an entry of the
    carry that is constant in a round. This covers weight decay, proximal terms and control variates. A solver whose
    steps have this form declares it by `step_rule`, and an engine may take such steps inside the backward pass. A
    subclass that overrides `direction` or `step` does not inherit `step_rule`: it declares its own, or has none.
    """

    kind: ClassVar[str] = "local"
    sampler: ClassVar[Sampler] = "shuffle"
    noisy: ClassVar[bool] = False  # whether its steps draw random numbers of their own
    alone: ClassVar[bool] = False  # whether engines must train one party at a time
    measures: ClassVar[frozenset[str] | None] = frozenset({"train_loss"})
    update: ClassVar[str | None] = "w"
    sends: ClassVar[tuple[str, ...]] = ("w",)  # vectors of the model's length in a reply
    numbers: ClassVar[tuple[str, ...]] = ()  # single numbers in a reply
    partner: ClassVar[tuple[str, str] | None] = None  # the only algorithm that it works with, and why
    paced: ClassVar[bool] = True
    # What a subclass overrides, set when the class is made.
    rated: ClassVar[bool] = False  # `rate`: the solver has a learning rate
    own_batches: ClassVar[bool] = False  # `batches` or `count`: engines must list each party's batches
    own_finish: ClassVar[bool] = False  # `finish` or `report`: engines must call them for each party
    own_run: ClassVar[bool] = False  # `run`, `train` or `drawn`: engines must train one party at a time
    own_memory: ClassVar[bool] = False  # `remember`, `run`, `train` or `drawn`: replies may depend on the memory
    entries: ClassVar[Entries | None] = stated(model=MODEL, work=WORK_ENTRY, version=AGE, age=AGE)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.rated = _overrides(cls, "rate")
        cls.own_batches = _overrides(cls, "batches", "count")
        cls.own_finish = _overrides(cls, "finish", "report")
        cls.own_run = _overrides(cls, "run", "train", "drawn")
        cls.own_memory = cls.own_run or _overrides(cls, "remember")
        if _depth(cls, "step_rule") > min(_depth(cls, "step"), _depth(cls, "direction")):
            cls.step_rule = LocalSolver.step_rule  # type: ignore[method-assign]
        if _depth(cls, "step_in_place") > _depth(cls, "step"):
            cls.step_in_place = LocalSolver.step_in_place  # type: ignore[method-assign]

    @property
    def vectors(self) -> tuple[str, ...]:
        return self.sends

    @property
    def recalls(self) -> bool:  # type: ignore[override]
        return self.own_memory

    def check(self, spec: ParamSpec) -> None:
        """Raise ConfigError for a model that the solver cannot train. Called before the run starts."""

    def prepare(self, objective: Objective, x: Tensor, y: Tensor) -> None:
        """Examine a model before the first step; `x` and `y` show what its samples look like."""

    def rate(self, round: int) -> float:
        """The learning rate in a round; 0 for solvers without one."""
        return 0.0

    @property
    def pull(self) -> float:
        """The factor of w in the default direction, as of weight decay."""
        return 0.0

    @property
    def step_rule(self) -> StepRule | None:
        """What `direction` and `step` compute, as one value; None where no StepRule describes them."""
        return None

    def remember(self, spec: ParamSpec, initial: Params) -> Memory:
        """A party's memory before its first round. `initial` is the model that every party starts with."""
        return {}

    def start(self, ctx: Context, w: Tensor, payload: Payload, memory: Memory) -> tuple[Tensor, Carry]:
        """Return the first parameters and the first carry."""
        return w, {}

    def direction(self, ctx: Context, w: Tensor, batch: Batch, carry: Carry, key: Tensor) -> Tensor:
        """Return the direction of descent; by default gradient + pull * w - toward."""
        direction = ctx.gradient(w, batch, key)
        if self.pull:
            direction.add_(w, alpha=self.pull)
        return direction.sub_(carry["toward"]) if "toward" in carry else direction

    def step(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """Take one step; return the new parameters and the new carry."""
        return descend(w, direction, ctx.rate), carry

    def step_in_place(self, ctx: Context, w: Tensor, direction: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        """As `step`, with the same bits; may overwrite `w` and those tensors of the carry that `step` replaces.

        It is called only after `step`, by a loop that has no other use for what `step` returned. A subclass that
        overrides `step` does not inherit it.
        """
        return self.step(ctx, w, direction, carry)

    def finish(self, ctx: Context, start: Tensor, w: Tensor, carry: Carry,
               memory: Memory) -> tuple[dict[str, Tensor], Memory]:  # fmt: skip
        """Return the tensors to send (by default the update w - start) and the new memory."""
        return {"w": w - start}, memory

    def report(self, carry: Carry) -> dict[str, Tensor]:
        """Return the metrics to report beside the training loss."""
        return {}

    @property
    def plan(self) -> tuple[int, int | None, int | None, bool]:
        """Epochs, steps, batch size and whether short batches are dropped."""
        fields = vars(self)
        return fields.get("epochs", 1), fields.get("steps"), fields.get("batch"), fields.get("drop_last", False)

    def batches(self, n: int, seed: int, round: int, party: int) -> list[np.ndarray[Any, Any]]:
        """The indices of the samples of each step.

        Epochs are shuffled, and the last batch of an epoch may be short. Under Poisson sampling each sample joins each
        step with a fixed probability: batches vary in length, and may be empty.
        """
        if self.sampler == "full":
            return [np.arange(n)]
        if self.sampler == "poisson":
            own, rate = rng.folded(rng.key(seed, "poisson", round), party), self.rate_of(n)
            return self._joining(n, lambda step: np.flatnonzero(rng.uniforms(rng.folded(own, step), n) < rate))
        return self._shuffled(n, rng.folded(rng.key(seed, "shuffle", round), party))

    def _shuffled(self, n: int, key: int, fewest: int = 0) -> list[np.ndarray[Any, Any]]:
        """The samples of each step, where a key shuffles each epoch.

        With `fewest`, batches have at least so many samples, and the last ones of an epoch join the others: a short
        batch would weigh its samples more, and a dropped one would leave them out.
        """
        epochs, steps, size, drop_last = self.plan
        size = n if size is None else min(max(size, fewest), n)
        out: list[np.ndarray[Any, Any]] = []
        epoch = 0
        while (epoch < epochs) if steps is None else (len(out) < steps):
            go_on()
            order = rng.shuffled(rng.folded(key, epoch), n) if size < n else np.arange(n)
            pieces = [order[at : at + size] for at in range(0, n, size)]
            if fewest:
                pieces = np.array_split(order, n // size)
            elif drop_last and len(pieces) > 1 and len(pieces[-1]) < size:
                pieces.pop()
            out.extend(pieces)
            epoch += 1
        return out if steps is None else out[:steps]

    def drawn(self, party: Party) -> list[np.ndarray[Any, Any]]:
        """The indices of the samples of each step at a party.

        Poisson sampling draws from the party's secret, if it has one: its privacy guarantee holds only while nobody
        knows which samples joined a step. With a privacy floor, so do shuffled epochs (`Party.rows_key`).
        """
        n = party.n
        if self.sampler == "poisson" and party.secret:
            return self._joining(n, lambda step: poisson_sample(party.private("poisson", step), n, self.rate_of(n)))
        if self.sampler != "shuffle" or not party.rows_secret:
            return self.batches(n, party.seed, party.round, party.id)
        key = party.rows_key("batches", 0)
        own = self.own_batches
        return self.batches(n, key, party.round, party.id) if own else self._shuffled(n, key, party.min_drawn)

    def _check_batches(self, party: Party) -> None:
        """NotAdmitted if the steps use fewer samples than a party's privacy floor allows, and `drawn` does not mend it.

        Of a solver with batches of its own, it may be known which samples it leaves out. Poisson sampling draws the
        batches that its accountant knows; without noise they must be large.
        """
        fewest = min(party.min_drawn, party.n)
        if fewest and self.sampler == "poisson":
            noise = 0.0 if self.budget is None else self.release(party.n, {}).noise
            if noise < LEAST_NOISE and self.rate_of(party.n) * party.n < fewest:
                raise NotAdmitted(
                    f"its policy requires batches of at least {fewest} samples where there is little noise"
                )
        if not fewest or self.sampler == "poisson" or not self.own_batches:
            return
        batches = self.batches(party.n, 0, 0, 0)
        if min(map(len, batches)) < fewest or len(np.unique(np.concatenate(batches))) < party.n:
            raise NotAdmitted(
                f"its policy requires that each step of {self.name!r} uses at least {fewest} samples, and that the "
                "steps together leave out none"
            )

    def _joining(self, n: int, draw: Callable[[int], np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """The samples of each step, drawn by its number."""
        out = []
        for step in range(self.count(n)):
            go_on()
            out.append(draw(step))
        return out

    def rate_of(self, n: int) -> float:
        """The probability that a sample joins a step under Poisson sampling: batch / n, at most 1."""
        size = self.plan[2]
        return 1.0 if size is None else min(1.0, size / n)

    def count(self, n: int) -> int:
        """The number of steps of a party with n samples: the length of `batches`."""
        if self.sampler == "full":
            return 1
        epochs, steps, size, drop_last = self.plan
        if steps is not None:
            return steps
        size = n if size is None else min(size, n)
        return epochs * max(1, n // size if drop_last else -(-n // size))

    def last_batch(self, n: int, work: Mapping[str, Any]) -> int | None:
        if n == 0 or self.sampler != "shuffle" or not self.has("batch"):
            return None
        solver = self.at({name: value for name, value in work.items() if self.has(name)})
        steps = solver.plan[1]
        one = {"steps": min(steps, n)} if steps is not None else {"epochs": 1} if self.has("epochs") else {}
        return min(map(len, solver.at(one).batches(n, 0, 0, 0)))

    def share(self, payload: Payload) -> float:
        """The time of a step in a simulation, as a fraction of the time of a step with the whole model."""
        return 1.0

    def has(self, name: str) -> bool:
        """Whether the solver has such a field."""
        return name in vars(self)

    def at(self, work: Mapping[str, Any]) -> Self:
        """The solver with the fields that an ask sets for one party (`WORK`).

        Other fields raise ConfigError: clipping and noise belong to the op, which the party's policy has checked.
        """
        if other := sorted(set(work) - set(WORK)):
            raise ConfigError(f"work: {', '.join(other)} cannot be set for one party; it takes {', '.join(WORK)}")
        solver: Self = fill(type(self), work, "work", base=self) if work else self
        return solver

    @property
    def kernel(self) -> LocalSolver:
        """The solver without learning rate and number of steps: equal kernels have equal steps."""
        neutral = {"lr": 1e-6, "epochs": 1, "steps": None}
        return self.at({name: value for name, value in neutral.items() if self.has(name)})

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        return self.train(party, payload, memory)

    def train(self, party: Party, payload: Payload, memory: Memory, rule: Rule | None = None) -> tuple[Reply, Memory]:
        """Take all steps of a party, one after another. `rule` is an engine's own function for gradients."""
        if "work" in payload:
            rest = {name: value for name, value in payload.items() if name != "work"}
            return self.at(payload["work"]).train(party, rest, memory, rule)
        self._check_batches(party)
        x, y = party.rows("train")
        objective = party.objective
        model = Params(*(payload["model"][name].to(objective.device) for name in Params._fields))
        self.prepare(objective, x if isinstance(x, Tensor) else x[:1], y)
        batches = self.drawn(party)
        load = functools.cache(lambda: Batch(whole(x), y, None))
        base = rng.folded(rng.key(party.seed, "step", party.round), party.id)
        keys = rng.step_keys(base, len(batches)).to(objective.device)
        ctx = Context(objective, party.n, len(batches), party.round, self.rate(party.round), load,
                      (model.stats, model.counts), torch.tensor(base, device=objective.device), rule=rule,
                      private=party.private if party.secret else None, public=party.public)  # fmt: skip
        fresh = self.remember(objective.spec, objective.initial)
        before = {name: memory.get(name, value).to(objective.device) for name, value in fresh.items()}
        extra = {name: value for name, value in payload.items() if name != "model"}
        start, carry = self.start(ctx, model.w, extra, before)
        w, seen = start, torch.zeros((), dtype=torch.float64)
        take = self.step
        for rows, key in zip(batches, keys, strict=True):
            go_on()
            index = ctx.rows = torch.from_numpy(rows).to(objective.device)
            if party.augment is not None:
                draws = key if self.budget is None else ctx.draws(key)
                batch = Batch(augmented(party.augment, x[index], rows, int(draws)), y[index], None)
            else:
                batch = load() if len(rows) == party.n else Batch(x[index], y[index], None)
            direction = self.direction(ctx, w, batch, carry, key)
            w, carry = take(ctx, w, direction, carry)
            take = self.step_in_place  # from the second step on, the vectors are those that a step has made
            seen = seen + (ctx.seen.to(torch.float64).cpu() if ctx.seen is not None else 0.0)
        tensors, after = self.finish(ctx, start, w, carry, before)
        metrics = {"train_loss": float(seen) / len(batches)} if self.tells_loss else {}
        metrics |= {name: float(v) for name, v in self.report(carry).items()}
        return local_reply(objective, tensors, ctx.buffers, party.n, metrics), {**memory, **after}

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        if n == 0:
            return {}
        solver = self.at(payload.get("work") or {})
        epochs, steps, _, _ = solver.plan
        return ({"epochs": epochs} if steps is None else {}) | {"steps": solver.count(n)}

    @property
    def tells_loss(self) -> bool:
        """Whether replies carry the training loss."""
        return self.measures is None or "train_loss" in self.measures

    def expects(self, payload: Payload) -> dict[str, Shape]:
        model = payload["model"]
        shapes = {name: like(model["w"]) for name in self.sends}
        shapes |= {name: ((), model["w"].dtype) for name in self.numbers}
        return shapes | ({"stats": like(model["stats"])} if model["stats"].numel() else {})

    def expects_maxima(self, payload: Payload) -> dict[str, Shape]:
        counts = payload["model"]["counts"]
        return {"counts": like(counts)} if counts.numel() else {}


def _overrides(cls: type[LocalSolver], *methods: str) -> bool:
    """Whether a solver class has a version of its own of one of these methods."""
    return any(getattr(cls, method) is not getattr(LocalSolver, method) for method in methods)


def _depth(cls: type[LocalSolver], method: str) -> int:
    """The position, among a class and its bases, of the first one that defines a method."""
    return next(at for at, base in enumerate(cls.__mro__) if method in vars(base))


def descend(w: Tensor, direction: Tensor, rate: float | Tensor) -> Tensor:
    """Take one step. The rate is a tensor where stacked parties have different rates, and on a GPU."""
    return w - direction * rate if isinstance(rate, Tensor) else torch.sub(w, direction, alpha=rate)


def local_reply(objective: Objective, tensors: dict[str, Tensor], buffers: tuple[Tensor, Tensor], n: int,
                metrics: dict[str, float]) -> Reply:  # fmt: skip
    """Make a reply of the solver's tensors and the model's buffers."""
    stats, counts = buffers
    if objective.spec.stats:
        tensors = {**tensors, "stats": stats}
    maxima = {"counts": counts} if objective.spec.counts else {}
    return Reply(tensors, weight=n, maxima=maxima, metrics=metrics)
