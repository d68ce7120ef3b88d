"""Draw three_data_sets.svg from the recorded results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lavis_mafa.io.files import write_text
from lavis_mafa.pages.charts import Curve, Series, curves_svg
from lavis_mafa.studies.spread import Spread

HERE = Path(__file__).resolve().parent
BASE, RANDOM_ECM = "ALBEF-base", "ALBEF-base + ECM"
SYSTEMS = [BASE, RANDOM_ECM, "GRIT-VLP", "ECM", "MAFA"]
FALSE = "false_negative_rate_in_itm"
APART = 0.16  # of the data sets' marks in one system's place


@cache
def recorded_rows(file: str) -> dict[str, Any]:
    """Return the rows of recorded results, by name."""
    text = (HERE.parent / f"results/{file}.json").read_text("utf-8")
    rows: dict[str, Any] = json.loads(text)["rows"]
    return rows


@dataclass(frozen=True)
class DataSet:
    """Recorded results of one data set.

    Attributes:
        retrieval: names of its figures of R@1 with any valid pair, to be averaged.
        random_ecm: the name that its table gives to ALBEF-base + ECM.
        random_ecm_file: the results that have this row, if others than ``file``.
    """

    name: str
    file: str
    retrieval: tuple[str, ...]
    random_ecm: str = RANDOM_ECM
    random_ecm_file: str = ""

    def rows_of(self, system: str) -> dict[str, Any]:
        """Return the recorded rows that include a system, by name."""
        file = self.random_ecm_file if system == RANDOM_ECM else ""
        return recorded_rows(file or self.file)


DATA_SETS = (
    DataSet(
        "toy world: clustered",
        "compare_ten",
        ("any_r1",),
        random_ecm_file="compare_ten_more",
    ),
    DataSet("toy world: dense", "compare_dense", ("any_r1",)),
    DataSet(
        "aerial photographs: UCM-Captions",
        "ucm",
        retrieval=("valid_txt_r1", "valid_img_r1"),
        random_ecm="random + ECM",
    ),
)


def svg() -> str:
    """Return the figure: false negatives that ITM learns, and R@1 compared with ALBEF-base."""
    left = Curve("", y_label="false negatives in ITM (percent)", places=SYSTEMS)
    right = Curve("", y_label="R@1, any valid pair, minus ALBEF-base's", places=SYSTEMS)
    for number, data_set in enumerate(DATA_SETS):
        shift = APART * (number - (len(DATA_SETS) - 1) / 2)
        x = [place + shift for place in range(1, len(SYSTEMS) + 1)]
        false, gains = [], []
        for system in SYSTEMS:
            rows = data_set.rows_of(system)
            name = data_set.random_ecm if system == RANDOM_ECM else system
            seeds, base = rows[name]["seeds"], rows[BASE]["seeds"]
            false.append(_spread({seed: own[FALSE] for seed, own in seeds.items()}))
            gains.append(_spread(_gains(seeds, base, data_set.retrieval)))
        for curve, spreads in ((left, false), (right, gains)):
            means: list[float | None] = [spread.mean for spread in spreads]
            curve.series.append(Series(data_set.name, x, means, [one.sd for one in spreads]))
    drawn = curves_svg([left, right])
    assert drawn is not None
    return drawn


def _spread(by_seed: dict[str, float]) -> Spread:
    spread = Spread.of(by_seed.values())
    assert spread is not None
    return spread


def _gains(
    seeds: dict[str, dict[str, Any]], base: dict[str, dict[str, Any]], columns: tuple[str, ...]
) -> dict[str, float]:
    """Return the differences to the base with the same seed, averaged over the columns."""
    return {
        seed: sum(figures[name] - base[seed][name] for name in columns) / len(columns)
        for seed, figures in seeds.items()
    }


if __name__ == "__main__":
    write_text(HERE / "three_data_sets.svg", svg())
