"""Fusions: rules that combine the parties' updates into one."""

from hansa.fusion.coordinate import MeaMed, Median, TrimmedMean
from hansa.fusion.fltrust import FLTrust
from hansa.fusion.fusion import Fused, Fusion, Robust
from hansa.fusion.geometric import GeometricMedian
from hansa.fusion.krum import Bulyan, Krum, MultiKrum
from hansa.fusion.legato import Legato
from hansa.fusion.mean import WeightedMean, mean_update
from hansa.fusion.norm_clip import NormClip
from hansa.fusion.update import Update
from hansa.fusion.zeno import Zeno

__all__ = ["Bulyan", "FLTrust", "Fused", "Fusion", "GeometricMedian", "Krum", "Legato", "MeaMed", "Median",
           "MultiKrum", "NormClip", "Robust", "TrimmedMean", "Update", "WeightedMean", "Zeno",
           "mean_update"]  # fmt: skip
