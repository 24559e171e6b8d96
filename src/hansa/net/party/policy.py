"""A party's policy, `party.toml`: what it takes part in, and its own settings. Local policy wins."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hansa.core.budget import Budget
from hansa.core.data_op import DataOp
from hansa.core.delivery import Deliver
from hansa.core.entries import Sizes, refuses_payload
from hansa.core.fields import Owner, owner_of, stated_types
from hansa.core.op import Op, Payload
from hansa.core.other_model import ARCHITECTURE, described
from hansa.core.plain_data import field_types, fill, from_config
from hansa.core.predictor import Evaluate
from hansa.core.registry import Part, own_function
from hansa.core.relay import RECEIVE, SEND
from hansa.core.route_op import RouteOp
from hansa.core.wrapper import unwrap
from hansa.data.class_weights import WeighClasses
from hansa.data.statement import DataStatement
from hansa.kernel.ranges import Ranges
from hansa.local.dp_sgd import DPSGD
from hansa.local.finetune import FineTune, FineTunedPredictor
from hansa.local.sgd import SGD
from hansa.local.solver import WORK, LocalSolver
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.metrics.function import functions
from hansa.net.party.approve_rules import SIGNED, SIGNING, Approve
from hansa.net.party.broadcast import Broadcasts
from hansa.net.party.evaluations import Evaluations, evaluates
from hansa.net.party.query_budget import QueryBudget
from hansa.net.party.trust import Trust
from hansa.net.party.workload import Workload
from hansa.net.transport.wire import Blob, Work
from hansa.numerics.objective import count_numbers
from hansa.plumbing import codec
from hansa.plumbing.errors import ConfigError, DataError, PartyError
from hansa.plumbing.functions import is_function, only
from hansa.transforms import Packed, Transform

LEAST_NOISE = 0.3  # the noise multiplier that `dp = true` alone requires: less hides almost nothing
PACKED = Packed.name  # the op that applies a transform: the policy names the transform instead
NOT_LISTED = "is not among the functions that its policy allows (functions in party.toml)"
CURIOUS = "a curious aggregator that follows the protocol, not one that lies"  # as secure sums say it
MATCHES = 20  # the fewest common people with a floor, by default
DRAWN = 20  # the fewest samples that an ask draws or leaves out, where a secure sum is required
DECLINES = 20  # asks that a party may decline after it has read its samples, over all jobs
MOVED = {  # settings of version 0.2, and what replaces them
    ("privacy", "clip"): "clip in the table [ranges]",
    ("evaluate", "per_job"): "per_job = { evaluate = ... } in the table [budget]",
    ("evaluate", "total"): "total = { evaluate = ... } in the table [budget]",
}
TOML = """\
# What this party takes part in. It gives a reason for each refusal, and the aggregator reports it.
# Names may have wildcards: "heart-*".
# jobs = ["*"]       # jobs by name
# ops = ["*"]        # operations on the data: "sgd", "evaluate", ... (`hansa parts op`, `hansa parts local`), and
#                    # transforms of updates: "int8", ... (`hansa parts transform`)
# models = ["*"]     # models that come with hansa or its plug-ins (`hansa models`)
# model = "small"    # the model that this party trains in jobs with several models, by its name in the job
# functions = []     # parts of your own that a job may name, as models, solvers, augmentations: ["my_models:net"];
#                    # nothing else is ever imported. Your own copy is used: no message carries code
# min_cohort = 1     # the smallest cohort in which this party's update may be summed; with privacy.active the party
#                    # counts the cohort itself, otherwise it trusts the aggregator's number
# min_rows = 1       # the fewest of this party's rows in a node of a tree whose sums it sends; the rows of a smaller
#                    # node are counted with those of its sibling
# matches = 0        # asks, over all jobs, that may read the ids of this party's rows, to match them with rows of other
#                    # parties: it reveals whom they have in common. 0 refuses jobs over columns
# min_matches = 20   # the fewest people in common, in training rows and in test rows if any; with a floor 20, without
#                    # one 0. The party that leads a matching may leave out people: results would be about the others
# fuzzy = false      # whether they may also be matched by likeness (linkage): then the aggregator gets encodings of all
#                    # ids, which can be guessed by whoever knows the parties' key
# scores = false     # whether the operator may ask a joint model of this party for scores of people, by their ids. Each
#                    # such job counts as one of `matches`, and asks for at most limits.people people
# keep_replies = false   # whether a job may keep this party's replies after their rounds ([audit] keep_replies), for
#                    # attacks that measure what they reveal; nobody sees an aggregator that keeps them secretly
# class_weights = 1000.0    # a job may weigh classes in the training loss by 1/1000 to 1000; 1 refuses other weights
# max_bytes = 17179869184   # the largest message to fetch
# device = "cpu"     # where to train

# [privacy]          # the floor: the least protection of what leaves this party
# epsilon = 3.0      # the budget over all jobs, at delta; when it is spent, the party stops training. Implies dp
# delta = 1e-5
# dp = false         # train only if the reply is differentially private (dp-sgd)
# sigma = 0.3        # and has at least this noise multiplier
# discrete = false   # and adds noise in exact arithmetic: refuses local.mechanism = "float"
# secure = false     # train only if the update is hidden in a secure sum
# active = false     # and only with signed masks: a job's privacy.active alone would be the aggregator's word
# declines = 20      # asks, over all jobs, that it may decline after it has read its samples (each reveals a bit);
#                    # then it answers no such ask any more

# [evaluate]         # limits on metrics of this party's test samples; these are the defaults with a floor
# min_samples = 20   # the fewest test samples for an evaluation
# numbers = 200      # the most numbers of an evaluation: metrics, classes, bins and groups (without a floor: any)
# groups = { sex = [0, 1], age = { edges = [40, 60] } }   # columns that jobs may group test samples by, and into which
#                    # groups; with a floor none, without one any. A party with a group of fewer than min_samples test
#                    # samples tells nothing of the groups of that column

# [budget]           # asks that may read this party's samples, over all jobs; a repeated ask counts once. The kinds are
#                    # train, statistics, evaluate, describe and match
# queries = 10000    # the budget of all kinds together; default: no limit
# costs = { evaluate = 1, match = 10 }   # what an ask of each kind costs, by default 1
# total = { evaluate = 1000 }    # the most asks of a kind; with a floor 1000 evaluations, without one no limit
# per_job = { evaluate = 100 }   # and in each job; with a floor 100 evaluations, without one no limit
# renew = false      # true: other samples (--data) begin a new budget. Answers about two data sets that differ in one
#                    # row may tell of that row

# [ranges]           # the numbers that a job may choose, by field or by part and field; these are some of the defaults
# batch = [1, 1000000000]        # a lower bound of 32 refuses updates of fewer samples per step
# lr = [0.0, 1e6]
# clip = [1e-9, 1e9]             # dp-sgd itself: 1e-6 to 1e6
# sigma = [0.0, 1e6]
# "secure-masked.range" = [1e-6, 1e12]

# [broadcast]        # checks of the models that this party is asked to train
# rounds = true      # refuse to train for an earlier round than before in the job
# replays = false    # refuse a model of an earlier round of the job
# norm = 10.0        # the largest norm of the change since the last model; without it: any
# factor = 10.0      # and at most this many times the median of the changes before; without it: any
# loss = 3.0         # the loss on this party's samples is at most this many times the median before; without it: any
# refusals = 20      # models, over all jobs, that it may refuse for their loss (each reveals a bit); then it stops

# [limits]           # the most work per ask
# epochs = 10000
# steps = 1000000
# seconds = 86400    # an ask that takes longer is stopped
# parameters = 1000000000   # of a model that comes with hansa or its plug-ins
# participants = 10000      # parties that this one shares secrets with in a secure sum, or messages in a route
# people = 10000000         # people that another party may bring to be matched with the people of this one, per job
# jobs = 1000        # jobs whose memory this party keeps; beyond that, it deletes those that trained longest ago
# public = 1073741824       # bytes of public samples that this party stores, of all jobs together
# memory = 8589934592       # bytes; default: all memory of the machine

# [approve]          # who approves a job before its first ask (`hansa approve`); see docs/howto/approve.md
# mode = "always"    # "always": every job is approved; "ask": the owner approves each job; "rules": a job that meets
#                    # every rule below is approved, and any other job waits for the owner
# jobs = ["heart-*"] # rules: jobs, models, algorithms and fellow parties by name
# models = ["logistic"]
# algorithms = ["fedavg"]
# parties = ["clinic", "hospital"]
# min_parties = 3    # the fewest parties of a job
# min_cohort = 3     # the smallest cohort that a job may allow
# rounds = 100       # the most rounds
# epochs = 5         # the most epochs of local training per ask
# steps = 1000       # the most steps
# epsilon = 3.0      # every reply from training samples is differentially private, and costs a job at most this
# delta = 1e-5       # at a delta of at most this
# secure = true      # replies are hidden in a secure sum
# active = true      # with signatures

# [trust]            # what the aggregator must prove before this party works for it; see docs/attestation.md
# attestation = { name = "sev-snp", measurements = ["4af0..."], roots = "amd-milan.pem" }

# [peers]            # the parties that this one sends messages to, receives them from, or forms masked sums with,
# clinic = "5f1e..."  # each with the fingerprint of its certificate, as that party tells you; no other is accepted

# [own]              # replaces the aggregator's values
# lr = 0.01
# batch = 32

# [data]             # what is told of the data, to every job; `hansa join` adds this table. See docs/deploy.md
"""


@dataclass(frozen=True)
class Floor:
    """The table `[privacy]` of `party.toml`: the protection of replies that depend on training samples.

    `epsilon` is the party's budget over all jobs. With it, or with `dp`, the party accepts only dp-sgd with at least
    `sigma`; without epsilon and sigma, `dp` requires a sigma of 0.3. With `discrete` it accepts no noise in floating
    point, whose last bits may reveal something about a sample. With `secure` it accepts only ops that hide the reply in
    a secure sum. The aggregator chooses the kind of sum and its parties, so `secure` protects against a curious
    aggregator that follows the protocol. Against a lying aggregator a party sets `active`, so that it takes part only
    in masked sums with signatures, and pins the other parties (`peers`).

    With any floor, no job takes test samples out of the training samples: the aggregator would choose which.
    Evaluations on separate test samples are hidden in a secure sum too. They need no noise, since they do not train.
    A party that declines an ask after it has read its samples reveals a bit, whatever the reason: after `declines` of
    these it answers no ask any more that reads samples. Descriptions of the data need no protection of their reply. To
    refuse evaluations or descriptions, leave them out of `ops`.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    dp: bool = False
    sigma: float = 0.0
    discrete: bool = False
    secure: bool = False
    active: bool = False
    declines: int = DECLINES

    def __post_init__(self) -> None:
        if self.declines < 0:
            raise ConfigError(f"declines must not be negative, got {self.declines}")
        if self.declines != DECLINES and not self.exists:
            raise ConfigError("declines applies to a privacy floor, which this party has not; set epsilon, dp, secure "
                              "or active too")  # fmt: skip
        Budget(1.0 if self.epsilon is None else self.epsilon, self.delta)
        if not self.sigma >= 0:
            raise ConfigError(f"sigma must not be negative, got {self.sigma}")
        if self.discrete and not self.private:
            raise ConfigError("discrete applies to the noise of dp-sgd, which this party does not require; set "
                              "epsilon, sigma or dp = true too")  # fmt: skip

    @property
    def budget(self) -> Budget | None:
        return None if self.epsilon is None else Budget(self.epsilon, self.delta)

    @property
    def private(self) -> bool:
        """Whether the party requires differential privacy."""
        return self.dp or self.sigma > 0 or self.epsilon is not None

    @property
    def least_noise(self) -> float:
        """The least noise multiplier; `dp` alone requires LEAST_NOISE, or almost no noise would be enough."""
        return LEAST_NOISE if self.dp and not self.sigma and self.epsilon is None else self.sigma

    @property
    def exists(self) -> bool:
        """Whether the party requires any protection."""
        return self.private or self.secure or self.active

    def refuses(self, op: Op, n: int, payload: Payload, held_out: bool = False) -> str | None:
        """Why a reply from n samples would not be protected enough, or None.

        `held_out` says that the job takes its test samples from the party's training samples.
        """
        if held_out and self.exists and evaluates(op):
            return (
                "its policy has a privacy floor, so no job may evaluate on its training samples; give the party test "
                "samples of its own (hansa join --test) and set task.party_test = 0"
            )
        inner = unwrap(op)[1]
        if isinstance(inner, Evaluate) and inner.predictor == FineTunedPredictor.name and self.private:
            return (
                "its policy requires differential privacy, and metrics of its fine-tuned model depend on its training "
                "samples without noise"
            )
        if op.name == "describe" or isinstance(op, (DataOp, FineTune, Deliver)):  # the last two have empty replies
            return None
        if (self.secure or self.active) and op.name.startswith("route-"):
            return "its policy requires a secure sum, and this job sends messages to other parties, which read them"
        if self.secure and not op.name.startswith("secure-"):
            return f"its policy requires a secure sum, and {op.name!r} would reveal its reply; set privacy.secure"
        if self.active and not _signed(op):
            weak = f", and withstands {CURIOUS}" if op.name.startswith("secure-") else ""
            return (
                f"its policy requires masked sums with signatures, and {op.name!r} is not part of one{weak}; set "
                "privacy.secure = 'masking' and privacy.active = true"
            )
        if op.serves or isinstance(inner, Evaluate) or not self.private:  # another evaluation sends more
            return None
        if op.budget is None:
            return f"its policy requires differential privacy, and {op.name!r} has none; use the local solver 'dp-sgd'"
        least, noise = self.least_noise, op.release(n, payload).noise if n else math.inf
        if noise < least or noise == 0:
            return f"its policy requires a sigma of at least {least:g}, and the job has {noise:g}; set local.sigma"
        for part in parts(op):
            if isinstance(part, DPSGD) and part.mechanism == "float" and self.discrete:
                return "its policy requires discrete noise, and the job has local.mechanism = 'float'; leave it out"
        return None


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
    min_cohort: int = 1
    min_rows: int = 1
    matches: int = 0
    min_matches: int | None = None
    fuzzy: bool = False
    scores: bool = False
    keep_replies: bool = False
    class_weights: float = 1000.0
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
        for name in ("min_cohort", "min_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("matches", "min_matches"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if "match" in self.budget.total:
            raise ConfigError("budget.total.match: the limit of readings of ids is `matches`, outside this table")
        if self.class_weights < 1:
            raise ConfigError(f"class_weights must be at least 1, got {self.class_weights}")
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
        except (
            OSError,
            ValueError,
            RecursionError,
        ) as error:  # ValueError: invalid UTF-8 or TOML, or a number too long
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
            unknown = [name for name in _functions(part) if name not in self.functions]
            if unknown:
                return f"its policy does not allow the function {unknown[0]!r}"
            for model in _models(part):
                refused = self.refuses_model(model)
                if refused is not None:
                    return refused
        if self.peers and isinstance(op, Op) and op.name.startswith("secure-") and not _signed(op):
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

    def payload(self, op: Op, payload: Payload) -> Payload:
        """The payload with the party's own learning rate, batch size and amount of work, where the op has them."""
        inner = unwrap(op)[1]
        solver = inner if isinstance(inner, LocalSolver) else getattr(inner, "local", None)
        if not isinstance(solver, LocalSolver) or not inner.paced:
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


def unsealed(op: Op) -> str | None:
    """Why an ask for an op of a route would send its messages to the aggregator, or None."""
    layers, inner = unwrap(op)
    for outer, part in zip((None, *layers), (*layers, inner), strict=True):
        if isinstance(part, RouteOp) and (outer is None or outer.name not in (SEND, RECEIVE)):
            return f"the op {part.name!r} sends messages to other parties, and the ask does not seal them"
    return None


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


def _functions(op: Part) -> list[str]:
    """The functions of the metrics of an op."""
    return functions(op.metrics) if isinstance(op, EvaluateMetrics) else []


def _models(op: Part) -> list[str]:
    """The names of the models in the fields of an op."""
    values = [getattr(op, name) for name in field_types(type(op))]
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [part.name for part in flat if isinstance(part, Part) and part.kind == "model"]


def _signed(op: Op) -> bool:
    """Whether an op is part of a masked sum with signatures."""
    return op.name in SIGNED or (op.name in SIGNING and bool(getattr(op, "active", False)))


def parts(op: Part) -> Iterator[Part]:
    """Yield an op, its inner ops and their transforms, recursively."""
    yield op
    for name in field_types(type(op)):
        inner = getattr(op, name)
        for part in inner if isinstance(inner, tuple) else (inner,):
            if isinstance(part, (Op, Transform)):
                yield from parts(part)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
