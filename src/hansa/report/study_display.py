"""Display of a study's results: findings, pictures, a table in a notebook, the report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hansa.metrics.measures import OVER_PARTIES, measure_of, written
from hansa.metrics.statistics import Difference, Estimate, Ranking
from hansa.plumbing.errors import ConfigError
from hansa.report.display import human_bytes

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

Axis = Literal["rounds", "bytes", "simulated_seconds"]


class StudyDisplay(ABC):
    """Interface of a study's results for reports, and their own display methods."""

    study: Any  # hansa.study.Study
    outcomes: list[Any]  # hansa.study.Outcome, one per run
    trials: list[Any]  # hansa.study.Trial, one per candidate and rung of tuning

    @property
    @abstractmethod
    def metric(self) -> str: ...
    @property
    @abstractmethod
    def tested(self) -> dict[str, str]: ...
    @property
    @abstractmethod
    def algorithms(self) -> list[str]: ...
    @property
    @abstractmethod
    def baselines(self) -> list[str]: ...
    @property
    @abstractmethod
    def contenders(self) -> list[str]: ...
    @property
    @abstractmethod
    def settings(self) -> list[str]: ...
    @property
    @abstractmethod
    def failed(self) -> list[Any]: ...
    @abstractmethod
    def runs(self, algorithm: str, setting: str) -> list[Any]: ...
    @abstractmethod
    def values(self, measure: str, algorithm: str, setting: str) -> dict[int, float | None]: ...
    @abstractmethod
    def estimate(self, measure: str, algorithm: str, setting: str) -> Estimate | None: ...
    @abstractmethod
    def differences(self, setting: str) -> list[Difference]: ...
    @abstractmethod
    def order(self, setting: str) -> list[str]: ...
    @abstractmethod
    def leaders(self, setting: str) -> list[str]: ...
    @abstractmethod
    def ranks(self) -> Ranking: ...
    @abstractmethod
    def only(self, outcomes: list[Any]) -> StudyDisplay: ...
    @abstractmethod
    def curve(
        self, algorithm: str, setting: str, metric: str, against: Axis = "rounds"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...
    @abstractmethod
    def table(self) -> list[dict[str, Any]]: ...
    @abstractmethod
    def beyond(self, measures: Sequence[str]) -> str | None: ...

    def findings(self) -> list[str]:
        """The main results as sentences; the report begins with them."""
        from hansa.report.study_findings import Names, findings

        return findings(self, Names(self))

    def plot(self, name: str | None = None) -> Figure:
        """A picture of the report by name, by default the metric against rounds (accuracy-rounds).

        `pictures` lists the names."""
        from hansa.report.study_report import pictures

        wanted = name or f"{self.metric}-rounds"
        seen = []
        for picture in pictures(self):
            if picture.name == wanted:
                return picture.figure
            seen.append(picture.name)
        raise ConfigError(f"this study has no picture {wanted!r}; it has: {', '.join(seen)}")

    @property
    def pictures(self) -> list[str]:
        """The names that `plot` accepts."""
        from hansa.report.study_report import pictures

        return [picture.name for picture in pictures(self)]

    def _repr_html_(self) -> str:
        columns = [f"final_{self.metric}", *OVER_PARTIES, "bytes_up"]
        if self.study.target is not None:
            columns.insert(1, "rounds_to_target")
        rows = self.table()
        columns = [name for name in columns if any(row.get(name) is not None for row in rows)]
        labels = ["setting", "algorithm", *(measure_of(name, self.metric).label for name in columns)]
        head = "".join(f'<th scope="col">{escape(label)}</th>' for label in labels)
        body = ""
        for row in rows:
            name = escape(row["algorithm"]) + (" *" if row["best"] else " ~" if row["leads"] else "")
            cells = "".join(f"<td>{escape(_cell(column, self.metric, row[column]))}</td>" for column in columns)
            body += f"<tr><td>{escape(row['setting'])}</td><td>{name}</td>{cells}</tr>"
        note = f"* best final {escape(self.metric)} of the setting, ~ not significantly worse; 95% intervals over seeds"
        note += f"; {beyond}" if (beyond := self.beyond(columns)) else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{note}</p>"

    def report(self, folder: str | Path | None = None) -> Path:
        """Write the report (report.html, report.md, plots/) to a folder, by default the study's; return its page."""
        from hansa.report.study_report import write

        place = folder if folder is not None else self.study.folder
        if place is None:
            raise ConfigError("this study has no folder; pass a folder to report()")
        return next(path for path in write(self, place) if path.suffix == ".html")


def _cell(measure: str, metric: str, estimate: Estimate | None) -> str:
    """Format an estimate for a notebook's table; for bytes, which hardly depend on the seed, only the mean."""
    if measure == "bytes_up" and estimate is not None and estimate.mean is not None:
        return human_bytes(estimate.mean)
    return written(estimate, measure=measure_of(measure, metric))
