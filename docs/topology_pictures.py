"""Draw the topologies: `python docs/topology_pictures.py` writes docs/images/topology-*.svg.

Each picture is drawn from the graph of the registered part. The last one mixes random models on each graph.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from hansa.report.plots import BLUE, GREY, blank, svg
from hansa.topology import (
    Complete,
    EdgeList,
    Graph,
    Lattice,
    RandomGraph,
    RandomRegular,
    Ring,
    SmallWorld,
    Star,
    Topology,
    metropolis,
    spectral_gap,
)

IMAGES = Path(__file__).resolve().parent / "images"
PARTIES, MANY, ROUNDS = 12, 64, 60
ONE_WAY = (*(f"{k} -> {(k + 1) % PARTIES}" for k in range(PARTIES)), "0 -> 6", "3 -- 9", "8 -> 2", "5 -> 11")
TOPOLOGIES: dict[str, Topology] = {
    "ring": Ring(), "grid": Lattice(columns=4), "random-regular": RandomRegular(3, seed=1),
    "small-world": SmallWorld(4, 0.2, seed=2), "complete": Complete(), "star": Star(), "random": RandomGraph(0.3, 1),
    "edges": EdgeList(edges=ONE_WAY),
}  # fmt: skip
CURVES: dict[str, tuple[Topology, str]] = {
    "ring": (Ring(), "-"), "grid": (Lattice(), "--"), "small-world, degree 4": (SmallWorld(4, 0.2), "-."),
    "random-regular, degree 4": (RandomRegular(4), ":"), "star": (Star(), (0, (5, 1, 1, 1, 1, 1))),  # type: ignore[dict-item]
    "complete": (Complete(), (0, (1, 3))),  # type: ignore[dict-item]
}  # fmt: skip


def places(name: str) -> list[tuple[float, float]]:
    """Where the parties stand: in rows, around the first one, or on a circle."""
    if name == "grid":
        return [(0.62 * (k % 4 - 1.5), 0.62 * (1 - k // 4)) for k in range(PARTIES)]
    rim = PARTIES - 1 if name == "star" else PARTIES
    circle = [(math.sin(2 * math.pi * k / rim), math.cos(2 * math.pi * k / rim)) for k in range(rim)]
    return [(0.0, 0.0), *circle] if name == "star" else circle


def draw(axes: Axes, name: str, graph: Graph) -> None:
    """Draw a graph: lines for edges in both directions, arrows for one-way edges."""
    at = places(name)
    edges = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    for sender, receiver in sorted(edges):
        if (receiver, sender) not in edges:
            axes.add_patch(FancyArrowPatch(at[sender], at[receiver], arrowstyle="-|>", mutation_scale=11, lw=1.2,
                                           color=BLUE, shrinkA=8, shrinkB=9))  # fmt: skip
        elif sender < receiver:
            axes.plot(*zip(at[sender], at[receiver], strict=True), color=GREY, lw=1.3, zorder=1)
    for party, place in enumerate(at):
        axes.plot(*place, "o", ms=15, mfc="#E5F1F8", mec=BLUE, mew=1.5, zorder=3)
        axes.text(*place, str(party), ha="center", va="center", fontsize=8, zorder=4)
    axes.set_xlim(-1.2, 1.2)
    axes.set_ylim(-1.2, 1.2)
    axes.set_aspect("equal")
    axes.axis("off")


def main() -> None:
    for name, topology in TOPOLOGIES.items():
        figure = blank(2.6, 2.6)
        draw(figure.add_subplot(111), name, topology.checked("picture", PARTIES, None, symmetric=False))
        (IMAGES / f"topology-{name}.svg").write_bytes(svg(figure))
    figure = blank(6.4, 3.6)
    axes = figure.add_subplot(111)
    start = torch.from_numpy(np.random.default_rng(0).normal(size=(MANY, 100)))
    for label, (topology, style) in CURVES.items():
        mixing, models, apart = metropolis(topology.graph(MANY)), start, list[float]()
        for _ in range(ROUNDS + 1):
            apart.append(float((models - models.mean(0)).norm()))
            models = mixing.apply(models)
        shown = [max(value / apart[0], 1e-16) for value in apart]
        colour = {"color": "black"} if label == "complete" else {}
        axes.semilogy(shown, ls=style, lw=1.8, **colour, label=f"{label}: gap {spectral_gap(mixing):.3f}")
    axes.set_ylim(1e-8, 2)
    axes.set_xlabel("rounds of mixing")
    axes.set_ylabel("distance from the mean model")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0.06, 0.0))
    (IMAGES / "topology-speed.svg").write_bytes(svg(figure))


if __name__ == "__main__":
    main()
