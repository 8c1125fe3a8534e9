"""A figure of matplotlib as PNG bytes: drawn off screen in the report's colours, or not at all without matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, DIM, FAINT = "#2b2f36", "#6b747e", "#d9dde2"  # of text, of remarks, of lines that only guide the eye
STYLE: Any = {"font.size": 9, "axes.edgecolor": FAINT}
STYLE |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)


def png(draw: Callable[[Figure], None], width: float, height: float, dots: int) -> bytes | None:
    """What `draw` draws on a white figure of width x height inches; None where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=dots, facecolor="white", metadata={"Software": None})
    return memory.getvalue()


def titles(figure: Figure, above: str, below: str, colour: str = DIM) -> None:
    """A title at the upper left, and a remark at the lower left."""
    figure.suptitle(above, x=0.01, ha="left", fontsize=12, fontweight="bold")
    if below:
        figure.supxlabel(below, x=0.01, ha="left", fontsize=8.5, color=colour)
