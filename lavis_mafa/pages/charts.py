"""Tables and charts as HTML and SVG that need no script; every given string is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Cell = str | float | int | None

WIDTH, HEIGHT, DIGIT = 480, 300, 10  # of a chart, and the room for a digit on a phone
COLOURS = 6  # line colours in the template; further series repeat them dashed
MARKERS = 80  # a series with more points than this is a bare line
MAX_POINTS = 600  # a longer series is thinned before it is drawn
MAX_NUMBERS = 200  # a curve with more x values than this gets no table of its numbers
HUGE, TINY = 1e100, 1e-100  # beyond these a value is not drawn: axis arithmetic would overflow
LEGEND = 20  # height of a line of the legend in an SVG file
# Colours of the light theme of the reports; as a file of its own an SVG cannot use their style.
STYLE = """<style>
text { font: 13px sans-serif; fill: #57606a } .mid { text-anchor: middle } .end { text-anchor: end }
path { fill: none; stroke-linecap: round } .grid { stroke: #e3e7eb } .axis { stroke: #57606a }
.line { stroke: currentColor; stroke-width: 2 } .d1 { stroke-dasharray: 6 4 }
.bar { stroke: currentColor } .dot { fill: currentColor }
.s0 { color: #0b62a8 } .s1 { color: #c2540a } .s2 { color: #17803d }
.s3 { color: #8a3fd1 } .s4 { color: #b0256b } .s5 { color: #7a6400 }
</style><rect width="100%" height="100%" fill="#ffffff"/>"""
_tick_label = "{:,.10g}".format  # ten digits hide what 3 * 0.1 leaves behind


@dataclass
class Series:
    """One line of a curve: one y for each x, None for a gap. Beyond 600 points it is thinned.

    ``spread`` holds half the height of each point's error bar; None: no bar.
    """

    name: str
    x: list[float] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)
    spread: list[float | None] = field(default_factory=list)


@dataclass
class Curve:
    """A line chart. Values that are not finite, or on a logarithmic axis not above zero, are gaps.

    Attributes:
        log_x, log_y: logarithmic axes; that of x has its ticks where the data are.
        bounds: what y can be, such as ``(0, 1)`` for shares: the axis has no ticks beyond.
        places: names of x = 1, 2, ... where x is no number; points are then not joined by lines.
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    series: list[Series] = field(default_factory=list)
    note: str = ""
    log_y: bool = False
    log_x: bool = False
    bounds: tuple[float, float] | None = None
    places: list[str] = field(default_factory=list)


@dataclass
class Table:
    """A table. ``highlight_best`` maps a column's name to "max" or "min"; ties are all marked."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""
    highlight_best: dict[str, str] = field(default_factory=dict)


def require(value: str, allowed: Sequence[str], what: str) -> None:
    """Raise ValueError unless the value is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}, expected one of {', '.join(allowed)}")


def esc(text: object) -> str:
    """Return text that is safe in HTML, attributes included."""
    return html.escape(str(text), quote=True)


def as_number(value: object) -> float | int | None:
    """Return the value as a Python number if it is one (NumPy's and 0-d tensors too), else None."""
    if hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def format_number(value: object) -> str:
    """Return a cell's text: floats with three significant digits, all of integers, None as "–"."""
    number = as_number(value)
    if number is None:
        return "–" if value is None else str(value)
    if isinstance(number, int):
        return f"{number:,}"
    if number == 0:
        return "0"
    if 999.5 <= abs(number) < 1e6:
        return f"{number:,.0f}"
    if abs(number) < 1e-4 or abs(number) >= 1e6:
        return f"{number:.2e}"
    return f"{number:#.3g}".rstrip(".")


def _figure(kind: str, title: str, body: str, note: str = "") -> str:
    caption = f"<figcaption>{esc(title)}</figcaption>" if title else ""
    note = f'<p class="note">{esc(note)}</p>' if note else ""
    return f'<figure class="{kind}">{caption}{body}{note}</figure>'


def table_html(table: Table) -> str:
    """Return a table as a figure.

    Raises:
        ValueError: if its rows or ``highlight_best`` do not fit its columns.
    """
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ValueError(
                f"table {table.title!r}: the row {row!r} has {len(row)} cells, "
                f"expected {len(table.columns)}, one for each of {table.columns!r}"
            )
    best: dict[int, float] = {}
    for column, which in table.highlight_best.items():
        require(column, table.columns, f"table {table.title!r}: a column of highlight_best")
        require(which, ("max", "min"), f"table {table.title!r}: highlight_best[{column!r}]")
        place = table.columns.index(column)
        cells = (as_number(row[place]) for row in table.rows)
        numbers = [n for n in cells if n is not None and math.isfinite(n)]
        if len(numbers) > 1:  # a single value has nothing to beat
            best[place] = max(numbers) if which == "max" else min(numbers)

    def cell(place: int, value: Cell) -> str:
        text, number = esc(format_number(value)), as_number(value)
        if number is not None and number == best.get(place):
            return f'<td class="n best"><span role="img" aria-label="best">★</span> {text}</td>'
        is_text = number is None and value is not None
        return f"<td>{text}</td>" if is_text else f'<td class="n">{text}</td>'

    head = body = ""
    for place, name in enumerate(table.columns):
        has_text = any(isinstance(row[place], str) for row in table.rows)
        head += f'<th scope="col"{"" if has_text else " class=n"}>{esc(name)}</th>'
    for row in table.rows:
        body += f"<tr>{''.join(cell(place, value) for place, value in enumerate(row))}</tr>"
    # A wide table scrolls; without tabindex the keyboard could not scroll it.
    region = f'tabindex="0" role="region" aria-label="{esc(table.title or "table")}"'
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    body = f'<div class="scroll" {region}>{body}</div>'
    notes = [table.note, "★: the best of its column." if best else ""]
    return _figure("table", table.title, body, " ".join(note for note in notes if note))


def ticks(low: float, high: float, least_step: float = 0.0) -> list[float]:
    """Return at most 8 multiples of 1, 2 or 5 times a power of ten that enclose low to high."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), TINY):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    # 0.999: rounding must not pass over a step that fits exactly.
    step = max(least_step, next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, max(last, first + 1) + 1)]


@dataclass
class _Point:
    """A point of a line: its place (y None: a gap; on a log axis an exponent) and hover text."""

    x: float
    y: float | None
    hint: str
    bar: tuple[float, float] | None = None


def _points(series: Series, curve: Curve) -> list[_Point]:
    step = math.ceil(len(series.x) / MAX_POINTS) or 1
    ys: list[float | None] = [as_number(y) for y in series.y]
    spreads = series.spread or [None] * len(ys)
    given = list(zip(map(float, series.x), ys, spreads, strict=True))
    points = []
    for x, y, spread in [*given[:-1:step], *given[-1:]]:
        height = bar = None
        if y is not None and abs(y) < HUGE and (y > TINY or not curve.log_y):
            height = math.log10(y) if curve.log_y else y
            bar = (y - spread, y + spread) if spread and not curve.log_y else None
        if abs(x) < HUGE and (x > TINY or not curve.log_x):
            at = curve.places[int(x) - 1] if curve.places else _tick_label(x)
            hint = f"{series.name}: {format_number(y)} at {at}"
            points.append(_Point(x, height, f"<title>{esc(hint)}</title>", bar))
    return points


def curve_html(curve: Curve) -> str:
    """Return a curve as a figure, with its numbers in a table that unfolds.

    Raises:
        ValueError: if a series' ``x`` and ``y`` differ in length.
    """
    chart = _draw(curve)
    if chart is None:
        return _figure("chart", curve.title, '<p class="note">No values to draw.</p>', curve.note)
    body, height = chart
    alt = esc(f"{curve.title}: line chart of {', '.join(s.name for s in curve.series)}")
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{alt}">{body}</svg>'
    legend = ""
    for place, one in enumerate(curve.series):
        key = f'<svg viewBox="0 0 24 8" aria-hidden="true">{_key(place, "M2 4H22")}</svg>'
        legend += f"<li>{key}{esc(one.name)}</li>"
    legend = f'<ul class="legend">{legend}</ul>'
    return _figure("chart", curve.title, svg + legend + _numbers(curve), curve.note)


def curves_svg(curves: Sequence[Curve]) -> str | None:
    """Return curves side by side as an SVG file of its own; None if there is nothing to draw."""
    drawn = [(curve, *chart) for curve in curves if (chart := _draw(curve)) is not None]
    if not drawn:
        return None
    named = [len([s for s in curve.series if s.name]) for curve, _, _ in drawn]
    tall = max(height + LEGEND * count for (_, _, height), count in zip(drawn, named, strict=True))
    size = f"{WIDTH * len(drawn)} {tall}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">{STYLE}']
    for column, (curve, body, height) in enumerate(drawn):
        parts.append(f'<g transform="translate({WIDTH * column} 0)">{body}')
        for place, one in enumerate(curve.series):
            if one.name:
                y = height + LEGEND * place + 4
                parts.append(_key(place, f"M40 {y}h24"))
                parts.append(f'<text x="72" y="{y + 4}">{esc(one.name)}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _key(place: int, path: str) -> str:
    """Return the sample of a line in the legend."""
    return f'<path class="line {_pen(place)}" d="{path}"/>'


def _pen(place: int) -> str:
    return f"s{place % COLOURS} d{place // COLOURS % 2}"


def _draw(curve: Curve) -> tuple[str, int] | None:
    """Return a chart's axes and lines as SVG elements, and its height; None without values."""
    for one in curve.series:
        if len(one.x) != len(one.y):
            raise ValueError(
                f"curve {curve.title!r}, series {one.name!r}: x has {len(one.x)} values and "
                f"y has {len(one.y)}, expected one y for each x (None for a gap)"
            )
    lines = [_points(one, curve) for one in curve.series]
    drawn = [(p.x, p.y) for line in lines for p in line if p.y is not None]
    if not drawn:
        return None
    xs, ys = zip(*drawn, strict=True)
    ends = [end for line in lines for p in line for end in p.bar or ()]
    lowest, highest = min([*ys, *ends]), max([*ys, *ends])
    y_ticks = ticks(lowest, highest, least_step=1.0 if curve.log_y else 0.0)
    if curve.bounds is not None and not curve.log_y:
        low, high = curve.bounds
        y_ticks = [t for t in y_ticks if low <= t <= high]
        if len(y_ticks) < 2 or y_ticks[0] > lowest or y_ticks[-1] < highest:
            y_ticks = [low, high]
    y_labels = [_tick_label(10.0**t if curve.log_y else t) for t in y_ticks]
    x_ticks = ticks(min(xs), max(xs), least_step=1.0 if all(x == int(x) for x in xs) else 0.0)
    # The data may end between two ticks of x; a lone x is given the whole range of its ticks.
    first, last = (min(xs), max(xs)) if max(xs) > min(xs) else (x_ticks[0], x_ticks[-1])
    if curve.log_x:
        x_ticks = sorted(set(xs))
        first, last = (first, last) if max(xs) > min(xs) else (max(xs) / 2, max(xs) * 2)
    left, right, top, bottom = 14 + DIGIT * max(map(len, y_labels)), WIDTH - 16, 30, HEIGHT - 46
    if curve.places:
        first, last = 0.5, len(curve.places) + 0.5
        # The first name is written slantwise to the left, beyond the axis if it is long.
        left = max(left, min(WIDTH // 2, 6 * len(curve.places[0]) - WIDTH // (2 * int(last))))
    height = HEIGHT

    def across(x: float) -> str:
        share = (x - first) / (last - first)
        if curve.log_x:
            share = math.log(x / first) / math.log(last / first)
        return f"{left + share * (right - left):.1f}"

    def down(y: float, shift: float = 0.0) -> str:
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return f"{bottom - up * (bottom - top) + shift:.1f}"

    svg = []
    for tick, label in zip(y_ticks, y_labels, strict=True):
        svg.append(f'<path class="grid" d="M{left} {down(tick)}H{right}"/>')
        svg.append(f'<text class="end" x="{left - 6}" y="{down(tick, 4)}">{label}</text>')
    svg.append(f'<path class="axis" d="M{left} {bottom}H{right}"/>')
    if curve.places:
        # Names are written slantwise below the axis: half their length is the room they need.
        height = bottom + 24 + DIGIT * max(map(len, curve.places)) // 2
        for place, name in enumerate(curve.places, 1):
            turned = f'transform="translate({across(place)} {bottom + 16}) rotate(-35)"'
            svg.append(f'<text class="end" {turned}>{esc(name)}</text>')
    else:
        x_labels = [(tick, _tick_label(tick)) for tick in x_ticks if first <= tick <= last]
        room = sum(DIGIT * (len(label) + 1) for _, label in x_labels)
        for tick, label in x_labels[:: math.ceil(room / (right - left)) or 1]:
            x = across(tick)
            svg.append(f'<path class="axis" d="M{x} {bottom}v5"/>')
            svg.append(f'<text class="mid" x="{x}" y="{bottom + 19}">{label}</text>')
        at = f'x="{(left + right) / 2}" y="{HEIGHT - 8}"'
        svg.append(f'<text class="mid" {at}>{esc(curve.x_label)}</text>')
    svg.append(f'<text x="4" y="16">{esc(curve.y_label)}</text>')
    strokes = dots = ""
    for place, (one, line) in enumerate(zip(curve.series, lines, strict=True)):
        css, path, pen = _pen(place), "", "M"
        for p in line:
            if p.y is not None:
                # h0: a single point between two gaps is a dot, thanks to the round line cap
                path += f"{pen}{across(p.x)} {down(p.y)}" + ("h0" if pen == "M" else "")
                if len(line) <= MARKERS:
                    at = f'cx="{across(p.x)}" cy="{down(p.y)}"'
                    dots += f'<circle class="dot {css}" {at} r="3">{p.hint}</circle>'
                if p.bar is not None:
                    low, high = p.bar
                    bar = f"M{across(p.x)} {down(low)}V{down(high)}"
                    strokes += f'<path class="bar {css}" d="{bar}"/>'
            pen = "M" if p.y is None or curve.places else "L"
        title = f"<title>{esc(one.name)}</title>"
        strokes += f'<path class="line {css}" d="{path}">{title}</path>'
    return f"{''.join(svg)}{strokes}{dots}", height


def _numbers(curve: Curve) -> str:
    """Return the curve as a table that unfolds, for readers without the chart."""
    columns = [dict(zip(s.x, s.y, strict=True)) for s in curve.series]
    xs = sorted(set().union(*columns))
    if len(xs) > MAX_NUMBERS:
        return ""
    table = Table("", [curve.x_label or "x", *(s.name for s in curve.series)])
    table.rows = [[_tick_label(x), *(c.get(x) for c in columns)] for x in xs]
    return f"<details><summary>Numbers</summary>{table_html(table)}</details>"
