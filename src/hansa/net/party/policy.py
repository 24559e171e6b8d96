"""A party's policy, `party.toml`: what it takes part in, and its own settings. Local policy wins."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.core.data_op import DataOp
from hansa.core.entries import Sizes, refuses_payload
from hansa.core.fields import Owner, owner_of, stated_types
from hansa.core.op import Memory, Op, Payload
from hansa.core.other_model import ARCHITECTURE, described
from hansa.core.plain_data import check_numbers, fill, from_config
from hansa.core.quantities import AnyCount, Count, Multiple
from hansa.core.registry import Part, own_function
from hansa.core.wrapper import unwrap
from hansa.data.class_weights import WeighClasses
from hansa.data.statement import DataStatement
from hansa.kernel.ranges import Ranges
from hansa.local.sgd import SGD
from hansa.local.solver import WORK, LocalSolver
from hansa.net.party.approve_rules import Approve
from hansa.net.party.broadcast import Broadcasts
from hansa.net.party.evaluations import Evaluations, evaluates
from hansa.net.party.floor import Floor
from hansa.net.party.op_parts import PACKED, metric_functions, models_in, parts, signed, unsealed
from hansa.net.party.policy_template import TOML
from hansa.net.party.query_budget import QueryBudget
from hansa.net.party.trust import Trust
from hansa.net.party.workload import Workload
from hansa.net.transport.wire import Blob, Work
from hansa.numerics.objective import count_numbers
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, PartyError
from hansa.plumbing.functions import is_function, only
from hansa.transforms import Transform

NOT_LISTED = "is not among the functions that its policy allows (functions in party.toml)"
MATCHES = 20  # the fewest common people with a floor, by default
DRAWN = 20  # the fewest samples that an ask draws or leaves out, where a secure sum is required
MOVED = {  # settings of version 0.2, and what replaces them
    ("privacy", "clip"): "clip in the table [ranges]",
    ("evaluate", "per_job"): "per_job = { evaluate = ... } in the table [budget]",
    ("evaluate", "total"): "total = { evaluate = ... } in the table [budget]",
}
TABLES = {"privacy": Floor, "evaluate": Evaluations, "budget": QueryBudget, "broadcast": Broadcasts, "limits": Workload,
          "approve": Approve, "trust": Trust}  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """The fields of `party.toml`."""

    jobs: tuple[str, ...] = ("*",)
    ops: tuple[str, ...] = ("*",)
    models: tuple[str, ...] = ("*",)
    model: str | None = None
    functions: tuple[str, ...] = ()
    min_cohort: Count = 1
    min_rows: Count = 1
    matches: AnyCount = 0
    min_matches: AnyCount | None = None
    fuzzy: bool = False
    scores: bool = False
    keep_replies: bool = False
    class_weights: Multiple = 1000.0
    max_bytes: int = 2**34
    device: str = "cpu"
    own: dict = field(default_factory=dict)  # type: ignore[type-arg]
    privacy: Floor = Floor()
    evaluate: Evaluations = Evaluations()
    budget: QueryBudget = QueryBudget()
    ranges: Ranges = Ranges()
    broadcast: Broadcasts = Broadcasts()
    limits: Workload = Workload()
    approve: Approve = Approve()
    trust: Trust = Trust()
    peers: dict = field(default_factory=dict)  # type: ignore[type-arg]
    data: DataStatement | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        if "match" in self.budget.total:
            raise ConfigError("budget.total.match: the limit of readings of ids is `matches`, outside this table")
        if self.broadcast.loss is not None and self.privacy.private:
            raise ConfigError(
                "broadcast.loss refuses models because of the party's samples, without noise, and privacy requires "
                "differential privacy; leave out one of them"
            )
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"device: unknown device {self.device!r}; use 'cpu', 'cuda' or 'cuda:N'") from None
        if {"epochs", "steps"} <= set(self.own):
            raise ConfigError("own: epochs has no effect beside steps; leave one of them out")
        for name, value in self.own.items():
            if name not in WORK:
                raise ConfigError(f"own: unknown field {name!r}; a party may set {', '.join(WORK)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"own.{name}: expected a positive number, got {value!r}")
            if name != "lr" and not isinstance(value, int):
                raise ConfigError(f"own.{name}: expected a whole number, got {value!r}")
            owner = owner_of(stated_types(SGD)[name]) or Owner()
            usual = (0, getattr(self.limits, name, math.inf)) if owner.harmless else (owner.least, owner.most)
            low, high = self.ranges.own.get(name, usual)
            if not low <= value <= high:
                raise ConfigError(
                    f"own.{name} is {value:g}, and this policy allows {low:g} to {high:g} in [ranges] or [limits]; "
                    "every ask would be refused"
                )
        for name, value in self.peers.items():
            if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
                raise ConfigError(
                    f"peers.{name}: expected the fingerprint of a certificate (64 hex digits), got {value!r}"
                )

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy; if there is no file, write one with all settings as comments."""
        if not path.exists():
            path.write_text(TOML)
        try:
            tree = tomllib.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:  # ValueError: invalid UTF-8 or TOML, a number too long
            raise ConfigError(f"cannot read {path}: {error}") from None
        _check_whole_numbers(tree, str(path))
        for table, name in MOVED:
            if isinstance(tree.get(table), dict) and name in tree[table]:
                raise ConfigError(f"{path}: {table}.{name} is now {MOVED[table, name]}")
        for name, kind in TABLES.items():
            if isinstance(tree.get(name), dict):
                tree[name] = fill(kind, tree[name], where=f"{path}: {name}")
        if isinstance(tree.get("ranges"), dict):
            tree["ranges"] = Ranges.read(tree["ranges"], f"{path}: ranges")
        if isinstance(tree.get("data"), dict):
            tree["data"] = fill(DataStatement, tree["data"], where=f"{path}: data")
        policy: Policy = fill(cls, tree, where=str(path))
        return policy

    @property
    def queries(self) -> QueryBudget:
        """The effective budget of queries."""
        return self.budget.under(self.privacy.exists, self.matches)

    @property
    def fewest_matches(self) -> int:
        """The fewest people whom this party must have in common with others."""
        return (MATCHES if self.privacy.exists else 0) if self.min_matches is None else self.min_matches

    @property
    def fewest_drawn(self) -> int:
        """The fewest samples that an ask may draw, or leave out, from a party whose sums are hidden."""
        return max(self.min_rows, DRAWN) if self.privacy.secure or self.privacy.active else 0

    def split(self, task: dict[str, Any]) -> dict[str, Any]:
        """The task without held-out samples if the party has a privacy floor.

        The aggregator would choose which training samples are held out.
        """
        return {**task, "party_test": 0.0} if task and self.privacy.exists else task

    def choose(self, task: dict[str, Any], party: int) -> dict[str, Any]:
        """The task with the model that this party trains, where a job has several: by its own choice, or as assigned.

        A PartyError if the job does not have the model of its choice.
        """
        models, turn, bases = task.get("models"), task.get("turn"), task.get("bases", {})
        if models is None:
            return task
        listed = isinstance(models, Mapping) and isinstance(turn, list) and isinstance(bases, Mapping)
        if not listed or not turn or not all(isinstance(name, str) and name in models for name in turn):
            raise DataError("malformed task: expected models by name, and the names that parties take in turn")
        name = turn[party % len(turn)] if self.model is None else self.model
        if name not in models:
            raise PartyError(
                f"its policy chooses the model {name!r} (model in party.toml), and the job has "
                f"{', '.join(map(repr, models))}"[:400]
            )
        if not isinstance(models[name], (str, Mapping)):
            raise DataError(f"malformed task: the model {name!r} must be a name or a table")
        return {**task, "model": models[name], "base": bases.get(name), "chosen": name}

    def refuses_several(self, op: Op, message: Mapping[str, Any], task: Mapping[str, Any]) -> str | None:
        """Why this party refuses a secure sum of a job whose parties have different models, or None.

        The job chooses the models. With an architecture that makes the updates of the others vanish, or their scores
        constant, the sum would be this party's. Without `active` only sums over one model of the message are refused,
        which no honest job asks for.
        """
        models, bases = task.get("models"), task.get("bases", {})
        asked = self.privacy.active or "packed" in message or _has_model(message)
        if models is None or not op.name.startswith("secure-") or not asked:
            return None
        if len({codec.digest({"model": model, "base": bases.get(name)}) for name, model in models.items()}) < 2:
            return None
        return "the parties of the job have different models, so a secure sum may hide nothing of this party"

    def refuses_public(self, public: Blob) -> str | None:
        """Why this party refuses a job's public samples, or None."""
        if public.size > self.limits.public:
            return (
                f"its policy stores at most {self.limits.public} bytes of public samples (limits.public in "
                f"party.toml), and those of the job have {public.size}"
            )
        return self.limits.refuses_bytes(public.size)

    def refuses_work(self, work: Work) -> str | None:
        """Why this party refuses to take part in a job, or None."""
        if not _matches(work.name, self.jobs):
            return f"its policy does not accept the job {work.name!r}"
        if work.min_cohort < self.min_cohort:
            return (
                f"its policy requires a cohort of at least {self.min_cohort}, and the job allows {work.min_cohort}; "
                "set run.min_cohort"
            )
        if work.keeps and not self.keep_replies:
            return (
                "its policy does not let the aggregator keep its replies (keep_replies in party.toml), and the job "
                "keeps them; leave out audit.keep_replies"
            )
        if max(work.message.size, work.task.size) > self.max_bytes:
            return f"its policy accepts messages of at most {self.max_bytes} bytes (max_bytes in party.toml)"
        return self.limits.refuses_bytes(max(work.message.size, work.task.size))

    def refuses_op(self, op: Part) -> str | None:
        """Why this party refuses an op or a transform, or None; inner ops and transforms are checked too."""
        for part in parts(op):
            if is_function(part.name):
                refused = self._refuses_function(part.name)
                if refused is not None:
                    return refused
            elif part.name != PACKED and not _matches(part.name, self.ops):
                kind = "transform" if isinstance(part, Transform) else "op"
                return f"its policy does not accept the {kind} {part.name!r}"
            if isinstance(part, Op) and part.divides and (self.min_cohort > 1 or self.privacy.active):
                rule = "active masks" if self.min_cohort == 1 else f"a cohort of at least {self.min_cohort}"
                return f"its policy requires {rule}, and {part.name!r} tells clusters apart, perhaps of one party"
            unknown = [name for name in metric_functions(part) if name not in self.functions]
            if unknown:
                return f"its policy does not allow the function {unknown[0]!r}"
            for model in models_in(part):
                refused = self.refuses_model(model)
                if refused is not None:
                    return refused
        if self.peers and isinstance(op, Op) and op.name.startswith("secure-") and not signed(op):
            return (
                f"its policy names its peers (peers in party.toml), and {op.name!r} is not part of a sum with "
                "signatures; set privacy.secure = 'masking' and privacy.active = true"
            )
        return None

    def refuses_preparation(self, op: Part) -> str | None:
        """Why this party refuses a preparation of its data, or None."""
        if isinstance(op, DataOp) and op.learns and self.privacy.private:
            return (
                f"its policy requires differential privacy, and {op.name!r} prepares each sample by numbers of all "
                "training samples, without noise"
            )
        return self.refuses_op(op)

    def refuses_weights(self, op: Part, payload: Any) -> str | None:
        """Why this party refuses the weights that a job gives the classes, or None.

        With very unequal weights an update would tell about the samples of one class alone.
        """
        weights = payload.get("weights") if isinstance(op, WeighClasses) and isinstance(payload, Mapping) else None
        if not isinstance(weights, Tensor) or not weights.numel():
            return None  # the op itself refuses a malformed payload
        most = self.class_weights
        if bool(((weights >= 1 / most) & (weights <= most)).all()):
            return None
        return f"its policy allows class weights from {1 / most:g} to {most:g} (class_weights in party.toml)"

    def refuses_model(self, model: str | Mapping[str, Any] | None) -> str | None:
        """Why this party refuses to train a model, or None. A function must be listed literally."""
        name = model if isinstance(model, str) or model is None else str(model.get("name"))
        if name is None:
            return None
        if is_function(name):
            refused = self._refuses_function(name)
            if refused is None and isinstance(model, Mapping) and len(model) > 1 and own_function(name, "model"):
                return f"a job may not choose arguments of the function {name!r}; only fields of a class are checked"
            return refused
        return None if _matches(name, self.models) else f"its policy does not accept the model {name!r}"

    def _refuses_function(self, name: str) -> str | None:
        if name in self.functions:
            return None
        return f"its policy does not allow the function {name!r} (functions in party.toml)"

    def only_listed(self) -> AbstractContextManager[None]:
        """Import no function or class of the owner's that the policy does not list."""
        return only(self.functions, NOT_LISTED)

    def refuses_augment(self, function: Any) -> str | None:
        """Why this party refuses an augmentation of its samples, or None. A function must be listed literally."""
        return None if function is None else self._refuses_function(str(function)[:100])

    def refuses_architecture(self, payload: Payload) -> str | None:
        """Why this party refuses a model that a payload describes in place of the task's, or None.

        Only registered models are accepted, since no message may name a function. The size is counted without memory.
        """
        return next((why for config in described(payload) if (why := self._refuses_described(config))), None)

    def _refuses_described(self, config: Any) -> str | None:
        if not isinstance(config, Mapping) or not isinstance(config.get("name"), str) or is_function(config["name"]):
            return "malformed ask: architecture must be the fields of a registered model"
        refused = self.refuses_model(config)
        if refused is not None:
            return refused
        size = count_numbers(from_config("model", config, where=ARCHITECTURE))
        if size > self.limits.parameters:
            return (
                f"its policy allows models of at most {self.limits.parameters} parameters (limits.parameters in "
                f"party.toml), and this one has {size}"
            )
        return None

    def refuses_payload(self, op: Op, payload: Payload, sizes: Sizes) -> str | None:
        """Why a payload is not as the op states, or None. With a privacy floor the op must state what it reads.

        The messages of a route must be sealed: the op that makes them replies to the aggregator otherwise.
        """
        refused = unsealed(op)
        if refused is not None:
            return refused
        if op.entries is None and self.privacy.exists:
            return (
                f"its policy requires privacy ([privacy] in party.toml), and the op {op.name!r} does not state what it "
                "reads from a payload; its class needs `entries` (hansa.core.entries)"
            )
        return refuses_payload(op, payload, sizes)

    def refuses_memory(self, op: Op, memory: Memory) -> str | None:
        """Why this party refuses to build a reply on its memory, or None. It is called before a sample is read.

        The aggregator chooses who takes part in a sum and which memory each party builds on. With memory that only one
        party has, a sum of signed masks shows the reply of this party.
        """
        hides = op.name.startswith("secure-") and not op.serves and not evaluates(op)  # which has limits of its own
        if not (self.privacy.active and hides and op.builds_on(memory)):
            return None
        return (
            f"its policy requires masked sums with signatures (privacy.active in party.toml), and a reply of "
            f"{unwrap(op)[1].name!r} here would depend on what this party remembers of earlier asks, which such a sum "
            "does not hide; use a method whose parties remember nothing between rounds"
        )

    def payload(self, op: Op, payload: Payload) -> Payload:
        """The payload with the party's own learning rate, batch size and amount of work, where the op has them."""
        inner = unwrap(op)[1]
        solver = inner if isinstance(inner, LocalSolver) else getattr(inner, "local", getattr(inner, "private", None))
        if not isinstance(solver, LocalSolver) or not solver.paced:
            return payload
        own = {name: value for name, value in self.own.items() if solver.has(name)}
        if not own:
            return payload
        work = dict(payload.get("work", {}))
        if "epochs" in own and solver.has("steps"):
            own["steps"] = None  # the owner counts in epochs, whatever the aggregator counts in
        if own.get("steps") is not None:
            work.pop("epochs", None)
        return {**payload, "work": {**work, **own}}


def _has_model(tree: Any) -> bool:
    """Whether a message holds the parameters of a model."""
    if isinstance(tree, Mapping):
        w = tree["model"].get("w") if isinstance(tree.get("model"), Mapping) else None
        return (isinstance(w, Tensor) and w.numel() > 0) or any(map(_has_model, tree.values()))
    return False


def _check_whole_numbers(tree: Any, where: str) -> None:
    """Raise a ConfigError for a whole number that does not fit into a message to the worker process."""
    if isinstance(tree, int) and not -(2**63) <= tree < 2**63:
        raise ConfigError(f"{where}: the whole number has more than 64 bits; at most {2**63 - 1} is allowed")
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        _check_whole_numbers(value, f"{where}: {name}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
