"""Draw the diagram of relays: `python docs/relays_picture.py` writes docs/images/topology-relays.svg."""

from __future__ import annotations

import matplotlib
from matplotlib.figure import Figure
from pictures import IMAGES, arrow, box, canvas

from hansa.report.plots import BLUE, GREEN, ORANGE, blank


def relays() -> Figure:
    """Draw a root, two relays, parties behind them and one party without a relay."""
    figure = blank(7.6, 4.0)
    axes = canvas(figure, 15.2, 8.0)
    box(axes, (7.6, 7.1), (6.4, 1.3), "root: hansa serve\nadds the sums, divides once", GREEN)
    sums = {3.4: "sum over ann, bob\nweight 120 + 300", 10.2: "sum over cid, dan, eve\nweight 45 + 80 + 60"}
    for x, name in ((3.4, "relay north: hansa relay"), (10.2, "relay south: hansa relay")):
        box(axes, (x, 4.3), (4.6, 1.1), f"{name}\nown ledger, log, receipts", ORANGE)
        arrow(axes, (x, 4.9), (7.6 + (x - 6.8) * 0.45, 6.4), GREEN)
        axes.text(1.7 if x < 7 else 7.5, 5.65, sums[x], fontsize=8, ha="center", va="center", color="0.2")
    for x, above, text in ((2.1, 3.4, "ann\nn = 120"), (4.7, 3.4, "bob\nn = 300"), (8.0, 10.2, "cid\nn = 45"),
                           (10.2, 10.2, "dan\nn = 80"), (12.4, 10.2, "eve\nn = 60")):  # fmt: skip
        box(axes, (x, 1.4), (1.8, 1.2), text, BLUE)
        arrow(axes, (x, 2.0), (above + (x - above) * 0.5, 3.7), BLUE, "--")
    axes.text(6.4, 2.85, "replies, signed;\nreceipts come back", fontsize=8, ha="center", va="center", color="0.2")
    box(axes, (14.2, 4.3), (1.8, 1.2), "fay\nn = 75", BLUE)
    arrow(axes, (14.2, 4.95), (10.9, 6.8), BLUE, "--")
    axes.text(7.6, 0.35, "every line is a TLS connection that the lower side opens", ha="center", fontsize=8.5,
              style="italic", color="0.35")  # fmt: skip
    return figure


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "hansa"
    about = {"Date": None, "Creator": None}
    relays().savefig(IMAGES / "topology-relays.svg", metadata=about, facecolor="white", bbox_inches="tight")
