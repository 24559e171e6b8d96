"""Run attacks on a finished run, and report what an outsider, a party and the aggregator could learn."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hansa
from hansa.artifacts.run_folder import read_json, write_json
from hansa.attacks.attributes import attributes, column_number
from hansa.attacks.canaries import CANARIES, audit_epsilon
from hansa.attacks.defences import accuracy, defences
from hansa.attacks.extraction import extraction
from hansa.attacks.gradient_leakage import Prior
from hansa.attacks.inversion import inversion
from hansa.attacks.leakage import gradients
from hansa.attacks.membership import MemberPool, membership, train_references
from hansa.attacks.properties import properties
from hansa.attacks.recipe import Recipe, recipe_of
from hansa.attacks.updates import Protection
from hansa.core.task import Task
from hansa.numerics.objective import kept_generator
from hansa.plumbing.determinism import deterministic, threads
from hansa.plumbing.errors import ConfigError, HansaError, nearest
from hansa.report.attack_report import contents, defences_sheet, who
from hansa.report.html import Sheet, write_report
from hansa.report.job_attack_report import job_contents, job_who
from hansa.run.result import Result

JSON, HTML = "attacks.json", "attacks.html"
NAMES = ("membership", "epsilon", "gradients", "inversion", "attributes", "properties", "extraction", "defences")
PAIRS = 2  # of reference models
MOST_PAIRS = 64
Watch = Callable[[str], None]


@dataclass(frozen=True)
class AttackAudit:
    """The results of attacks on a run or a job, as plain data: `tree["membership"]["loss"]["auc"]`, and so on."""

    tree: dict[str, Any]

    def __repr__(self) -> str:
        done = ", ".join(name for name in NAMES if name in self.tree)
        return f"<AttackAudit of {self.tree['run']['name']}: {done}>"

    def save(self, folder: str | Path) -> Path:
        """Write `attacks.json` and the page `attacks.html` to a folder; return the page.

        Attacks that an earlier report of the same run has, and that were not repeated, stay in the report.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        tree = self._joined(read_json(place / JSON)) if (place / JSON).exists() else self.tree
        write_json(place / JSON, tree)
        make = job_contents if tree["run"].get("job") else contents
        return write_report(place / HTML, *make(tree))

    def _joined(self, earlier: dict[str, Any]) -> dict[str, Any]:
        """The results with those of an earlier report of the same run, by the same version."""
        kept = {name: earlier[name] for name in NAMES if name in earlier and name not in self.tree}
        if not kept or any(earlier.get(name) != self.tree[name] for name in ("hansa", "run")):
            return self.tree
        done = [*earlier.get("commands", [earlier["command"]]), self.tree["command"]]
        found = {**kept, **{name: self.tree[name] for name in NAMES if name in self.tree}}
        about = {name: value for name, value in self.tree.items() if name not in NAMES}
        commands = list(dict.fromkeys(done))
        return {**about, "command": " && ".join(commands), "commands": commands,
                **{name: found[name] for name in NAMES if name in found}}  # fmt: skip

    @property
    def summary(self) -> Sheet:
        """The first table of the report: who could learn what."""
        return job_who(self.tree) if self.tree["run"].get("job") else who(self.tree)

    @property
    def defences(self) -> Sheet | None:
        """The table of defences; None if they were not compared."""
        return defences_sheet(self.tree["defences"]) if "rows" in self.tree.get("defences", {}) else None

    @property
    def refusals(self) -> dict[str, str]:
        """The reason of each attack that was not possible."""
        return {name: each["refused"] for name, each in self.tree.items()
                if name in NAMES and "refused" in each}  # fmt: skip


def attack(run: str | Path | Result, attacks: Sequence[str] = NAMES, *, task: Task | None = None,
           references: int = PAIRS, canaries: int = CANARIES, attribute: Sequence[str] = (),
           on_attack: Watch | None = None) -> AttackAudit:  # fmt: skip
    """Attack a finished simulated run: a run folder, or a `Result`.

    `attacks` names attacks (all by default). `references` is the number of pairs of reference models for membership;
    with 0, only the loss is used. `canaries` is the number of canaries in the run that measures epsilon. `attribute`
    names features to infer. The same run gives the same numbers. A run from Python that was saved needs its `task`.
    """
    for name in attacks:
        if name not in NAMES:
            raise ConfigError(f"unknown attack {name!r}{nearest(name, NAMES)}")
    if not 0 <= references <= MOST_PAIRS:
        raise ConfigError(f"references must lie in 0 to {MOST_PAIRS} pairs of models, got {references}")
    if canaries < 8:
        raise ConfigError(f"canaries must be at least 8, got {canaries}")
    with deterministic("cpu"), threads(1), kept_generator():
        recipe = recipe_of(run, task)
        if recipe.settings["device"] != "cpu":
            raise ConfigError(
                "attacks run on the CPU, and run.device of this run is another; repeat the run on the CPU"
            )
        return AttackAudit(
            _tree(recipe, attacks, references, canaries, tuple(attribute), on_attack or (lambda name: None))
        )


def _tree(recipe: Recipe, attacks: Sequence[str], references: int, canaries: int, attribute: tuple[str, ...],
          watch: Watch) -> dict[str, Any]:  # fmt: skip
    for name in attribute:
        column_number(recipe, name)
    pool, prior = MemberPool.of(recipe), Prior.of(recipe.others[0])

    def by_references() -> dict[str, Any]:
        trained = train_references(recipe, pool, references) if references else None
        return {**membership(recipe, pool, trained), "references": 2 * references}

    doing: dict[str, Callable[[], dict[str, Any]]] = {
        "membership": by_references,
        "epsilon": lambda: audit_epsilon(recipe, canaries),
        "gradients": lambda: gradients(recipe, Protection.of(recipe), prior),
        "inversion": lambda: inversion(recipe, prior),
        "attributes": lambda: attributes(recipe, attribute),
        "properties": lambda: properties(recipe, Protection.of(recipe)),
        "extraction": lambda: extraction(recipe),
        "defences": lambda: defences(recipe, pool, prior),
    }
    tree: dict[str, Any] = {"hansa": hansa.__version__, "run": _about(recipe),
                            "command": _command(recipe, attacks, references, canaries, attribute)}  # fmt: skip
    for name in NAMES:
        if name not in attacks:
            continue
        watch(name)
        try:
            tree[name] = doing[name]()
        except HansaError as refusal:  # a protection that leaves an attack nothing to read is a result
            tree[name] = {"refused": str(refusal)}
    return tree


def _about(recipe: Recipe) -> dict[str, Any]:
    run, privacy = recipe.settings, recipe.settings["privacy"]
    local = recipe.algorithm.parts().local
    return {
        "name": recipe.run_dir.name if recipe.run_dir is not None else recipe.algorithm.name,
        "algorithm": recipe.algorithm.name, "local": None if local is None else local.name, "rounds": run["rounds"],
        "parties": recipe.parties, "seed": recipe.seed, "training_samples": len(recipe.members),
        "other_samples": len(recipe.others[1]), "accuracy": accuracy(recipe.model, recipe),
        "accuracy_on_training": _accuracy_on_members(recipe),
        "secure": None if privacy.secure is None else privacy.secure.name,
        "dp": None if recipe.epsilon is None else {"unit": recipe.unit, "epsilon": recipe.epsilon,
                                                   "delta": recipe.delta},
        "compress": None if run["compress"] is None else run["compress"].name, "bound": privacy.bound,
    }  # fmt: skip


def _accuracy_on_members(recipe: Recipe) -> float:
    x, y = recipe.members.x, recipe.members.y
    metrics = recipe.model.objective.metrics(recipe.model.outputs(x), y)
    return float(metrics.get("accuracy", -metrics["loss"]))


def _command(recipe: Recipe, attacks: Sequence[str], references: int, canaries: int, attribute: tuple[str, ...]) -> str:
    """The command that repeats the attacks."""
    parts = ["hansa", "attack", str(recipe.run_dir) if recipe.run_dir is not None else "RUN"]
    if tuple(attacks) != NAMES:
        parts += [word for name in attacks for word in ("--attack", name)]
    parts += ["--references", str(references)] if references != PAIRS else []
    parts += ["--canaries", str(canaries)] if canaries != CANARIES else []
    parts += [word for name in attribute for word in ("--attribute", name)]
    return shlex.join(parts)
