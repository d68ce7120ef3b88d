"""Evidence for tests of the advice: favourable, and what changes it."""

from __future__ import annotations

import dataclasses
import json

from lavis_mafa.analysis.advice.evidence import Estimate, Evidence, Fall, Quality
from lavis_mafa.analysis.advice.rules import advice_of
from lavis_mafa.analysis.judging import TRUTH

ENABLED, SPACE, QUEUE = (f"run.grit.{key}" for key in ("enabled", "search_space", "queue_size"))
ACTION, HIGH, LOW = (f"model.mafa.connections.{key}" for key in ("action", "high", "low"))
TYPE, SOFT_ALPHA = (f"model.mafa.soft_labels.{key}" for key in ("type", "alpha"))
NEGATIVES = "model.mafa.negatives"
FEW, MANY = Estimate(0.005, 0.003, 0.008), Estimate(0.26, 0.24, 0.28)
SOME, MOST = Estimate(0.24, 0.22, 0.26), Estimate(0.57, 0.55, 0.6)
THIRD = Estimate(0.32, 0.31, 0.325)
GOOD = Quality(
    TRUTH,
    pairs=900,
    above=300,
    precision=Estimate(0.67, 0.62, 0.72),
    base_rate=Estimate(0.3, 0.28, 0.32),
    lift=Estimate(2.4, 2.1, 2.8),
    reaching=(0.9, Estimate(0.84, 0.81, 0.87)),
)
POOR = dataclasses.replace(GOOD, lift=Estimate(1.3, 1.1, 1.5), reaching=None)
FALLS = Fall(4, 0.4, 0.3, Estimate(0.25, 0.2, 0.3))
IS_FLAT = Fall(4, 0.4, 0.398, Estimate(0.005, -0.01, 0.02))
ON_PLATEAU = Fall(4, 0.637, 0.634, Estimate(0.005, 0.004, 0.006))


def evidence(**changes):
    """Return evidence that favours grouping and mining, with some changes."""
    grouped = {(32, 256): Estimate(0.1, 0.09, 0.11), (32, 1024): SOME, (32, 4096): MOST}
    base = {
        **{"judge": TRUTH, "batch_size": 32, "search_space": 1024, "queue_size": 4096},
        **{"random": {32: FEW}, "grouped": grouped, "itm": IS_FLAT},
        **{"con_d": "own", "problems": (), "quality": GOOD},
    }
    return Evidence(**{**base, **changes})


def by_option(found):
    """Return the advised value and its certainty by option, without conditional settings."""
    return {one.option: (one.value, one.certainty) for one in advice_of(found) if not one.condition}


def write_log(folder, losses, **grit):
    """Write the log of a run with four steps an epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"kind": "config", "config": {"run": {"grit": grit}}}]
    for epoch, loss in enumerate(losses):
        for step, noise in enumerate((-0.01, 0.01, -0.01, 0.01)):
            at = {"epoch": epoch, "global_step": 4 * epoch + step + 1}
            records.append({"kind": "step", **at, "loss_itm": loss + noise})
        records.append({"kind": "epoch", "epoch": epoch, "loss_itm": loss})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "log.jsonl").write_text(text + '{"kind": "ste')
    return folder
