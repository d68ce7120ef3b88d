"""One self-contained HTML file that shows a run: tables, curves and the mined connections.

The file asks for nothing outside itself and opens from disk. Tables and curves are plain HTML and
SVG; the gallery of connections and its histogram need JavaScript. Every string from the caller
(captions, paths, settings) is escaped, and the page's content security policy lets no script run
but the one in ``report_template.html``.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

Cell = str | float | int | None

DIRECTIONS = ("i2t", "t2i")
STATES = ("positive", "ambiguous", "negative")
THUMBNAIL = 192  # longest side of an embedded image, pixels
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
    """A line chart. Values that are not finite, or with ``log_y`` not above zero, are gaps."""

    title: str
    x_label: str = ""
    y_label: str = ""
    series: list[Series] = field(default_factory=list)
    note: str = ""
    log_y: bool = False


@dataclass
class Table:
    """A table. ``highlight_best`` maps a column's name to "max" or "min"; ties are all marked."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""
    highlight_best: dict[str, str] = field(default_factory=dict)


@dataclass
class Mined:
    """One hard negative that Con-D judged.

    Attributes:
        direction: "i2t": the anchor is an image and a text was mined for it; "t2i": the reverse.
        anchor_image, anchor_caption: the anchor's own pair.
        mined_image, mined_caption: the own pair of what was mined.
        probability: Con-D's match probability, 0 to 1.
        truth: whether the judged image and caption really match; None where nobody knows.
        epoch: when it was mined.
        state: what was made of it: "positive", "ambiguous" or "negative".
        anchor_index, mined_index: the pairs' places in the data set.
        run: the run it comes from, where a report compares several.
    """

    direction: str
    anchor_image: Image.Image
    anchor_caption: str
    mined_image: Image.Image
    mined_caption: str
    probability: float
    truth: bool | None
    epoch: int
    state: str
    anchor_index: int
    mined_index: int
    run: str = ""

    def __post_init__(self) -> None:
        self.probability = float(self.probability)
        self.truth = None if self.truth is None else bool(self.truth)
        _require(self.direction, DIRECTIONS, "direction of a mined connection")
        _require(self.state, STATES, "state of a mined connection")
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(
                f"probability of a mined connection is {self.probability}, expected 0 to 1: "
                "Con-D's softmax output for the class 'match', not its logit"
            )


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    intro: str = "",
    tables: Iterable[Table] = (),
    curves: Iterable[Curve] = (),
    connections: Iterable[Mined] = (),
    notes: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report to ``path``, creating its folder, and return the path.

    An existing report is replaced in one step, so a reader never meets half a file. ``intro`` is
    plain text whose blank lines part paragraphs. ``connections`` may be a generator: its images are
    read one at a time. Each distinct image is embedded once, at most 192 px wide and high (some
    5 to 10 kB for a photograph). Nested ``settings`` are shown with dotted names.

    Raises:
        ValueError: for a table whose rows or ``highlight_best`` do not fit its columns, or a
            series whose ``x`` and ``y`` differ in length.
    """
    cards, images = _gallery(connections)
    rows = list(_flat(settings or {}))
    sections = {
        "tables": ("Tables", "".join(map(_table, tables))),
        "curves": ("Curves", "".join(map(_curve, curves))),
        "connections": ("Mined connections", "in the template" if cards else ""),
        "notes": ("Notes", "".join(f"<li>{_esc(note)}</li>" for note in notes)),
        "settings": ("Settings", _table(Table("", ["setting", "value"], rows)) if rows else ""),
    }
    template = Path(__file__).with_name("report_template.html").read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "script_hash": f"sha256-{digest}",
        "title": _esc(title),
        "intro": "".join(f"<p>{_esc(p)}</p>" for p in re.split(r"\n\s*\n", intro) if p.strip()),
        "nav": "",
        "data": _json({"cards": cards, "images": images}),
    }
    for key, (name, body) in sections.items():
        parts["nav"] += f'<a href="#{key}">{name}</a>' if body else ""
        parts[key], parts[f"{key}_hidden"] = body, "" if body else " hidden"
    # One pass: a placeholder's name inside a caption is text, not a placeholder.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    return _write(Path(path), page)


def _write(path: Path, page: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(page.encode("utf-8", "replace"))  # lone surrogates of odd file names
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _require(value: str, allowed: Sequence[str], what: str) -> None:
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}, expected one of {', '.join(allowed)}")


def _esc(text: object) -> str:
    return html.escape(str(text), quote=True)


def _json(value: object) -> str:
    """JSON that may stand inside a script element: without ``<`` nothing in it can end that."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[list[Cell]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield [f"{prefix}{key}", "–" if value is None else str(value)]


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
    caption = f"<figcaption>{_esc(title)}</figcaption>" if title else ""
    note = f'<p class="note">{_esc(note)}</p>' if note else ""
    return f'<figure class="{kind}">{caption}{body}{note}</figure>'


def _table(table: Table) -> str:
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ValueError(
                f"table {table.title!r}: the row {row!r} has {len(row)} cells, "
                f"expected {len(table.columns)}, one for each of {table.columns!r}"
            )
    best: dict[int, float] = {}
    for column, which in table.highlight_best.items():
        _require(column, table.columns, f"table {table.title!r}: a column of highlight_best")
        _require(which, ("max", "min"), f"table {table.title!r}: highlight_best[{column!r}]")
        place = table.columns.index(column)
        cells = (_number(row[place]) for row in table.rows)
        numbers = [n for n in cells if n is not None and math.isfinite(n)]
        if len(numbers) > 1:  # a single value has nothing to beat
            best[place] = max(numbers) if which == "max" else min(numbers)

    def cell(place: int, value: Cell) -> str:
        text, number = _esc(format_number(value)), _number(value)
        if number is not None and number == best.get(place):
            return f'<td class="n best"><span role="img" aria-label="best">★</span> {text}</td>'
        is_text = number is None and value is not None
        return f"<td>{text}</td>" if is_text else f'<td class="n">{text}</td>'

    head = body = ""
    for place, name in enumerate(table.columns):
        has_text = any(isinstance(row[place], str) for row in table.rows)
        head += f'<th scope="col"{"" if has_text else " class=n"}>{_esc(name)}</th>'
    for row in table.rows:
        body += f"<tr>{''.join(cell(place, value) for place, value in enumerate(row))}</tr>"
    region = f'tabindex="0" role="region" aria-label="{_esc(table.title or "table")}"'
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    body = f'<div class="scroll" {region}>{body}</div>'
    return _figure("table", table.title, body, table.note)


def _ticks(low: float, high: float, least_step: float = 0.0) -> list[float]:
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
            points.append((x, height, f"<title>{_esc(hint)}</title>"))
    return points


def _curve(curve: Curve) -> str:
    for one in curve.series:
        if len(one.x) != len(one.y):
            raise ValueError(
                f"curve {curve.title!r}, series {one.name!r}: x has {len(one.x)} values and "
                f"y has {len(one.y)}, expected one y for each x (None for a gap)"
            )
    lines = [_points(one, curve.log_y) for one in curve.series]
    drawn = [(x, y) for line in lines for x, y, _ in line if y is not None]
    if not drawn:
        return _figure("chart", curve.title, '<p class="note">No values to draw.</p>', curve.note)
    xs, ys = zip(*drawn, strict=True)
    y_ticks = _ticks(min(ys), max(ys), least_step=1.0 if curve.log_y else 0.0)
    y_labels = [_tick_label(10.0**t if curve.log_y else t) for t in y_ticks]
    x_ticks = _ticks(min(xs), max(xs), least_step=1.0 if all(x == int(x) for x in xs) else 0.0)
    # The data may end between two ticks of x; a lone x is given the whole range of its ticks.
    first, last = (min(xs), max(xs)) if max(xs) > min(xs) else (x_ticks[0], x_ticks[-1])
    left, right, top, bottom = 14 + DIGIT * max(map(len, y_labels)), WIDTH - 16, 30, HEIGHT - 46

    def across(x: float) -> str:
        return f"{left + (x - first) / (last - first) * (right - left):.1f}"

    def down(y: float, shift: float = 0.0) -> str:
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return f"{bottom - up * (bottom - top) + shift:.1f}"

    alt = _esc(f"{curve.title}: line chart of {', '.join(s.name for s in curve.series)}")
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
    svg.append(f'<text class="mid" {at}>{_esc(curve.x_label)}</text>')
    svg.append(f'<text x="4" y="16">{_esc(curve.y_label)}</text>')
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
        name = _esc(one.name)
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
    return f"<details><summary>Numbers</summary>{_table(table)}</details>"


def _gallery(connections: Iterable[Mined]) -> tuple[list[dict[str, Any]], list[str]]:
    """What the page's script shows: the cards, and the data URIs of the images they name."""
    places: dict[bytes, int] = {}
    images: list[str] = []

    def place(image: Image.Image) -> int:
        image = image.convert("RGB")  # as the models read it, transparency dropped
        key = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).digest()
        if key not in places:
            places[key] = len(images)
            images.append(_data_uri(image))
        return places[key]

    cards = [
        {
            "direction": one.direction,
            "state": one.state,
            "truth": one.truth,
            "epoch": int(one.epoch),
            "run": str(one.run),
            "p": float(f"{one.probability:.6g}"),
            "anchor": [place(one.anchor_image), one.anchor_caption, int(one.anchor_index)],
            "mined": [place(one.mined_image), one.mined_caption, int(one.mined_index)],
        }
        for one in connections
    ]
    return cards, images


def _data_uri(image: Image.Image) -> str:
    """The image as a thumbnail; ``image`` itself is made small."""
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    files = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 80})):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        files.append((len(buffer.getvalue()), kind, buffer.getvalue()))
    _, kind, data = min(files)  # drawings are smaller and exact as PNG, photographs as JPEG
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
