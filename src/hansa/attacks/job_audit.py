"""Attack a deployed job that kept its replies, and report what its aggregator could learn."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hansa
from hansa.attacks.audit import NAMES, AttackAudit, Watch
from hansa.attacks.kept_job import KeptJob, kept_job
from hansa.attacks.kept_updates import kept_gradients, kept_membership, kept_properties
from hansa.numerics.objective import kept_generator
from hansa.plumbing.determinism import deterministic, threads
from hansa.plumbing.errors import ConfigError, HansaError, nearest

JOB_ATTACKS = ("membership", "gradients", "properties")


def attack_job(federation: str | Path, job: str, attacks: Sequence[str] = JOB_ATTACKS, *, party: str | None = None,
               data: str | None = None, test: str | None = None, target: str | None = None,
               labels: Sequence[str] = (), on_attack: Watch | None = None) -> AttackAudit:  # fmt: skip
    """Attack a finished job of a federation: the folder of the aggregator, and the job.

    The job must have kept its replies (`audit.keep_replies`); one with a secure sum has none, and the report says so.
    The aggregator has no samples of the parties. With `data`, the file of `party`, the attacks on that party are
    scored; `data`, `test`, `target` and `labels` are those of `hansa join`. The same job gives the same numbers.
    """
    for name in attacks:
        if name not in NAMES:
            raise ConfigError(f"unknown attack {name!r}{nearest(name, JOB_ATTACKS)}")
        if name not in JOB_ATTACKS:
            raise ConfigError(
                f"the attack {name!r} trains again with the parties' samples, which a federation has not in one "
                f"place; simulate the job and attack the run. Attacks on jobs: {', '.join(JOB_ATTACKS)}"
            )
    given = {"--party": party, "--test": test, "--target": target, "--labels": labels or None}
    for option, value in given.items():
        if value is not None and data is None:
            raise ConfigError(f"{option} belongs to the file of a party; give the file too: --data")
    with deterministic("cpu"), threads(1), kept_generator():
        kept = kept_job(federation, job, party, data, test, target, labels)
        command = _command(federation, job, attacks, data, given)
        return AttackAudit(_tree(kept, attacks, command, on_attack or (lambda name: None)))


def _tree(kept: KeptJob, attacks: Sequence[str], command: str, watch: Watch) -> dict[str, Any]:
    doing: dict[str, Callable[[KeptJob], dict[str, Any]]] = {
        "membership": kept_membership, "gradients": kept_gradients, "properties": kept_properties,
    }  # fmt: skip
    tree: dict[str, Any] = {"hansa": hansa.__version__, "run": _about(kept), "command": command}
    for name in JOB_ATTACKS:
        if name not in attacks:
            continue
        watch(name)
        try:
            tree[name] = doing[name](kept)
        except HansaError as refusal:
            tree[name] = {"refused": str(refusal)}
    return tree


def _about(kept: KeptJob) -> dict[str, Any]:
    experiment, privacy = kept.job.experiment, kept.job.experiment.privacy
    local = experiment.algorithm.parts().local
    spent = [line for line in kept.job.history if line.get("epsilon") is not None]
    dp = {"unit": "sample" if privacy.dp is None else "party", "epsilon": float(spent[-1]["epsilon"]),
          "delta": float(spent[-1]["delta"])} if spent else None  # fmt: skip
    compress = experiment.run.compress
    return {
        "name": kept.job.id, "job": True, "algorithm": experiment.algorithm.name,
        "local": None if local is None else local.name, "rounds": len(kept.job.history),
        "parties": len(kept.job.parties), "secure": None if privacy.secure is None else privacy.secure.name, "dp": dp,
        "compress": None if compress is None else compress.name, "bound": privacy.bound,
        "owner": None if kept.owner is None else kept.owner.name, "updates": len(kept.updates),
    }  # fmt: skip


def _command(federation: str | Path, job: str, attacks: Sequence[str], data: str | None,
             given: dict[str, Any]) -> str:  # fmt: skip
    """The command that repeats the attacks."""
    parts = ["hansa", "attack", str(federation), job]
    if tuple(attacks) != JOB_ATTACKS:
        parts += [word for name in attacks for word in ("--attack", name)]
    for option, value in {"--data": data, **given}.items():
        if value is not None:
            parts += [option, ",".join(value) if option == "--labels" else value]
    return shlex.join(parts)
