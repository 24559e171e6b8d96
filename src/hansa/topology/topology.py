"""Base of topologies: which parties send to which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hansa.core.registry import Part
from hansa.plumbing.errors import ConfigError
from hansa.topology.graph import Graph


class Topology(Part):
    """Base of topologies. A topology makes a graph from the number of parties, or from their names."""

    kind: ClassVar[str] = "topology"
    repair: ClassVar[str] = "use another topology"  # what to do about a graph that is not connected

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        """The graph. It depends on the fields and the arguments alone. `names` are by default the parties' numbers."""
        raise TypeError(f"the topology {self.name!r} does not define graph()")

    def checked(self, algorithm: str, parties: int, names: Sequence[str] | None, symmetric: bool) -> Graph:
        """The graph; a ConfigError if an algorithm cannot use it.

        With `symmetric` every edge needs its opposite. Every party must reach every other one.
        """
        graph = self.graph(parties, names)

        def who(party: int) -> str:
            return repr(str(party) if names is None else names[party])

        one_way = graph.one_way if symmetric else None
        if one_way is not None:
            sender, receiver = map(who, one_way)
            raise ConfigError(
                f"{algorithm}: in the topology {self.name}, {sender} sends to {receiver} and gets nothing back, and "
                f"{algorithm} needs every edge in both directions; add the opposite edge, or use push-sum"
            )
        apart = graph.unreachable
        if apart is not None:
            sender, receiver = map(who, apart)
            raise ConfigError(
                f"{algorithm}: the topology {self.name} is not connected: nothing from party {sender} reaches party "
                f"{receiver}, so the parties would never agree on one model; {self.repair}"
            )
        return graph
