"""What the settings of a run need of its algorithm and of each other."""

from __future__ import annotations

from typing import Any

from hansa.core.plain_data import field_types
from hansa.experiment.rules.rule import Facts, Rule
from hansa.fusion import Fusion
from hansa.local.solver import LocalSolver
from hansa.select import Selector


def _paced(f: Facts) -> bool:
    return isinstance(f.solver, LocalSolver) and f.solver.paced


def _quorum_of_one(f: Facts) -> Any:
    """The setting that asks for more replies than a round with a single party has, and how many."""
    needed = f.run.rules().needed(1)
    return needed > 1 and ("min_cohort" if f.run.min_cohort > 1 else "quorum", needed)


def _readers(f: Facts) -> Any:
    """What to use in place of an algorithm that looks at each update."""
    if not f.algorithm.verbs - {"reduce"}:
        return None
    if f.seen is f.algorithm:
        return "use an algorithm that needs their sums alone, such as fedavg"
    return "use the fusion 'mean' and have each party bound the norm of its own update (privacy.bound)"


def _mixed(f: Facts) -> Any:
    """A setting with a transform that needs the same parameters in each round, the transform, and what it needs."""
    for setting in ("compress", "compress_down"):
        transform = getattr(f.run, setting)
        if transform is not None and transform.layered:
            return setting, transform, "needs the layers of a vector"
        if transform is not None and transform.remembers:
            return setting, transform, "remembers numbers of a vector"
    return None


def _unmet(f: Facts) -> Any:
    needed = f.run.rules().needed(f.cohort_size)
    return needed > f.cohort_size and needed


def _few(f: Facts) -> Any:
    """The number of updates that the new model is made of, if they are fewer than `min_cohort`."""
    used = f.fusion.used(f.cohort_size)
    return used < f.run.min_cohort and (used,)


SETTINGS = [
    Rule("A pace needs local steps", lambda f: f.run.pace.sets is not None, lambda f: not _paced(f),
         "run.pace: {algorithm.name} has no local steps, so {run.pace.name!r} has no effect", "use 'fixed'"),
    Rule("A pace sets a field of the local solver", lambda f: f.run.pace.sets is not None and _paced(f),
         lambda f: f.run.pace.sets not in field_types(type(f.solver)),
         "run.pace: {run.pace.name!r} sets {run.pace.sets}, which the local solver {solver.name!r} does not have",
         "use 'fixed'"),
    Rule("A selector needs cohorts", lambda f: not f.run.select.takes_any,
         lambda f: {"all": "needs every party in every round",
         "own": "chooses parties itself"}.get( f.algorithm.participation),
         "{algorithm.name} {found}, so run.select cannot be {run.select.name!r}", "leave it out, or use 'uniform'"),
    Rule("A selector that needs evaluations needs a model", "run.select.evaluates", lambda f: not f.algorithm.trains,
         "run.select = {run.select.name!r} evaluates the task's model at the parties, and {algorithm.name} trains no "
         "model", "use 'uniform' or 'weighted'"),
    Rule("A selector's own conditions", lambda f: type(f.run.select).check is not Selector.check,
         lambda f: f.run.select.check(f.algorithm, f.problem),
         "some selectors need a model, test samples or losses of the parties"),
    Rule("A secure sum hides losses", "run.select.watches", lambda f: f.hidden,
         "run.select: the selector {run.select.name!r} needs the loss of each party that trained, which a secure sum "
         "hides", "choose another selector"),
    Rule("Sums hide updates from a selector", "run.select.sees",
         lambda f: "a secure sum hides" if f.hidden is not None else f.run.sums == "exact"
         and "exact sums never look at",
         "run.select: the selector {run.select.name!r} needs the update of each party, which {found}",
         "choose another selector"),
    Rule("A secure sum covers no messages between parties", "hidden", lambda f: "route" in f.algorithm.verbs,
         "{algorithm.name}: its parties send messages to each other, and their losses and numbers of samples to the "
         "aggregator, which a secure sum or a bound on updates does not cover",
         "leave privacy.secure and privacy.bound out, or use another algorithm"),
    Rule("A secure sum needs more than one party", "hidden", lambda f: f.algorithm.alone,
         "{algorithm.name}: some of its rounds ask a single party, and a secure sum of one update hides nothing",
         "set {found}"),
    Rule("A round with one party has one reply", "algorithm.alone", _quorum_of_one,
         "run.{found[0]}: {algorithm.name} has rounds that ask a single party, and this setting requires {found[1]} "
         "replies", "set {algorithm.alone}"),
    Rule("A least cohort needs one model for all", lambda f: f.run.min_cohort > 1,
         lambda f: f.algorithm.clustered,
         "run.min_cohort: a cluster of {algorithm.name} may have fewer than {run.min_cohort} parties, and its model "
         "would show their updates", "leave it out, or use another algorithm"),
    Rule("A secure sum hides replies from an algorithm", "hidden", lambda f: f.algorithm.sums_alone,
         "{algorithm.name}: it looks at the reply of each party, which a secure sum hides",
         "set {found}, or leave the secure sum out"),
    Rule("A secure sum hides updates from an algorithm or a fusion", "hidden", _readers,
         "{algorithm.name}: {seen.name} looks at the update of each party, which a secure sum hides",
         "{found}, or no secure sum"),
    Rule("Transforms with a memory need the same parameters in each round",
         lambda f: f.run.compress is not None or f.run.compress_down is not None,
         lambda f: (not f.algorithm.aligned or (f.fusion is not None and f.fusion.permutes)) and _mixed(f),
         "run.{found[0]}: {found[1].name} {found[2]}, and those of {algorithm.name} are about other parameters from "
         "round to round", "use one transform without memory, such as 'int8'"),
    Rule("Exact sums are plain sums", lambda f: f.run.sums == "exact", lambda f: f.hidden,
         "run.sums: 'exact' applies to plain sums, and a secure sum or protocol= takes over every sum (secure sums add "
         "whole numbers anyway)", "leave one of them out"),
    Rule("Exact sums need sums", lambda f: f.run.sums == "exact", lambda f: "reduce" not in f.algorithm.verbs,
         "run.sums: {seen.name} does not sum the replies of a round, so 'exact' would have no effect", "leave it out"),
    Rule("A quorum can be met", lambda f: f.run.rules().needed(1) > 1 or f.run.quorum != 1, _unmet,
         "run.quorum: the quorum of {found} can never be met: a round asks {cohort_size} parties"),
    Rule("A new model is made of so many updates", lambda f: f.run.min_cohort > 1 and isinstance(f.fusion, Fusion),
         _few,
         "run.min_cohort is {run.min_cohort}, but {fusion.name} makes the new model of the updates of {found[0]} of "
         "{cohort_size} parties", "use another fusion"),
    Rule("A larger cohort needs a cohort", "run.over_select", lambda f: f.algorithm.participation != "cohort",
         "run.over_select: {algorithm.name} has no cohort to enlarge", "leave it out"),
    Rule("A larger cohort needs a fixed size", "run.over_select", lambda f: f.run.select.independent,
         "run.over_select: {run.select.name} draws each party by itself, so the cohort has no fixed size",
         "leave it out"),
    Rule("A least cohort needs rounds", lambda f: f.run.min_cohort > 1,
         lambda f: f.algorithm.participation == "own",
         "run.min_cohort: {algorithm.name} applies updates one by one as they arrive, so no cohort hides a single one",
         "leave it out, or use another algorithm"),
    Rule("A deadline needs rounds", lambda f: f.run.deadline is not None, lambda f: f.algorithm.participation == "own",
         "run.deadline: {algorithm.name} is asynchronous and has no deadlines", "leave it out"),
]  # fmt: skip
