"""Simulate a federation on one machine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from hansa.adversary import Adversary, Band, adversaries
from hansa.artifacts.run_folder import RunFolder
from hansa.core.algorithm import Algorithm
from hansa.core.federation import SumProtocol
from hansa.core.plain_data import fill
from hansa.core.runtime import complete
from hansa.core.task import Holdings, Task
from hansa.drift import Course, drifts
from hansa.experiment.baselines import KEPT, POOLED, baseline
from hansa.experiment.rules import Facts, check, packings, task_facts
from hansa.experiment.settings import Run
from hansa.experiment.sources import code_of
from hansa.local.solver import LocalSolver
from hansa.numerics.objective import Objective
from hansa.plumbing.determinism import deterministic, threads
from hansa.plumbing.errors import ConfigError
from hansa.privacy import Privacy, spent
from hansa.privacy import privacy as privacy_of
from hansa.report.diagnosis import problem
from hansa.report.progress import Watch
from hansa.run.callbacks import Callback, checked, reason_to_stop
from hansa.run.loop import Training
from hansa.run.plan import describe, fingerprint
from hansa.run.recorder import Recorder, find_trackers, sample_counts
from hansa.run.result import Result
from hansa.run.simulated_table import prepare_table
from hansa.server import Descent
from hansa.sim.engine import EngineInputs, ReferenceEngine
from hansa.sim.run_size import RunSize
from hansa.sim.runtime import Simulation

log = logging.getLogger("hansa")


def simulate(algorithm: Algorithm, task: Task, *, run_dir: str | Path | None = None, resume: bool = False,
             force: bool = False, on_round: Watch | None = None, protocol: SumProtocol | None = None,
             absent: Callable[[int, int], bool] | None = None, adversary: Any = None, drift: Any = None,
             privacy: Any = None, track: Any = None, experiment: dict[str, Any] | None = None, alone: bool = False,
             progress: bool | None = None, callbacks: Any = (), **settings: Any) -> Result:  # fmt: skip
    """Run an algorithm on a task; all parties are simulated on this machine.

    `settings` are the fields of `hansa.run.Run` (rounds, cohort, seed, engine, device, ...). With `run_dir` the run
    writes metrics and checkpoints to that folder. `resume=True` continues from the last checkpoint: under the same plan
    (torch version, engine, threads, ...) to the same bits, under another plan only with `force=True`. `on_round` is
    called with the metrics line of each round. `progress=True` shows a progress bar on a terminal or in a notebook; by
    default only in a notebook, if there is no `on_round`. `absent(party, round)` says whether a party is missing in a
    round. `protocol` takes over `reduce`; it excludes `privacy`. `adversary` is an attack, or a list of attacks by one
    group of parties each (parts, names or tables). `drift` is what changes with the rounds: one drift or a list (parts
    or tables). `privacy` says how updates are protected (a `hansa.Privacy`, or a table as in an experiment's
    [privacy]).
    `track` names one tracker or a list of them ("mlflow", "mlflow:URI", parts, tables); a resumed run keeps its
    trackers if `track` is left out. `callbacks` are `hansa.Callback` objects, or functions of (line, result): they are
    called after each round, and may stop the run. `alone` keeps the run in one process, for several runs side by side.
    """
    run, protection = _check_arguments(algorithm, task, run_dir, resume, force, privacy, settings)
    drifting = drifts(drift, run.rounds)
    check(Facts(algorithm=algorithm, run=run, privacy=protection, adversary=adversary, drift=drifting,
                protocol=protocol, deployed=False, **task_facts(task, task.ids is not None)))  # fmt: skip
    unprepared = task.prepare is None
    trackers, called = find_trackers(track, run_dir if resume else None), checked(callbacks)
    device = run.engine.driver_device(run.device)
    with deterministic(device), matrix_products(run.precision), ExitStack() as opened:
        task, prepared = prepare_table(algorithm, task, run, protection, protocol)
        objective = Objective(task.model, task.loss, run.seed, device, run.precision == "bf16")
        holdings = task.holdings(objective)
        folder = RunFolder(run_dir) if run_dir is not None else None
        recorder = Recorder(folder, trackers, run.rounds, progress, on_round)
        data = (
            fingerprint(holdings, task.class_weight) if folder is not None else None
        )  # before an adversary poisons them
        counts = sample_counts(task, holdings) if trackers else None
        groups, secure = adversaries(adversary), (protocol or protection.secure) is not None
        band = _poison(groups, algorithm, holdings, run, secure, recorder.path) if groups else None
        before = folder.experiment()["plan"] if folder is not None and resume else {}
        engine = opened.enter_context(closing(_engine(algorithm, objective, holdings, run, before, alone)))
        clock, forging = run.clock(holdings), band if band is not None and band.forges else None
        clock.now += prepared.seconds if prepared is not None else 0.0
        course = Course(drifting, holdings, run.seed, not unprepared) if drifting else None
        if course is not None:
            course.changed = engine.data_changed
        runtime = Simulation(engine, run.rules(objective.spec), clock, absent, recorder.path, forging, spent, course,
                             run.devices.relays)  # fmt: skip
        record = describe(algorithm, run, engine, experiment, groups, protection, drifting)
        training = Training(algorithm, task, run, objective, holdings, folder, runtime, protection, protocol,
                            recorder.on_round, clock, history=recorder.history,
                            attackers=None if band is None else band.attackers,
                            probe=None if band is None else band.probe(holdings), prepared=prepared,
                            course=course)  # fmt: skip
        record |= {} if band is None else {"attackers": [holdings.name(party) for party in sorted(band.attackers)]}
        if folder is not None:
            code = code_of((algorithm, run, groups, task.prepare, task.model),
                           (task.model, task.loss, *(task.models or {}).values()))  # fmt: skip
            record |= {"data": data, "code": code}
        if called:
            so_far = Result(training, training.state, record, recorder.path)

            def after(line: dict[str, Any]) -> str | None:
                so_far.state = training.state
                return reason_to_stop(called, line, so_far)

            training.called = after
        with recorder.recording(record, counts, resume, force):
            return _train(training, runtime, recorder, record, called)


def _train(training: Training, runtime: Simulation, recorder: Recorder, record: dict[str, Any],
           callbacks: list[Callback]) -> Result:  # fmt: skip
    """Run all rounds and record the result."""
    try:
        with threads(1):
            state = complete(training.steps(), runtime.answer)
    finally:
        # They may refer to the result, which would stay in memory until a garbage collection.
        training.on_round = training.called = None
    result = Result(training, state, record, recorder.path)
    result.baselines = {name: _baseline(name, training) for name in training.run.baselines}
    wrong = problem(result.history)
    if wrong is not None:
        log.warning(wrong)
    for callback in callbacks:
        callback.end(result)
    recorder.finish(result)
    return result


def _baseline(name: str, training: Training) -> dict[str, Any]:
    """The metrics of a baseline at its end, and those of each party."""
    run = training.run
    task = dataclasses.replace(training.task, pooled=name == POOLED)
    settings = {field: getattr(run, field) for field in KEPT}
    result = simulate(baseline(name, training.algorithm), task, progress=False, alone=True, **settings)
    log.info("baseline %s: %d rounds", name, result.summary["rounds"])
    last: dict[str, Any] = next(
        (line for line in reversed(result.history) if "loss" in line or "unmeasured" in line), {}
    )
    apart = ("seconds", "simulated_seconds", "train_loss")
    numbers = {key: value for key, value in last.items() if isinstance(value, float) and key not in apart}
    return numbers | {key: last[key] for key in ("parties", "worst_parties", "unmeasured") if key in last}


def _check_arguments(algorithm: Any, task: Any, run_dir: str | Path | None, resume: bool, force: bool, privacy: Any,
                     settings: dict[str, Any]) -> tuple[Run, Privacy]:  # fmt: skip
    """Check the arguments of `simulate`: the settings of the run, and how updates are protected."""
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f'expected an algorithm such as hansa.FedAvg() or build("algorithm", "fedavg"), got {algorithm!r}'
        )
    if not isinstance(task, Task):
        raise ConfigError(f"expected a hansa.Task, got {task!r}")
    if resume and run_dir is None:
        raise ConfigError("resume=True needs run_dir, the folder of the run to resume")
    run: Run = fill(Run, settings, where="run")
    protection = privacy_of(privacy)
    if force and not resume:
        raise ConfigError("force=True applies to a resumed run only; give resume=True too, or leave it out")
    _check_device(run)
    for name in run.baselines:
        baseline(name, algorithm)
    return run, protection


def _check_device(run: Run) -> None:
    device = run.device
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"run.device: unknown device {device!r}; use 'cpu', 'cuda' or 'cuda:N'") from None
    if torch.device(run.engine.driver_device(device)).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device: 'cuda' needs a GPU, and this machine has no usable one; use 'cpu'")
    if run.precision == "tf32" and kind != "cuda":
        raise ConfigError("run.precision: 'tf32' needs a GPU; on a CPU use 'float32' or 'bf16'")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"run.device: {device!r} is not supported; use 'cpu' or 'cuda'")


def _poison(groups: tuple[Adversary, ...], algorithm: Algorithm, holdings: Holdings, run: Run, secure: bool,
            folder: Path | None) -> Band:  # fmt: skip
    """The attackers of a run; they poison their training samples here."""
    weighted = getattr(algorithm.parts().fusion, "weighted", False)
    band = Band(groups, holdings, run.seed, _server_rate(algorithm), weighted, run.reply_memory, folder)
    packed = algorithm.packs or any(each.transform.packs for each in packings(algorithm, run))
    band.check(algorithm, run.size(len(holdings)), secure, packed)
    band.poison(holdings)
    return band


def _server_rate(algorithm: Algorithm) -> Callable[[int], float] | None:
    """The learning rate per round of a server optimiser that applies the fused update as it is; None for all others.

    Methods with a local solver of their own transform the updates first, except SCAFFOLD.
    """
    server = algorithm.parts().server
    if type(server) is not Descent or algorithm.completes not in (None, "scaffold"):
        return None
    return lambda round: server.lr * server.schedule.factor(round)


def _engine(algorithm: Algorithm, objective: Objective, holdings: Holdings, run: Run, before: dict[str, Any],
            alone: bool) -> ReferenceEngine:  # fmt: skip
    """The engine of a run; `before` is the plan of a run that is resumed, which decides the engine."""
    solver = algorithm.parts().local
    work = RunSize(run.rounds, run.size(len(holdings)), solver) if isinstance(solver, LocalSolver) else None
    engine = run.engine.start(EngineInputs(objective, holdings, run.seed, work, before, alone, run.compile, run.device))
    log.info("engine %s: %s", engine.name, engine.why())
    return engine


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """How a GPU multiplies float32 matrices: exactly, or with tensor cores that keep 10 bits of each factor (tf32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
