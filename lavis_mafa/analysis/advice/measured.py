"""Figures of the recorded comparisons that the recommendations cite.

The files in docs/results are not part of the installed package, so the figures are repeated here.
tests/analysis/test_advice_results.py recomputes every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gain:
    """Difference between two systems that were trained with the same seeds.

    Attributes:
        study: file in docs/results without its suffix.
        row, than: names of the systems; the gain is that of ``row`` over ``than``.
        value: mean over the seeds: percentage points of R@1, or AUC (0 to 1) for ``itm_auc``.
        low, high: 95 % interval of the mean.
        ahead: number of seeds on which ``row`` is better.
        seeds: number of seeds.
        column: the figure; ``any_r1`` is R@1 against any valid pair after re-ranking with ITM,
            ``itc_r1`` that of ITC alone.
    """

    study: str
    row: str
    than: str
    value: float
    low: float
    high: float
    ahead: int
    seeds: int = 5
    column: str = "any_r1"

    @property
    def digits(self) -> int:
        """Return the number of decimals of the figures."""
        return 3 if self.column == "itm_auc" else 1

    @property
    def open(self) -> bool:
        """Return whether the interval contains 0."""
        return self.low <= 0.0 <= self.high

    def __str__(self) -> str:
        value, low, high = (f"{one:+.{self.digits}f}" for one in (self.value, self.low, self.high))
        unit = "" if self.column == "itm_auc" else " points"
        seeds = f"better on {self.ahead} of {self.seeds} seeds"
        return f"{value}{unit} ({low} to {high}, {seeds}{', open' if self.open else ''})"


@dataclass(frozen=True)
class Level:
    """Mean of a system's figure over the seeds of a study; attributes as of `Gain`."""

    study: str
    row: str
    column: str
    value: float

    @property
    def digits(self) -> int:
        """Return the number of decimals of the figure."""
        return 3 if self.column.startswith("itm_") else 1


# Grouping of all and of an eighth of the data, and mining in that eighth.
GROUPING_SPARSE = Gain("compare_sparse", "GRIT-VLP", "ALBEF-base", -9.6, -13.2, -5.9, 0)
GROUPING_EIGHTH_SPARSE = Gain(
    "compare_sparse", "GRIT-VLP, M = train / 8", "ALBEF-base", -0.2, -1.2, 0.8, 3
)
GROUPING_EIGHTH_SPARSE_16 = Gain(
    "compare_sparse_16", "GRIT-VLP, M = train / 8", "ALBEF-base", 1.6, 1.0, 2.2, 5
)
MINING_EIGHTH_SPARSE_16 = Gain(
    "compare_sparse_16", "ECM, M = train / 8", "GRIT-VLP, M = train / 8", -1.7, -3.1, -0.3, 0
)
# Grouping from the warm-up, and ITM's loss at the end of the warm-up.
GROUPING_WARM_UP = Gain(
    "compare_clustered",
    "GRIT-VLP, from the warm-up",
    "ALBEF-base, from the warm-up",
    8.9,
    7.2,
    10.5,
    5,
)
ITM_WARM_UP = Level("compare_fresh", "warm-up, random mini-batches", "itm_loss", 0.217)

# ITM's AUC on UCM-Captions, where many of the picked negatives are false, by the warm-up's picker.
ITM_SAMPLED = Level("ucm_pickers", "warm-up, sampled negatives", "itm_auc_far", 0.798)
ITM_UNIFORM_FIRST = Level("ucm_pickers", "warm-up, uniform negatives first", "itm_auc_far", 0.912)
ITM_UNIFORM_LAST = Level("ucm_pickers", "shared warm-up", "itm_auc_far", 0.922)

# S-ITC (alpha .2) instead of the consistency loss, with mini-batches of 32 and of 16.
S_ITC = Gain("compare_ten", "S-ITC", "GRIT-VLP", -3.4, -4.5, -2.3, 0, 10, "itc_r1")
S_ITC_16 = Gain("compare_16", "S-ITC", "GRIT-VLP", -1.9, -3.4, -0.4, 0, column="itc_r1")
S_ITC_RERANKED = Gain("compare_ten", "S-ITC", "GRIT-VLP", 0.0, -1.5, 1.5, 5, 10)
S_ITC_RERANKED_16 = Gain("compare_16", "S-ITC", "GRIT-VLP", -1.0, -4.6, 2.5, 2)
# The same in the dense toy world, with ECM and an alpha of .5.
S_ITC_DENSE = Gain("compare_dense", "MAFA", "ECM", -11.8, -14.6, -9.1, 0, column="itc_r1")
S_ITC_RERANKED_DENSE = Gain("compare_dense", "MAFA", "ECM", -2.2, -3.2, -1.1, 0)
# S-ITC (alpha .2) instead of one-hot labels in random mini-batches.
S_ITC_RANDOM = Gain("compare_settings", "ALBEF-base + S-ITC", "ALBEF-base", -0.9, -2.7, 0.9, 2)
# The same in the dense toy world, with an alpha of .5.
S_ITC_RANDOM_DENSE = Gain("compare_dense", "ALBEF-base + S-ITC", "ALBEF-base", 0.1, -1.8, 2.0, 3)
S_ITC_RANDOM_DENSE_ITC = Gain(
    "compare_dense", "ALBEF-base + S-ITC", "ALBEF-base", -5.9, -10.6, -1.2, 0, column="itc_r1"
)

# S-ITC instead of the consistency loss, by alpha.
ALPHAS = {
    0.1: Gain("compare_settings", "S-ITC, alpha .1", "GRIT-VLP", -0.8, -3.0, 1.3, 3, 5, "itc_r1"),
    0.2: Gain("compare_settings", "S-ITC", "GRIT-VLP", -3.4, -5.7, -1.2, 0, 5, "itc_r1"),
    0.5: Gain("compare_settings", "S-ITC, alpha .5", "GRIT-VLP", -8.3, -10.6, -5.9, 0, 5, "itc_r1"),
}
ALPHAS_RERANKED = {
    0.1: Gain("compare_settings", "S-ITC, alpha .1", "GRIT-VLP", 1.6, -0.2, 3.4, 5),
    0.2: Gain("compare_settings", "S-ITC", "GRIT-VLP", -0.7, -4.0, 2.6, 3),
    0.5: Gain("compare_settings", "S-ITC, alpha .5", "GRIT-VLP", 0.0, -1.0, 1.0, 3),
}

# Hard negatives sampled in proportion to their similarity instead of the hardest ones.
SAMPLED = Gain("compare_ten", "GRIT-VLP, negatives sampled", "GRIT-VLP", 5.9, 4.7, 7.1, 10, 10)
SAMPLED_DENSE = Gain("compare_dense", "GRIT-VLP, negatives sampled", "GRIT-VLP", 6.3, 1.3, 11.4, 5)
SAMPLED_ECM_DENSE = Gain("compare_dense", "ECM, negatives sampled", "ECM", 1.2, -0.5, 2.9, 4)
SAMPLED_ECM = Gain("compare_settings", "ECM, negatives sampled", "ECM", 5.3, -0.8, 11.4, 5)
SAMPLED_ECM_HALF = Gain(
    "compare_settings",
    "ECM, M = train / 2, negatives sampled",
    "ECM, M = train / 2",
    -1.8,
    -4.5,
    0.9,
    1,
)

# Parts of the data instead of all of them as search space.
EIGHTH = Gain("compare_ten", "GRIT-VLP, M = train / 8", "GRIT-VLP", 6.6, 5.1, 8.1, 10, 10)
EIGHTH_DENSE = Gain("compare_dense", "GRIT-VLP, M = train / 8", "GRIT-VLP", 5.8, 0.9, 10.7, 5)
EIGHTH_SPARSE = Gain("compare_sparse", "GRIT-VLP, M = train / 8", "GRIT-VLP", 9.4, 5.5, 13.2, 5)
EIGHTH_ECM_DENSE = Gain("compare_dense", "ECM, M = train / 8", "ECM", 1.5, 0.6, 2.4, 5)
EIGHTH_ECM_SPARSE = Gain("compare_sparse", "ECM, M = train / 8", "ECM", 4.0, 1.9, 6.1, 5)
HALF_ECM = Gain("compare_ten", "ECM, M = train / 2", "ECM", 4.8, 1.8, 7.7, 10, 10)
HALF_ECM_OVER_EIGHTH = Gain(
    "compare_ten", "ECM, M = train / 2", "ECM, M = train / 8", 0.8, -1.4, 2.9, 6, 10
)

# Dropping instead of converting, and converting instead of dropping.
DROP_MAFA = Gain("compare_ten_more", "MAFA with ECM-E", "MAFA", 3.0, 1.3, 4.7, 10, 10)
CONVERT_HALF = Gain(
    "compare_ten", "ECM, M = train / 2", "ECM, M = train / 2, dropped", -0.8, -3.2, 1.6, 3, 10
)

# Mining in random mini-batches.
RANDOM_ECM = Gain("compare_ten_more", "ALBEF-base + ECM", "ALBEF-base", 2.6, 1.2, 4.0, 10, 10)
RANDOM_ECM_DENSE = Gain("compare_dense", "ALBEF-base + ECM", "ALBEF-base", -1.0, -5.9, 3.8, 3)
RANDOM_ECM_DENSE_ITM = Gain(
    "compare_dense", "ALBEF-base + ECM", "ALBEF-base", 0.045, 0.018, 0.071, 5, column="itm_auc"
)

# Con-D of the compared ECM, and a perfect one instead of it.
CON_D_PRECISION = Level("compare_fresh", "ECM", "con_d_precision", 64.1)
CON_D_BASE_RATE = Level("compare_fresh", "ECM", "con_d_base_rate", 33.4)
ORACLE = Gain("compare_ten_more", "ECM, oracle as Con-D", "ECM", -1.5, -3.0, -0.1, 1, 10)
ORACLE_DENSE = Gain("compare_dense", "ECM, oracle as Con-D", "ECM", 2.5, 1.0, 4.0, 5)
