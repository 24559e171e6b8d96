"""The content of the live page of a simulation, read from the run's folder while the run writes it.

The run does no work for the page. How the run ended is not in the folder; the process that started the page sends it.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hansa
from hansa.plumbing.errors import ConfigError
from hansa.ui.events import LONGEST, Line, Look, shown

METRICS, EXPERIMENT, REPORT = "metrics.jsonl", "experiment.json", "report.html"  # as `hansa.run` names them
PARTIES = 200  # parties that are shown; missing and rejected ones first
FIRST = ("accuracy", "loss")  # metrics of a party on its own test samples that are shown first
OWN = 6  # such metrics that are shown
CHUNK = 2**22  # bytes of metrics that one look reads


class RunFolderSource:
    """The folder of a run, as a `hansa.ui.events.Source` and a `hansa.ui.page.Control`.

    `on_stop` is called when somebody with the token presses Stop.
    """

    def __init__(self, path: Path, token: str, on_stop: Callable[[], None]) -> None:
        self.path, self._token, self._on_stop = path, token, on_stop
        self.status, self.reason = "running", ""  # as the run reports them
        self.linked = False  # whether the page links to the report
        self._begin()

    def _begin(self) -> None:
        self._at = self._round = 0
        self._sums = {"bytes_up": 0, "bytes_down": 0}
        self._parties: dict[str, dict[str, Any]] = {}

    @property
    def ended(self) -> bool:
        """Whether the run has finished, failed or stopped."""
        return self.status not in ("running", "stopping")

    def look(self) -> Look | None:
        """As `Source.look`; None if the run went back to a checkpoint."""
        lines = self._new_lines()
        if lines is None:
            self._begin()
            return None
        for line in lines:
            self._count(line)
        name = self.path.name
        job = {"job": name, "status": self.status, "reason": self.reason[:LONGEST], "submitted": None,
               "round": self._round, "rounds": self._rounds(), **self._sums}  # fmt: skip
        if self.ended and (self.path / REPORT).exists():
            job |= {"report": str(self.path / REPORT), "linked": self.linked}
        about = {"kind": "simulation", "title": name, "version": hansa.__version__, "trouble": None, "starts": False,
                 "stops": True, "ended": self.ended and not self.linked}  # fmt: skip
        lost = sum(bool(party["missing"] or party["rejected"]) for party in self._parties.values())
        parties = sorted(self._parties.values(), key=lambda party: (-party["rejected"], -party["missing"]))[:PARTIES]
        values = {"about": about, "jobs": [job], "parties": {"total": lost},
                  **{f"party:{party['name']}": dict(party) for party in parties}}  # fmt: skip
        return values, {name: [shown(line) for line in lines]}

    def _new_lines(self) -> list[Line] | None:
        """The rounds since the last look; None if they do not follow the rounds that were read."""
        try:
            with open(self.path / METRICS, "rb") as file:
                if file.seek(0, 2) < self._at:
                    return None
                file.seek(self._at)
                data = file.read(CHUNK)
        except FileNotFoundError:
            return [] if self._at == 0 else None
        whole = data[: data.rfind(b"\n") + 1]
        try:
            lines: list[Line] = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            return None
        if any(line["round"] != self._round + place for place, line in enumerate(lines, 1)):
            return None
        self._at += len(whole)
        self._round += len(lines)
        return lines

    def _count(self, line: Mapping[str, Any]) -> None:
        for name in self._sums:
            self._sums[name] += line.get(name) or 0
        for how in ("missing", "rejected"):
            for party, why in line.get(how, {}).items():
                row = self._row(party)
                row[how] += 1
                row["reason"] = f"round {line['round']}: {str(why)[:LONGEST]}"
        for party, metrics in (line.get("parties") or line.get("worst_parties") or {}).items():
            names = sorted(metrics, key=lambda name: (name not in FIRST, FIRST.index(name) if name in FIRST else 0))
            self._row(party)["scores"] = {name: metrics[name] for name in names[:OWN]}

    def _row(self, party: str) -> dict[str, Any]:
        """The row of a party; of too many parties, a row that is not shown."""
        row = {"number": len(self._parties), "name": party, "missing": 0, "rejected": 0, "reason": ""}
        if party not in self._parties and len(self._parties) >= 100 * PARTIES:
            return row
        return self._parties.setdefault(party, row)

    def _rounds(self) -> int | None:
        try:
            rounds = json.loads((self.path / EXPERIMENT).read_bytes())["run"]["rounds"]
        except (OSError, ValueError, KeyError, TypeError):  # not written yet
            return None
        return rounds if isinstance(rounds, int) else None

    # Control of the run

    def admits(self, token: str) -> bool:
        """Whether this is the token of the page."""
        return hmac.compare_digest(self._token.encode(), token.encode(errors="replace"))

    def start(self, experiment: str, name: str) -> tuple[str, list[str]]:
        """Refused: a simulation has one run."""
        raise ConfigError("the page of a simulation cannot start jobs; use `hansa run`")

    def stop(self, job: str) -> bool:
        """Stop the run after its current round; it can be resumed."""
        if self.ended:
            return False
        self.status = "stopping"
        self._on_stop()
        return True

    def report(self) -> bytes | None:
        """The report of the run, once it has ended."""
        path = self.path / REPORT
        return path.read_bytes() if self.ended and path.exists() else None
