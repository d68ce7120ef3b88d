"""How the comparison of several seeds is told: Markdown, JSON, and a page."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lavis_mafa._version import __version__
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.pages.report import Cell, Curve, Series, Table, write_report
from lavis_mafa.pages.tables import markdown_section
from lavis_mafa.runners.run_log import read_log
from lavis_mafa.studies.demo.measure import toy_world
from lavis_mafa.studies.demo.page import mined_by
from lavis_mafa.studies.demo.systems import System
from lavis_mafa.studies.demo.tables import tables_of
from lavis_mafa.studies.runs import about
from lavis_mafa.studies.spread import Figures, Spread, note_on_spread, spreads_of

REFERENCE = "grit"
DRAWN = ("base", "grit", "s_itc", "ecm", "mafa", "mafa_oracle")
SIZES = ("epochs", "warm_up_epochs", "train_size", "test_size", "start_steps")
TITLE = "Systems compared on the toy world"
INTRO = """{train_size:,} training pairs and {test_size:,} test images of a rendered world in \
which it is known which captions are valid for which images; a tiny ALBEF. Every seed has a start \
of the image encoder ({start_steps:,} steps), a warm-up ({warm_up_epochs} epochs, random \
mini-batches) and a Con-D of its own; its systems begin with that warm-up and train {epochs} \
epochs, unless their name says otherwise.

R@k against the original pairs (TR: texts for an image, IR: images for a text) counts a valid \
caption of another image as an error, so it punishes a model for accepting what is true: read it \
together with R@k against any valid pair and mAP@R over all valid pairs. The AUC of ITM is taken \
on pairs that the warm-up of the same seed finds similar, the same for all systems."""
NOTES = [
    "False negatives: share of valid pairs among the hard negatives picked in the last epoch. "
    "False ones in ITM: the same among the pairs that ITM then learned as no match.",
    "Con-D trained on the same pairs for more epochs than the systems that do without it: compare "
    "them with those that train twice as long as well.",
]


def command_of(args: argparse.Namespace) -> str:
    """The command that gives these figures, less where and how fast it works."""
    words = ["bash", "run_scripts/mafa/compare.sh", "--seeds", *map(str, args.seeds)]
    for name in SIZES:
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return shlex.join([*words, "--systems", *args.systems])


def write_results(
    args: argparse.Namespace, systems: Mapping[str, System], figures: Figures
) -> None:
    """Write ``args.results`` in Markdown and the same, seed by seed, as JSON beside it."""
    told = about(command_of(args))
    sizes = {name: getattr(args, name) for name in SIZES}
    parts = [
        "<!-- Written by run_scripts/mafa/compare.sh: run it again instead of editing this. -->",
        f"# {TITLE}",
        "lavis_mafa {version}, torch {torch}, {date}:".format(**told),
        f"```bash\n{told['command']}\n```",
        INTRO.format(**sizes),
        note_on_spread(figures),
    ]
    for table in tables_of(figures, _titles(systems), REFERENCE):
        parts.append(markdown_section(table))
    parts += ["## Notes", "\n".join(f"- {note}" for note in NOTES)]
    parts.append(markdown_section(_systems_table(systems.values())))
    write_text(args.results, "\n\n".join(parts) + "\n")
    spreads = spreads_of(figures)
    compared = {
        name: {
            **{key: getattr(systems[name], key) for key in ("title", "source", "epochs", "con_d")},
            "options": dict(systems[name].options),
            "seeds": {str(seed): dict(found) for seed, found in by_seed.items()},
            "spread": {key: dataclasses.asdict(value) for key, value in spreads[name].items()},
        }
        for name, by_seed in figures.items()
    }
    content = {**told, "sizes": sizes, "systems": compared}
    write_json(args.results.with_suffix(".json"), content)


def write_page(
    args: argparse.Namespace,
    systems: Mapping[str, System],
    figures: Figures,
    folders: Mapping[str, Sequence[Path]],
) -> Path:
    """Write ``report.html``: the tables, curves of means, and what MAFA mined with one seed.

    Args:
        folders: by system, those of its runs that are done.
    """
    drawn = {systems[name].title: folders[name] for name in DRAWN if name in folders}
    mined = []
    if folders.get("mafa"):
        train = toy_world(args.train_size, args.test_size)["train"]
        mined = list(mined_by(folders["mafa"][0], train, "mafa"))
    return write_report(
        args.output / "report.html",
        title=TITLE,
        intro=INTRO.format(**{name: getattr(args, name) for name in SIZES}),
        tables=[
            *tables_of(figures, _titles(systems), REFERENCE),
            _systems_table(systems.values()),
        ],
        curves=[
            _curve(drawn, "false_negative_rate_i2t", "False hard negatives"),
            _curve(drawn, "loss_itm", "ITM loss"),
        ],
        connections=mined,
        notes=[note_on_spread(figures), *NOTES],
        settings={"version": __version__, "command": command_of(args)},
    )


def _titles(systems: Mapping[str, System]) -> dict[str, str]:
    return {name: system.title for name, system in systems.items()}


def _systems_table(systems: Iterable[System]) -> Table:
    rows: list[list[Cell]] = [
        [
            system.title,
            system.name,
            system.source or None,
            system.epochs,
            system.con_d or None,
            " ".join(f"{key}={value}" for key, value in system.options.items()),
        ]
        for system in systems
    ]
    columns = ["system", "name", "source", "epochs", "Con-D", "options"]
    return Table("The systems", columns, rows)


def _curve(folders: Mapping[str, Sequence[Path]], key: str, title: str) -> Curve:
    """Means over seeds, epoch by epoch."""
    series = []
    for name, own in folders.items():
        by_epoch: dict[int, list[float | None]] = {}
        for folder in own:
            for record in read_log(folder, "epoch", once="epoch"):
                by_epoch.setdefault(record["epoch"], []).append(record.get(key))
        means = {epoch: Spread.of(values) for epoch, values in sorted(by_epoch.items())}
        there = {epoch: spread.mean for epoch, spread in means.items() if spread}
        series.append(Series(name, [float(x) for x in there], list(there.values())))
    return Curve(title, "epoch", title, [one for one in series if one.x], note="Means over seeds.")
