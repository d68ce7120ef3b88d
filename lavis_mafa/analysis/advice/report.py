"""Count, advise and write the advice; see `lavis_mafa.commands.advise`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lavis.common.dist_utils import is_main_process
from numpy.typing import NDArray

from lavis_mafa.algorithm.labels import SoftLabels
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.analysis.advice import measured
from lavis_mafa.analysis.advice.evidence import (
    Config,
    Estimate,
    Evidence,
    Fall,
    con_d_of,
    evidence_of,
    fall_of,
    grouped_pairs,
    labeled_pairs,
)
from lavis_mafa.analysis.advice.rules import (
    MOST_GROUPED,
    MOST_RANDOM,
    Advice,
    advice_of,
    least_lift,
    options_line,
)
from lavis_mafa.analysis.count import count_false_negatives
from lavis_mafa.analysis.hard_negatives import samplings
from lavis_mafa.analysis.judged_pairs import FILE, Judged
from lavis_mafa.analysis.judging import discriminators_of
from lavis_mafa.analysis.loading import ModelAndData, data_source, options_of
from lavis_mafa.analysis.quality.correction import Correction, correction_of
from lavis_mafa.analysis.quality.labels import Labels, consistent, pooled, read_labels
from lavis_mafa.analysis.search_spaces import ALL
from lavis_mafa.analysis.self_check import self_check_tables
from lavis_mafa.config import load_config
from lavis_mafa.io.files import write_json, write_text
from lavis_mafa.models.mafa_model import checkpoint_of
from lavis_mafa.pages.charts import Cell, Table
from lavis_mafa.pages.report import write_report
from lavis_mafa.pages.tables import markdown_section, markdown_table
from lavis_mafa.runners.run_log import LOG, read_log

COUNTS, GROUPED = "counts.json", "grouped"
HYPOTHESIS = (
    "These rules were found on two toy worlds: a clustered one, where grouping and mining help, "
    "and a dense one, where grouping harms. UCM-Captions, aerial photographs, agrees with the "
    "second. In the recorded comparisons of these three (three to ten seeds) neither the advised "
    "grouping nor the advised mining retrieves significantly worse than its opposite. This is no "
    "independent test, since the bounds were chosen with these results in view, and the bound on "
    "ITM's loss is a guess. A third toy world was compared after the bounds on false "
    "negatives were set: they advise against grouping there, and grouping all of the data changed "
    f"R@1 by {measured.GROUPING_SPARSE}. The rules are a hypothesis about other data: compare "
    "short runs with and without the advised settings before a long one."
)
INTERVALS = "Intervals are 95 %; a difference is open if its interval contains 0."
# Pairs up to which parts of the data are counted by default: a larger search space takes longer to
# encode and to judge.
QUICK = 10_000


def advise(args: argparse.Namespace) -> None:
    """Count if needed, and write ``advice.json``, ``advice.md`` and ``advice.html``.

    Also writes the grouped hard negatives to ``grouped/judged.npz``, to be labeled.

    Raises:
        ValueError: for arguments that are out of range or do not fit together or the counts.
    """
    if set(args.sampling) != {"random", "grit"}:
        raise ValueError("the advice compares --sampling random and grit: leave out --sampling")
    if ALL in (args.search_spaces or ()):
        raise ValueError(f"the advice is about mini-batches: leave {ALL} out of --search-spaces")
    # Read first: damaged files are reported before hours are spent on counts.
    try:
        itm = None if args.run is None else fall_of_run(args.run)
    except ValueError:
        if not getattr(args, "run_is_source", False):
            raise
        itm = None  # the run is only the source of model and data
    labels = [read_labels(path) for path in args.labels]
    if labels:
        consistent(labels)
    if not is_finished(args):
        count_false_negatives(args, complete)
    elif is_main_process():
        print(f"reused: {args.output / COUNTS}")
    if is_main_process():
        _advise(args, labels, itm)


def fall_of_run(folder: Path) -> Fall:
    """Return the fall of ITM's loss in a run, see `fall_of`.

    Raises:
        FileNotFoundError: if the folder has no log.
        ValueError: if the run has fewer than two epochs with random mini-batches.
    """
    if not (folder / LOG).is_file():
        raise FileNotFoundError(f"--run: no run in {folder}: {LOG} does not exist")
    configs = [record.get("config") for record in read_log(folder, "config")]
    try:
        return fall_of(
            configs[-1] if configs else None,
            read_log(folder, "epoch", once="epoch"),
            read_log(folder, "step", once="global_step"),
        )
    except ValueError as error:
        raise ValueError(f"--run {folder}: {error}") from error


def is_finished(args: argparse.Namespace) -> bool:
    """Return whether ``--output`` holds the counts that the arguments ask for."""
    path = args.output / COUNTS
    if not path.is_file() or not (args.output / FILE).is_file() or args.self_check is not None:
        return False
    counts, judged = json.loads(path.read_text(encoding="utf-8")), Judged.load(args.output)
    wanted = {
        **data_source(args),
        **{name: getattr(args, name) for name in ("checkpoint", "threshold", "seed")},
    }
    sizes, spaces = _counted(counts)
    names = samplings(args.sampling, args.batch_sizes or sizes, args.search_spaces or spaces)
    return (
        all(counts.get(name) == value for name, value in wanted.items())
        and judged.about.get("con_d") == discriminators_of(args)
        # A correction or judgements may have changed since; the count is quick with saved verdicts.
        and not (
            args.correction or args.judgements or counts["judgements"] or counts["corrections"]
        )
        and args.sample in (None, _sample(counts))
        and bool(spaces)
        and {one.name for one in names} <= judged.samplings.keys()
    )


def complete(args: argparse.Namespace, loaded: ModelAndData) -> None:
    """Set the arguments of `count` that are not given.

    What was counted before in ``--output`` is counted again, with its saved verdicts, since a count
    never drops earlier results.

    Raises:
        ValueError: if the counts in ``--output`` are of a sample that is too small.
    """
    path = args.output / COUNTS
    counts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    sizes, spaces = _counted(counts) if counts else ([], [])
    run, total = loaded.cfg.run_cfg, len(loaded.data)
    batch, space = int(run.batch_size_train), int(run.grit.search_space)
    sizes += args.batch_sizes or ([] if sizes else [batch, max(2, batch // 2)])
    spaces += args.search_spaces or ([] if spaces else search_spaces(space, max(sizes), total))
    args.batch_sizes, args.search_spaces = sorted(set(sizes)), sorted(set(spaces))
    largest = min(total, max(*sizes, *spaces))
    if args.sample is None:
        args.sample = _sample(counts) if counts else largest
    if counts and args.sample == _sample(counts) and args.sample < largest:
        raise ValueError(
            f"{args.output} has counts of a sample of {args.sample:,}, too small for B or M of "
            f"{largest:,}: give another --output, or at most {args.sample:,}"
        )


def search_spaces(space: int, batch_size: int, total: int) -> list[int]:
    """Return the search spaces to count by default, ascending and larger than a mini-batch.

    They are M of the config and an eighth, half and all of the data, of which the first two were
    measured to be best, up to `QUICK` pairs or 4 M. If half of the data is more, M / 4 and 4 M are
    counted too.

    Args:
        space: M of the config.
        batch_size: the largest B.
        total: number of samples.
    """
    largest = max(QUICK, 4 * space)
    wanted = {space, *(one for one in (total // 8, total // 2, total) if one <= largest)}
    if total // 2 > largest:
        wanted |= {space // 4, 4 * space}
    found = {min(one, total) for one in wanted}
    return sorted(one for one in found if one > batch_size) or [min(space, total)]


def _counted(counts: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return all B and all M of ``counts.json``, ascending."""
    sizes = {one["batch_size"] for one in counts["counts"]} - {None}
    spaces = {one["search_space"] for one in counts["counts"]} - {None}
    return sorted(sizes), sorted(spaces)


def _sample(counts: Mapping[str, Any]) -> int:
    """Return the number of samples that were drawn."""
    return int(counts["looked_at"]) + len(counts["unreadable"])


def _advise(args: argparse.Namespace, labels: Sequence[Labels], itm: Fall | None) -> None:
    counts = json.loads((args.output / COUNTS).read_text(encoding="utf-8"))
    judged, (config, untrained) = Judged.load(args.output), config_of(args)
    grouped = args.output / GROUPED
    words = ["lavis-mafa", "label", "page", str(grouped), "--all"]
    words += ["--output", str(args.output / "labels.html")]

    def evidence(correction: Correction | None) -> Evidence:
        return evidence_of(
            counts,
            judged,
            config,
            labels=labels,
            correction=correction,
            itm=itm,
            label=shlex.join(words),
            untrained=untrained,
        )

    plain = evidence(None)
    decides = grouped_pairs(judged, plain.batch_size, plain.search_space)
    found = evidence(_correction(counts, judged, decides, labels))
    if found.con_d is not None:
        judged.select(decides).save(grouped / FILE)
    write_advice(args.output, found, advice_of(found), counts)


def config_of(args: argparse.Namespace) -> tuple[Config, bool]:
    """Return the settings that the advice refers to, and whether the weights are random."""
    cfg = load_config(args.cfg_path, options_of(args), machine=False)
    run, mafa = cfg.run_cfg, cfg.model_cfg.get("mafa") or {}
    connections = mafa.get("connections") or {}
    labels, form = mafa.get("soft_labels") or {}, mafa.get("itc_loss", StepSettings.itc_loss)
    config = Config(
        int(run.batch_size_train),
        int(run.grit.search_space),
        int(run.grit.queue_size),
        float(connections.get("low", MiningRule.low)),
        float(connections.get("high", MiningRule.high)),
        str(labels.get("type", SoftLabels.type)),
        consistency=(cfg.model_cfg.arch, form) == ("albef_mafa", "softmax"),
    )
    return config, checkpoint_of(cfg.model_cfg) is None


def _correction(
    counts: Mapping[str, Any], judged: Judged, grouped: NDArray[Any], labels: Sequence[Labels]
) -> Correction | None:
    """Return the correction of the discriminator at the threshold of the counts.

    None if the labels, and without labels the counts, give none.
    """
    threshold = float(counts["threshold"])
    found = [Correction(**one) for one in counts["corrections"]]
    if labels:
        of = labeled_pairs(judged, grouped, labels)
        called = of.probability_by(labels[0].name) > threshold
        pairs = set(zip(of.image[called].tolist(), of.text[called].tolist(), strict=True))
        found = [correction_of(labels, of)] if not pairs.isdisjoint(pooled(labels)) else []
    name = con_d_of(judged, labels)
    return next((one for one in found if (one.name, one.above) == (name, threshold)), None)


def write_advice(
    output: Path, evidence: Evidence, advice: Sequence[Advice], counts: Mapping[str, Any]
) -> None:
    """Print the advice and write ``advice.json``, ``advice.md`` and ``advice.html``.

    Args:
        counts: content of ``counts.json``.
    """
    options = options_line(advice)
    source = {name: counts[name] for name in ("cfg_path", "options", "split", "checkpoint")}
    content = {
        "options": options,
        "advice": [asdict(one) for one in advice],
        "evidence": _content(evidence),
        "counts": source,
        "note": HYPOTHESIS,
    }
    write_json(output / "advice.json", content)
    table = advice_table(advice)
    checks = self_check_tables(counts.get("self_check") or {})
    tables = [table, *evidence_tables(evidence), *checks]
    parts = [f"# Advice\n\n{HYPOTHESIS}", markdown_table(table), INTERVALS]
    parts += [f"    --options {options}"]
    parts += [markdown_section(one) for one in tables[1:]]
    write_text(output / "advice.md", "\n\n".join(parts) + "\n")
    advised = [f"{one.title} ({one.certainty})" for one in advice if one.is_setting]
    page = write_report(
        output / "advice.html",
        title="Advice",
        headline=f"Advised for these data: {', '.join(advised)}.",
        intro=f"{HYPOTHESIS}\n\n--options {options}",
        tables=tables,
        notes=[INTERVALS, "The counts are in counts.json, counts.md and report.html."],
        settings=source,
    )
    for one in advice:
        print(f"\n{one.title} ({one.certainty})\n  {one.reason}")
    print(f"\n{INTERVALS}\n\nTo use it:\n  --options {options}\n\n{HYPOTHESIS}")
    print(f"\nwritten: {output / 'advice.json'}, advice.md, {page.name}")


def _content(evidence: Evidence) -> dict[str, Any]:
    """Return the evidence as plain values; shares become lists."""
    rows = [
        {"batch_size": b, "search_space": m, "share": share._asdict()}
        for (b, m), share in _shares(evidence)
    ]
    content = asdict(evidence)
    del content["random"], content["grouped"]
    return {**content, "shares": rows}


def _shares(evidence: Evidence) -> list[tuple[tuple[int, int | None], Estimate]]:
    random = [((b, None), share) for b, share in evidence.random.items()]
    return [*random, *evidence.grouped.items()]


def advice_table(advice: Sequence[Advice]) -> Table:
    """Return the advice with its reasons."""
    rows: list[list[Cell]] = [[one.title, one.certainty, one.reason] for one in advice]
    return Table("Advice", ["advice", "certainty", "reason"], rows)


def evidence_tables(evidence: Evidence) -> list[Table]:
    """Return the figures that the rules compare with their bounds."""
    note = (
        f"Judged by {evidence.judge}{', corrected by labels' * evidence.corrected}; mean of both "
        f"directions. Bounds: random {_percent(MOST_RANDOM)}, grouped {_percent(MOST_GROUPED)}."
    )
    rows: list[list[Cell]] = [
        ["random" if m is None else "grouped", b, m, _percent(share.value), _interval(share)]
        for (b, m), share in _shares(evidence)
    ]
    columns = ["mini-batches", "B", "M", "false", "95 %"]
    tables = [Table("False negatives among hard negatives", columns, rows, note)]
    quality = evidence.quality
    if quality is not None:
        note = f"Truth by {quality.source}; discriminator {evidence.con_d}."
        if quality.base_rate is not None:
            note += f" Bound of the lift: {least_lift(quality.base_rate.value):.3g}."
        tables.append(
            Table(
                "Con-D on grouped hard negatives",
                ["figure", "value", "95 %"],
                [
                    ["pairs with a known truth", quality.pairs, None],
                    [f"of them above {evidence.high:g}", quality.above, None],
                    _row("precision above it", quality.precision),
                    _row("base rate", quality.base_rate),
                    ["lift", *_lift(quality.lift)],
                ],
                note,
            )
        )
    return tables


def _row(name: str, share: Estimate | None) -> list[Cell]:
    return [name, *([None, None] if share is None else [_percent(share.value), _interval(share)])]


def _lift(lift: Estimate | None) -> list[Cell]:
    return [None, None] if lift is None else [f"{lift[0]:.3g}", f"{lift[1]:.3g}–{lift[2]:.3g}"]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _interval(share: Estimate) -> str:
    return f"{100 * share.low:.2f}–{100 * share.high:.2f} %"
