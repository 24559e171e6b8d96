"""Runs of a study on a Ray cluster (`study.ray`): each run is a task on some machine, and its folder comes back."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hansa.artifacts.run_folder import LOCK
from hansa.cluster.connection import RayConnection
from hansa.study.pool import CellRun, DurationEstimator, PoolWatcher
from hansa.study.worker import Loader, run_one, sentence

TICK = 0.25  # seconds between two refreshes of the progress


def run_cell(path: list[str], modules: Sequence[str], tree: dict[str, Any], place: str) -> dict[str, Any]:
    """Do a run on a machine of the cluster; returns the files of its folder, or why it failed."""
    sys.path += [folder for folder in path if folder not in sys.path]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        try:
            for module in modules:
                importlib.import_module(module)
            run_one(tree, place, folder, Loader())
        except Exception as error:
            return {"failed": sentence(error)}
        names = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]
        return {"files": {name.as_posix(): (folder / name).read_bytes() for name in names if name.name != LOCK}}


class RayPool:
    """Does runs as tasks of a cluster, the longest first, at most `count` at a time. Ray repeats those of lost
    machines."""

    def __init__(self, address: str, count: int | None, modules: Sequence[str]) -> None:
        self._connection = RayConnection(address, count, 1.0)
        self._ray = self._connection.ray
        self._count, self._modules = count, list(modules)
        self.durations = DurationEstimator()
        self._task = self._ray.remote(run_cell).options(num_cpus=1, max_retries=3)
        try:
            self._connection.room(None, 1.0)
        except BaseException:
            self._connection.close()
            raise

    def run(self, title: str, jobs: Sequence[CellRun], watch: PoolWatcher) -> dict[Path, str]:
        """Do all runs that are not done; return the reason for each failed run, by folder."""
        failed: dict[Path, str] = {}
        left = [job for job in jobs if not job.done()]
        watch.begin(title, left, len(jobs) - len(left))
        left.sort(key=self.durations.expected)
        flying: dict[Any, tuple[CellRun, float]] = {}
        path = [folder for folder in sys.path if folder]
        while left or flying:
            while left and (self._count is None or len(flying) < self._count):
                job = left.pop()
                watch.started(job)
                place = str(Path(job.experiment.folder).resolve())
                flying[self._task.remote(path, self._modules, job.experiment.tree, place)] = job, time.monotonic()
            for ref in self._ray.wait(list(flying), num_returns=1, timeout=TICK)[0]:
                job, began = flying.pop(ref)
                try:
                    answer = self._ray.get(ref)
                except self._ray.exceptions.RayError as error:
                    answer = {"failed": f"the cluster lost it ({type(error).__name__})"}
                if "failed" in answer:
                    failed[job.run_dir] = answer["failed"]
                else:
                    store(answer["files"], job.run_dir)
                    self.durations.learn(job, time.monotonic() - began)
                watch.finished(job, answer.get("failed"))
            watch.tick()
        return failed

    def close(self) -> None:
        """Disconnect; Ray ends the tasks of this process."""
        self._connection.close()


def store(files: dict[str, bytes], folder: Path) -> None:
    """Write the files of a finished run into its folder, whole or not at all."""
    part = folder.with_name(f".{folder.name}.ray")
    shutil.rmtree(part, ignore_errors=True)
    for name, content in files.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).write_bytes(content)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)
