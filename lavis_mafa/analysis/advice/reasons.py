"""Reasons of recommendations that cite recorded comparisons.

R@1 is that against any valid pair.
"""

from __future__ import annotations

from collections.abc import Mapping

from lavis_mafa.analysis.advice import measured

DROPPING = (
    "Dropping is an alternative (action: drop only leaves out what Con-D finds). In the clustered "
    "toy world its gain in R@1 against any valid pair over converting was "
    f"{measured.DROP_MAFA} for MAFA with all of the data as search space. For ECM with half of the "
    f"data, converting instead of dropping changed it by {measured.CONVERT_HALF}. In the dense "
    "world and on UCM-Captions there was no clear difference (three seeds), and in MAFA's Table 5 "
    "dropping was worse. Which is better on your data is open: compare short runs of both."
)

WITHOUT_GROUPING = (
    "Mine in random mini-batches: in the dense toy world that changed R@1 against any valid pair "
    f"by {measured.RANDOM_ECM_DENSE} and ITM's AUC by {measured.RANDOM_ECM_DENSE_ITM}. In the "
    f"clustered one it changed R@1 by {measured.RANDOM_ECM}. On UCM-Captions retrieval did not "
    "change clearly, and ITM improved (three seeds)."
)

SMALL_SPACE = (
    "Uncertain, since few of the negatives in mini-batches grouped with this M are false: in the "
    "sparse toy world, GRIT-VLP with an eighth of the data as search space changed R@1 over random "
    f"mini-batches by {measured.GROUPING_EIGHTH_SPARSE_16} where 4.6 % of their hard negatives are "
    f"false, and by {measured.GROUPING_EIGHTH_SPARSE} where 13 % are, and it improved ITC alone "
    "and ITM in both. Mining in the first case changed R@1 by "
    f"{measured.MINING_EIGHTH_SPARSE_16}. Compare a short run with grouping, this M and no mining."
)

ON_PLATEAU = (
    "A loss near this value does not show that ITM learned from these mini-batches: it knows too "
    "little yet, or too many of the picked negatives match. Train on with random mini-batches "
    "first, and with uniform negatives (warm_up_negatives) if that does not help: on UCM-Captions, "
    "two of six epochs with uniform instead of sampled negatives raised ITM's AUC against other "
    f"classes from {measured.ITM_SAMPLED.value:.2f} to {measured.ITM_UNIFORM_FIRST.value:.2f} at "
    f"the beginning and to {measured.ITM_UNIFORM_LAST.value:.2f} at the end."
)
STILL_FALLS = (
    "That it still falls is no reason against grouping: in the clustered toy world it was "
    f"{measured.ITM_WARM_UP.value:.3f} at the end of the warm-up, and grouping from there gained "
    f"{measured.GROUPING_WARM_UP} in R@1 over further random mini-batches."
)

CONSISTENCY = (
    "With grouping, no compared labels were clearly better than GRIT-VLP's consistency loss. S-ITC "
    "(alpha .2) instead of it changed R@1 of ITC alone in the clustered toy world by "
    f"{measured.S_ITC}, with mini-batches of 16 by {measured.S_ITC_16}, and R@1 after re-ranking "
    f"by {measured.S_ITC_RERANKED} and {measured.S_ITC_RERANKED_16}. In the dense toy world, S-ITC "
    f"(alpha .5) with ECM changed the two by {measured.S_ITC_DENSE} and "
    f"{measured.S_ITC_RERANKED_DENSE}. Uncertain on other data: MAFA's Table 4 reports gains from "
    "S-ITC, and one-hot labels with grouping were not compared."
)
ONE_HOT_RANDOM = (
    "The compared systems without grouping, ALBEF-base with and without ECM, have one-hot labels. "
    f"S-ITC instead of them changed R@1 in the clustered toy world by {measured.S_ITC_RANDOM}. In "
    f"the dense one (alpha .5), it changed R@1 by {measured.S_ITC_RANDOM_DENSE}, and that of ITC "
    f"alone by {measured.S_ITC_RANDOM_DENSE_ITC}. Uncertain: this was measured in toy worlds only."
)
ONE_HOT_GROUPED = (
    "The consistency loss was measured only with arch: albef_mafa and itc_loss: softmax. The "
    "studies of other models and other forms of ITC use one-hot labels with grouping. Uncertain: "
    "there are no recorded comparisons of labels for them."
)

HARDEST_MINED = (
    "With grouping and mining, the hardest negatives were measured at every search space. Sampled "
    f"ones instead changed R@1 by {measured.SAMPLED_ECM_HALF} with half of the data as search "
    f"space, and by {measured.SAMPLED_ECM} with all of the data in the clustered toy world; in the "
    f"dense one, with all of the data, by {measured.SAMPLED_ECM_DENSE}. Uncertain: this was "
    "measured in toy worlds only, and no difference is clear."
)
# Without mining, either a small search space or sampled negatives were measured, but not both.
WITHOUT_MINING = (
    "Without mining, two changes improved R@1 of GRIT-VLP in the clustered and the dense toy "
    f"world: sampled negatives with all of the data as search space by {measured.SAMPLED} and "
    f"{measured.SAMPLED_DENSE}, and an eighth of the data with the hardest negatives by "
    f"{measured.EIGHTH} and {measured.EIGHTH_DENSE}. Both together were not measured. "
)
HARDEST = (
    f"{WITHOUT_MINING}The advised search space is a small one, so the hardest negatives go with "
    "it. Uncertain: this was measured in toy worlds only; negatives: sampled is an alternative "
    "that is worth a short run."
)
SAMPLED = (
    f"{WITHOUT_MINING}No counted search space has as few false negatives as that eighth had, so "
    "sampled negatives are advised. Uncertain: this was measured in toy worlds only."
)
SAMPLED_RANDOM = (
    "The compared systems without grouping, ALBEF-base with and without ECM, sample hard negatives "
    "in proportion to their similarity, as ALBEF does. Uncertain: without grouping, the hardest "
    "negatives were not compared with sampled ones."
)


def _by_alpha(gains: Mapping[float, measured.Gain]) -> str:
    return ", ".join(f"{gain} with {alpha:g}" for alpha, gain in gains.items())


WITH_S_ITC = (
    "The advised labels replace S-ITC. To keep S-ITC, use an alpha of .1 to .2 (the papers: .5 for "
    "ALBEF, .2 for BLIP-2). With grouping, in the clustered toy world, S-ITC instead of the "
    f"consistency loss changed R@1 of ITC alone by {_by_alpha(measured.ALPHAS)}, and R@1 after "
    f"re-ranking by {_by_alpha(measured.ALPHAS_RERANKED)}. Uncertain: this was measured in one toy "
    "world."
)

SAME_HIGH = (
    "The config's value, at which the lift was measured. In the clustered toy world, ECM gained "
    f"with a precision of {measured.CON_D_PRECISION.value:.3g} % at a base rate of "
    f"{measured.CON_D_BASE_RATE.value:.3g} % and a threshold of 0.8. A higher precision did not "
    "always help: a perfect Con-D changed R@1 of ECM there by "
    f"{measured.ORACLE}, and in the dense one by {measured.ORACLE_DENSE}. Uncertain: thresholds "
    "were compared with one seed only."
)

TOY_WORLDS = "Uncertain: search spaces were compared over several seeds in toy worlds only."
HALF = (
    "The bound comes from the clustered toy world, where, with ECM, half of the data gained "
    f"{measured.HALF_ECM} in R@1 over all of it, and {measured.HALF_ECM_OVER_EIGHTH} over an "
    "eighth. In the dense and the sparse one, where grouping harms, an eighth gained "
    f"{measured.EIGHTH_ECM_DENSE} and {measured.EIGHTH_ECM_SPARSE} over all of it. {TOY_WORLDS}"
)
EIGHTH = (
    "The bound comes from the clustered toy world, where, without mining, an eighth of the data "
    f"gained {measured.EIGHTH} in R@1 over all of it. In the dense and the sparse one, where "
    f"grouping harms, it gained {measured.EIGHTH_DENSE} and {measured.EIGHTH_SPARSE}. {TOY_WORLDS}"
)
