"""SVG written by hand: a plot area with axes, ticks and marks. Colours come from the page's style sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 40
SERIES_CLASSES = ("base", "cand", "third", "fourth", "fifth", "sixth")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between `low` and `high`, both inclusive where they are round."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def label(value: float) -> str:
    """A tick's number: short, without an exponent where there is room."""
    if value == 0:
        return "0"
    for size, mark in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if mark == 'k' else size):.4g}{mark}"
    return f"{value:.4g}"


@dataclass
class Plot:
    """A drawing area that maps data to pixels and collects elements."""

    title: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    elements: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1.0) * (self.width - self.left - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - _BOTTOM - (value - low) / ((high - low) or 1.0) * (self.height - _BOTTOM - _TOP)

    @property
    def floor(self) -> float:
        return float(self.height - _BOTTOM)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self.elements.append(f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "middle") -> None:
        self.elements.append(
            f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, css: str, title: str = "") -> None:
        tip = f"<title>{escape(title)}</title>" if title else ""
        self.elements.append(
            f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
            f'height="{max(height, 0):.1f}">{tip}</rect>'
        )

    def circle(self, x: float, y: float, css: str, title: str = "") -> None:
        tip = f"<title>{escape(title)}</title>" if title else ""
        self.elements.append(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{tip}</circle>')

    def path(self, points: list[tuple[float, float]], css: str, *, close_to: float | None = None) -> None:
        """A polyline; with `close_to` an area down to that height."""
        if not points:
            return
        steps = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        tail = ""
        if close_to is not None:
            tail = f" L{points[-1][0]:.1f},{close_to:.1f} L{points[0][0]:.1f},{close_to:.1f} Z"
        self.elements.append(f'<path class="{css}" d="M{steps}{tail}"/>')

    def x_axis(self, name: str) -> None:
        """Ticks, numbers and the axis' name."""
        for value in ticks(*self.x_range):
            at = self.x(value)
            self.line(at, self.floor, at, self.floor + 4, "axis")
            self.text(at, self.floor + 17, label(value), "tick")
        self.line(self.left, self.floor, self.width - _RIGHT, self.floor, "axis")
        self.text((self.left + self.width - _RIGHT) / 2, self.height - 5, name, "tick")

    def y_axis(self, name: str = "") -> None:
        """Grid lines with numbers."""
        for value in ticks(*self.y_range, count=4):
            at = self.y(value)
            self.line(self.left, at, self.width - _RIGHT, at, "grid")
            self.text(self.left - 6, at + 4, label(value), "tick", "end")
        if name:
            middle = (self.floor + _TOP) / 2
            self.elements.append(
                f'<text class="tick" transform="translate(13,{middle:.1f}) rotate(-90)" '
                f'text-anchor="middle">{escape(name)}</text>'
            )

    def limit(self, value: float, name: str) -> None:
        """A horizontal line that must not be crossed."""
        at = self.y(value)
        self.line(self.left, at, self.width - _RIGHT, at, "limit")
        self.text(self.left + 6, at - 5, name, "limit-label", "start")

    def svg(self) -> str:
        body = "".join(self.elements)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">'
            f"<title>{escape(self.title)}</title>{body}</svg>"
        )


def legend(names: list[str]) -> str:
    """Coloured names above a chart."""
    keys = (
        f'<span class="key"><i class="swatch {css}"></i>{escape(name)}</span>'
        for name, css in zip(names, _cycled(len(names)), strict=True)
    )
    return f'<div class="legend">{"".join(keys)}</div>'


def _cycled(count: int) -> list[str]:
    return [SERIES_CLASSES[i % len(SERIES_CLASSES)] for i in range(count)]


def css_of(index: int) -> str:
    """The class of the i-th series."""
    return SERIES_CLASSES[index % len(SERIES_CLASSES)]
