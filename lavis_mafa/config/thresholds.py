"""Take the thresholds of connections from a file of calibrated thresholds."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.config.check import Report, Settings
from lavis_mafa.models.con_d.calibration import CalibratedThresholds

SECTION = "model.mafa.connections"


def take_thresholds(config: MutableMapping[str, Any], report: Report) -> None:
    """Set ``high``, and ``low`` if it is calibrated, to those of ``connections.calibration``.

    A ``low`` above the calibrated ``high`` is lowered to it. The config then records the values
    that are used. Without the machine that trains, the file may be missing; the thresholds then
    stay as they are.
    """
    key = f"{SECTION}.calibration"
    path = Settings(config, report)[key]
    if path is None or key in report.bad:
        return
    try:
        found = CalibratedThresholds.load(path)
    except (OSError, ValueError) as error:
        if report.machine or not isinstance(error, OSError):
            report.add(key, f"{path}: {error}")
        return
    connections = config["model"]["mafa"]["connections"]
    given = connections.get("low")
    low = found.low if found.low is not None else MiningRule.low if given is None else given
    used = {"high": found.high}
    if found.low is not None or (isinstance(low, int | float) and low > found.high):
        used["low"] = min(low, found.high)  # without a low of its own no pair is ambiguous
    replaced = [
        f"{name}: {connections[name]}"
        for name, value in used.items()
        if connections.get(name) not in (None, value)
    ]
    connections.update(used)
    values = ", ".join(f"{name}: {value:.6g}" for name, value in used.items())
    more = f"; replaces {', '.join(replaced)}" if replaced else ""
    report.note(
        key,
        f"{values} by {found.name} (precision {100 * found.precision:.1f} % on the "
        f"{found.pairs_above} of {found.pairs} pairs above high, truth by {found.truth}){more}",
    )
