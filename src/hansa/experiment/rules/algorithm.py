"""What an algorithm and its parts need of a task, of the parties and of each other."""

from __future__ import annotations

from typing import Any

from hansa.core.algorithm import Algorithm
from hansa.core.op import known_open_tensors
from hansa.core.plain_data import field_types
from hansa.core.registry import Part, noun
from hansa.experiment.rules.rule import Facts, Rule
from hansa.fusion import Fusion
from hansa.local.solver import LocalSolver


def _has_own(part: Any, base: type, method: str) -> bool:
    """Whether a part has its own way to do something that its base does too."""
    return part is not None and getattr(type(part), method) is not getattr(base, method)


def _remembers(f: Facts) -> Any:
    """The local solver, if a party has a memory with it."""
    return f.solver if f.solver is not None and f.solver.remember(*f.shapes) else None


def _undeclared(f: Facts) -> Any:
    """A field with a part that `parts()` leaves out: the class, the kind of the part, its noun, the field."""
    parts = f.algorithm.parts()
    declared = (parts.local, parts.fusion, parts.server)
    for name in field_types(type(f.algorithm)):
        part = getattr(f.algorithm, name)
        exchangeable = isinstance(part, Part) and part.kind in ("local", "fusion", "server")
        if exchangeable and not any(part is other for other in declared):
            return type(f.algorithm).__name__, part.kind, noun(part.kind), name
    return None


def _without_trusted(f: Facts) -> Any:
    """The part that judges updates by trusted samples, where there are none."""
    return not f.has_trusted and next((p for p in (f.algorithm, f.fusion) if p is not None and p.trusts), None)


def _permuted(f: Facts) -> Any:
    """What remembers or exchanges numbers by their places."""
    algorithm = f.algorithm
    if (solver := _remembers(f)) is not None:
        return f"the local solver {solver.name!r} remembers"
    by_place = not algorithm.aligned or not algorithm.whole or algorithm.whole_updates or not algorithm.trains
    return by_place and f"{algorithm.name} exchanges"


def _unequal(f: Facts) -> Any:
    """The tensors of updates whose sizes differ, and what combines them, where it needs updates of one length."""
    if f.fusion is None and f.algorithm.verbs & {"gather", "submit"}:
        return None
    tensors = known_open_tensors(f.local, {"model": f.shapes[1]._asdict()})
    combines = f"the fusion {f.fusion.name!r} combines" if f.fusion is not None else "the algorithm sums"
    return tensors and (", ".join(tensors), combines)


def _check_fits(f: Facts) -> None:
    for module in f.modules.values():
        f.fusion.fits(module)


def _check_solver(f: Facts) -> None:
    for spec in f.models.values() or (f.shapes[0],):
        f.solver.check(spec)
    _ = f.spec  # until it is known, another model may be refused


def _judges(f: Facts) -> bool:
    return f.fusion is not None and f.fusion.trusts and f.local is not None


ALGORITHM = [
    Rule("Several models need an algorithm for several", "task.models",
         lambda f: f.algorithm.models == "one" and (len(f.task.models), ", ".join(f.task.models)),
         "{algorithm.name} combines updates of one model, and task.models has {found[0]} ({found[1]})",
         "set task.model, or use an algorithm for several models"),
    Rule("Some algorithms need public samples", "algorithm.uses_public", lambda f: not f.has_public,
         "{algorithm.name} needs samples that every party sees, and the task has none",
         "set task.public to a number of samples, a file or a function (in Python, Task(public=x))"),
    Rule("Some algorithms need public samples with targets", "algorithm.public_targets", lambda f: not f.public_targets,
         "{algorithm.name} needs public samples with targets, and task.public has features alone",
         "give a number of samples, a file with the target column, or a function that returns (x, y) (in Python, "
         "Task(public=(x, y)))"),
    Rule("Public samples need an algorithm that uses them", "has_public", lambda f: not f.algorithm.uses_public,
         "{algorithm.name} uses no public samples", "leave task.public out"),
    Rule("Parties that train models of their own are given some", lambda f: f.algorithm.models != "one",
         lambda f: not f.modules, "{algorithm.name}: its parties train models of their own, and the task has none",
         "give Task(models={{...}}), or Task(model=...) for one architecture"),
    Rule("An algorithm can serve the parties of a run", lambda f: _has_own(f.algorithm, Algorithm, "check_parties"),
         lambda f: f.algorithm.check_parties(f.parties, f.names), "peers need a graph that connects all of them"),
    Rule("Some algorithms need every party in every round", lambda f: f.algorithm.participation == "all",
         lambda f: f.cohort_size < f.parties, "{algorithm.name} needs every party in every round",
         "set the cohort to 1.0 (it selects {cohort_size} of {parties})"),
    Rule("An algorithm declares its parts", _undeclared, _undeclared,
         "{algorithm.name}: {found[0]}.parts() does not declare the {found[2]} in the field {found[3]!r}",
         "have it return Parts({found[1]}=self.{found[3]})"),
    Rule("A fusion can fuse the updates of a round", lambda f: _has_own(f.fusion, Fusion, "check"),
         lambda f: f.fusion.check(f.cohort_size), "a fusion needs a least number of updates"),
    Rule("A fusion can fuse updates of the model", lambda f: _has_own(f.fusion, Fusion, "fits"), _check_fits,
         "some fusions know the layers of some models alone"),
    Rule("A fusion that permutes units has whole updates of one model", lambda f: f.fusion and f.fusion.permutes,
         _permuted,
         "{algorithm.name}: {fusion.name} permutes the units of a party's update, and {found} more than whole updates "
         "of one model, by the places of units", "use another fusion"),
    Rule("The server's samples belong to no cluster", lambda f: f.fusion and f.fusion.trusts,
         lambda f: f.algorithm.clustered,
         "{algorithm.name}: {fusion.name} judges updates by the server's samples, which belong to no cluster",
         "use another fusion"),
    Rule("A fusion that compares rounds needs parties that stay in their cluster",
         lambda f: f.fusion and f.fusion.remembers, lambda f: f.algorithm.clustered,
         "{algorithm.name}: {fusion.name} compares a party's updates of different rounds, and a party may change its "
         "cluster", "use another fusion"),
    Rule("A fusion that compares rounds needs rounds", lambda f: f.fusion and f.fusion.remembers,
         lambda f: f.algorithm.participation == "own",
         "{algorithm.name}: {fusion.name} compares the updates of a round with those of the rounds before, and "
         "{algorithm.name} takes updates as they arrive", "use another fusion"),
    Rule("A fusion that compares rounds needs the same parameters in each", lambda f: f.fusion and f.fusion.remembers,
         lambda f: not f.algorithm.aligned,
         "{algorithm.name}: {fusion.name} compares the layers of an update with those of earlier rounds, and the "
         "parties of {algorithm.name} send other parameters from round to round", "use another fusion"),
    Rule("Who judges by trusted samples is given some", lambda f: f.algorithm.trusts or (f.fusion and f.fusion.trusts),
         _without_trusted, "{found.name} judges updates by samples of the server's own, and the task has none",
         "set task.trusted to how many samples to keep for it (in Python, Task(trusted=(x, y)))"),
    Rule("A server that trains as a party has no memory", lambda f: _judges(f) and f.fusion.trains, _remembers,
         "{algorithm.name}: with {fusion.name} the server trains as a party does, but it has no memory, which the "
         "local solver {found.name!r} needs", "use another fusion"),
    Rule("Who judges by trusted samples judges updates alone", _judges,
         lambda f: f.algorithm.numbers or len(f.solver.sends) > 1,
         "{algorithm.name}: {fusion.name} judges updates by the server's samples, and cannot judge what the local "
         "solver {solver.name!r} sends beside them", "use another fusion"),
    Rule("A local solver can train the model", lambda f: _has_own(f.solver, LocalSolver, "check"), _check_solver,
         "some solvers cannot train models with running statistics (BatchNorm)"),
    Rule("Updates that are combined have one length", "solver", _unequal,
         "{algorithm.name}: the local solver {local.name!r} leaves the size of {found[0]} open (UpTo), and {found[1]} "
         "updates of one length", "use another solver"),
    Rule("One half of an algorithm works with the other half", lambda f: getattr(f.local, "partner", None),
         lambda f: f.local.partner[0] != f.algorithm.completes and f.local.partner,
         "{algorithm.name} cannot use the local solver {local.name!r}, which is one half of {found[0]}, {found[1]}",
         "use the algorithm {found[0]}, or another solver"),
    Rule("Some algorithms need their own local solver",
         lambda f: f.algorithm.completes is not None and f.local is not None and not f.algorithm.takes_any,
         lambda f: getattr(f.local, "partner", None) is None,
         "{algorithm.name} needs its own local solver, and cannot use {local.name!r}"),
    Rule("An algorithm's own conditions", lambda f: _has_own(f.algorithm, Algorithm, "check"),
         lambda f: f.algorithm.check(f.problem), "the page of the algorithm has them"),
    Rule("Missing values need an algorithm that can use them", "keeps_missing", lambda f: not f.algorithm.takes_missing,
         "task.prepare: {algorithm.name} cannot use missing values", "use 'standardise', which fills them in"),
]  # fmt: skip
