"""Tracking: send the rounds and results of a run to the console, a file, TensorBoard or MLflow while it runs.

Tracking is not part of a run: it changes no bit, and a tracker that fails or hangs neither stops nor slows the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hansa.plumbing.lazy import exports

if TYPE_CHECKING:
    from hansa.track.session import Session, begin, remembered, track_folder
    from hansa.track.tracker import Log, RunInfo, Tracker, trackers

# Imported on first use: the process of a tracker must not import what only a run needs.
_HOMES = {
    "RunInfo": ".tracker",
    "Log": ".tracker",
    "Session": ".session",
    "Tracker": ".tracker",
    "begin": ".session",
    "remembered": ".session",
    "track_folder": ".session",
    "trackers": ".tracker",
}

__all__ = [
    "Log",
    "RunInfo",
    "Session",
    "Tracker",
    "begin",
    "remembered",
    "track_folder",
    "trackers",
]

__getattr__ = exports("hansa.track", _HOMES)
