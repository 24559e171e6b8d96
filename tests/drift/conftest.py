"""Fixtures of the tests of drift."""

from __future__ import annotations

import pytest
from small_pictures import make_task

import hansa
from hansa.core.task import Holdings
from hansa.numerics.objective import Objective


@pytest.fixture
def task() -> hansa.Task:
    return make_task()


@pytest.fixture
def holdings(task: hansa.Task) -> Holdings:
    return task.holdings(Objective(task.model, "cross_entropy", 0))
