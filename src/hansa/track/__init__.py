"""Tracking: what a run tells of itself as it goes on, to the console, a file, TensorBoard or MLflow.

Tracking is no part of a run: it changes no bit of it, and a tracker that fails, or hangs, neither stops nor slows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hansa.core.lazy import exports

if TYPE_CHECKING:
    from hansa.track.session import Session, begin, remembered, track_folder
    from hansa.track.tracker import Log, RunInfo, Tracker, trackers

# Imported when asked for: a tracker's own process needs none of what a run needs.
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
