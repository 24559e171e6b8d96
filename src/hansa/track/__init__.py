"""Tracking: what a run tells of itself as it goes on, to the console, a file, TensorBoard or MLflow.

Tracking is no part of a run: it changes no bit of it, and a tracker that fails, or hangs, neither stops nor slows it.
"""

from hansa.track import console, jsonl, mlflow, tensorboard  # noqa: F401 (they are registered)
from hansa.track.session import Session, begin, remembered, track_folder
from hansa.track.study import StudySession, track_study
from hansa.track.tracker import About, Log, Tracker, trackers

__all__ = [
    "About",
    "Log",
    "Session",
    "StudySession",
    "Tracker",
    "begin",
    "remembered",
    "track_folder",
    "track_study",
    "trackers",
]
