"""The registered engine `ray`. Ray itself is imported when a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hansa.core.fields import Advice
from hansa.core.quantities import Count
from hansa.core.registry import register
from hansa.plumbing.errors import ConfigError
from hansa.sim.engine import Engine, EngineInputs, ReferenceEngine


@register("ray")
@dataclass(frozen=True)
class Ray(Engine):
    """Actors on a Ray cluster, each of which trains parties by the engine `inner`; with the bits of that engine.

    `address` is "local" for a new cluster on this machine, "auto" for the cluster that this machine belongs to (or that
    the variable RAY_ADDRESS names), or HOST:PORT of the head of a cluster that this machine belongs to. `actors` is the
    number of actors, by default as many as the cluster has room for; each occupies `cpus` CPUs of Ray's accounting and
    trains on one thread. With `run.device = "cuda"` each also occupies `gpus` GPUs (1 by default, or a share of one),
    and trains on the card that Ray gives it. With `run.sums = "exact"` replies are summed on the cluster.
    """

    address: str = "local"
    actors: Annotated[Count, Advice("leave it out for all of the cluster")] | None = None
    cpus: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    gpus: Annotated[float, Meta(ge=1e-4, le=1), Advice("an actor trains on one card, or on a share of it")] | None = (
        None
    )
    inner: Literal["stacked", "reference"] = "stacked"

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise ConfigError(
                f"address: {self.address!r} is that of a Ray client; start the run on a machine of the cluster and "
                "give 'auto' or HOST:PORT"
            )

    def driver_device(self, device: str) -> str:
        return "cpu"  # the driver needs no card: actors have them

    def start(self, inputs: EngineInputs) -> ReferenceEngine:
        from hansa.cluster.engine import started  # imports what trains; the settings of a run need only the names

        return started(self, inputs)
