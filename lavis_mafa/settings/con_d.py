"""Check the config of a Con-D that is given without a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lavis_mafa.io.problems import ConfigView
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.settings.check import Report, filled
from lavis_mafa.settings.key import section_of
from lavis_mafa.settings.registered import mafa_key


def check_con_d(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check a Con-D config given without a run, with the keys of ``model.mafa.con_d``.

    Returns:
        The config with all defaults, and the problems (empty if it is valid).
    """
    con_d = dataclasses.replace((mafa_key(given).keys or {})["con_d"], annotation=dict)
    # Put where it stands in a whole config: problems then name its keys by their full path.
    keys = {"model": section_of({"mafa": section_of({"con_d": con_d})})}
    report = Report(keys)
    config: Any = filled({"model": {"mafa": {"con_d": dict(given)}}}, keys, report)
    cfg = ConfigView(config, report.bad, "model")
    ask = getattr(DISCRIMINATORS.get(cfg["model.mafa.con_d.arch"] or ""), "problems_of", None)
    report.take(ask(cfg) if ask else ())
    return config["model"]["mafa"]["con_d"], report.problems
