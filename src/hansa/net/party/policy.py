"""A party's own policy, `party.toml`: what it takes part in, and what it does its own way. Local policy wins."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hansa.core.budget import Budget
from hansa.core.errors import ConfigError
from hansa.core.op import DataOp, Op, Payload, unwrap
from hansa.core.registry import field_types, fill
from hansa.local.dp_sgd import DPSGD
from hansa.local.solver import WORK, LocalSolver
from hansa.net.party.evaluations import Evaluations, evaluates
from hansa.net.party.workload import Workload
from hansa.net.transport.wire import Work

LEAST_NOISE = 0.3  # the noise multiplier that `dp = true` alone asks for: less hides next to nothing
DECLINES = 20  # of secure sums, over all jobs
TOML = """\
# What this party takes part in. What it refuses it refuses with the reason, and the aggregator reports it.
# Names may have wildcards: "heart-*".
# jobs = ["*"]       # jobs by name
# ops = ["*"]        # what may be done with the data: "sgd", "evaluate", ... (`hansa parts op`, `hansa parts local`)
# models = ["*"]     # models that come with hansa or its plug-ins (`hansa models`)
# functions = []     # models of your own that a job may name: ["my_models:net"]; nothing else is ever imported
# min_cohort = 1     # the fewest parties that this one's update may be summed with; the party counts them itself where
#                    # it has privacy.active, elsewhere the number is the aggregator's word
# max_bytes = 17179869184   # of a message that is fetched
# device = "cpu"     # where to train

# [privacy]          # the floor: what leaves this party is protected at least so
# epsilon = 3.0      # its budget over all jobs, at delta; once it is spent, the party trains no more. Implies dp
# delta = 1e-5
# dp = false         # train only where the reply is differentially private (dp-sgd)
# sigma = 0.3        # and has a noise multiplier of at least this
# clip = [1e-6, 1e6] # and clips each sample's gradient to a length in this range
# secure = false     # train only where the update is hidden in a secure sum
# active = false     # and that by masks, with signatures: a job's privacy.active alone is the aggregator's own word
# declines = 20      # secure sums, over all jobs, that it declines for what its numbers are (each tells a bit of them)

# [evaluate]         # what metrics may tell about this party's test samples; these are the limits under a floor
# min_samples = 20   # the fewest test samples that a model is measured on
# per_job = 100      # evaluations in a job
# total = 1000       # evaluations over all jobs

# [limits]           # the most that one ask may make this party do
# epochs = 10000
# steps = 1000000
# seconds = 86400    # an ask that takes longer is stopped
# parameters = 1000000000   # of a model that comes with hansa or its plug-ins
# participants = 10000      # parties that this one shares secrets with in a secure sum
# jobs = 1000        # jobs that this party remembers something of; of more, it forgets those that trained longest ago
# memory = 8589934592       # bytes; by default all that the machine has

# [peers]            # the parties that this one sums with where the aggregator is not believed (privacy.active), each
# clinic = "5f1e..."  # by the fingerprint of its certificate, as it says itself: then no other is taken for a party

# [own]              # in place of what the aggregator says
# lr = 0.01
# batch = 32
"""


# The exchanges of a masked sum with signatures: those that say that they are, and those that go on from there.
SIGNING, SIGNED = ("secure-keys", "secure-shares"), ("secure-masked", "secure-consistent", "secure-unmask")


@dataclass(frozen=True)
class Floor:
    """The table `[privacy]` of `party.toml`: what protects the replies that are made of the party's training samples.

    `epsilon` is the party's budget over all jobs. With it, or with `dp`, every op that is no dp-sgd with at least
    `sigma` and a clip in the range `clip` is refused; without epsilon and sigma, `dp` asks for a sigma of 0.3. With
    `secure` every op is refused that does not hide its reply in a secure sum. Which sum, and among whom, is the
    aggregator's to say: that protects from one which is curious and does as agreed. One which lies is kept from a
    party's update only where the party has `active` here, so that nothing but masked sums with
    signatures is answered, and pins the others (`peers`). Under any of them no job takes test samples out of the
    training samples: the aggregator would choose which. Evaluations on test samples of the party's own are hidden in a
    secure sum too, and need no noise: they are no training. The aggregator chooses the range of a sum, so a party whose
    numbers do not fit tells a bit of them by saying so: after `declines` of these it answers no sum any more.
    Descriptions of the data are always answered. A party that wants neither leaves them out of `ops`.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    dp: bool = False
    sigma: float = 0.0
    clip: tuple[float, ...] = ()
    secure: bool = False
    active: bool = False
    declines: int = DECLINES

    def __post_init__(self) -> None:
        if self.declines < 0:
            raise ConfigError(f"declines must not be negative, got {self.declines}")
        if self.declines != DECLINES and not (self.secure or self.active):
            raise ConfigError("declines are of secure sums, and the party asks for none; set secure or active too")
        Budget(1.0 if self.epsilon is None else self.epsilon, self.delta)
        if not self.sigma >= 0:
            raise ConfigError(f"sigma must not be negative, got {self.sigma}")
        if self.clip and not (len(self.clip) == 2 and 0 < self.clip[0] <= self.clip[1]):
            raise ConfigError(f"clip is a range of two positive numbers, as in [0.1, 10.0], got {list(self.clip)}")
        if self.clip and not self.private:
            raise ConfigError("clip bounds what dp-sgd is asked to do, and the party asks for no dp-sgd; set epsilon, "
                              "sigma or dp = true too")  # fmt: skip

    @property
    def budget(self) -> Budget | None:
        return None if self.epsilon is None else Budget(self.epsilon, self.delta)

    @property
    def private(self) -> bool:
        """Whether it asks for differential privacy."""
        return self.dp or self.sigma > 0 or self.epsilon is not None

    @property
    def least_noise(self) -> float:
        """The least noise multiplier. Where nothing else says how much noise is enough, next to none would do."""
        return LEAST_NOISE if self.dp and not self.sigma and self.epsilon is None else self.sigma

    @property
    def exists(self) -> bool:
        """Whether the party asks for any protection."""
        return self.private or self.secure or self.active

    def refuses(self, op: Op, n: int, payload: Payload, held_out: bool = False) -> str | None:
        """Why a reply made of n samples would not be protected enough, or None; `held_out` where the job takes its
        test samples from those that the party trains on."""
        if held_out and self.exists and evaluates(op):
            return (
                "its policy has a privacy floor, so no job measures a model on samples that the party trains on; give "
                "the party test samples of its own (hansa join --test) and set task.party_test = 0"
            )
        if op.name == "describe" or isinstance(op, DataOp):
            return None
        if self.secure and not op.name.startswith("secure-"):
            return (
                f"its policy asks for a secure sum, and would have to show its reply to {op.name!r}; set privacy.secure"
            )
        if self.active and not (op.name in SIGNED or (op.name in SIGNING and getattr(op, "active", False))):
            return (
                f"its policy asks for a masked sum whose parties sign what they were told, and {op.name!r} is no part "
                "of one; set privacy.secure = 'masking' and privacy.active = true"
            )
        if op.serves or evaluates(op) or not self.private:
            return None
        if op.budget is None:
            return f"its policy asks for differential privacy, and {op.name!r} has none; use the local solver 'dp-sgd'"
        least, noise = self.least_noise, op.release(n, payload).noise if n else math.inf
        if noise < least or noise == 0:
            return f"its policy asks for noise of sigma {least:g} or more, and the job has {noise:g}; set local.sigma"
        for part in parts(op):
            clip = part.clip if isinstance(part, DPSGD) else None
            if clip is not None and self.clip and not self.clip[0] <= clip <= self.clip[1]:
                low, high = self.clip
                return f"its policy asks for a clip of {low:g} to {high:g}, and the job has {clip:g}; set local.clip"
        return None


@dataclass(frozen=True)
class Policy:
    """The fields of `party.toml`."""

    jobs: tuple[str, ...] = ("*",)
    ops: tuple[str, ...] = ("*",)
    models: tuple[str, ...] = ("*",)
    functions: tuple[str, ...] = ()
    min_cohort: int = 1
    max_bytes: int = 2**34
    device: str = "cpu"
    own: dict = field(default_factory=dict)  # type: ignore[type-arg]
    privacy: Floor = Floor()
    evaluate: Evaluations = Evaluations()
    limits: Workload = Workload()
    peers: dict = field(default_factory=dict)  # type: ignore[type-arg]

    def __post_init__(self) -> None:
        if self.min_cohort < 1:
            raise ConfigError(f"min_cohort must be at least 1, got {self.min_cohort}")
        for name, value in self.own.items():
            if name not in WORK:
                raise ConfigError(f"own: unknown field {name!r}; a party may set {', '.join(WORK)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"own.{name}: expected a positive number, got {value!r}")
            if name != "lr" and not isinstance(value, int):
                raise ConfigError(f"own.{name}: expected a whole number, got {value!r}")

        if self.peers and not self.privacy.active:
            raise ConfigError(
                "peers: the others are known by their certificates only in sums whose parties sign, and which sum it "
                "is would be the aggregator's word; set active = true in [privacy], or leave peers out"
            )
        for name, value in self.peers.items():
            if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
                raise ConfigError(
                    f"peers.{name}: expected the fingerprint of a certificate (64 hex digits), got {value!r}"
                )

    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy in a file; where there is none, one that says what could be set is written."""
        if not path.exists():
            path.write_text(TOML)
        try:
            tree = tomllib.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, a number too long
            raise ConfigError(f"cannot read {path}: {error}") from None
        for name, table in (("privacy", Floor), ("evaluate", Evaluations), ("limits", Workload)):
            if isinstance(tree.get(name), dict):
                tree[name] = fill(table, tree[name], where=f"{path}: {name}")
        policy: Policy = fill(cls, tree, where=str(path))
        return policy

    def split(self, task: dict[str, Any]) -> dict[str, Any]:
        """A task as this party sees it: under a privacy floor all its training samples are trained on, since the
        aggregator would choose which are held out."""
        return {**task, "party_test": 0.0} if task and self.privacy.exists else task

    def refuses_work(self, work: Work) -> str | None:
        """Why this party does not take part in a job, or None."""
        if not _matches(work.name, self.jobs):
            return f"its policy does not accept the job {work.name!r}"
        if work.min_cohort < self.min_cohort:
            return (
                f"its policy asks for a cohort of at least {self.min_cohort}, and the job allows {work.min_cohort}; "
                "set run.min_cohort"
            )
        if max(work.message.size, work.task.size) > self.max_bytes:
            return f"its policy takes messages of up to {self.max_bytes} bytes"
        return self.limits.refuses_bytes(max(work.message.size, work.task.size))

    def refuses_op(self, op: Op) -> str | None:
        """Why this party does not do that, or None; an op inside another counts too."""
        for part in parts(op):
            if not _matches(part.name, self.ops):
                return f"its policy does not accept the op {part.name!r}"
        return None

    def refuses_model(self, model: str | Mapping[str, Any] | None) -> str | None:
        """Why this party does not train that model, or None. A function must be on the list, letter for letter."""
        name = model if isinstance(model, str) or model is None else str(model.get("name"))
        if name is None:
            return None
        if ":" in name:
            return None if name in self.functions else f"its policy does not allow the function {name!r}"
        return None if _matches(name, self.models) else f"its policy does not accept the model {name!r}"

    def payload(self, op: Op, payload: Payload) -> Payload:
        """What the party works on: with its own learning rate, batch size and amount of work, where the op has such."""
        inner = unwrap(op)[1]
        if not isinstance(inner, LocalSolver) or not inner.paced:
            return payload
        own = {name: value for name, value in self.own.items() if inner.has(name)}
        if not own:
            return payload
        if "epochs" in own and "steps" not in own and inner.has("steps"):
            own["steps"] = None  # which would go before them
        return {**payload, "work": {**payload.get("work", {}), **own}}


def parts(op: Op) -> Iterator[Op]:
    """An op, and those that are fields of it or of these."""
    yield op
    for name in field_types(type(op)):
        inner = getattr(op, name)
        if isinstance(inner, Op):
            yield from parts(inner)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
