"""The registered engines (`run.engine`). Other packages add theirs by the entry-point group `hansa.engine`."""

from __future__ import annotations

from dataclasses import dataclass

from hansa.core.registry import register
from hansa.sim.engine import Engine, EngineInputs, ReferenceEngine


@register("auto")
@dataclass(frozen=True)
class Auto(Engine):
    """The fastest engine for the model, the device and the length of the run."""

    def start(self, inputs: EngineInputs) -> ReferenceEngine:
        from hansa.sim.choice import fastest  # imports what trains; the settings of a run need only the names

        return fastest(inputs)


@register("reference")
@dataclass(frozen=True)
class Reference(Engine):
    """One party after another, on one thread, by the function that a deployed party runs."""

    def start(self, inputs: EngineInputs) -> ReferenceEngine:
        return ReferenceEngine(inputs.objective, inputs.holdings, inputs.seed)


@register("workers")
@dataclass(frozen=True)
class Workers(Engine):
    """The reference engine in one process per core, with the same bits."""

    def start(self, inputs: EngineInputs) -> ReferenceEngine:
        from hansa.sim.choice import workers

        return workers(inputs)


@register("stacked")
@dataclass(frozen=True)
class Stacked(Engine):
    """Many parties at once where the model allows it, also on a GPU; in long runs in one process per core."""

    def start(self, inputs: EngineInputs) -> ReferenceEngine:
        from hansa.sim.choice import stacked

        return stacked(inputs)
