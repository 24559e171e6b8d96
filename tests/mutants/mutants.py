"""Mutation testing: change one formula of a module, run the tests that reach its line, and see whether one fails.

    make mutants MODULE=src/hansa/fusion JOBS=2               a package, two mutants at a time
    make mutants MODULE=src/hansa/server/adaptive.py          a file
    make mutants MODULE=src/hansa/local SAMPLE=80 SEED=0      a random sample; the same seed gives the same sample

A mutant that no test notices survives, and is printed: a test is missing, or the change makes no difference. Each
mutant runs in a fork of a process that has imported torch and the other requirements. The fork imports the changed
module from memory; nothing is written to the source tree. Tests that start programs do not take part: a program runs
the unchanged code, so that such a test would notice any difference, right or wrong.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest
from mutations import Mutant, mutants_of, with_probes

ROOT = Path(__file__).resolve().parents[2]
# Tests beside those in the folder with the name of the package.
MORE_TESTS = {
    "fusion": ["testing/test_check_fusion.py"],
    "kernel": [
        "local/test_clipping.py",
        "local/test_clipping_extremes.py",
        "local/test_dp_sgd.py",
        "privacy/test_accounting.py",
    ],
    "local": ["algorithms", "testing/test_check_solver.py"],
    "privacy": ["local/test_dp_sgd.py"],
}
MEMORY = 8 * 2**30  # bytes of data of a process
COLLECT = 60  # seconds of processor time to import and collect the tests
PROGRAM = ("", 0)  # stands for a line of a program that a test starts
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain"]


class Test(NamedTuple):
    """A test of the unchanged code: its file, its duration, and the statements (file, line) that it reaches."""

    path: str
    seconds: float
    lines: set[tuple[str, int]]


class Plugin:
    """pytest plugin: Hypothesis does not simplify failures, which takes long."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings(), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")


class Chosen(Plugin):
    """pytest plugin: run these tests only, in this order, each with a time limit."""

    def __init__(self, tests: dict[str, Test], patience: float) -> None:
        self.tests, self.patience = tests, patience

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[test] for test in self.tests if test in by_id] or items

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        usual = self.tests[nodeid].seconds if nodeid in self.tests else 0
        limit = self.patience + 5 * usual
        signal.setitimer(signal.ITIMER_PROF, limit)  # of processor time: another program may keep the machine busy
        signal.setitimer(signal.ITIMER_REAL, 10 * limit)


class Traced(Plugin):
    """pytest plugin: record duration and lines of each test."""

    def __init__(self, own: tuple[str, ...]) -> None:
        self.own = own
        self.lines: set[tuple[str, int]] = set()
        self.tests: dict[str, Test] = {}
        self.shared: dict[str, set[tuple[str, int]]] = {}  # of the test that set up a fixture for others too
        self.fixtures: dict[str, list[str]] = {}
        vars(builtins)["__reached__"] = self.reach
        sys.addaudithook(lambda event, _: self.lines.add(PROGRAM) if event == "subprocess.Popen" else None)

    def reach(self, path: str, line: int) -> None:
        self.lines.add((path, line))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for module in own_modules(self.own).values():  # a cache would hide lines that an earlier test has reached
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
        start, self.lines = time.monotonic(), set()
        yield
        self.tests[item.nodeid] = Test(str(item.path), time.monotonic() - start, self.lines)
        self.fixtures[item.nodeid] = getattr(item, "fixturenames", [])

    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        if fixturedef.scope != "function" and fixturedef.baseid:
            self.shared[fixturedef.argname] = self.lines

    def result(self) -> dict[str, Test]:
        for name, test in self.tests.items():
            test.lines.update(*(self.shared.get(fixture, ()) for fixture in self.fixtures[name]))
        return self.tests


def own_modules(own: tuple[str, ...]) -> dict[str, Any]:
    """The imported modules whose files lie in these folders."""
    return {name: m for name, m in sys.modules.copy().items() if (getattr(m, "__file__", None) or "").startswith(own)}


def load_from(changed: dict[str, CodeType]) -> None:
    """Import these files from memory."""
    load = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: changed.get(self.path) or load(self, name)  # type: ignore[method-assign]


def start_fork(work: Callable[[], int], output: str = os.devnull) -> int:
    """Start a function in a fork, in a process group of its own; return the id of the process."""
    if pid := os.fork():
        return pid
    status = 70
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # ends the process
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        status = work()
        sys.stdout.flush()
    finally:
        os._exit(status)


def unchanged(files: Sequence[Path], tests: Sequence[str], own: tuple[str, ...], folder: Path) -> dict[str, Test]:
    """Run the tests without a mutation, and import what they import, less the project's own modules."""
    output, result = folder / "output", folder / "result"

    def work() -> int:
        plugin = Traced(own)
        load_from({str(path): with_probes(path) for path in files})
        status = pytest.main([*tests, *OPTIONS, f"--basetemp={folder / 'tests'}"], plugins=[plugin])
        found = {name: [test.path, test.seconds, sorted(test.lines)] for name, test in plugin.result().items()}
        result.write_text(json.dumps([found, [name for name in sys.modules if name not in own_modules(own)]]))
        return int(status)

    pid = start_fork(work, str(output))
    try:
        status = os.waitpid(pid, 0)[1]
    except BaseException:
        os.killpg(pid, signal.SIGKILL)
        raise
    if status:
        print(output.read_text(errors="replace")[-5000:], file=sys.stderr)
        fail("the tests above fail, or there are none, without a mutation; repair them first")
    found, modules = json.loads(result.read_text())
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    passed = {name: Test(path, seconds, set(map(tuple, lines))) for name, (path, seconds, lines) in found.items()}
    return {name: test for name, test in passed.items() if PROGRAM not in test.lines}


def noticing(mutant: Mutant, tests: dict[str, Test]) -> dict[str, Test]:
    """The tests that may notice a mutant, the fastest first."""
    line = (str(mutant.path), mutant.statement)
    reaching = [name for name, test in tests.items() if mutant.at_import or line in test.lines]
    return {name: tests[name] for name in sorted(reaching, key=lambda name: tests[name].seconds)}


def run_mutant(mutant: Mutant, tests: dict[str, Test], folder: str, patience: float) -> int:
    """Run the tests on a changed module; 0 if all pass."""
    signal.setitimer(signal.ITIMER_PROF, COLLECT)
    load_from({str(mutant.path): mutant.code()})
    files = dict.fromkeys(test.path for test in tests.values())
    return int(pytest.main([*files, *OPTIONS, f"--basetemp={folder}/tests"], plugins=[Chosen(tests, patience)]))


def run_all(mutants: Sequence[Mutant], tests: dict[str, Test], jobs: int, patience: float) -> list[str]:
    """Run all mutants, `jobs` at a time; return the verdict on each."""
    verdicts = ["survived"] * len(mutants)
    queue = [k for k in reversed(range(len(mutants))) if noticing(mutants[k], tests)]
    running: dict[int, tuple[int, tempfile.TemporaryDirectory[str]]] = {}
    try:
        while queue or running:
            while queue and len(running) < jobs:
                k = queue.pop()
                folder = tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True)
                work = functools.partial(run_mutant, mutants[k], noticing(mutants[k], tests), folder.name, patience)
                running[start_fork(work)] = k, folder
            pid, status = os.wait()
            k, folder = running.pop(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what the test left behind
            folder.cleanup()
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF)
            verdicts[k] = "timed out" if late else "killed" if status else "survived"
            if not (left := len(queue) + len(running)) % 20:
                print(f"{left} mutants left", file=sys.stderr, flush=True)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
    return verdicts


def report(mutants: Sequence[Mutant], verdicts: Sequence[str], tests: dict[str, Test]) -> None:
    """Print the survivors, and a table of the files."""
    counts: dict[str, Counter[str]] = {}
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        name = os.path.relpath(mutant.path)
        counts.setdefault(name, Counter())[verdict] += 1
        if verdict == "survived":
            note = "" if noticing(mutant, tests) else "  (no test reaches this line)"
            print(f"{name}:{mutant.line}: {mutant.before}  ->  {mutant.after}{note}")
    counts["all"] = Counter(verdicts)
    wide = max(map(len, counts))
    print(f"\n{'':{wide}}    mutants     killed  timed out   survived   killed %")
    for name, count in counts.items():
        numbers = [count.total(), count["killed"], count["timed out"], count["survived"]]
        share = 100 * (1 - count["survived"] / count.total())
        print(f"{name:{wide}}" + "".join(f"{number:11d}" for number in numbers) + f"{share:11.1f}")


def fail(reason: str) -> None:
    print(f"mutants: {reason}", file=sys.stderr)
    raise SystemExit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path, help="file or package to mutate")
    parser.add_argument("--tests", nargs="+", help="files or folders of tests (default: those of the package)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at the same time")
    parser.add_argument("--sample", type=int, help="number of mutants, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    limit = "most processor time of a test, in seconds, beside 5 times its usual duration"
    parser.add_argument("--patience", type=float, default=10.0, help=limit)
    given = parser.parse_args()
    module = given.module.resolve()
    files = [module] if module.suffix == ".py" and module.is_file() else sorted(module.rglob("*.py"))
    mutants = [mutant for path in files for mutant in mutants_of(path)]
    if not mutants:
        fail(f"{given.module} has no formula to mutate; name a file or a package, such as src/hansa/fusion")
    source = next(folder for folder in files[0].parents if not (folder / "__init__.py").exists())
    package = files[0].relative_to(source).parts[1:2]
    more = MORE_TESTS.get("".join(package), [])
    tests = given.tests or [str(ROOT / "tests" / name) for name in (*package, *more, "public")]
    if missing := [test for test in tests if not Path(test).exists()]:
        fail(f"there are no tests at {missing[0]}; name files or folders of tests with --tests")
    if given.sample is not None and given.sample < len(mutants):
        chosen = random.Random(given.seed).sample(range(len(mutants)), given.sample)
        mutants = [mutants[k] for k in sorted(chosen)]
    sys.path.insert(0, str(source))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the forks too
    own = tuple(f"{folder}{os.sep}" for folder in (source, ROOT / "tests", *(Path(t).resolve() for t in tests)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        passed = unchanged(files, tests, own, Path(folder))
    print(f"{len(passed)} tests pass on the unchanged code; {len(mutants)} mutants to run", file=sys.stderr, flush=True)
    report(mutants, run_all(mutants, passed, max(1, given.jobs), given.patience), passed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
