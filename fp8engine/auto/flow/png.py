"""PNG of a flow's drawing: the shapes of its SVG, drawn by matplotlib (the extra `report`)."""

from __future__ import annotations

import os
import re
from xml.etree import ElementTree


def png(svg: str, path: str | os.PathLike) -> None:
    """Write what `draw.svg` made as a PNG of twice its size: boxes, curves with an arrow, and text, in their order."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
    from matplotlib.path import Path

    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    figure = Figure(figsize=(width / 72, height / 72), dpi=144)  # so that a point is a pixel
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for order, shape in enumerate(root.iter()):
        tag, of = shape.tag.rpartition("}")[2], shape.attrib
        if tag == "rect":
            x, y, wide, high, radius = (float(of[key]) for key in ("x", "y", "width", "height", "rx"))
            style = {"facecolor": of["fill"], "edgecolor": of.get("stroke", "none"), "zorder": order}
            style |= {"linestyle": (0, (5, 4))} if "stroke-dasharray" in of else {}
            rounded = f"round,pad=0,rounding_size={radius}"
            axes.add_patch(FancyBboxPatch((x, y), wide, high, boxstyle=rounded, mutation_aspect=1, **style))
        elif tag == "path" and "marker-end" in of:
            numbers = [float(number) for number in re.findall(r"[-\d.]+", of["d"])]
            points = list(zip(numbers[::2], numbers[1::2], strict=True))
            way = Path(points, [Path.MOVETO, *[Path.CURVE4] * (len(points) - 1)])
            style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": of["stroke"], "zorder": order}
            axes.add_patch(FancyArrowPatch(path=way, shrinkA=0, shrinkB=0, **style))
        elif tag == "text":
            style = {"fontsize": 0.9 * float(of["font-size"]), "color": of["fill"], "zorder": order}
            side = "center" if "text-anchor" in of else "left"
            weight = "bold" if "font-weight" in of else "normal"
            axes.text(float(of["x"]), float(of["y"]), shape.text or "", ha=side, weight=weight, **style)
    figure.savefig(path, format="png")
