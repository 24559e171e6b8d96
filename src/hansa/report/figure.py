"""A matplotlib figure that a notebook displays even if pyplot was not imported."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hansa.report import plots


class Drawing(Figure):
    """A figure with its own canvas; size in inches. A notebook displays it as the last value of a cell."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """PNG for a notebook, shown at half its pixel width for high-density screens."""
        picture = plots.png(self)
        return picture, {"width": int.from_bytes(picture[16:20], "big") // 2}
