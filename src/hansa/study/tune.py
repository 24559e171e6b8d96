"""Tuning by successive halving, with the same budget for each algorithm.

Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016. All n
candidates run for a part of the rounds, the better half continues to twice as many rounds, and so on, until two are
left and have run for half of the study's rounds. Candidates continue from their checkpoints.

Each algorithm is tuned separately in each setting, over the same number of candidates, with seeds that the comparison
does not use. Candidates are scored on the parties' own held-out samples if there are any, else on the test set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hansa.artifacts.run_folder import RunFolder
from hansa.metrics.names import higher_is_better
from hansa.report.diagnosis import diverged, without_effect
from hansa.study.cell import Cell, key_of
from hansa.study.pool import CellRun
from hansa.study.results import Trial
from hansa.study.spec import TUNING_SEED, Study

LAST = 3  # a score is the mean of this many evaluations: single ones are noisy if few parties train per round
Run = Callable[[str, Sequence[CellRun]], dict[Path, str]]
Place = tuple[str, str]  # an algorithm in a setting


def rungs(candidates: int, rounds: int) -> list[int]:
    """Rounds after which candidates are compared: with 4 candidates and 40 rounds, 10 and 20."""
    count = math.ceil(math.log2(candidates)) if candidates > 1 else 0
    return sorted({max(1, math.ceil(rounds / 2 ** (count - i))) for i in range(count)})


def seeds(study: Study) -> list[int]:
    """Seeds for tuning, none of which the comparison uses."""
    free = (seed for seed in range(TUNING_SEED, TUNING_SEED + study.tune_seeds + len(study.seeds) + 1))
    return [seed for seed in free if seed not in study.seeds][: study.tune_seeds]


def tune(study: Study, folder: Path, run: Run) -> tuple[dict[Place, dict[str, Any]], list[Trial]]:
    """Find the best values for each algorithm in each setting; return them and all trials."""
    apart = dataclasses.replace(study, seeds=tuple(seeds(study)))
    left: dict[Place, list[dict[str, Any]]] = {}
    cells: dict[tuple[Place, int], list[Cell]] = {}  # by place and candidate's number, one cell per seed
    count = len(study.candidates(study.algorithms[0].label))
    for number in range(count):
        choice = {c.label: study.candidates(c.label)[number] for c in study.algorithms}
        everywhere = {(cell.algorithm, cell.setting): choice[cell.algorithm] for cell in apart.cells()}
        for cell in apart.cells(everywhere):
            cells.setdefault(((cell.algorithm, cell.setting), number), []).append(cell)
            left.setdefault((cell.algorithm, cell.setting), study.candidates(cell.algorithm))
    alive = {place: list(range(count)) for place in left}
    trials: list[Trial] = []
    total = {place: cells[place, 0][0].experiment.run.rounds for place in left}
    steps = max(len(rungs(count, rounds)) for rounds in total.values())
    for rung in range(steps):
        jobs: dict[tuple[Place, int], list[CellRun]] = {}
        for place, numbers in alive.items():
            ladder = rungs(count, total[place])
            if rung < len(ladder):
                for number in numbers:
                    tried = ", ".join(f"{name}={value}" for name, value in left[place][number].items())
                    jobs[place, number] = [_job(cell, folder, ladder[rung], tried) for cell in cells[place, number]]
        failed = run(f"tuning, rung {rung + 1} of {steps}", [job for each in jobs.values() for job in each])
        for place, numbers in alive.items():
            ladder = rungs(count, total[place])
            if rung >= len(ladder):
                continue
            scored = [(number, *_score(study, jobs[place, number], failed)) for number in numbers]
            metric = next((name for _, _, name in scored if name), study.metric or "accuracy")
            sign = -1.0 if higher_is_better(metric) else 1.0
            order = sorted(scored, key=lambda each: math.inf if each[1] is None else sign * each[1])
            last = rung == len(ladder) - 1
            usable = [each for each in order if each[1] is not None] or order  # a candidate without a score is dropped
            survivors = [number for number, _, _ in usable[: 1 if last else math.ceil(len(order) / 2)]]
            for number, score, _ in scored:
                values = left[place][number]
                won = last and number in survivors
                trials.append(Trial(*place, values, rung + 1, ladder[rung], score, number in survivors, metric,
                                    won and at_edge(left[place], values)))  # fmt: skip
            alive[place] = sorted(survivors)
    return {place: left[place][numbers[0]] for place, numbers in alive.items()}, trials


def _job(cell: Cell, folder: Path, rounds: int, tried: str) -> CellRun:
    """A candidate's run up to a rung; the folder is the same at every rung."""
    key = key_of(cell.experiment, without=("run.rounds",))
    run = {**cell.tree["run"], "rounds": rounds}
    shorter = dataclasses.replace(cell, tree={**cell.tree, "run": run})
    return CellRun(
        f"{cell.algorithm}, {cell.setting}, {tried}", cell.algorithm, shorter.experiment, folder / "trials" / key
    )


def _score(study: Study, jobs: Sequence[CellRun], failed: dict[Path, str]) -> tuple[float | None, str | None]:
    """A candidate's mean score over seeds at the end of a rung, and the metric of the score.

    The score is None if a run failed or its metric is not finite."""
    scores: list[float] = []
    metric = None
    for job in jobs:
        history = [] if job.run_dir in failed else RunFolder(job.run_dir).history()
        lines = [line for line in history if line["round"] <= job.rounds and "loss" in line]
        lines = [] if without_effect(history) or diverged(history) else lines
        plain = study.metric or ("accuracy" if any("accuracy" in line for line in lines) else "loss")
        own = f"party_{plain}_mean"
        metric = own if any(own in line for line in lines) else plain
        last = lines[-LAST:]
        values = [float(line[metric]) for line in last if line.get(metric) is not None]
        if not values or len(values) < len(last):
            return None, metric if lines else None
        scores.append(math.fsum(values) / len(values))
    return math.fsum(scores) / len(scores), metric


def at_edge(candidates: Sequence[dict[str, Any]], values: dict[str, Any]) -> bool:
    """Whether a number among the values is the smallest or largest value tried."""
    for name, value in values.items():
        tried = {candidate[name] for candidate in candidates if type(candidate[name]) in (int, float)}
        if len(tried) > 1 and value in (min(tried), max(tried)):
            return True
    return False
