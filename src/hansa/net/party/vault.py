"""The vault: a party's irrevocable record of privacy spending and of answers that it gives only once.

The file `vault.jsonl` only grows: some hundred bytes per private release, per evaluation, per reading of ids, per job
(its split of the samples), and per answer of a secure sum (three or four). No line may be deleted: a deleted answer
could be requested again, and the secrets of an old sum can be recomputed from the party's secret (`load_secret`) and
its old messages. A line is on disk before the reply is computed, so neither `kill -9` nor a power failure gives budget
back. A repeated ask that is answered with the same noise costs nothing again. Only the party can see the vault.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hansa.core import disk
from hansa.core.budget import Accountant, Budget, PrivateOp, Release, charge, finite, merged
from hansa.core.crash_points import steps
from hansa.core.errors import ConfigError, DataError, PartyError
from hansa.core.op import Vault
from hansa.net.party.evaluations import Evaluations
from hansa.net.party.peers import Peers

FILE = "vault.jsonl"
DECLINED = "declined "  # prefix for asks that were declined because of the party's values
EVALUATION = "evaluation "  # prefix for asks that were answered with metrics
MATCH = "match "  # prefix for asks that read the ids of the party's rows


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the vault: a release under its ask, or the `digest` that was answered under `name`."""

    job: str
    at: float
    ask: str = ""
    rate: float = 0.0
    sigma: float = 0.0
    steps: int = 0
    name: str = ""
    digest: str = ""


@dataclass(frozen=True)
class VaultContents:
    """The contents of a vault: releases by job and ask, and digests by job and name."""

    spent: dict[tuple[str, str], Release]
    answered: dict[tuple[str, str], str]
    evaluations: Counter[str] = field(default_factory=Counter)  # by job
    declines: Counter[str] = field(default_factory=Counter)  # of secure sums because of the party's values, by job
    matches: Counter[str] = field(default_factory=Counter)  # asks that read ids, by job

    def note(self, job: str, name: str, digest: str) -> None:
        """Record an answer under `name`; only the first one counts."""
        if (job, name) not in self.answered:
            self.answered[job, name] = digest
            self.evaluations[job] += name.startswith(EVALUATION)
            self.declines[job] += name.startswith(DECLINED)
            self.matches[job] += name.startswith(MATCH)

    def job_releases(self, job: str) -> tuple[Release, ...]:
        """The releases in a job."""
        return merged(release for (name, _), release in self.spent.items() if name == job)

    @property
    def all_releases(self) -> tuple[Release, ...]:
        """The releases in all jobs."""
        return merged(self.spent.values())

    @property
    def jobs(self) -> list[str]:
        """The jobs with releases, in order of their first release."""
        return list(dict.fromkeys(job for job, _ in self.spent))


def parse_lines(path: Path, lines: Sequence[bytes]) -> VaultContents:
    """Parse the lines of a vault; a DataError if one is damaged, since the spending is unknown then."""
    contents, decoder = VaultContents({}, {}), msgspec.json.Decoder(Line)
    for number, text in enumerate(lines, 1):
        try:
            line = decoder.decode(text)
            if line.name:
                contents.note(line.job, line.name, line.digest)
            else:
                contents.spent.setdefault((line.job, line.ask), Release(line.rate, line.sigma, line.steps))
        except (msgspec.DecodeError, ConfigError) as error:
            raise DataError(
                f"{path}, line {number}: damaged ({error}), so the privacy spending of this party is unknown; restore "
                "the file from a backup, or move it away and lower privacy.epsilon by the amount spent"
            ) from None
    return contents


def read_vault(folder: Path) -> VaultContents:
    """Read the vault in a party's folder, for display only."""
    path = folder / FILE
    return parse_lines(path, disk.whole(path.read_bytes()).split(b"\n")[:-1] if path.exists() else [])


class PartyVault:
    """The vault in a party's folder.

    `limit` is the party's budget over all jobs; `pins` maps the names of other parties to certificate fingerprints.
    """

    def __init__(self, folder: Path, accountant: Accountant, limit: Budget | None = None,
                 pins: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self._path, self._accountant = folder / FILE, accountant
        self.limit_to(limit, pins or {})
        self._lines = disk.LineLog(self._path)
        self.contents = parse_lines(self._path, self._lines.read())

    def limit_to(self, limit: Budget | None, pins: Mapping[str, str]) -> None:
        """Set the party's budget over all jobs, and the parties that it accepts."""
        self._limit, self.peers = limit, Peers(self._path.parent, pins)

    def charge(self, job: str, ask: str, op: PrivateOp, n: int, payload: Mapping[str, Any]) -> float | None:
        """Record the spending for an ask before it is answered; return the job's epsilon after it.

        None if the reply is not differentially private. A PartyError if it exceeds the job's budget or the party's own.
        An ask that was charged before costs nothing again.
        """
        budget = op.budget
        if budget is None or n == 0:
            return None
        if (job, ask) in self.contents.spent:
            return self._accountant(self.contents.job_releases(job), budget.delta)
        release = op.release(n, payload)
        epsilon = charge(self.contents.job_releases(job), release, budget, self._accountant)
        if self._limit is not None:
            charge(self.contents.all_releases, release, self._limit, self._accountant)
        self._add(Line(job, time.time(), ask, release.rate, release.noise, release.steps))
        self.contents.spent[job, ask] = Release(release.rate, release.noise, release.steps)
        return epsilon

    def once(self, job: str, name: str, digest: str) -> None:
        """Record an answer under `name`; a PartyError if it was given before for another digest."""
        before = self._first(job, name, digest)
        if before != digest:
            raise PartyError(f"the party has answered {name} before, for different content, and answers it only once")

    def fix(self, job: str, name: str, value: str) -> None:
        """Record a choice of the aggregator that is fixed for a job; a PartyError if it has changed."""
        before = self._first(job, name, value)
        if before != value:
            raise PartyError(f"the job's {name} were {before} and are now {value}; they are fixed once per job")

    def evaluate(self, job: str, ask: str, limits: Evaluations) -> None:
        """Record an evaluation before it is answered; a PartyError if it exceeds the limits. A repeat counts once."""
        name = f"{EVALUATION}{ask}"
        if (job, name) in self.contents.answered:
            return
        counts = self.contents.evaluations
        for done, most, where in ((counts[job], limits.per_job, "per_job"), (counts.total(), limits.total, "total")):
            if most is not None and done >= most:
                scope = "per job" if where == "per_job" else "over all jobs"
                raise PartyError(
                    f"its policy allows {most} evaluations {scope}, and they are used up; see evaluate.{where} in "
                    "party.toml"
                )
        self._first(job, name, "answered")

    def match(self, job: str, ask: str, most: int) -> None:
        """Record that an ask reads ids before it does; a PartyError after `most` asks. A repeat counts once."""
        name = f"{MATCH}{ask}"
        if (job, name) in self.contents.answered:
            return
        if self.contents.matches.total() >= most:
            used = ", and they are used up" if most else ""
            raise PartyError(
                f"its policy allows {most} asks over all jobs to match its rows with those of other parties{used}; see "
                "matches in party.toml"
            )
        self._first(job, name, "read")

    def may_decline(self, job: str, ask: str, most: int) -> None:
        """Raise a PartyError once `most` secure sums were declined because of the party's values, except this one."""
        if self.contents.declines.total() >= most and (job, f"{DECLINED}{ask}") not in self.contents.answered:
            raise PartyError(
                f"its policy allows it to decline {most} secure sums over all jobs because of its values, since each "
                "reveals a bit, and they are used up; see privacy.declines in party.toml"
            )

    def declined(self, job: str, ask: str) -> None:
        """Record that a secure sum was declined because of the party's values; a repeat counts once."""
        self._first(job, f"{DECLINED}{ask}", "declined")

    def _first(self, job: str, name: str, digest: str) -> str:
        """Return the first digest recorded under `name`; record `digest` if there was none."""
        if (job, name) not in self.contents.answered:
            self._add(Line(job, time.time(), name=name, digest=digest))
            self.contents.note(job, name, digest)
        return self.contents.answered[job, name]

    def _add(self, line: Line) -> None:
        self._lines.add(msgspec.json.encode(line))

    def for_job(self, job: str) -> Vault:
        """The vault for the ops of a job."""
        return JobVault(self, job)


class JobVault(Vault):
    """A job's part of a party's vault."""

    def __init__(self, vault: PartyVault, job: str) -> None:
        self._vault, self._job = vault, job

    def once(self, name: str, digest: str) -> None:
        self._vault.once(self._job, name, digest)

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        return self._vault.peers.sign(data)

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        return self._vault.peers.known(certificate)

    @property
    def scope(self) -> tuple[str, ...]:
        return self._vault.peers.federation, self._job


def load_secret(folder: Path) -> bytes:
    """Load the party's secret: 32 random bytes, created once, which never leave.

    Everything that nobody may guess is derived from it.
    """
    path = folder / "secret"
    if not path.exists():
        disk.put(path, [secrets.token_bytes(32)], steps("private"))
    secret = path.read_bytes()
    if len(secret) != 32:
        raise DataError(f"{path} is damaged: it has {len(secret)} bytes, expected 32; move it away to create a new one")
    return secret


def report(contents: VaultContents, budget: Budget, accountant: Accountant) -> dict[str, Any]:
    """A party's privacy spending per job and in total, as plain data."""
    jobs = {
        job: {
            "epsilon": finite(accountant(contents.job_releases(job), budget.delta)),
            "replies": sum(j == job for j, _ in contents.spent),
        }
        for job in contents.jobs
    }
    limit = finite(budget.epsilon)
    return {
        "epsilon": finite(accountant(contents.all_releases, budget.delta)),
        "delta": budget.delta,
        "budget": limit,
        "jobs": jobs,
    }
