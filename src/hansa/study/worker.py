"""A worker process of a study: does one run after another, reports progress, and ends with its parent."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hansa.artifacts.run_folder import EXPERIMENT
from hansa.data.dataset import Data
from hansa.experiment.config import Experiment, parse
from hansa.experiment.tasks import load_data
from hansa.plumbing.child import ParentConnection
from hansa.plumbing.determinism import threads
from hansa.plumbing.errors import HansaError
from hansa.run.simulate import simulate

INTERVAL = 0.2  # minimum seconds between two progress messages of a run
Watch = Callable[[int], None]


class Loader:
    """Loads data sets; keeps the last one for the next run."""

    def __init__(self) -> None:
        self._key: tuple[str, str | None, str] | None = None
        self._data: Data | None = None

    def __call__(self, experiment: Experiment) -> Data | None:
        """The experiment's data set; None if its parties have files of their own."""
        table = experiment.task
        if table.dataset is None:
            return None
        key = (json.dumps(table.dataset, sort_keys=True), table.data_dir, experiment.folder)
        if key != self._key:
            self._data = None  # free the memory before loading the next data set
            self._data, self._key = load_data(experiment), key
        return self._data


def run_one(tree: dict[str, Any], place: str, run_dir: Path, load: Loader, watch: Watch | None = None) -> None:
    """Do a run, or resume it if its folder holds a part of it.

    A run uses one process and one thread, so its bits do not depend on the number of parallel runs."""
    experiment = parse(tree, place)
    last = 0.0

    def on_round(line: dict[str, Any]) -> None:
        nonlocal last
        if watch is not None and time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            watch(line["round"])

    with threads(1):
        simulate(experiment.algorithm, experiment.build_task(load(experiment)), run_dir=run_dir,
                 resume=(run_dir / EXPERIMENT).exists(), on_round=on_round, alone=True,
                 experiment={"tree": tree, "folder": str(Path(place).resolve())}, **experiment.settings())  # fmt: skip


def sentence(error: BaseException) -> str:
    """The reason why a run failed, in one sentence."""
    return str(error) if isinstance(error, HansaError) else f"{type(error).__name__}: {error}"


def main() -> None:
    """Do runs, one after another, until the parent ends."""
    parent = ParentConnection()  # output of a run goes to the log
    messages = parent.until_parent_ends()
    setup, load = next(messages), Loader()
    sys.path[:] = setup["path"]
    for module in setup["modules"]:
        importlib.import_module(module)
    for job in messages:
        try:
            run_one(job["tree"], job["place"], Path(job["run_dir"]), load, lambda done: parent.send({"round": done}))
            parent.send({"done": True})
        except (Exception, SystemExit) as error:
            if not isinstance(error, HansaError):
                traceback.print_exc()
            parent.send({"failed": sentence(error)})


if __name__ == "__main__":
    main()
