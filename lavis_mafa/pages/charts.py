"""Tables and line charts as HTML and SVG that need no script; every given string is escaped."""

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
_tick_label = "{:,.10g}".format  # ten digits hide what 3 * 0.1 leaves behind


@dataclass
class Series:
    """One line of a curve: one y for each x, None for a gap. Beyond 600 points it is thinned."""

    name: str
    x: list[float] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)


@dataclass
class Curve:
    """A line chart. Values that are not finite, or on a logarithmic axis not above zero, are gaps.

    Attributes:
        log_x, log_y: logarithmic axes; that of x has its ticks where the data are.
        bounds: what y can be, such as ``(0, 1)`` for shares: the axis has no ticks beyond.
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    series: list[Series] = field(default_factory=list)
    note: str = ""
    log_y: bool = False
    log_x: bool = False
    bounds: tuple[float, float] | None = None


@dataclass
class Table:
    """A table. ``highlight_best`` maps a column's name to "max" or "min"; ties are all marked."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""
    highlight_best: dict[str, str] = field(default_factory=dict)


def require(value: str, allowed: Sequence[str], what: str) -> None:
    """Refuse a word that is none of the allowed."""
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}, expected one of {', '.join(allowed)}")


def esc(text: object) -> str:
    """Text that may stand in HTML, attributes included."""
    return html.escape(str(text), quote=True)


def _number(value: object) -> float | int | None:
    """The value as a Python number if it is one (NumPy's and 0-d tensors too), otherwise None."""
    if hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def format_number(value: object) -> str:
    """A cell's text: floats with three significant digits, integers whole, None as "–"."""
    number = _number(value)
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
    """A table as a figure.

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
        cells = (_number(row[place]) for row in table.rows)
        numbers = [n for n in cells if n is not None and math.isfinite(n)]
        if len(numbers) > 1:  # a single value has nothing to beat
            best[place] = max(numbers) if which == "max" else min(numbers)

    def cell(place: int, value: Cell) -> str:
        text, number = esc(format_number(value)), _number(value)
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
    region = f'tabindex="0" role="region" aria-label="{esc(table.title or "table")}"'
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    body = f'<div class="scroll" {region}>{body}</div>'
    return _figure("table", table.title, body, table.note)


def ticks(low: float, high: float, least_step: float = 0.0) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most 8, that enclose ``low`` to ``high``."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), TINY):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(least_step, next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, max(last, first + 1) + 1)]


def _points(series: Series, log_y: bool) -> list[tuple[float, float | None, str]]:
    """Where each point lies (y None: a gap; on a log axis y is an exponent) and its hover text."""
    step = math.ceil(len(series.x) / MAX_POINTS) or 1
    pairs = list(zip(map(float, series.x), map(_number, series.y), strict=True))
    points = []
    for x, y in [*pairs[:-1:step], *pairs[-1:]]:
        height = None
        if y is not None and abs(y) < HUGE and (y > TINY or not log_y):
            height = math.log10(y) if log_y else y
        if abs(x) < HUGE:
            hint = f"{series.name}: {format_number(y)} at {_tick_label(x)}"
            points.append((x, height, f"<title>{esc(hint)}</title>"))
    return points


def curve_html(curve: Curve) -> str:
    """A curve as a figure, with its numbers in a table that unfolds.

    Raises:
        ValueError: if a series' ``x`` and ``y`` differ in length.
    """
    for one in curve.series:
        if len(one.x) != len(one.y):
            raise ValueError(
                f"curve {curve.title!r}, series {one.name!r}: x has {len(one.x)} values and "
                f"y has {len(one.y)}, expected one y for each x (None for a gap)"
            )
    lines = [_points(one, curve.log_y) for one in curve.series]
    if curve.log_x:
        lines = [[point for point in line if point[0] > TINY] for line in lines]
    drawn = [(x, y) for line in lines for x, y, _ in line if y is not None]
    if not drawn:
        return _figure("chart", curve.title, '<p class="note">No values to draw.</p>', curve.note)
    xs, ys = zip(*drawn, strict=True)
    y_ticks = ticks(min(ys), max(ys), least_step=1.0 if curve.log_y else 0.0)
    if curve.bounds is not None and not curve.log_y:
        low, high = curve.bounds
        y_ticks = [t for t in y_ticks if low <= t <= high]
        if len(y_ticks) < 2 or y_ticks[0] > min(ys) or y_ticks[-1] < max(ys):
            y_ticks = [low, high]
    y_labels = [_tick_label(10.0**t if curve.log_y else t) for t in y_ticks]
    x_ticks = ticks(min(xs), max(xs), least_step=1.0 if all(x == int(x) for x in xs) else 0.0)
    # The data may end between two ticks of x; a lone x is given the whole range of its ticks.
    first, last = (min(xs), max(xs)) if max(xs) > min(xs) else (x_ticks[0], x_ticks[-1])
    if curve.log_x:
        x_ticks = sorted(set(xs))
        first, last = (first, last) if max(xs) > min(xs) else (max(xs) / 2, max(xs) * 2)
    left, right, top, bottom = 14 + DIGIT * max(map(len, y_labels)), WIDTH - 16, 30, HEIGHT - 46

    def across(x: float) -> str:
        share = (x - first) / (last - first)
        if curve.log_x:
            share = math.log(x / first) / math.log(last / first)
        return f"{left + share * (right - left):.1f}"

    def down(y: float, shift: float = 0.0) -> str:
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return f"{bottom - up * (bottom - top) + shift:.1f}"

    alt = esc(f"{curve.title}: line chart of {', '.join(s.name for s in curve.series)}")
    svg = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alt}">']
    for tick, label in zip(y_ticks, y_labels, strict=True):
        svg.append(f'<path class="grid" d="M{left} {down(tick)}H{right}"/>')
        svg.append(f'<text class="end" x="{left - 6}" y="{down(tick, 4)}">{label}</text>')
    svg.append(f'<path class="axis" d="M{left} {bottom}H{right}"/>')
    x_labels = [(tick, _tick_label(tick)) for tick in x_ticks if first <= tick <= last]
    room = sum(DIGIT * (len(label) + 1) for _, label in x_labels)
    for tick, label in x_labels[:: math.ceil(room / (right - left)) or 1]:
        x = across(tick)
        svg.append(f'<path class="axis" d="M{x} {bottom}v5"/>')
        svg.append(f'<text class="mid" x="{x}" y="{bottom + 19}">{label}</text>')
    at = f'x="{(left + right) / 2}" y="{HEIGHT - 8}"'
    svg.append(f'<text class="mid" {at}>{esc(curve.x_label)}</text>')
    svg.append(f'<text x="4" y="16">{esc(curve.y_label)}</text>')
    strokes = dots = legend = ""
    for place, (one, line) in enumerate(zip(curve.series, lines, strict=True)):
        css, path, pen = f"s{place % COLOURS} d{place // COLOURS % 2}", "", "M"
        for x_value, y, hint in line:
            if y is not None:
                # h0: a point alone between two gaps is a dot, thanks to the round line cap
                path += f"{pen}{across(x_value)} {down(y)}" + ("h0" if pen == "M" else "")
                if len(line) <= MARKERS:
                    at = f'cx="{across(x_value)}" cy="{down(y)}"'
                    dots += f'<circle class="dot {css}" {at} r="3">{hint}</circle>'
            pen = "M" if y is None else "L"
        name = esc(one.name)
        strokes += f'<path class="line {css}" d="{path}"><title>{name}</title></path>'
        key = f'<svg viewBox="0 0 24 8" aria-hidden="true"><path class="line {css}" d="M2 4H22"/>'
        legend += f"<li>{key}</svg>{name}</li>"
    chart = f'{"".join(svg)}{strokes}{dots}</svg><ul class="legend">{legend}</ul>'
    return _figure("chart", curve.title, chart + _numbers(curve), curve.note)


def _numbers(curve: Curve) -> str:
    """The curve as a table that unfolds: for who cannot see the chart or wants a value."""
    columns = [dict(zip(s.x, s.y, strict=True)) for s in curve.series]
    xs = sorted(set().union(*columns))
    if len(xs) > MAX_NUMBERS:
        return ""
    table = Table("", [curve.x_label or "x", *(s.name for s in curve.series)])
    table.rows = [[_tick_label(x), *(c.get(x) for c in columns)] for x in xs]
    return f"<details><summary>Numbers</summary>{table_html(table)}</details>"
