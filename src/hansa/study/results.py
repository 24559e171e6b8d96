"""What a study has found: its runs, their measures over seeds, and which differences count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hansa.artifacts.run_folder import SUMMARY, RunFolder, read_json, write_json
from hansa.core.errors import ConfigError, nearest
from hansa.metrics import statistics
from hansa.metrics.measures import MEASURES, TO_TARGET, measure_of, reaches_beyond
from hansa.metrics.names import higher_is_better, plain_metric
from hansa.metrics.statistics import Difference, Estimate, Ranking
from hansa.report.diagnosis import without_effect
from hansa.report.study_display import Axis, StudyDisplay
from hansa.study.cell import Cell
from hansa.study.spec import Study

if TYPE_CHECKING:
    pass

RESULTS = "results.json"


@dataclass(frozen=True)
class Outcome:
    """One run of a study: its rounds and its summary, or in one sentence why it could not be done."""

    cell: Cell
    history: list[dict[str, Any]]  # the lines of metrics.jsonl
    summary: dict[str, Any]  # summary.json
    failed: str | None = None
    run_dir: Path | None = None

    def measures(self, target: float | None = None, metric: str = "accuracy") -> dict[str, float | None]:
        """The names of MEASURES, and final and best `metric`; None where there is no value: not measured, no finite
        number at the end, or a target never reached. A target counts from the first evaluation that meets it."""
        out: dict[str, float | None] = {}
        evaluated = [line for line in self.history if "loss" in line or metric in line]
        last = evaluated[-1] if evaluated else {}
        for name in dict.fromkeys(("accuracy", "loss", metric)):
            values = [line[name] for line in evaluated if line.get(name) is not None]
            pick = max if higher_is_better(name) else min
            out[f"final_{name}"], out[f"best_{name}"] = last.get(name), pick(values) if values else None
        out["worst_tenth"] = last.get(f"party_{plain_metric(metric)}_worst_tenth")
        out |= dict.fromkeys(TO_TARGET)
        spent = 0
        for line in self.history:
            spent += line["bytes_up"] + line["bytes_down"]
            value = line.get(metric)
            if target is None or value is None:
                continue
            if value >= target if higher_is_better(metric) else value <= target:
                out["rounds_to_target"] = float(line["round"])
                out["simulated_seconds_to_target"] = line.get("simulated_seconds")
                out["bytes_to_target"] = float(spent)
                break
        for name in ("bytes_up", "bytes_down", "simulated_seconds", "seconds"):
            value = self.summary.get(name)
            out[name] = None if value is None else float(value)
        return out


@dataclass(frozen=True)
class Trial:
    """One candidate of tuning at one rung: its `score` (mean over tuning seeds) after so many rounds, and whether it
    was kept for the next rung; at the last rung, whether it won. `edge` says, of a winner, that it lies at an end of
    the values tried, so that a better one may lie beyond."""

    algorithm: str
    setting: str
    values: dict[str, Any]
    rung: int
    rounds: int
    score: float | None
    kept: bool
    metric: str = "accuracy"  # what the score is of
    edge: bool = False


@dataclass(frozen=True, repr=False)
class Results(StudyDisplay):
    """All runs of a study, to be looked at from every side. Failed runs are in `outcomes` and count nowhere else."""

    study: Study
    outcomes: list[Outcome]
    trials: list[Trial]

    @property
    def algorithms(self) -> list[str]:
        """Labels of the algorithms, in the study's order."""
        return list(dict.fromkeys(outcome.cell.algorithm for outcome in self.outcomes))

    @property
    def settings(self) -> list[str]:
        """Labels of the settings (partition, adversary and variant), in the study's order."""
        return list(dict.fromkeys(outcome.cell.setting for outcome in self.outcomes))

    @property
    def failed(self) -> list[Outcome]:
        """The runs that could not be done."""
        return [outcome for outcome in self.outcomes if outcome.failed is not None]

    @cached_property
    def metric(self) -> str:
        """What algorithms are compared by: the study's metric, or accuracy where it is measured, else the loss."""
        if self.study.metric is not None:
            return self.study.metric
        measured = any("accuracy" in line for outcome in self.outcomes for line in outcome.history)
        return "accuracy" if measured or not self.outcomes else "loss"

    def runs(self, algorithm: str, setting: str) -> list[Outcome]:
        """The runs of an algorithm in a setting that were done, one a seed."""
        for name, known in ((algorithm, self.algorithms), (setting, self.settings)):
            if name not in known:
                raise ConfigError(f"the study has no {name!r}{nearest(name, known)}")
        return [
            outcome
            for outcome in self.outcomes
            if outcome.cell.algorithm == algorithm and outcome.cell.setting == setting and outcome.failed is None
        ]

    def values(self, measure: str, algorithm: str, setting: str) -> dict[int, float | None]:
        """A measure of each run, by seed."""
        known = {*MEASURES, f"final_{self.metric}", f"best_{self.metric}"}
        if measure not in known:
            raise ConfigError(f"unknown measure {measure!r}{nearest(measure, known)}")
        found = ((outcome.cell.seed, self._measures(outcome)) for outcome in self.runs(algorithm, setting))
        return {seed: measures[measure] for seed, measures in found}

    @cached_property
    def _cached(self) -> dict[int, dict[str, float | None]]:
        return {}

    def _measures(self, outcome: Outcome) -> dict[str, float | None]:
        if id(outcome) not in self._cached:
            self._cached[id(outcome)] = outcome.measures(self.study.target, self.metric)
        return self._cached[id(outcome)]

    def estimate(self, measure: str, algorithm: str, setting: str) -> Estimate | None:
        """A measure over seeds, with a 95% interval; None where no run was done, or none has such a measure."""
        values = list(self.values(measure, algorithm, setting).values())
        censored = measure in TO_TARGET
        if (censored and self.study.target is None) or (not censored and all(v is None for v in values)):
            return None
        return statistics.estimate(values, censored)

    def differences(self, setting: str) -> list[Difference]:
        """All pairs of algorithms in a setting: by how much their final metric differs, and whether that counts."""
        values = {}
        for algorithm in self.algorithms:
            found = self.values(f"final_{self.metric}", algorithm, setting)
            values[algorithm] = {seed: value for seed, value in found.items() if value is not None}
        return statistics.differences(setting, values)

    def order(self, setting: str) -> list[str]:
        """The algorithms that have a value in a setting, the best final metric first."""
        sign = -1.0 if higher_is_better(self.metric) else 1.0
        means = {name: self.estimate(f"final_{self.metric}", name, setting) for name in self.algorithms}
        found = {name: each.mean for name, each in means.items() if each is not None and each.mean is not None}
        return sorted(found, key=lambda name: sign * found[name])

    def leaders(self, setting: str) -> list[str]:
        """The best algorithm of a setting, and all that are not significantly worse."""
        order = self.order(setting)
        worse = {pair: each.significant for each in self.differences(setting)
                 for pair in ((each.first, each.second), (each.second, each.first))}  # fmt: skip
        return [name for name in order if name == order[0] or not worse.get((order[0], name), False)]

    def ranks(self) -> Ranking:
        """Mean ranks by the final metric over blocks, a block being a setting with a seed in which every algorithm was
        run; a run whose metric is no number any more ranks last."""
        higher = higher_is_better(self.metric)
        worst = -math.inf if higher else math.inf
        blocks = []
        for setting in self.settings:
            by_name = [self.values(f"final_{self.metric}", name, setting) for name in self.algorithms]
            for seed in self.study.seeds:
                if all(seed in values for values in by_name):
                    row = [values[seed] for values in by_name]
                    blocks.append([worst if value is None else value for value in row])
        return statistics.ranking(self.algorithms, blocks, higher)

    def curve(
        self, algorithm: str, setting: str, metric: str, against: Axis = "rounds"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(x, mean, low, high) of a metric over seeds, with the 95% interval at each x (the mean itself where there is
        one seed only). It ends where the first of the runs ends. Against bytes (up and down, of all parties) or
        simulated seconds, runs lie on a common grid, by linear interpolation."""
        lines = [_points(outcome.history, metric, against) for outcome in self.runs(algorithm, setting)]
        lines = [line for line in lines if len(line[0])]
        if not lines:
            return (np.zeros(0),) * 4
        if against == "rounds":
            common = set.intersection(*(set(x) for x, _ in lines))
            grid = np.array(sorted(common))
        elif all(np.array_equal(lines[0][0], x) for x, _ in lines):
            grid = lines[0][0]
        else:
            ends = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
            grid = np.linspace(*ends, max(2, *(len(x) for x, _ in lines)))
        values = np.array([np.interp(grid, x, y) for x, y in lines])
        if len(values) == 1:
            return grid, values[0], values[0], values[0]
        found = [statistics.interval(column) for column in values.T]
        mean, low, high = (np.array([each[i] for each in found], dtype=np.float64) for i in range(3))
        return grid, mean, low, high

    def only(self, outcomes: list[Outcome]) -> Results:
        """Some of the runs by themselves."""
        return Results(self.study, outcomes, [])

    def rows(self) -> list[dict[str, Any]]:
        """A row a run: labels, seed, and every measure."""
        return [
            {
                "setting": outcome.cell.setting, "partition": outcome.cell.partition,
                "adversary": outcome.cell.adversary, "variant": outcome.cell.variant,
                "algorithm": outcome.cell.algorithm, "seed": outcome.cell.seed, **self._measures(outcome),
                "failed": outcome.failed,
            }
            for outcome in self.outcomes
        ]  # fmt: skip

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row a run; pandas is an extra."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_frame needs pandas: pip install 'hansa[notebook]'") from None
        return pandas.DataFrame(self.rows())

    def table(self) -> list[dict[str, Any]]:
        """A row a setting and algorithm, the best first within a setting: `setting`, `algorithm`, `best` (of all in the
        setting), `leads` (not significantly worse than the best), and the estimate of each measure under its name."""
        out = []
        names = dict.fromkeys((f"final_{self.metric}", *MEASURES))
        for setting in self.settings:
            order = self.order(setting)
            leaders = self.leaders(setting) if order else []
            for name in [*order, *(name for name in self.algorithms if name not in order)]:
                row: dict[str, Any] = {"setting": setting, "algorithm": name}
                row |= {"best": name in order[:1], "leads": name in leaders}
                out.append(row | {measure: self.estimate(measure, name, setting) for measure in names})
        return out

    def beyond(self, measures: Sequence[str]) -> str | None:
        """What "!" after an interval means, where a row of the table has one."""
        metrics = {name: measure_of(name, self.metric) for name in measures}
        if not any(reaches_beyond(row[name], metrics[name]) for row in self.table() for name in metrics):
            return None
        return (
            "! the interval reaches beyond the possible values, so it is meaningless: too few seeds for how much the "
            "runs differ"
        )

    def __repr__(self) -> str:
        counts = ((self.algorithms, "algorithm"), (self.settings, "setting"), (self.outcomes, "run"))
        words = [f"{len(found)} {word}{'s' * (len(found) != 1)}" for found, word in counts]
        words += [f"{len(self.failed)} failed"] * bool(self.failed)
        return f"<Results of {self.study.name}: {', '.join(words)}>"

    def save(self, folder: str | Path | None = None) -> Path:
        """Write what `load` needs to a folder, the study's own by default; the runs stay where they are."""
        path = Path(folder) if folder is not None else self.study.folder
        if path is None:
            raise ConfigError("this study has no folder; give save() one")
        path.mkdir(parents=True, exist_ok=True)
        runs = []
        for outcome in self.outcomes:
            place = outcome.run_dir
            if place is not None and place.is_relative_to(path):
                place = place.relative_to(path)
            runs.append({**outcome.cell.plain(), "failed": outcome.failed, "run_dir": None if place is None else
                         str(place)})  # fmt: skip
        trials = [vars(trial) for trial in self.trials]
        write_json(path / RESULTS, {"study": self.study.plain(), "runs": runs, "trials": trials})
        return path / RESULTS

    @classmethod
    def load(cls, folder: str | Path) -> Results:
        """The results that `hansa compare` has left in a folder."""
        path = Path(folder)
        if not (path / RESULTS).exists():
            raise ConfigError(f"{path} holds no results of a study: it has no {RESULTS}; run `hansa compare` first")
        tree = read_json(path / RESULTS)
        study = replace(Study.of_plain(tree["study"]), folder=path)
        outcomes = []
        for run in tree["runs"]:
            place = None if run["run_dir"] is None else path / run["run_dir"]
            outcomes.append(outcome_of(Cell.of_plain(run), place, run["failed"]))
        return cls(study, outcomes, [Trial(**trial) for trial in tree["trials"]])


def outcome_of(cell: Cell, run_dir: Path | None, failed: str | None = None) -> Outcome:
    """A run as its folder tells it."""
    if run_dir is None or not run_dir.exists():
        missing = failed or (None if run_dir is None else f"the folder {run_dir} is not there any more")
        return Outcome(cell, [], {}, missing, run_dir)
    summary = read_json(run_dir / SUMMARY) if (run_dir / SUMMARY).exists() else {}
    history = RunFolder(run_dir).history()
    return Outcome(cell, history, summary, failed or without_effect(history), run_dir)


def _points(history: Sequence[dict[str, Any]], metric: str, against: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Where a metric was measured, and what it was."""
    x, y, spent = [], [], 0
    for line in history:
        spent += line["bytes_up"] + line["bytes_down"]
        if line.get(metric) is not None:
            at = {"rounds": line["round"], "bytes": spent, "simulated_seconds": line.get("simulated_seconds")}[against]
            if at is not None:
                x.append(float(at))
                y.append(float(line[metric]))
    return np.array(x), np.array(y)
