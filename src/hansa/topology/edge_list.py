"""A topology from a list of edges between named parties, in a file or in the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hansa.core.registry import register
from hansa.plumbing.errors import ConfigError, nearest
from hansa.plumbing.functions import experiment_folder
from hansa.topology.graph import Graph, check_edges
from hansa.topology.topology import Topology

BOTH, ONE_WAY = " -- ", " -> "


@register("edges")
@dataclass(frozen=True)
class EdgeList(Topology):
    """Edges between named parties, one per line: `ann -- bob` sends in both directions, `ann -> bob` in one.

    `file` is a text file, looked for from the experiment's folder; empty lines and lines that begin with # do not
    count. It is read once, into `edges`: records and jobs have the edges, and do not need the file again. Without
    names, parties are called by their numbers from 0.
    """

    file: str | None = None
    edges: tuple[str, ...] = ()
    repair: ClassVar[str] = "add an edge"

    def __post_init__(self) -> None:
        if (self.file is None) == (not self.edges):
            raise ConfigError("the topology edges needs a file or a list of edges, and not both")
        if self.file is not None:
            object.__setattr__(self, "edges", _lines(self.file))
            object.__setattr__(self, "file", None)
        check_edges(len(self.edges), "the topology edges")
        for edge in self.edges:
            _ends(edge)

    def graph(self, parties: int, names: Sequence[str] | None = None) -> Graph:
        known = {name: k for k, name in enumerate(map(str, range(parties)) if names is None else names)}
        senders, receivers = [], []
        for edge in self.edges:
            one, other, both = _ends(edge)
            for name in (one, other):
                if name not in known:
                    raise ConfigError(
                        f"the topology edges: the edge {edge!r} names {name!r}, which is no party{nearest(name, known)}"
                    )
            senders.append(known[one])
            receivers.append(known[other])
            if both:
                senders.append(known[other])
                receivers.append(known[one])
        return Graph(parties, senders, receivers)


def _ends(edge: str) -> tuple[str, str, bool]:
    """The two names of an edge, and whether it goes in both directions."""
    for mark in (BOTH, ONE_WAY):
        one, found, other = edge.partition(mark)
        if found and one.strip() and other.strip() and BOTH not in other and ONE_WAY not in other:
            if one.strip() == other.strip():
                raise ConfigError(f"the edge {edge!r} leads from a party to itself; remove it")
            return one.strip(), other.strip(), mark == BOTH
    raise ConfigError(f"the edge {edge!r} is not of the form 'ann -- bob' or 'ann -> bob'")


def _lines(file: str) -> tuple[str, ...]:
    """The edges in a text file."""
    path = Path(experiment_folder()) / file
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the topology edges: {path} cannot be read: {reason}") from None
    lines = [line.strip() for line in text.splitlines()]
    edges = tuple(line for line in lines if line and not line.startswith("#"))
    if not edges:
        raise ConfigError(f"the topology edges: {path} has no edge")
    return edges
