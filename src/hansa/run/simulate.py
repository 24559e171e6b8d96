"""Simulate a federation in one process."""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import hansa
from hansa.adversary import Adversary, Band, adversaries
from hansa.artifacts.run_folder import Store
from hansa.core import codec
from hansa.core.algorithm import Algorithm
from hansa.core.determinism import deterministic, threads
from hansa.core.errors import ConfigError
from hansa.core.federation import SumProtocol
from hansa.core.objective import Objective
from hansa.core.registry import Part, fill, from_config, to_config
from hansa.core.runtime import complete
from hansa.core.task import Holdings, Task
from hansa.data.picture import table
from hansa.experiment.settings import Run
from hansa.local.solver import LocalSolver
from hansa.privacy import Privacy, spent
from hansa.privacy import privacy as privacy_of
from hansa.report.diagnosis import rejected_rounds, without_effect
from hansa.report.progress import Watch, watcher
from hansa.run.loop import Training
from hansa.run.result import Result
from hansa.server import Descent
from hansa.sim.engine import ReferenceEngine
from hansa.sim.runtime import Simulation, Work, pick_engine
from hansa.sim.stacked import StackedEngine

if TYPE_CHECKING:
    from hansa.track import Session, Tracker

log = logging.getLogger("hansa")
NUMERICS = 3  # how streams of random numbers and orders of samples are made; a change makes other bits
COUNTED = 5_000  # parties whose samples are counted for a tracker's picture, at most
# From how many steps on compiling is earned back: it takes 0.09 s for each operation of a step, and saves 2 to 5 us of
# each at every step (benchmarks/RESULTS.md, "When compiling pays").
COMPILED_STEPS = 30_000


def simulate(algorithm: Algorithm, task: Task, *, run_dir: str | Path | None = None, resume: bool = False,
             force: bool = False, on_round: Watch | None = None, protocol: SumProtocol | None = None,
             absent: Callable[[int, int], bool] | None = None, adversary: Any = None, privacy: Any = None,
             track: Any = None, experiment: dict[str, Any] | None = None, alone: bool = False,
             progress: bool | None = None, **settings: Any) -> Result:  # fmt: skip
    """Run an algorithm on a task, all parties in this process.

    `settings` are the fields of `hansa.run.Run` (rounds, cohort, seed, engine, device, ...). With `run_dir` the run
    writes metrics and checkpoints there, and `resume=True` goes on from the last one: under the same plan (torch
    version, engine, threads, ...) to the same bits, under another only with `force=True`. `on_round` is called with
    each round's metrics. `progress=True` shows in a notebook or on a terminal where the run stands; by default it is
    shown in a notebook, where no `on_round` watches. `absent(party, round)` takes parties away; `protocol` takes over
    `reduce`, and goes without `privacy`. `adversary` is an attack, or a list of them, each by a group of parties of its
    own (parts, names or tables). `privacy` says how updates are protected (a `hansa.Privacy`, or a table as in an
    experiment's [privacy]).
    `track` names trackers ("mlflow", "mlflow:URI", parts, tables), one or a list; a run that goes on keeps
    those it had where none is given. `alone` keeps the run in one process, for one of several that run side by side.
    """
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f'expected an algorithm such as hansa.FedAvg() or build("algorithm", "fedavg"), got {algorithm!r}'
        )
    if not isinstance(task, Task):
        raise ConfigError(f"expected a hansa.Task, got {task!r}")
    if resume and run_dir is None:
        raise ConfigError("resume=True needs run_dir, the folder of the run to go on with")
    run: Run = fill(Run, settings, where="run")
    protected = privacy_of(privacy)
    if protocol is not None and protected != Privacy():
        raise ConfigError(
            "protocol= takes over every sum, so that what privacy= asks for would be left out; give the protocol as "
            "privacy.secure, or leave one of them out"
        )
    if force and not resume:
        raise ConfigError("force=True is about a run that goes on; give resume=True too, or leave it out")
    _check_device(run.device, run.precision)
    trackers = _trackers(track, run_dir if resume else None)
    with deterministic(run.device), products(run.precision):
        objective = Objective(task.model, task.loss, run.seed, run.device, run.precision == "bf16")
        holdings = task.holdings(objective)
        store = Store(run_dir) if run_dir is not None else None
        folder = store.path if store is not None else None
        data = fingerprint(holdings) if store is not None else None  # before anybody poisons them
        held = _counted(task, holdings) if trackers else None
        groups = adversaries(adversary)
        parts = algorithm.parts()
        weighted = getattr(parts.fusion, "weighted", False)
        band = None
        if groups:
            band = Band(groups, holdings, run.seed, _server_rate(algorithm), weighted, run.reply_memory, folder)
            band.check(algorithm, run.size(len(holdings)), masked=(protocol or protected.secure) is not None)
            band.poison(holdings)
        clock = run.clock(holdings)
        solver = parts.local
        work = Work(run.rounds, run.size(len(holdings)), solver) if isinstance(solver, LocalSolver) else None
        before = store.experiment()["plan"] if store is not None and resume else {}
        alone = alone or before.get("lanes") == 1  # as it was begun
        engine = pick_engine(run.engine, objective, holdings, run.seed, work, before.get("engine"), alone)
        if isinstance(engine, StackedEngine):
            long = work is not None and work.steps(holdings, engine.chunk) >= COMPILED_STEPS
            long = before.get("compiled", long)
            engine.compiles = engine.records and (run.compile == "on" or (run.compile == "auto" and long))
        log.info("engine %s: %s", engine.name, engine.why())
        forging = band if band is not None and band.forges else None
        runtime = Simulation(engine, run.rules(objective.spec), clock, absent, folder, forging, spent)
        record = _record(algorithm, run, engine, experiment, groups, protected)
        bar = watcher(run.rounds, False if progress is None and on_round is not None else progress)
        session: Session | None = None

        def told(line: dict[str, Any]) -> None:
            if bar is not None:
                bar.watch(line)
            if session is not None:
                session.follow(training.history)
            if on_round is not None:
                on_round(line)

        training = Training(algorithm, task, run, objective, holdings, store, runtime, protected, protocol, told,
                            clock,
                            attackers=None if band is None else band.attackers,
                            probe=None if band is None else band.probe(holdings))  # fmt: skip
        if band is not None:
            record["attackers"] = [holdings.name(party) for party in sorted(band.attackers)]
        try:
            if bar is not None:
                bar.start()
            if store is not None:
                record["data"] = data
                store.lock()  # until all of it is written
                if resume:
                    _same_run(store.experiment(), record, force)
                else:
                    store.create(record)
            if trackers:
                from hansa.track import begin

                session = begin(trackers, record, folder, held)
            with threads(1):
                state = complete(training.steps(), runtime.answer)
            result = Result(training, state, record, folder)
            problem = without_effect(result.history) or rejected_rounds(result.history)
            if problem is not None:
                log.warning(problem)
            if store is not None:
                store.finish(result.saved_model(), result.described(), result.summary)
            if session is not None:
                session.finish_result(result)
        except BaseException as error:
            if session is not None:
                session.fail("interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or repr(error))
            raise
        finally:
            training.on_round = None  # it refers to the training: a circle would keep all data until a collection
            engine.close()
            if bar is not None:
                bar.close()
            try:
                if session is not None:
                    session.close(f"{folder}/metrics.jsonl" if folder is not None else "result.history")
            finally:
                if store is not None:
                    store.close()
    return result


def _trackers(track: Any, resumed: str | Path | None) -> tuple[Tracker, ...]:
    """The trackers that were named, or those that a run had which goes on."""
    if track is None and resumed is None:
        return ()
    from hansa.track import remembered, trackers

    return remembered(Path(resumed)) if track is None and resumed is not None else trackers(track)


def _counted(task: Task, holdings: Holdings) -> dict[str, Any] | None:
    """What each party holds, as numbers to draw; None for too many parties."""
    if len(holdings) > COUNTED:
        return None
    y = holdings.train.y.cpu()
    classes = None if y.is_floating_point() else holdings.classes
    rows = np.split(np.arange(len(y)), holdings.train.offsets[1:-1])
    counts = table(rows, y if y.dim() == 1 else y.flatten(1)[:, 0], classes)  # of sequences, the first target
    return {"counts": counts, "classes": classes, "names": None if task.names is None else list(task.names)}


def plan(engine: ReferenceEngine, device: str) -> dict[str, Any]:
    """What the bits of a run depend on, recorded with it."""
    frozen = engine.objective.frozen
    card = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda} if device.startswith("cuda") else {}
    return {
        "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "device": device,
        "numerics": NUMERICS, **card, **engine.plan(), **({"frozen": codec.digest(frozen)} if frozen else {}),
    }  # fmt: skip


def fingerprint(holdings: Holdings) -> str:
    """A checksum of the parties' training samples, and of the server's own."""
    check = zlib.crc32(holdings.train.offsets.tobytes())
    for tensor in (holdings.train.x, holdings.train.y, *(holdings.trusted or ())):
        flat = tensor.detach().cpu().contiguous().view(-1)
        check = zlib.crc32(flat.view(torch.uint8).numpy().data if flat.numel() else b"", check)
    return f"{check:08x}"


def _server_rate(algorithm: Algorithm) -> Callable[[int], float] | None:
    """The learning rate of a server that takes the fused update as it is, round by round; None for all others.

    Methods with a local solver of their own make something else of the updates first, except SCAFFOLD.
    """
    server = algorithm.parts().server
    if type(server) is not Descent or algorithm.completes not in (None, "scaffold"):
        return None
    return lambda round: server.lr * server.schedule.factor(round)


def _record(algorithm: Algorithm, run: Run, engine: ReferenceEngine, experiment: Any,
            groups: tuple[Adversary, ...], protected: Privacy) -> dict[str, Any]:  # fmt: skip
    settings = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
    settings |= {name: to_config(value) for name, value in settings.items() if isinstance(value, Part)}
    return {
        "hansa": hansa.__version__, "algorithm": to_config(algorithm), "run": settings,
        "plan": plan(engine, run.device), "experiment": experiment, "adversary": [to_config(group) for group in groups],
        "privacy": protected.tree(),
    }  # fmt: skip


# What may change when a run goes on: when it stops, and how often it saves.
_FREE = ("rounds", "target", "metric", "patience", "byte_budget", "time_budget", "checkpoint_seconds")


def _same_run(before: dict[str, Any], now: dict[str, Any], force: bool) -> None:
    """Refuse to go on under another plan, algorithm or settings, unless forced. Whether there is differential privacy
    stays as it was: what a run has spent is reckoned from its first round on."""
    if _promises(before) != _promises(now):
        raise ConfigError(
            "this run was begun with differential privacy of another kind, or without: its epsilon would not cover all "
            "of its rounds; begin a new run"
        )
    if before.get("data") != now["data"] and not force:
        raise ConfigError(
            "the data are not those this run was begun with; use --force (force=True) to go on all the same"
        )
    for part, free in (("plan", ()), ("algorithm", ()), ("adversary", ()), ("privacy", ()), ("run", _FREE)):
        old, new = (_fields(json.loads(json.dumps(record.get(part, [])))) for record in (before, now))
        changed = [f"{k} was {old.get(k)!r} and is {new.get(k)!r}" for k in sorted({*old, *new})
                   if old.get(k) != new.get(k) and k not in free]  # fmt: skip
        if changed and not force:
            raise ConfigError(
                f"this run was begun with another {part} ({'; '.join(changed)}), so its numbers could not be "
                "replayed; use --force (force=True) to go on all the same"
            )


def _promises(record: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a run's sums, and its parties' replies, are differentially private."""
    local = record["algorithm"].get("local")
    solver: Any = from_config("local", local, where="algorithm.local") if isinstance(local, dict) else None
    return record.get("privacy", {}).get("dp") is not None, solver is not None and solver.budget is not None


def _fields(part: Any) -> dict[str, Any]:
    """A part of a record by name; of a list, by number."""
    return part if isinstance(part, dict) else {f"group {number}": entry for number, entry in enumerate(part)}


@contextmanager
def products(precision: str) -> Iterator[None]:
    """How a GPU multiplies float32 matrices inside: in full, or with tensor cores that keep 10 bits of each factor."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check_device(device: str, precision: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"run.device: unknown device {device!r}; use 'cpu', 'cuda' or 'cuda:N'") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device: 'cuda' was asked for, but this machine has no usable GPU")
    if precision == "tf32" and kind != "cuda":
        raise ConfigError("run.precision: 'tf32' is a GPU's; on a CPU use 'float32' or 'bf16'")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"run.device: {device!r} is not supported; use 'cpu' or 'cuda'")
