"""Results of a study: runs, measures over seeds, and significant differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hansa.artifacts.run_folder import SUMMARY, RunFolder, read_json, write_json
from hansa.metrics import statistics
from hansa.metrics.measures import MEASURES, OVER_PARTIES, TO_TARGET, measure_of, over_parties, reaches_beyond
from hansa.metrics.names import higher_is_better
from hansa.metrics.statistics import Difference, Estimate, Ranking
from hansa.plumbing.errors import ConfigError, nearest
from hansa.report.diagnosis import diverged, without_effect
from hansa.report.study_display import Axis, StudyDisplay
from hansa.study.cell import Cell
from hansa.study.spec import Study

if TYPE_CHECKING:
    pass

RESULTS = "results.json"
ALONE = "local-only"  # the baseline whose parties have models of their own


@dataclass(frozen=True)
class Outcome:
    """One run of a study: its rounds and its summary, or the reason why it failed."""

    cell: Cell
    history: list[dict[str, Any]]  # the lines of metrics.jsonl
    summary: dict[str, Any]  # summary.json
    failed: str | None = None
    run_dir: Path | None = None

    def measures(self, target: float | None = None, metric: str = "accuracy") -> dict[str, float | None]:
        """Values of MEASURES, and the final and best `metric`, by name.

        None without a value: not measured, not finite at the end, or target not reached. The first evaluation that
        meets the target counts."""
        out: dict[str, float | None] = {}
        evaluated = [line for line in self.history if "loss" in line or metric in line]
        last = evaluated[-1] if evaluated else {}
        for name in dict.fromkeys(("accuracy", "loss", metric)):
            values = [line[name] for line in evaluated if line.get(name) is not None]
            pick = max if higher_is_better(name) else min
            out[f"final_{name}"], out[f"best_{name}"] = last.get(name), pick(values) if values else None
        after = self.summary.get("finetuned", {}).get("after", {})
        for name in OVER_PARTIES:
            out[name] = (after if name == "finetuned" else last).get(over_parties(name, metric))
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
    """One tuning candidate at one rung: its `score` (mean over tuning seeds) after the rounds of the rung.

    `kept`: it continues to the next rung; at the last rung, it won. `edge`: the winner is the smallest or largest
    value tried, so a better value may lie beyond."""

    algorithm: str
    setting: str
    values: dict[str, Any]
    rung: int
    rounds: int
    score: float | None
    kept: bool
    metric: str = "accuracy"  # the metric of the score
    edge: bool = False


@dataclass(frozen=True, repr=False)
class Results(StudyDisplay):
    """All runs of a study, with tables, estimates and tests. Failed runs appear only in `outcomes` and `failed`."""

    study: Study
    outcomes: list[Outcome]
    trials: list[Trial]

    @property
    def algorithms(self) -> list[str]:
        """Labels of the algorithms, in the study's order."""
        return list(dict.fromkeys(outcome.cell.algorithm for outcome in self.outcomes))

    @property
    def baselines(self) -> list[str]:
        """Labels of the baselines among the algorithms; they are in no ranking."""
        return [choice.label for choice in self.study.algorithms if choice.baseline]

    @property
    def contenders(self) -> list[str]:
        """Labels of the algorithms that are not baselines."""
        return [name for name in self.algorithms if name not in self.baselines]

    @property
    def settings(self) -> list[str]:
        """Labels of the settings (partition, adversary and variant), in the study's order."""
        return list(dict.fromkeys(outcome.cell.setting for outcome in self.outcomes))

    @property
    def failed(self) -> list[Outcome]:
        """The failed runs."""
        return [outcome for outcome in self.outcomes if outcome.failed is not None]

    @cached_property
    def metric(self) -> str:
        """Metric of the comparison: the study's metric, else accuracy if measured, else the loss.

        Without test samples it is the training loss. Beside models of single parties, which no central test set
        measures, it is the mean over parties, on the same samples for all."""
        measured = {name for outcome in self.outcomes for line in outcome.history for name in line}
        known = [name for name in ("accuracy", "loss", "train_loss") if name in measured]
        usual = known[0] if known else "loss" if any(outcome.history for outcome in self.outcomes) else "accuracy"
        metric = self.study.metric or usual
        over = f"party_{metric}_mean"
        return over if (ALONE in self.baselines or self.tested) and over in measured else metric

    @cached_property
    def tested(self) -> dict[str, str]:
        """The test samples of each algorithm, if the algorithms have different ones; else empty."""
        found = {outcome.cell.algorithm: outcome.summary["tested"] for outcome in self.outcomes
                 if outcome.failed is None and "tested" in outcome.summary}  # fmt: skip
        return found if len(set(found.values())) > 1 else {}

    def runs(self, algorithm: str, setting: str) -> list[Outcome]:
        """Successful runs of an algorithm in a setting, one per seed."""
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
        by_seed = ((outcome.cell.seed, self._measures(outcome)) for outcome in self.runs(algorithm, setting))
        return {seed: measures[measure] for seed, measures in by_seed}

    @cached_property
    def _cached(self) -> dict[int, dict[str, float | None]]:
        return {}

    def _measures(self, outcome: Outcome) -> dict[str, float | None]:
        if id(outcome) not in self._cached:
            self._cached[id(outcome)] = outcome.measures(self.study.target, self.metric)
        return self._cached[id(outcome)]

    def estimate(self, measure: str, algorithm: str, setting: str) -> Estimate | None:
        """A measure over seeds, with a 95% interval; None if no run succeeded or none has the measure."""
        values = list(self.values(measure, algorithm, setting).values())
        censored = measure in TO_TARGET
        if (censored and self.study.target is None) or (not censored and all(v is None for v in values)):
            return None
        return statistics.estimate(values, censored)

    def differences(self, setting: str) -> list[Difference]:
        """Differences of the final metric for all pairs of algorithms in a setting, with significance.

        Pairs with a baseline are not tested: more tests would find less among the algorithms."""
        values = {}
        for algorithm in self.contenders:
            by_seed = self.values(f"final_{self.metric}", algorithm, setting)
            values[algorithm] = {seed: value for seed, value in by_seed.items() if value is not None}
        return statistics.differences(setting, values)

    def order(self, setting: str) -> list[str]:
        """Algorithms with a value in a setting, best final metric first; without the baselines."""
        sign = -1.0 if higher_is_better(self.metric) else 1.0
        means = {name: self.estimate(f"final_{self.metric}", name, setting) for name in self.contenders}
        finals = {name: each.mean for name, each in means.items() if each is not None and each.mean is not None}
        return sorted(finals, key=lambda name: sign * finals[name])

    def leaders(self, setting: str) -> list[str]:
        """The best algorithm of a setting, and all that are not significantly worse."""
        order = self.order(setting)
        worse = {pair: each.significant for each in self.differences(setting)
                 for pair in ((each.first, each.second), (each.second, each.first))}  # fmt: skip
        return [name for name in order if name == order[0] or not worse.get((order[0], name), False)]

    def ranks(self) -> Ranking:
        """Mean ranks of the algorithms, without baselines, by the final metric over blocks; a diverged run ranks last.

        A block is a setting with a seed for which every algorithm has a run."""
        higher = higher_is_better(self.metric)
        worst = -math.inf if higher else math.inf
        blocks = []
        for setting in self.settings:
            by_name = [self.values(f"final_{self.metric}", name, setting) | self._diverged(name, setting)
                       for name in self.contenders]  # fmt: skip
            for seed in self.study.seeds:
                if all(seed in values for values in by_name):
                    row = [values[seed] for values in by_name]
                    blocks.append([worst if value is None else value for value in row])
        return statistics.ranking(self.contenders, blocks, higher)

    def _diverged(self, algorithm: str, setting: str) -> dict[int, float | None]:
        """None by seed, for an algorithm's runs in a setting that failed because they diverged."""
        return {outcome.cell.seed: None for outcome in self.failed if outcome.cell.algorithm == algorithm
                and outcome.cell.setting == setting and diverged(outcome.history) is not None}  # fmt: skip

    def curve(
        self, algorithm: str, setting: str, metric: str, against: Axis = "rounds"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(x, mean, low, high) of a metric over seeds, with the 95% interval at each x.

        With one seed, low and high are the mean. The curve ends where the shortest run ends. Against bytes (up and
        down, of all parties) or simulated seconds, runs are interpolated linearly on a common grid."""
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
        intervals = [statistics.interval(column) for column in values.T]
        mean, low, high = (np.array([each[i] for each in intervals], dtype=np.float64) for i in range(3))
        return grid, mean, low, high

    def only(self, outcomes: list[Outcome]) -> Results:
        """Results with only these runs."""
        return Results(self.study, outcomes, [])

    def rows(self) -> list[dict[str, Any]]:
        """One row per run: labels, seed, and every measure."""
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
        """A pandas DataFrame with one row per run; pandas is an optional dependency."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_frame needs pandas: pip install 'hansa[notebook]'") from None
        return pandas.DataFrame(self.rows())

    def table(self) -> list[dict[str, Any]]:
        """One row per setting and algorithm, best first within a setting.

        Columns: `setting`, `algorithm`, `best` (of the setting), `leads` (not significantly worse than the best), and
        the estimate of each measure by its name."""
        out = []
        names = dict.fromkeys((f"final_{self.metric}", *MEASURES))
        for setting in self.settings:
            order = self.order(setting)
            alike = not self.tested or self.metric.startswith("party_")  # whether all are measured on the same samples
            leaders = self.leaders(setting) if order and alike else []
            for name in [*order, *(name for name in self.algorithms if name not in order)]:
                row: dict[str, Any] = {"setting": setting, "algorithm": name}
                row |= {"best": alike and name in order[:1], "leads": name in leaders}
                out.append(row | {measure: self.estimate(measure, name, setting) for measure in names})
        return out

    def beyond(self, measures: Sequence[str]) -> str | None:
        """Explanation of the mark "!", if a row of the table has one."""
        metrics = {name: measure_of(name, self.metric) for name in measures}
        if not any(reaches_beyond(row[name], metrics[name]) for row in self.table() for name in metrics):
            return None
        return (
            "! the interval reaches beyond the possible values, so it is meaningless: too few seeds for how much the "
            "runs differ"
        )

    def __repr__(self) -> str:
        counts = ((self.algorithms, "algorithm"), (self.settings, "setting"), (self.outcomes, "run"))
        words = [f"{len(items)} {word}{'s' * (len(items) != 1)}" for items, word in counts]
        words += [f"{len(self.failed)} failed"] * bool(self.failed)
        return f"<Results of {self.study.name}: {', '.join(words)}>"

    def save(self, folder: str | Path | None = None) -> Path:
        """Write the results for `load` to a folder, by default the study's; run folders are not copied."""
        path = Path(folder) if folder is not None else self.study.folder
        if path is None:
            raise ConfigError("this study has no folder; pass a folder to save()")
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
        """Load the results that `hansa compare` wrote to a folder."""
        path = Path(folder)
        if not (path / RESULTS).exists():
            raise ConfigError(f"{path} holds no results of a study (no {RESULTS}); run `hansa compare` first")
        tree = read_json(path / RESULTS)
        study = replace(Study.of_plain(tree["study"]), folder=path)
        outcomes = []
        for run in tree["runs"]:
            place = None if run["run_dir"] is None else path / run["run_dir"]
            outcomes.append(outcome_of(Cell.of_plain(run), place, run["failed"]))
        return cls(study, outcomes, [Trial(**trial) for trial in tree["trials"]])


def outcome_of(cell: Cell, run_dir: Path | None, failed: str | None = None) -> Outcome:
    """Read the outcome of a run from its folder."""
    if run_dir is None or not run_dir.exists():
        missing = failed or (None if run_dir is None else f"the folder {run_dir} no longer exists")
        return Outcome(cell, [], {}, missing, run_dir)
    summary = read_json(run_dir / SUMMARY) if (run_dir / SUMMARY).exists() else {}
    history = RunFolder(run_dir).history()
    return Outcome(cell, history, summary, failed or without_effect(history) or diverged(history), run_dir)


def _points(history: Sequence[dict[str, Any]], metric: str, against: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Points at which a metric was measured, and its values."""
    x, y, spent = [], [], 0
    for line in history:
        spent += line["bytes_up"] + line["bytes_down"]
        if line.get(metric) is not None:
            at = {"rounds": line["round"], "bytes": spent, "simulated_seconds": line.get("simulated_seconds")}[against]
            if at is not None:
                x.append(float(at))
                y.append(float(line[metric]))
    return np.array(x), np.array(y)
