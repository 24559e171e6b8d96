"""The vault: a party's irrevocable record of privacy spending and of answers that it gives only once.

The file `vault.jsonl` only grows: some hundred bytes per private release, per ask that reads samples, per model
that was refused for its loss, per job (its split of the samples), and per answer of a secure sum (three or four). No
line may be deleted: a deleted answer could be requested again. A line is on disk before the reply is computed, so
neither `kill -9` nor a power failure gives budget back. A repeated ask that is answered with the same noise costs
nothing again. Only the party can see the vault. The secrets of secure sums are not in the vault, and end with the sum
(`net.party.sessions`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hansa.core.budget import Accountant, Budget, PrivateOp, Release, charge
from hansa.core.vault import Vault
from hansa.holdings.gateway import Purpose
from hansa.net.party.peers import Peers, Signer
from hansa.net.party.query_budget import QueryBudget
from hansa.net.party.sessions import PartySessions
from hansa.net.party.vault_lines import DECLINED, EPSILON, FILE, LOSS, MARKS, PREFIXES, REFUSED, Line, parse_lines
from hansa.plumbing import disk
from hansa.plumbing.crash_points import steps
from hansa.plumbing.errors import DataError, NotAdmitted, PartyError

SECRET = "secret"  # the file with the party's secret


class PartyVault:
    """The vault in a party's folder.

    `limit` is the party's budget over all jobs; `pins` maps the names of other parties to certificate fingerprints;
    `signer` signs for the party where this process does not.
    """

    def __init__(self, folder: Path, accountant: Accountant, limit: Budget | None = None,
                 pins: Mapping[str, str] | None = None, signer: Signer | None = None) -> None:  # fmt: skip
        self._path, self._accountant, self._signer = folder / FILE, accountant, signer
        self.limit_to(limit, pins or {})
        self.sessions = PartySessions(folder)
        self._lines = disk.LineLog(self._path)
        self.contents = parse_lines(self._path, self._lines.read())

    def limit_to(self, limit: Budget | None, pins: Mapping[str, str]) -> None:
        """Set the party's budget over all jobs, and the parties that it accepts."""
        self._limit, self.peers = limit, Peers(self._path.parent, pins, self._signer)

    def read(self, job: str, ask: str, purpose: Purpose, data: str, op: PrivateOp, n: int, payload: Mapping[str, Any],
             budget: QueryBudget) -> float | None:  # fmt: skip
        """Record that an ask reads samples of the data set `data`, and its release, before it is answered.

        The result is the job's epsilon after it, None if the reply is not differentially private. A PartyError, and
        nothing is recorded, if it exceeds the budget of queries, the job's privacy budget or the party's own. An ask
        that was recorded before costs nothing again.
        """
        name = f"{PREFIXES[purpose]}{ask}"
        again = (job, name) in self.contents.answered
        if not again:
            of = data if budget.renew else None
            budget.check(purpose, self.contents.count(of), self.contents.count(of, job), self.contents.lost)
        epsilon, release = self._charge(job, ask, op, n, payload)
        if release is not None:
            self._add(Line(job, time.time(), ask, release.rate, release.noise, release.steps, name, data))
        elif not again:
            self._add(Line(job, time.time(), name=name, digest=data))
        return epsilon

    def _charge(self, job: str, ask: str, op: PrivateOp, n: int,
                payload: Mapping[str, Any]) -> tuple[float | None, Release | None]:  # fmt: skip
        """The job's epsilon after an ask, and the release to record for it; a PartyError if it exceeds a budget."""
        budget = op.budget
        if budget is None or n == 0:
            return None, None
        if (job, ask) in self.contents.spent:
            return self._accountant(self.contents.job_releases(job), budget.delta), None
        release = op.release(n, payload)
        epsilon = charge(self.contents.job_releases(job), release, budget, self._accountant)
        if self._limit is not None:
            lost = self.contents.lost.get(EPSILON, 0.0)
            charge(self.contents.all_releases, release, self._limit, self._accountant, lost)
        return epsilon, release

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

    def train(self, job: str, round: int, message: str, most: int) -> None:
        """Record an ask to train; a PartyError after `most` different ones in a round. A repeat counts once."""
        if not any(self._first(job, f"ask to train {round}.{place}", message) == message for place in range(most)):
            raise PartyError(
                f"the approved manifest allows {most} asks to train per round, and round {round + 1} has more"
            )

    def may_decline(self, most: int) -> None:
        """Raise a NotAdmitted once the party has declined `most` asks after it had read."""
        if self.contents.declined() >= most:
            raise NotAdmitted(
                f"its policy allows it to decline {most} asks over all jobs after it has read its samples, since each "
                "reveals a bit, and they are used up; see privacy.declines in party.toml"
            )

    def has_declined(self, job: str, ask: str) -> bool:
        """Whether an ask was declined. It is declined again: another answer would be another bit."""
        return (job, f"{DECLINED}{ask}") in self.contents.answered

    def declined(self, job: str, ask: str) -> None:
        """Record that an ask was declined after a reading; a repeat counts once."""
        self._first(job, f"{DECLINED}{ask}", "declined")

    def may_refuse(self, job: str, ask: str, most: int) -> bool:
        """Whether a model may be measured. An ask that was refused is refused again: another answer is another bit.

        A PartyError once `most` models were refused because of their loss.
        """
        if (job, f"{REFUSED}{ask}") in self.contents.answered:
            return False
        if self.contents.refused() >= most:
            raise PartyError(
                f"its policy allows it to refuse {most} models over all jobs because of their loss on its samples, "
                "since each reveals a bit, and they are used up; see broadcast.refusals in party.toml"
            )
        return True

    def refused(self, job: str, ask: str) -> None:
        """Record that a model was refused because of its loss; a repeat counts once."""
        self._first(job, f"{REFUSED}{ask}", "refused")

    def _first(self, job: str, name: str, digest: str) -> str:
        """Return the first digest recorded under `name`; record `digest` if there was none."""
        if (job, name) not in self.contents.answered:
            self._add(Line(job, time.time(), name=name, digest=digest))
        return self.contents.answered[job, name]

    def _add(self, line: Line) -> None:
        self._lines.add(msgspec.json.encode(line))
        self.contents.add(line)

    def begin_marks(self) -> None:
        """Add the key of the vault's marks, unless there is one."""
        if ("", MARKS) not in self.contents.answered:
            self._first("", MARKS, secrets.token_hex(32))

    def lose(self, lost: Mapping[str, float | None], marks: Iterable[str]) -> None:
        """Acknowledge that lines were lost: what they could have spent counts as spent. The secrets are replaced.

        Without them the party cannot answer a second time in an old sum or route, whose answers it may have forgotten.
        """
        self.sessions.forget_all()
        disk.put(self._path.parent / SECRET, [secrets.token_bytes(32)], steps("private"))
        self._add(Line("", time.time(), name=LOSS, lost=dict(lost), marks=tuple(sorted(marks))))

    def for_job(self, job: str, task: str = "") -> Vault:
        """The vault for the ops of a job, with the digest of its task."""
        return JobVault(self, job, task)


class JobVault(Vault):
    """A job's part of a party's vault."""

    def __init__(self, vault: PartyVault, job: str, task: str = "") -> None:
        self._vault, self._job, self._task = vault, job, task

    def once(self, name: str, digest: str) -> None:
        self._vault.once(self._job, name, digest)

    def begin_session(self, kind: str, name: str) -> bytes:
        return self._vault.sessions.begin(self._job, kind, name)

    def session(self, kind: str, name: str) -> bytes:
        return self._vault.sessions.secret(self._job, kind, name)

    def end_session(self, kind: str, name: str, answer: bytes) -> None:
        self._vault.sessions.end(self._job, kind, name, answer)

    def last_answer(self, kind: str, name: str) -> bytes | None:
        return self._vault.sessions.answer(self._job, kind, name)

    def sign(self, data: bytes) -> tuple[bytes, bytes]:
        return self._vault.peers.sign(data)

    def known(self, certificate: bytes) -> tuple[str, bytes]:
        return self._vault.peers.known(certificate)

    @property
    def scope(self) -> tuple[str, ...]:
        return self._vault.peers.federation, self._job

    @property
    def task(self) -> str:
        return self._task


def load_secret(folder: Path) -> bytes:
    """Load the party's secret: 32 random bytes, created once, which never leave.

    Everything that nobody may guess is derived from it.
    """
    path = folder / SECRET
    if not path.exists():
        disk.put(path, [secrets.token_bytes(32)], steps("private"))
    secret = path.read_bytes()
    if len(secret) != 32:
        raise DataError(f"{path} is damaged: it has {len(secret)} bytes, expected 32; move it away to create a new one")
    return secret
