"""What a party never takes back, in its own folder: what it has released of its privacy, and what it answered once.

The file `vault.jsonl` only grows: some hundred bytes for each private release, for each evaluation, for each job (how
it divides the samples), and for each of the three or four answers of a secure sum. What was forgotten could be asked
for again: the secrets of an old sum can be made again from the party's own (`load_secret`) and what it was sent then. A
line is on the disk before the reply that it is about is made, so neither `kill -9` nor a power failure gives back what
was spent; and an ask that is made again, and answered with the same noise, costs nothing again. Nobody but the party
can see it.
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
DECLINED = "declined "  # before the name of an ask that was declined for what the party's numbers are
EVALUATION = "evaluation "  # before the name of an ask that was answered with metrics


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line: a release, under the ask that it answered, or what was answered about `name`, which is a `digest`."""

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
    """What a vault holds: releases by job and ask, and digests by job and name."""

    spent: dict[tuple[str, str], Release]
    answered: dict[tuple[str, str], str]
    evaluations: Counter[str] = field(default_factory=Counter)  # by job
    declines: Counter[str] = field(default_factory=Counter)  # of secure sums, for what the party's numbers are, by job

    def note(self, job: str, name: str, digest: str) -> None:
        """Take up that something was answered about `name`; the first time counts."""
        if (job, name) not in self.answered:
            self.answered[job, name] = digest
            self.evaluations[job] += name.startswith(EVALUATION)
            self.declines[job] += name.startswith(DECLINED)

    def job_releases(self, job: str) -> tuple[Release, ...]:
        """What was released in a job."""
        return merged(release for (name, _), release in self.spent.items() if name == job)

    @property
    def all_releases(self) -> tuple[Release, ...]:
        """The releases in all jobs."""
        return merged(self.spent.values())

    @property
    def jobs(self) -> list[str]:
        """The jobs in which something was released, in their order."""
        return list(dict.fromkeys(job for job, _ in self.spent))


def parse_lines(path: Path, lines: Sequence[bytes]) -> VaultContents:
    """What lines say; a DataError where one is damaged: then nobody knows what was spent."""
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
                f"{path}, line {number}: damaged ({error}), so it is not known what this party has spent; restore it "
                "from a copy, or move it away and lower privacy.epsilon by what was spent"
            ) from None
    return contents


def read_vault(folder: Path) -> VaultContents:
    """What the vault in a party's folder holds, without taking part in anything."""
    path = folder / FILE
    return parse_lines(path, disk.whole(path.read_bytes()).split(b"\n")[:-1] if path.exists() else [])


class PartyVault:
    """The vault in a party's folder. `limit` is what the party may spend over all jobs; `pins` are the certificates by
    which it knows others."""

    def __init__(self, folder: Path, accountant: Accountant, limit: Budget | None = None,
                 pins: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self._path, self._accountant, self._limit = folder / FILE, accountant, limit
        self.peers = Peers(folder, pins or {})
        self._lines = disk.LineLog(self._path)
        self.contents = parse_lines(self._path, self._lines.read())

    def charge(self, job: str, ask: str, op: PrivateOp, n: int, payload: Mapping[str, Any]) -> float | None:
        """Note that an ask of a job is answered, before it is: the epsilon that the party has spent in the job then,
        None where the reply is not differentially private. A PartyError where it is over the job's budget, or over
        the party's own. An ask that was paid for costs nothing again."""
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
        """Note that something was answered about; a PartyError where it was about another before."""
        before = self._first(job, name, digest)
        if before != digest:
            raise PartyError(f"it has answered {name} before, about something else, and does so only once")

    def fix(self, job: str, name: str, value: str) -> None:
        """Note a choice of the aggregator's that holds for the whole job; a PartyError where it was another before."""
        before = self._first(job, name, value)
        if before != value:
            raise PartyError(f"the job's {name} were {before} before and are {value} now; they are fixed once per job")

    def evaluate(self, job: str, ask: str, limits: Evaluations) -> None:
        """Note that an ask is answered with metrics, before it is; a PartyError where that is over the limits. An ask
        that was answered counts once."""
        name = f"{EVALUATION}{ask}"
        if (job, name) in self.contents.answered:
            return
        counts = self.contents.evaluations
        for done, most, where in ((counts[job], limits.per_job, "per_job"), (counts.total(), limits.total, "total")):
            if most is not None and done >= most:
                over = "in a job" if where == "per_job" else "over all jobs"
                raise PartyError(
                    f"its policy answers {most} evaluations {over}, and has; see evaluate.{where} in party.toml"
                )
        self._first(job, name, "answered")

    def may_decline(self, job: str, ask: str, most: int) -> None:
        """A PartyError once so many secure sums were declined for what the party's numbers are, this one aside."""
        if self.contents.declines.total() >= most and (job, f"{DECLINED}{ask}") not in self.contents.answered:
            raise PartyError(
                f"its policy lets it decline {most} secure sums over all jobs for what its numbers are, since each "
                "tells something of them, and it has; see privacy.declines in party.toml"
            )

    def declined(self, job: str, ask: str) -> None:
        """Note that a secure sum was declined for what the party's numbers are; the same ask counts once."""
        self._first(job, f"{DECLINED}{ask}", "declined")

    def _first(self, job: str, name: str, digest: str) -> str:
        """What was noted about `name` first, on the disk; that is `digest` where nothing was before."""
        if (job, name) not in self.contents.answered:
            self._add(Line(job, time.time(), name=name, digest=digest))
            self.contents.note(job, name, digest)
        return self.contents.answered[job, name]

    def _add(self, line: Line) -> None:
        self._lines.add(msgspec.json.encode(line))

    def of(self, job: str) -> Vault:
        """The vault as the ops of a job see it."""
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
    """A party's own secret, 32 random bytes that are made once and never leave; all that nobody may guess comes from
    it."""
    path = folder / "secret"
    if not path.exists():
        disk.put(path, [secrets.token_bytes(32)], steps("private"))
    secret = path.read_bytes()
    if len(secret) != 32:
        raise DataError(f"{path} is damaged: it has {len(secret)} bytes and not 32; move it away to have another made")
    return secret


def report(contents: VaultContents, budget: Budget, accountant: Accountant) -> dict[str, Any]:
    """What a party has spent, by job and in all, as plain data."""
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
