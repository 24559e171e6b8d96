"""Federations of real processes with a lying member: an aggregator, a party, or a dealer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from forked import Forked
from hansa.cli import privacy  # noqa: F401 (adds its commands)
from hansa.cli.app import app
from hansa.experiment.config import parse
from hansa.net.aggregator.federation import FederationFolder, init
from hansa.net.local import free_port
from hansa.net.operator import Operator
from hansa.plumbing import codec

LIARS = Path(__file__).with_name("liars.py")
AGGREGATOR = "aggregator"
PATIENCE = 600.0  # seconds after which a process that has not answered is considered stuck


def samples(count: int = 40, features: int = 3, seed: int = 0) -> tuple[Any, Any]:
    """Two classes that a line separates."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(count, features)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def experiment(**tables: Any) -> dict[str, Any]:
    """A job of two quick rounds; `run={...}`, `task={...}` and so on override its tables."""
    tree: dict[str, Any] = {
        "task": {"parties": ["each.npz"], "model": "logistic"},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "epochs": 1, "batch": 16}},
        "run": {"rounds": 2, "seed": 0, "deadline": 600.0},
    }
    for name, table in tables.items():
        tree[name] = {**tree.get(name, {}), **table} if isinstance(table, Mapping) else table
    return tree


class Stage:
    """An aggregator and parties, each a process, over mutual TLS.

    `parties` gives each party its samples (x, y), or (x, y, test x, test y), `policies` the text of its `party.toml`,
    and `lies` the function by which a process lies: `{"aggregator": "test_module:function", "ann": ...}`. The
    processes are forked, to start at once, except those named in `interpreters`. Use it as a context manager.
    """

    def __init__(self, folder: Path, parties: Mapping[str, tuple[Any, ...]], policies: Mapping[str, str] | None = None,
                 lies: Mapping[str, str] | None = None, interpreters: Collection[str] = ()) -> None:  # fmt: skip
        self.folder, self.tests, self.lies, self.interpreters = folder, folder / "tests", dict(lies or {}), interpreters
        folder.mkdir(parents=True, exist_ok=True)
        self.federation: FederationFolder = init(
            folder / "federation", "stage", list(parties), ["localhost"], free_port()
        )
        self.operator = Operator(self.federation)
        self._ending = contextlib.ExitStack()
        self.processes: dict[str, Forked | subprocess.Popen[bytes]] = {}
        for name, (x, y, *test) in parties.items():
            np.savez(folder / f"{name}.npz", x=x, y=y)
            if test:
                self.tests.mkdir(exist_ok=True)
                np.savez(self.tests / f"{name}.npz", x=test[0], y=test[1])
            self.home(name).mkdir(parents=True)
            (self.home(name) / "party.toml").write_text((policies or {}).get(name, ""))

    def __enter__(self) -> Stage:
        try:
            self.start(AGGREGATOR, "serve", str(self.federation.folder))
            self.operator.wait_until_served(PATIENCE, self.all_run)
            for path in sorted(self.folder.glob("*.npz")):
                name = path.stem
                token = self.federation.folder / "tokens" / f"{name}.token"
                where = ["--token-file", str(token), "--data", str(path), "--state", str(self.home(name))]
                tests = self.tests / path.name
                self.start(
                    name, "join", self.federation.url, *where, *(["--test", str(tests)] if tests.exists() else [])
                )
        except BaseException:
            self._ending.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def home(self, party: str) -> Path:
        """A party's own folder."""
        return self.folder / "homes" / party

    def start(self, name: str, *words: str) -> None:
        """Start a `hansa` command as a process, with the lie of that name; its output is `log(name)`."""
        lie, log = self.lies.get(name), self.folder / f"{name}.log"
        variables = {"HANSA_NOTES": str(self.folder / f"{name}.notes")}
        if name not in self.interpreters:
            self.processes[name] = Forked(words, log, lie, variables)
        else:
            command = [sys.executable, *(["-m", "hansa.cli"] if lie is None else [str(LIARS), lie]), *words]
            env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
            with open(log, "ab") as file:
                self.processes[name] = subprocess.Popen(command, stdout=file, stderr=file, env=env)
        self._ending.callback(_end, self.processes[name])

    def run(self, tree: Mapping[str, Any], name: str = "job") -> dict[str, Any]:
        """Submit a job and wait for its end: its status, reason and rounds."""
        job, _ = self.operator.submit(parse(tree), name)
        lines: list[dict[str, Any]] = []
        ended = self.operator.wait(job, lines.append, self.all_run)
        return {**ended, "rounds": lines}

    def all_run(self) -> None:
        """Raise an error with its output if a process has ended."""
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended with exit code {process.returncode}:\n{self.log(name)}"

    def log(self, name: str) -> str:
        """The output of a process so far."""
        return (self.folder / f"{name}.log").read_text()

    def notes(self, name: str = AGGREGATOR) -> list[dict[str, Any]]:
        """The notes of a liar."""
        return [codec.decode(path.read_bytes()) for path in sorted((self.folder / f"{name}.notes").glob("*.note"))]

    def spent(self, party: str) -> dict[str, Any]:
        """The output of `hansa privacy spent` for a party."""
        done = CliRunner().invoke(app, ["privacy", "spent", "--state", str(self.home(party)), "--json"])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def _end(process: Forked | subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
