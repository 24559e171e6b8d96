"""What each party of a task holds: counted, and drawn."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from hansa.core.task import Task
from hansa.data import paint

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def held(task: Task) -> tuple[list[np.ndarray], np.ndarray, int | None]:
    """Each party's rows, the targets of all rows, and the number of classes (None for other targets). Of sequences the
    first target counts."""
    if isinstance(task.parties, tuple) and len(task.parties) == 3:
        joined, edges = np.asarray(task.parties[1]), np.asarray(task.parties[2])
    else:
        targets = [np.asarray(y) for _, y in task.parties]
        joined, edges = np.concatenate(targets), np.concatenate([[0], np.cumsum([len(y) for y in targets])])
    rows = [np.arange(a, b) for a, b in itertools.pairwise(edges)]
    joined = joined[:, 0] if joined.ndim > 1 else joined
    classes = task.classes
    if classes is None and task.loss == "cross_entropy" and len(joined):
        joined = joined.astype(np.int64)
        classes = int(joined.max()) + 1
    return rows, joined, classes


def draw_partition(task: Task) -> Figure:
    """Draw how many samples each party of a task has, and how they are shared among the classes."""
    from hansa.run.plots import blank

    figure = blank(7, 6)
    paint(figure, *held(task), list(task.names) if task.names is not None else None)
    return figure
