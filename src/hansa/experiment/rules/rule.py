"""What a rule is, what is known about a run, and what a rule says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from hansa.core.algorithm import Problem
from hansa.core.wrapper import unwrap
from hansa.data.column_transformer import ColumnTransformer
from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError, HansaError
from hansa.privacy import Privacy
from hansa.transforms import Packed, Transform

# What may be known about a run, in words. The fields of `Problem` are facts too.
FACTS = {
    "algorithm": "the algorithm",
    "run": "the settings of the run",
    "privacy": "the privacy settings",
    "task": "the task",
    "table": "the [task] table of a file",
    "partition": "the [partition] table of a file",
    "audit": "the [audit] table of a file",
    "adversary": "the attackers",
    "drift": "the drifts",
    "by_columns": "whether the parties hold different columns",
    "protocol": "whether a protocol of one's own takes over the sums",
    "deployed": "whether the run is a simulation",
    "networked": "whether the parties are reached over a network",
    "relays": "whether parties are behind relays",
    "central": "whether the aggregator has test samples",
    "sums": "the columns of the parties' tables",
    "parties": "the number of parties",
    "names": "the names of the parties",
    "cohort_size": "the number of parties of a round",
    "problem": "the number of parties",
    "classes": "the number of classes",
    "party_tests": "whether the parties have test samples of their own",
    "trusted": "the number of trusted samples",
    "public": "the number of public samples",
    "public_targets": "whether the public samples have targets",
}
_NAMES = frozenset(FACTS) | {field.name for field in dataclasses.fields(Problem)}


class Unknown(Exception):
    """A fact that is not known yet; the argument is its name."""

    @property
    def words(self) -> str:
        return FACTS.get(self.args[0], "the model and the samples")


class Facts:
    """What is known about a run: in a file little, when a job is submitted more, before the first round everything.

    A fact that is not known yet raises `Unknown`. Until the problem itself is known, the facts stand in for it.
    """

    def __init__(self, **known: Any) -> None:
        self._known = known

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(name)
        if name not in self._known:
            raise Unknown(name)
        return self._known[name]

    @property
    def problem(self) -> Any:
        """The problem, for what a part itself checks; these facts, as soon as the parties are known."""
        _ = self.parties
        return self._known.get("problem", self)

    @property
    def fusion(self) -> Any:
        return self.algorithm.parts().fusion

    @property
    def seen(self) -> Any:
        """The part that looks at the replies."""
        return self.fusion or self.algorithm

    @property
    def local(self) -> Any:
        return self.algorithm.parts().local

    @property
    def solver(self) -> Any:
        """The local solver itself, without what is around it."""
        return None if self.local is None else unwrap(self.local)[1]

    @property
    def private_local(self) -> Any:
        """The part whose replies have noise at the parties, if there is one."""
        return (self.local or self.algorithm) if self.algorithm.budget is not None else None

    @property
    def hidden(self) -> Any:
        """What hides single replies: a secure sum, or a protocol of one's own."""
        return self.protocol or self.privacy.secure

    @property
    def relayed(self) -> str | None:
        """The setting with the relays."""
        if self.run.devices.relays is not None:
            return "run.devices.relays"
        return "[relays] of federation.toml" if self.relays else None

    @property
    def packing(self) -> list[UsedTransform]:
        """The transforms of a run's updates."""
        return packings(self.algorithm, self.run)

    @property
    def packed(self) -> list[UsedTransform]:
        """Those that change the form of an update which the aggregator would see."""
        return [] if self.hidden is not None else [each for each in self.packing if each.transform.packs]

    @property
    def hides(self) -> str:
        """What hides single replies, in words."""
        return "a secure sum" if self.privacy.secure is not None else "protocol="

    @property
    def weighted(self) -> list[str]:
        """The settings that weigh samples or classes."""
        names = ("weights", "sample_weight", "class_weight")
        return [name for name in names if getattr(self.task, name, None) is not None]

    @property
    def protected(self) -> bool:
        return bool(self.privacy != Privacy())

    @property
    def keeps_missing(self) -> bool:
        return bool(getattr(self.task.prepare, "keeps_missing", False))

    @property
    def as_table(self) -> Any:
        """The preparation of a table, if there is one."""
        return self.task.prepare if isinstance(self.task.prepare, ColumnTransformer) else None

    @property
    def has_trusted(self) -> bool:
        return bool(self._known["trusted"]) if "trusted" in self._known else self.task.trusted is not None

    @property
    def has_public(self) -> bool:
        return bool(self._known["public"]) if "public" in self._known else self.task.public is not None

    @property
    def shapes(self) -> tuple[ParamSpec, Params]:
        """The layout of the model and its initial values; empty ones until they are known."""
        return self._known.get("spec", ParamSpec((), (), ())), self._known.get("initial", Params.none())


@dataclass(frozen=True)
class UsedTransform:
    """A transform of updates, with the setting that names it."""

    where: str
    transform: Transform


def task_facts(task: Any, by_columns: bool) -> dict[str, Any]:
    """What a task, or the [task] table of a file, says without its samples."""
    known: dict[str, Any] = {"task": task, "by_columns": by_columns}
    if not isinstance(task.prepare, ColumnTransformer):
        known["sums"] = "" if getattr(task.prepare, "keeps_missing", True) else "standardise"
    for name in ("trusted", "public"):
        if getattr(task, name) is None or isinstance(getattr(task, name), int):
            known[name] = getattr(task, name) or 0
    if task.models is None:
        known["models"] = {}
    if not by_columns:
        known["layout"] = None
    return known


def packings(algorithm: Any, run: Any) -> list[UsedTransform]:
    """The transforms of a run's updates."""
    local = algorithm.parts().local
    layers = unwrap(local)[0] if local is not None else []
    inner = [UsedTransform("local", layer.transform) for layer in layers if isinstance(layer, Packed)]
    return inner + ([] if run.compress is None else [UsedTransform("run.compress", run.compress)])


@dataclass(frozen=True)
class Rule:
    """One rule: where what is `given`, `when` must find nothing; else the run is refused because of `why`.

    The sentences are filled in with the facts; `{found}` is what `when` has found. A rule that asks a part for its own
    conditions lets `when` raise the error.
    """

    name: str
    given: str | Callable[[Facts], Any]  # a fact, or a part of one
    when: Callable[[Facts], Any]
    why: str
    instead: str = ""
    error: type[HansaError] = ConfigError

    def judge(self, facts: Facts) -> Judgement | None:
        """What the rule says of the facts; None if it does not concern them."""
        given = attrgetter(self.given) if isinstance(self.given, str) else self.given
        needed = None
        try:
            if not given(facts):
                return None
        except Unknown as unknown:
            needed = unknown.words
        try:
            found = self.when(facts)
        except Unknown as unknown:
            return Judgement(self, "later", needs=needed or unknown.words)
        except ConfigError as error:
            return Judgement(self, "broken", error)
        if not found:
            return None if needed else Judgement(self, "met")
        if needed:
            return Judgement(self, "later", needs=needed)
        sentence = f"{self.why}; {self.instead}" if self.instead else self.why
        return Judgement(self, "broken", self.error(sentence.format_map(_Words(facts, found))))


@dataclass(frozen=True)
class _Words:
    """The words of a sentence."""

    facts: Facts
    found: Any

    def __getitem__(self, name: str) -> Any:
        return self.found if name == "found" else getattr(self.facts, name)


@dataclass(frozen=True)
class Judgement:
    """What a rule says: it is met, it is broken, or it is decided later, when what it `needs` is known."""

    rule: Rule
    verdict: Literal["met", "broken", "later"]
    error: HansaError | None = None
    needs: str = ""


def judge(rules: Sequence[Rule], facts: Facts) -> Iterator[Judgement]:
    """What each rule that concerns the facts says of them."""
    for rule in rules:
        verdict = rule.judge(facts)
        if verdict is not None:
            yield verdict
