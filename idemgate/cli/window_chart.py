"""The chart of `idemgate simulate --svg`: deliveries and lateness over the window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["draw"]

LEFT, TOP, WIDTH, HEIGHT = 60, 50, 480, 240
STYLE = """
    text { font: 12px sans-serif; fill: #24292f } .grid { stroke: #8c959f55 }
    .deliveries { stroke: #0969da; fill: #0969da } .p50 { stroke: #1a7f37; fill: #1a7f37 }
    .p99 { stroke: #bc4c00; fill: #bc4c00 } polyline { fill: none !important; stroke-width: 2 }
    text.key { stroke: none }
    @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .deliveries { stroke: #58a6ff; fill: #58a6ff }
      .p50 { stroke: #3fb950; fill: #3fb950 } .p99 { stroke: #f0883e; fill: #f0883e } }
"""


def draw(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return an SVG of the rows that `simulate` prints. `name` is "window" or "quiet"; its axis is logarithmic."""
    spans = [math.log(row[f"{name}_s"]) for row in rows]
    width = (spans[-1] - spans[0]) or 1.0
    xs = [LEFT + WIDTH * ((span - spans[0]) / width if len(rows) > 1 else 0.5) for span in spans]
    latest = max(row["lateness_p99_s"] for row in rows) or 1.0
    lines = {
        "deliveries": [100 - row["saved_percent"] for row in rows],
        "p50": [100 * row["lateness_p50_s"] / latest for row in rows],
        "p99": [100 * row["lateness_p99_s"] / latest for row in rows],
    }
    titles = {"deliveries": "deliveries, % of events", "p50": "lateness p50, s", "p99": "lateness p99, s"}
    parts = [_text(LEFT + 160 * place, 24, titles[line], f"key {line}") for place, line in enumerate(lines)]
    for percent in range(0, 101, 25):
        y = _y(percent)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{percent}", anchor="end"))
        parts.append(_text(LEFT + WIDTH + 8, y + 4, f"{latest * percent / 100:.3g}"))
    parts += [
        _text(x, TOP + HEIGHT + 20, f"{row[f'{name}_s']:g} s", anchor="middle") for x, row in zip(xs, rows, strict=True)
    ]
    parts.append(_text(LEFT + WIDTH // 2, TOP + HEIGHT + 40, name, anchor="middle"))
    for line, values in lines.items():
        points = [(round(x, 1), _y(value)) for x, value in zip(xs, values, strict=True)]
        parts.append(f'<polyline class="{line}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>')
        parts += [f'<circle class="{line}" cx="{x}" cy="{y}" r="3"/>' for x, y in points]
    body = "\n  ".join(parts)
    title = f"Deliveries and lateness over the {name}"
    size = f"{LEFT + WIDTH + 60} {TOP + HEIGHT + 55}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" aria-label="{title}">\n'
        f"  <title>{title}</title>\n  <style>{STYLE}  </style>\n  {body}\n</svg>\n"
    )


def _y(percent: float) -> float:
    return round(TOP + HEIGHT * (1 - percent / 100), 1)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{round(x, 1)}" y="{y}" text-anchor="{anchor}" class="{kind}">{text}</text>'
