"""Draws curves in panels side by side, both axes logarithmic, as SVG for light and dark pages."""

from __future__ import annotations

from math import ceil, floor, log10

Curves = dict[str, dict[str, dict[int, float]]]
"""Panel, curve, x, y."""
PANEL, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 340, 52, 16, 86, 52
STEPS = (1, 2, 5)
"""Marks of the y axis within a power of ten."""
STYLE = """\
<style>
.back { fill: #ffffff } .text { fill: #24292f } .axis { stroke: #8c959f; fill: none } .grid { stroke: #d8dee4 }
.c0 { stroke: #0a60c0; fill: #0a60c0 } .c1 { stroke: #c04a00; fill: #c04a00 } .c2 { stroke: #2c7a3f; fill: #2c7a3f }
polyline { fill: none !important; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  .back { fill: #0d1117 } .text { fill: #e6edf3 } .grid { stroke: #30363d }
  .c0 { stroke: #6cb6ff; fill: #6cb6ff } .c1 { stroke: #ffa657; fill: #ffa657 } .c2 { stroke: #7ee787; fill: #7ee787 }
}
</style>"""


class Axis:
    """Maps values to pixels between two ends."""

    def __init__(self, least: float, most: float, start: float, end: float) -> None:
        self.least, self.start = log10(least), start
        self.scale = (end - start) / (log10(most) - self.least)

    def at(self, value: float) -> float:
        return self.start + (log10(value) - self.least) * self.scale


def drawing(panels: Curves) -> str:
    """Return the plot."""
    width = PANEL * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Processor time per record over '
        f'{", ".join(panels)}, both axes logarithmic">',
        STYLE,
        f'<rect class="back" width="{width}" height="{HEIGHT}"/>',
        text(8, 16, "Processor time per record, microseconds", "start"),
    ]
    for number, (name, curves) in enumerate(panels.items()):
        parts += panel(name, curves, number * PANEL)
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(name: str, curves: dict[str, dict[int, float]], left: float) -> list[str]:
    """Return the elements of one panel: grid, axes, curves, and the legend above them."""
    xs = sorted({x for points in curves.values() for x in points})
    ys = [y for points in curves.values() for y in points.values()]
    marks = [step * 10**power for power in range(floor(log10(min(ys))), ceil(log10(max(ys))) + 1) for step in STEPS]
    lowest, highest = max(m for m in marks if m <= min(ys)), min(m for m in marks if m >= max(ys))
    base, right = HEIGHT - BOTTOM, left + PANEL - RIGHT
    across, up = Axis(xs[0], xs[-1], left + LEFT + 8, right - 8), Axis(lowest, highest, base, TOP)
    parts = []
    for mark in marks:
        if lowest <= mark <= highest:
            parts.append(f'<path class="grid" d="M{left + LEFT} {up.at(mark):.1f}H{right}"/>')
            parts.append(text(left + LEFT - 6, up.at(mark) + 4, f"{mark:g}", "end"))
    parts.append(f'<path class="axis" d="M{left + LEFT} {TOP}V{base}H{right}"/>')
    parts += [text(across.at(x), base + 18, short(x)) for x in xs]
    parts.append(text((left + LEFT + right) / 2, base + 38, name))
    for number, (title, points) in enumerate(curves.items()):
        dots = [(across.at(x), up.at(y)) for x, y in sorted(points.items())]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline class="c{number}" points="{line}"/>')
        parts += [marker(number, x, y) for x, y in dots]
        parts.append(marker(number, left + LEFT + 6, 34 + 16 * number))
        parts.append(text(left + LEFT + 16, 38 + 16 * number, title, "start"))
    return parts


def marker(number: int, x: float, y: float) -> str:
    """Return a shape that is another one for each curve, for readers who see no colours."""
    shape = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-4 -4h8v8h-8z", "M0 -5l5 9h-10z")[number]
    return f'<path class="c{number}" transform="translate({x:.1f} {y:.1f})" d="{shape}"/>'


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text class="text" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def short(number: int) -> str:
    """Return 10k for 10,000 and 1M for a million."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:g}{unit}"
    return str(number)
