"""A matplotlib figure that shows itself in a notebook. Matplotlib's own does so only where pyplot was imported."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hansa.report import plots


class Drawing(Figure):
    """A figure with a canvas of its own, in inches. As the last value of a notebook's cell it is drawn below it."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """What a notebook shows, and how wide: half of its points, which dense screens have."""
        picture = plots.png(self)
        return picture, {"width": int.from_bytes(picture[16:20], "big") // 2}
