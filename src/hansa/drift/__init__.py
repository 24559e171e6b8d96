"""Drift: data and parties of a simulation that change with the rounds, and detectors of such changes."""

from hansa.drift.course import Course, drifts
from hansa.drift.detector import Detector, PageHinkley, Watch
from hansa.drift.drift import Concept, DataDrift, Drift
from hansa.drift.features import FeatureNoise, Rotation
from hansa.drift.labels import LabelShift, NewClasses
from hansa.drift.presence import DayAndNight, Joining, Leaving

__all__ = ["Concept", "Course", "DataDrift", "DayAndNight", "Detector", "Drift", "FeatureNoise", "Joining",
           "LabelShift", "Leaving", "NewClasses", "PageHinkley", "Rotation", "Watch", "drifts"]  # fmt: skip
