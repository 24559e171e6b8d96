"""A matplotlib figure that shows itself in a notebook. Matplotlib's own does so only where pyplot was imported."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 160  # sharp on dense screens; it is shown at the size of 80


class Drawing(Figure):
    """A figure with a canvas of its own, in inches. As the last value of a notebook's cell it is drawn below it."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """What a notebook shows, and how wide it is there."""
        picture = png(self)
        return picture, {"width": int.from_bytes(picture[16:20], "big") // 2}


def png(figure: Figure) -> bytes:
    """The figure as PNG, on white also where pages are dark."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, bbox_inches="tight", facecolor="white")
    return out.getvalue()
