"""Draw three_data_sets.svg: false negatives that ITM learns, and R@1 compared with ALBEF-base."""

from __future__ import annotations

import pandas as pd

from research.curves import Curve, Series
from research.figures.recorded import drawn, figures_of
from research.studies.spread import differences_to, spreads_of

BASE, RANDOM_ECM = "ALBEF-base", "ALBEF-base + ECM"
SYSTEMS = [BASE, RANDOM_ECM, "GRIT-VLP", "ECM", "MAFA"]
FALSE, R1 = "false_negative_rate_in_itm", "r1"
_APART = 0.16  # of the data sets' marks in one system's place


def _data_sets() -> dict[str, dict[str, pd.DataFrame]]:
    """Return figures by the name of the data set and the system that they are drawn for."""
    ten, more = figures_of("compare_ten"), figures_of("compare_ten_more")
    dense, ucm = figures_of("compare_dense"), figures_of("ucm")
    ucm = ucm.rename(index={"random + ECM": RANDOM_ECM}, level="row")
    for figures in (ten, more, dense):
        figures[R1] = figures["any_r1"]
    ucm[R1] = (ucm["valid_txt_r1"] + ucm["valid_img_r1"]) / 2
    return {
        "toy world: clustered": {**dict.fromkeys(SYSTEMS, ten), RANDOM_ECM: more},
        "toy world: dense": dict.fromkeys(SYSTEMS, dense),
        "aerial photographs: UCM-Captions": dict.fromkeys(SYSTEMS, ucm),
    }


def three_data_sets() -> str:
    """Return the figure as an SVG file."""
    left = Curve("", y_label="false negatives in ITM (percent)", places=SYSTEMS)
    right = Curve("", y_label="R@1, any valid pair, minus ALBEF-base's", places=SYSTEMS)
    data_sets = _data_sets()
    for number, (name, figures) in enumerate(data_sets.items()):
        shift = _APART * (number - (len(data_sets) - 1) / 2)
        x = [place + shift for place in range(1, len(SYSTEMS) + 1)]
        false = [spreads_of(figures[system])[system][FALSE] for system in SYSTEMS]
        gains = [differences_to(figures[system], BASE, keep=True)[system][R1] for system in SYSTEMS]
        for curve, spreads in ((left, false), (right, gains)):
            means: list[float | None] = [spread.mean for spread in spreads]
            curve.series.append(Series(name, x, means, [one.sd for one in spreads]))
    return drawn([left, right])


SVGS = {"three_data_sets.svg": three_data_sets}
