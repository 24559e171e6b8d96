"""The registered engine `ray`. Ray itself is imported when a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    actors: int | None = None
    cpus: float = 1.0
    gpus: float | None = None
    inner: Literal["stacked", "reference"] = "stacked"

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise ConfigError(f"actors must be at least 1, got {self.actors}; leave it out for all of the cluster")
        if not 0 < self.cpus <= 1024:
            raise ConfigError(f"cpus must lie in 0..1024, got {self.cpus}")
        if self.gpus is not None and not 1e-4 <= self.gpus <= 1:
            raise ConfigError(
                f"gpus must lie in 0.0001..1, got {self.gpus}; an actor trains on one card, or on a share of it"
            )
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
