"""The systems that are compared on the toy world: settings of one training step, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lavis_mafa.studies.demo.families import Family

ORACLE = "oracle"
WARM_UP, CON_D = "warm_up", "con_d"
DEMO = ("base", "grit", "s_itc", "mafa")


@dataclass(frozen=True)
class System:
    """One system.

    Attributes:
        name: short, for folders and ``--systems``.
        title: what people call it.
        source: where a paper has it; "" for a control of ours.
        options: what it sets beyond a family's toy config.
        epochs: how long it trains.
        start: the system whose last weights it begins with; None: the image encoder's start.
        con_d: its Con-D: the name of a system, ``oracle``, or "" for none.
    """

    name: str
    title: str
    source: str
    options: Mapping[str, Any]
    epochs: int
    start: str | None = WARM_UP
    con_d: str = ""


def systems_of(family: Family, epochs: int = 6, warm_up_epochs: int = 8) -> dict[str, System]:
    """All systems of a family by name, each after those that it needs.

    Args:
        epochs: of every system but the warm-up, Con-D (half) and the two that train twice as long.
        warm_up_epochs: of the warm-up, with which all begin.
    """
    labels = "model.mafa.soft_labels"
    random: dict[str, Any] = {"run.grit.enabled": False, f"{labels}.type": "one_hot"}
    sampled = {**random, "model.mafa.negatives": "sampled"}
    s_itc: dict[str, Any] = {"run.grit.start_epoch": 1}
    grit = {**s_itc, f"{labels}.type": "one_hot"}
    if family.consistency:
        grit |= {f"{labels}.type": "consistency", f"{labels}.start_epoch": 0}
    short = {"run.warmup_steps": 30}
    found: dict[str, System] = {}

    def add(name: str, title: str, source: str, options: Mapping[str, Any], **more: Any) -> None:
        more = {"epochs": epochs, **more}
        options = {**short, **options} if name != WARM_UP else options
        found[name] = System(name, title, source, options, **more)

    # Hardest negatives from the start leave ITM on a plateau.
    begin = {**sampled, "run.init_lr": 2e-3}
    tune = {**sampled, "model.mafa.loss_weights.lm": 0.0}
    title = "shared warm-up, random mini-batches"
    add(WARM_UP, title, "", begin, epochs=warm_up_epochs, start=None)
    if family.full:
        momentum = {**sampled, f"{labels}.type": "momentum"}
        add("momentum", family.full, "ALBEF; MAFA Table 3", momentum)
    add("base", family.base, "MAFA Table 5, row 1", sampled)
    add("grit", family.grit, "GRIT-VLP; MAFA Table 4, row 1", grit)
    add("s_itc", "S-ITC", "MAFA Table 4, row 3", s_itc)
    half = max(1, epochs // 2)
    title = "Con-D's fine-tuning for retrieval"
    add(CON_D, title, "MAFA 4.1", tune, epochs=half, start=family.con_d_from)
    add("ecm", "ECM", "MAFA Table 4, row 2; Table 14", grit, con_d=CON_D)
    add("mafa", "MAFA", "MAFA Table 4, row 4", s_itc, con_d=CON_D)
    add("mafa_oracle", "MAFA, oracle as Con-D", "cf. MAFA Table 16", s_itc, con_d=ORACLE)
    drop = {**s_itc, "model.mafa.connections.action": "drop"}
    add("ecm_e", "MAFA with ECM-E", "MAFA Table 5, row 4", drop, con_d=CON_D)
    rule = "model.mafa.connections"
    top_3, soft = {**s_itc, f"{rule}.top_k": 3}, {**s_itc, f"{rule}.labels": "probability"}
    add("mafa_top_3", "MAFA, three candidates judged", "", top_3, con_d=CON_D)
    add("mafa_probability", "MAFA, Con-D's probability as label", "", soft, con_d=CON_D)
    fne = {**grit, "model.mafa.negatives": "posterior"}
    add("fne", f"{family.grit}, negatives picked as FNE does", "FNE", fne)
    add("random_ecm", f"{family.base} + ECM", "MAFA Table 5, row 2", sampled, con_d=CON_D)
    smooth = {f"{labels}.type": "smoothed", f"{labels}.start_epoch": 1}
    add("random_s_itc", f"{family.base} + S-ITC", "MAFA Table 6, row 3", {**sampled, **smooth})
    fixed = {"model.mafa.learn_temperature": False, "model.temp": 0.07}
    add("grit_fixed", f"{family.grit}, temperature fixed at 0.07", "", {**grit, **fixed})
    add("s_itc_fixed", "S-ITC, temperature fixed at 0.07", "", {**s_itc, **fixed})
    add("grit_twice", f"{family.grit}, twice the epochs", "", grit, epochs=2 * epochs)
    add("mafa_twice", "MAFA, twice the epochs", "", s_itc, epochs=2 * epochs, con_d=CON_D)
    return found


def with_what_they_need(names: Sequence[str], systems: Mapping[str, System]) -> list[str]:
    """``names`` and all that they need, in an order in which they can be run."""
    wanted = set(names)
    for name in reversed(list(systems)):  # each stands after those that it needs
        if name in wanted:
            wanted |= {other for other in needs_of(systems[name]) if other in systems}
    return [name for name in systems if name in wanted]


def needs_of(system: System) -> frozenset[str]:
    """Names of the systems whose weights a system takes."""
    return frozenset(n for n in (system.start, system.con_d) if n and n != ORACLE)
