"""The live page's view of an aggregator: jobs, the open ask, parties, the log and its verification.

It only reads: the ledger, the queue, and the state machine of a job's open ask. It is called only while a browser shows
the page, and remembers what it has read, so that each call reads only new data. The page shows no number about a single
party; with a `min_cohort`, the reasons that parties gave have no numbers either, as in the records of rounds.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import hansa
from hansa.core.round_record import without_numbers
from hansa.experiment.settings import Run
from hansa.net.aggregator.asks import WHERE
from hansa.net.aggregator.collecting import AskProgress
from hansa.net.aggregator.job import Job
from hansa.net.aggregator.job_records import ACTIVE
from hansa.net.aggregator.jobs import JobRunner
from hansa.net.aggregator.ledger import Ledger, LedgerError, log_lines
from hansa.net.aggregator.runtime import NetworkRuntime
from hansa.net.audit.entries import Fault
from hansa.net.audit.verify import Audit, Report
from hansa.net.transport.wire import Order, printable, unpack
from hansa.plumbing.errors import DataError, HansaError
from hansa.ui.events import LONGEST, Line, Look, shown

JOBS = 12  # jobs that are shown: the active ones, then the newest
ROWS = 200  # parties that are shown one by one
LINES = 2000  # most rounds of a job that are read in one call
REPLIES = 50_000  # most replies that are searched for rejections in one call
VERIFYING = 0.05  # seconds per call for verifying the log
REASONS = 3000  # most characters of why a job ended, which may list reasons of several parties
STEP = 50  # entries of the log that are read at once
ANEW = 600.0  # seconds after which the log is verified again from its start, or 20 times the last duration
BEFORE = ("describe", "prepare")  # the phases before the first round
PHASES = {"describe": "describing the data", "prepare": "preparing the data", "select": "selecting parties",
          "round": "training", "publish": "making the model to publish", "evaluate": "evaluating",
          "finetune": "fine-tuning", "deliver": "delivering the parties' own models"}  # fmt: skip


class Live:
    """An aggregator as the live page shows it (`hansa.ui.events.Source`). `about` adds fields that only the process
    knows."""

    def __init__(self, runner: JobRunner, about: Callable[[], dict[str, Any]] = dict) -> None:
        self._runner, self._ledger, self._registry, self._queue = runner, runner.ledger, runner.registry, runner.queue
        self._about = about
        self._clock = time.time() - time.monotonic()  # difference of the two clocks, fixed for the whole page
        self._jobs: list[dict[str, Any]] = []
        self._rounds: dict[str, int] = {}  # by job: the last round that was read
        self._sums: dict[str, dict[str, int]] = {}  # by job: bytes so far
        self._wanted: dict[str, int | None] = {}  # by job: the number of rounds it will have
        self._before: dict[str, dict[str, Any]] = {}  # by job: the last ask that was shown
        self._rejected: dict[int, tuple[int, str]] = {}  # by party: number of rejections, and the last reason
        self._replies = 0  # number of the last reply that was searched
        self._verifier = Verifier(self._ledger, self._registry.federation.read("ca.pem"))
        self._shown: Look = ({}, {})

    def look(self) -> Look:
        """The current state. If the ledger cannot be read, the last state stays, with the error."""
        try:
            rounds = self._jobs_and_rounds()
            values = {
                "about": self._about_it(None),
                "jobs": list(self._jobs),
                "log": self._verifier.look(),
                **{f"now:{id}": self._now(job) for id, job in self._runner.under_way.items() if id in rounds},
                **self._parties(),
            }
        except LedgerError as error:
            before, jobs = self._shown[0], self._shown[1]
            return {**before, "about": self._about_it(str(error))}, {job: [] for job in jobs}
        self._shown = values, rounds
        return values, rounds

    def _about_it(self, trouble: str | None) -> dict[str, Any]:
        return {"kind": "federation", "title": self._registry.federation.name, "version": hansa.__version__,
                "trouble": trouble, **self._about()}  # fmt: skip

    def _jobs_and_rounds(self) -> dict[str, list[Line]]:
        rows = self._ledger.all(f"SELECT id, status, reason, submitted, order_ FROM jobs ORDER BY {ACTIVE} DESC, "
                                "submitted DESC LIMIT ?", JOBS)  # fmt: skip
        rounds = dict[str, list[Line]]()
        self._jobs.clear()
        for row in rows:
            id = row["id"]
            if id not in self._wanted:
                self._wanted[id] = _rounds_of(row["order_"])
            rounds[id] = lines = self._new_rounds(id)
            sums = self._sums.setdefault(id, {"bytes_up": 0, "bytes_down": 0})
            for line in lines:
                for name in sums:
                    sums[name] += line.get(name) or 0
            self._jobs.append({
                "job": id, "status": row["status"], "reason": printable(row["reason"] or "")[:REASONS],
                "submitted": row["submitted"], "round": self._rounds.get(id, 0), "rounds": self._wanted[id], **sums,
            })  # fmt: skip
        memories: list[dict[str, Any]] = [self._rounds, self._sums, self._wanted, self._before]
        for memory in memories:
            for id in set(memory) - set(rounds):
                del memory[id]
        return rounds

    def _new_rounds(self, id: str) -> list[Line]:
        rows = self._ledger.all("SELECT round, line FROM rounds WHERE job = ? AND round > ? ORDER BY round LIMIT ?",
                                id, self._rounds.get(id, 0), LINES)  # fmt: skip
        if rows:
            self._rounds[id] = rows[-1]["round"]
        return [shown(json.loads(row["line"])) for row in rows]

    def _now(self, job: Job) -> dict[str, Any]:
        """The open ask of a job; between two asks, the last one."""
        runtime, progress = job.runtime, job.runtime.progress
        before = self._before.get(job.id, {"round": None, "of": {}})
        if progress is None:
            flights = len(runtime.flights)
            phase = f"{flights} tickets under way" if flights else "at work at the aggregator"
            return {**before, "phase": phase, "since": None, "until": None, "waiting": flights}
        now = self._before[job.id] = self._progress(runtime, progress)
        return now

    def _progress(self, runtime: NetworkRuntime, progress: AskProgress) -> dict[str, Any]:
        key, machine, names = progress.key, progress.machine, runtime.parties
        public = without_numbers if runtime.rules.min_cohort > 1 else str
        rows = self._ledger.all(f"SELECT party, why, rejected FROM replies WHERE {WHERE}", *key)
        of = {names[p]: f"missing: {_short(public(why))}" for p, why in dict(machine.missing).items()}
        of |= {names[p]: "pending" for p in list(machine.waiting)}
        for row in rows:
            how = "answered" if row["why"] is None else "rejected" if row["rejected"] else "refused"
            of[names[row["party"]]] = how if row["why"] is None else f"{how}: {_short(public(row['why']))}"
        counts = {how: sum(text.startswith(how) for text in of.values()) for how in ("missing", "rejected", "refused")}
        phase = next((text for name, text in PHASES.items() if key[2].startswith(name)), key[2])
        after = key[2].startswith(("publish", "evaluate"))  # the round is closed, and counted already
        of_round = None if key[2].startswith(BEFORE) else key[1] + (not after)
        return {
            "round": of_round, "phase": phase, "since": progress.since, "until": progress.until,
            "asked": len(machine.parties), "answered": sum(state == "answered" for state in of.values()),
            "waiting": sum(state == "pending" for state in of.values()),
            **counts, "of": dict(list(of.items())[:ROWS]),
        }  # fmt: skip

    def _parties(self) -> dict[str, Any]:
        rows = self._ledger.all("SELECT number, name, joined FROM parties ORDER BY number")
        states: dict[str, set[str]] = {}
        for row in self._ledger.all("SELECT DISTINCT name, state FROM certificates WHERE role = 'party'"):
            states.setdefault(row["name"], set()).add(row["state"])
        self._look_for_rejected()
        heard = self._queue.heard_of(row["number"] for row in rows)
        parties = []
        for row in rows:
            here, seen = heard[row["number"]]
            state = _state(states.get(row["name"], set()))
            count, reason = self._rejected.get(row["number"], (0, ""))
            parties.append({
                "number": row["number"], "name": row["name"], "here": here and state == "enrolled",
                "seen": None if seen is None or not row["joined"] else round(seen + self._clock),
                "state": state, "rejected": count, "reason": reason,
            })  # fmt: skip
        shown = sorted(parties, key=lambda party: party["here"] and not party["rejected"])[:ROWS]  # problems first
        total = {"total": len(parties), "here": sum(party["here"] for party in parties)}
        return {"parties": total, **{f"party:{party['name']}": party for party in shown}}

    def _look_for_rejected(self) -> None:
        """Count the rejections of each party, and keep its last reason; each reply is read once."""
        last = self._ledger.one("SELECT max(seq) AS n FROM replies")
        end = min((last["n"] if last is not None else None) or 0, self._replies + REPLIES)
        new = (
            "SELECT r.party, r.job, r.round, r.phase, r.why, r.rejected, r.seq, j.order_ FROM replies r LEFT JOIN "
            "jobs j ON j.id = r.job WHERE r.seq > ? AND r.seq <= ? AND r.why IS NOT NULL AND NOT r.given_up"
        )
        for row in self._ledger.all(new, self._replies, end):
            count, _ = self._rejected.get(row["party"], (0, ""))
            where = row["job"] if row["phase"].startswith(BEFORE) else f"{row['job']}, round {row['round'] + 1}"
            why = row["why"] if row["rejected"] or _least(row["order_"]) == 1 else without_numbers(row["why"])
            why = f"{where}: {'' if row['rejected'] else 'refused: '}{_short(why)}"
            self._rejected[row["party"]] = count + row["rejected"], why
        self._replies = end


class Verifier:
    """Verifies the aggregator's own log as `hansa audit` does, a few entries per call. At the end of the log it
    continues with new entries; after a while it starts again, since verified entries may have been changed."""

    def __init__(self, ledger: Ledger, authority: bytes) -> None:
        self._ledger, self._authority = ledger, authority
        self._begin()

    def _begin(self) -> None:
        self._audit, self._fault = Audit(self._authority), ""
        self._begun, self._spent = time.monotonic(), 0.0

    def look(self) -> dict[str, Any]:
        """The length of the log, its last signed head, the number of verified entries, and the first fault, if any."""
        size = int(self._ledger.all("SELECT coalesce(max(seq), 0) FROM log")[0][0])
        row = self._ledger.one("SELECT head, closed FROM rounds ORDER BY rowid DESC LIMIT 1")
        head = json.loads(row["head"]) if row is not None else {}
        if time.monotonic() - self._begun > max(ANEW, 20 * self._spent):
            self._begin()
        begun = time.monotonic()
        while not self._fault and self._audit.tree.size < size and time.monotonic() - begun < VERIFYING:
            self._verify(size)
        self._spent += time.monotonic() - begun
        shown_head = {name: head.get(name) for name in ("size", "root", "job", "round")}
        return {"size": size, "head": {**shown_head, "at": row["closed"]} if row is not None else None,
                "verified": self._audit.tree.size, "fault": self._fault, **_counts(self._audit.report)}  # fmt: skip

    def _verify(self, size: int) -> None:
        after = self._audit.tree.size
        try:
            lines = log_lines(self._ledger, after, min(size, after + STEP))
            for line in lines:
                self._audit.add_line(line[:-1])
            if self._audit.tree.size == after:
                raise Fault(f"after entry {after}: entries are missing")
        except (Fault, DataError) as error:
            self._fault = str(error)
        except LedgerError:
            raise
        except HansaError as error:  # for example, an entry with an invalid certificate
            self._fault = str(error)


def _counts(report: Report) -> dict[str, int]:
    """The number of verified answers of each kind."""
    return {name: getattr(report, name) for name in ("updates", "evaluations", "answers", "rejected", "refusals")}


def _short(why: str) -> str:
    return printable(why)[:LONGEST]


def _state(states: set[str]) -> str:
    """The state of a party, from the states of its certificates."""
    if states & {"new", "valid"}:
        return "enrolled"
    return "revoked" if "revoked" in states else "invited"


@functools.lru_cache(maxsize=JOBS)
def _least(order: bytes) -> int:
    """The minimum cohort of an order; 2 if it cannot be read, to be careful."""
    try:
        table = unpack(order, Order).experiment.get("run", {})
    except DataError:
        return 2
    least = table.get("min_cohort", 1) if isinstance(table, dict) else 2
    return least if isinstance(least, int) else 2


def _rounds_of(order: bytes) -> int | None:
    """The number of rounds of an order."""
    try:
        table = unpack(order, Order).experiment.get("run", {})
    except DataError:
        return None
    rounds = table.get("rounds", Run().rounds) if isinstance(table, dict) else None
    return rounds if isinstance(rounds, int) else None
