"""Check that an algorithm and the settings of a run fit together, before anything runs."""

from __future__ import annotations

from hansa.core.algorithm import Algorithm, Problem
from hansa.core.errors import ConfigError
from hansa.core.federation import SumProtocol
from hansa.experiment.settings import Run
from hansa.fusion import Fusion


def check_settings(algorithm: Algorithm, run: Run, problem: Problem, protocol: SumProtocol | None = None) -> None:
    """Raise a ConfigError for an algorithm and settings of a run that cannot work together."""
    run.select.check(algorithm, problem)
    if run.select.watches and protocol is not None:
        raise ConfigError(
            f"run.select: the selector {run.select.name!r} needs the loss of each party that trained, which a secure "
            "sum hides; choose another selector"
        )
    if protocol is not None and "route" in algorithm.verbs:
        raise ConfigError(
            f"{algorithm.name}: its parties send messages to each other, and their losses and numbers of samples to "
            "the aggregator, which a secure sum or a bound on updates does not cover; leave privacy.secure and "
            "privacy.bound out, or use another algorithm"
        )
    if protocol is not None and algorithm.verbs - {"reduce"}:
        fusion = algorithm.parts().fusion or algorithm
        raise ConfigError(
            f"{algorithm.name}: {fusion.name} looks at the update of each party, which a secure sum hides; use the "
            "fusion 'mean' and have each party bound the norm of its own update (privacy.bound), or no secure sum"
        )
    needed = run.rules().needed(problem.cohort_size)
    if needed > problem.cohort_size:
        raise ConfigError(
            f"run.quorum: the quorum of {needed} can never be met: a round asks {problem.cohort_size} parties"
        )
    rule = algorithm.parts().fusion
    used = rule.used(problem.cohort_size) if isinstance(rule, Fusion) else problem.cohort_size
    if isinstance(rule, Fusion) and run.min_cohort > 1 and used < run.min_cohort:
        raise ConfigError(
            f"run.min_cohort is {run.min_cohort}, but {rule.name} makes the new model of the updates of {used} of "
            f"{problem.cohort_size} parties; use another fusion"
        )
    if run.over_select and algorithm.participation != "cohort":
        raise ConfigError(f"run.over_select: {algorithm.name} has no cohort to enlarge; leave it out")
    if run.over_select and run.select.independent:
        raise ConfigError(
            f"run.over_select: {run.select.name} draws each party by itself, so the cohort has no fixed size; leave it "
            "out"
        )
    if algorithm.participation == "own":
        if run.min_cohort > 1:
            raise ConfigError(
                f"run.min_cohort: {algorithm.name} applies updates one by one as they arrive, so no cohort hides a "
                "single one; leave it out, or use another algorithm"
            )
        if run.deadline is not None:
            raise ConfigError(f"run.deadline: {algorithm.name} is asynchronous and has no deadlines; leave it out")
