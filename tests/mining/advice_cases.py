"""_Evidence for tests of the advice: favourable, and what changes it."""

from __future__ import annotations

import dataclasses

from lavis_mafa.mining.advice import Estimate, _advice_of, _Evidence, _Quality
from lavis_mafa.mining.judging import TRUTH

ENABLED, SPACE, QUEUE, HARDNESS = (
    f"run.grit.{key}" for key in ("enabled", "search_space", "queue_size", "hardness")
)
ACTION = "model.mafa.connections.action"
FEW, MANY = Estimate(0.005, 0.003, 0.008), Estimate(0.26, 0.24, 0.28)
PHOTOGRAPHS, MOST = Estimate(0.072, 0.06, 0.08), Estimate(0.57, 0.55, 0.6)
GOOD = _Quality(
    pairs=900,
    above=300,
    precision=Estimate(0.67, 0.62, 0.72),
    base_rate=Estimate(0.3, 0.28, 0.32),
    lift=Estimate(2.4, 2.1, 2.8),
)
POOR = dataclasses.replace(GOOD, lift=Estimate(1.3, 1.1, 1.5))


def evidence(**changes):
    """Return evidence that favours grouping and mining, with some changes."""
    grouped = {256: FEW, 1024: Estimate(0.03, 0.02, 0.04), 4096: MOST}
    base = {
        **{"judge": TRUTH, "batch_size": 32, "search_space": 1024, "queue_size": 4096},
        **{"random": FEW, "grouped": grouped},
        **{"con_d": "own", "problems": (), "quality": GOOD},
    }
    return _Evidence(**{**base, **changes})


def by_option(found):
    """Return the advised value and its certainty by option."""
    advised = ((one.certainty, *o.split("=")) for one in _advice_of(found) for o in one.options)
    return {option: (value, certainty) for certainty, option, value in advised}
