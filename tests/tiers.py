"""When a test runs, and what it costs.

`make test` runs what has no mark. `make test-rest` (CI) adds tests marked `slow`, and those that were skipped for want
of an extra. `make test-night` runs everything. Of a product of parameters marked `thin(n)`, `make test` runs n cases,
CI enough for every value, or every pair of values if there are three parameters, and `make test-night` all.
"""

from __future__ import annotations

import itertools
import re
import resource
from collections.abc import Generator, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

TIERS = {"fast": "not slow and not night", "rest": "not night", "night": ""}  # the marks that each takes
SKIPPED = "hansa/{}/skipped"  # in pytest's cache, by tier: ids of tests that were skipped
COSTS = "hansa/{}/costs"  # in pytest's cache, by tier: seconds of processor time of each test
Case = tuple[Hashable, ...]


def covering(cases: Sequence[Case], strength: int) -> list[int]:
    """Positions of cases that together have every combination of `strength` values; greedy, the first if equal."""
    left = [set(itertools.combinations(enumerate(case), strength)) for case in cases]
    chosen = []
    while any(left):
        best = max(range(len(cases)), key=lambda at: (len(left[at]), -at))
        chosen.append(best)
        found = left[best]
        left = [rest - found for rest in left]
    return chosen


def chosen(cases: Sequence[Case], fast: int) -> tuple[set[int], set[int]]:
    """Positions of the cases of a product that `make test` and CI run: `fast` cases; and every value of one or two
    parameters, or every pair of values of three or more."""
    columns = [tuple(map(column.index, column)) for column in zip(*cases, strict=True)]
    # names that are set together are one parameter, and one value is none
    axes = [column for column in dict.fromkeys(columns) if any(column)] or [(0,) * len(cases)]
    cases = list(zip(*axes, strict=True))
    spread = covering(cases, 1)
    kept = {*[*spread, *(at for at in range(len(cases)) if at not in spread)][:fast]}
    return kept, kept | set(covering(cases, 2) if len(axes) > 2 else spread)


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of tests with the mark `thin` that `make test` or CI leaves out."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("thin"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in tests.values():
        mark = group[0].get_closest_marker("thin")
        assert mark is not None
        kept, paired = chosen([tuple(map(id, item.callspec.params.values())) for item in group], *mark.args)
        for at, item in enumerate(group):
            if at not in kept:
                item.add_marker(pytest.mark.slow if at in paired else pytest.mark.night)


TOGETHER = {"tests/cluster", "tests/plugins", "tests/track"}  # folders whose tests share processes for a whole session


def scope(nodeid: str) -> str:
    """The tests that pytest-xdist runs in one process: those of a file, or of a folder of `TOGETHER`.

    A second Ray cluster, or a second federation of a module, would take gigabytes.
    """
    path = nodeid.partition("::")[0]
    folder = path.rpartition("/")[0]
    return folder if folder in TOGETHER else path


def is_marked(path: Path, mark: str) -> bool:
    """Whether a whole file is marked, so that it need not be imported: MLflow alone takes seconds in each worker."""
    return re.search(rf"^pytestmark = \[?pytest\.mark\.{mark}\b", path.read_text(), re.MULTILINE) is not None


def processor_time() -> float:
    """Seconds of processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Records:
    """pytest plugin: what a tier skipped, and what each test cost, for the next tier and for tests/budget.py."""

    def __init__(self, config: pytest.Config, tier: str) -> None:
        self.cache, self.tier = config.cache, tier
        self.skipped: set[str] = set()
        self.costs: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        self.began, self.cost, self.last = processor_time(), 0.0, nextitem is None
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        report = yield
        if call.when != "teardown" or not self.last:  # the last test would pay for the end of the session's fixtures
            self.cost = processor_time() - self.began
        if call.when == "teardown":
            report.user_properties = [*report.user_properties, ("cost", self.cost)]
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.add(report.nodeid)
        for name, value in report.user_properties:
            if name == "cost":
                self.costs[report.nodeid] = round(value, 3)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.cache is not None and not hasattr(session.config, "workerinput"):
            self.cache.set(SKIPPED.format(self.tier), sorted(self.skipped))
            self.cache.set(COSTS.format(self.tier), self.costs)
