"""The lines of a party's vault, and the spending that they record."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hansa.core.budget import Release, merged
from hansa.holdings.gateway import Purpose
from hansa.plumbing import disk
from hansa.plumbing.errors import ConfigError, DataError

FILE = "vault.jsonl"
DECLINED = "declined "  # prefix for asks that were declined because of the party's values
REFUSED = "refused "  # prefix for asks whose model was refused because of its loss on the party's samples
LOSS = "loss"  # the name of a line that acknowledges that lines were lost
MARKS = "marks"  # the name of the line with the key of the vault's marks
PREFIXES: Mapping[Purpose, str] = {  # of asks that read samples, by their purpose
    "train": "training ", "statistics": "statistics ", "match": "match ", "evaluate": "evaluation ",
    "describe": "description ",
}  # fmt: skip
EPSILON, DECLINES, REFUSALS = (
    "epsilon",
    "declines",
    "refusals",
)  # what may be lost, beside readings by their purpose and queries


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the vault: a release under its ask, the `digest` that was answered under `name`, or both.

    Under the name of a reading, `digest` is that of the data set. A loss has what counts as spent by it (None: without
    limit), and the marks of the vault that are missing since.
    """

    job: str
    at: float
    ask: str = ""
    rate: float = 0.0
    sigma: float = 0.0
    steps: int = 0
    name: str = ""
    digest: str = ""
    lost: dict[str, float | None] = {}
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class VaultContents:
    """The contents of a vault: releases by job and ask, and digests by job and name.

    `readings` counts the asks that read samples, by data set, job and purpose. The data set is "" where it is unknown.
    """

    spent: dict[tuple[str, str], Release] = field(default_factory=dict)
    answered: dict[tuple[str, str], str] = field(default_factory=dict)
    declines: Counter[str] = field(default_factory=Counter)  # of secure sums because of the party's values, by job
    refusals: Counter[str] = field(default_factory=Counter)  # of models because of their loss, by job
    readings: dict[tuple[str, str, str], int] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)  # what counts as spent since the record of it was lost
    missing: set[str] = field(default_factory=set)  # marks of lines whose loss was acknowledged

    def add(self, line: Line) -> None:
        """Take a line into account; of several answers under one name only the first counts."""
        if line.ask or not line.name:
            self.spent.setdefault((line.job, line.ask), Release(line.rate, line.sigma, line.steps))
        if line.name == LOSS:
            self._lose(line)
        elif line.name and (line.job, line.name) not in self.answered:
            self.answered[line.job, line.name] = line.digest
            self.declines[line.job] += line.name.startswith(DECLINED)
            self.refusals[line.job] += line.name.startswith(REFUSED)
            for purpose, prefix in PREFIXES.items():
                if line.name.startswith(prefix):
                    data = line.digest if re.fullmatch("[0-9a-f]{64}", line.digest) else ""
                    key = (data, line.job, purpose)
                    self.readings[key] = self.readings.pop(key, 0) + 1  # at the end: the last key was read last

    def _lose(self, line: Line) -> None:
        self.missing.update(line.marks)
        for name, amount in line.lost.items():
            self.lost[name] = self.lost.get(name, 0.0) + (math.inf if amount is None else amount)

    def count(self, data: str | None = None, job: str | None = None) -> dict[str, float]:
        """The readings by purpose: of a data set (None: of all, unknown ones count for each), in a job or in all."""
        out: dict[str, float] = {}
        for (of, name, purpose), count in self.readings.items():
            if (data is None or of in ("", data)) and (job is None or name == job):
                out[purpose] = out.get(purpose, 0) + count
        return out

    def declined(self) -> float:
        """The secure sums that were declined in all jobs, with those that count as declined by a loss."""
        return self.declines.total() + self.lost.get(DECLINES, 0.0)

    def refused(self) -> float:
        """The models that were refused for their loss in all jobs, with those that count as refused by a loss."""
        return self.refusals.total() + self.lost.get(REFUSALS, 0.0)

    def job_releases(self, job: str) -> tuple[Release, ...]:
        """The releases in a job."""
        return merged(release for (name, _), release in self.spent.items() if name == job)

    @property
    def all_releases(self) -> tuple[Release, ...]:
        """The releases in all jobs."""
        return merged(self.spent.values())

    @property
    def jobs(self) -> list[str]:
        """The jobs with releases or readings or declined asks, in order of their first line."""
        names = [job for job, _ in self.spent] + [job for job, name in self.answered if _counts(name)]
        return list(dict.fromkeys(names))

    @property
    def data(self) -> str:
        """The data set of the last reading; "" if it is unknown."""
        return next((data for data, _, _ in reversed(self.readings) if data), "")


def _counts(name: str) -> bool:
    return name.startswith((DECLINED, REFUSED, *PREFIXES.values()))


def parse_lines(path: Path, lines: Sequence[bytes]) -> VaultContents:
    """Parse the lines of a vault; a DataError if one is damaged, since the spending is unknown then."""
    contents, decoder = VaultContents(), msgspec.json.Decoder(Line)
    for number, text in enumerate(lines, 1):
        try:
            contents.add(decoder.decode(text))
        except (msgspec.DecodeError, ConfigError) as error:
            raise DataError(
                f"{path}, line {number}: damaged ({error}), so the privacy spending of this party is unknown; restore "
                "the file from a backup, or remove this line and all after it, and then acknowledge the loss with "
                "`hansa privacy acknowledge-loss`"
            ) from None
    return contents


def read_vault(folder: Path) -> VaultContents:
    """Read the vault in a party's folder, for display only."""
    return parse_lines(folder / FILE, vault_lines(folder))


def vault_lines(folder: Path) -> list[bytes]:
    """The complete lines of the vault in a party's folder."""
    path = folder / FILE
    return disk.whole(path.read_bytes()).split(b"\n")[:-1] if path.exists() else []
