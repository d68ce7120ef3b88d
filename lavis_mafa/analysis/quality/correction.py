"""The share of a discriminator's matches that annotators confirm (MAFA Appendix B)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lavis_mafa.analysis.judged_pairs import UNKNOWN, VALID, Judged
from lavis_mafa.analysis.quality.agreement import agreement
from lavis_mafa.analysis.quality.labels import (
    LABELS,
    VERSION,
    Labels,
    checked,
    consistent,
    finite,
    pooled,
    read_content,
    read_labels,
    require_kind,
    weights,
)
from lavis_mafa.io.files import write_json
from lavis_mafa.metrics.binary import TENTHS, bin_of, weighted_share
from lavis_mafa.pages.charts import Table
from lavis_mafa.pages.tables import markdown_table

CORRECTION = "lavis_mafa correction"  # kind of the file


@dataclass
class Correction:
    """Share of a discriminator's matches that annotators confirm (0.83 in MAFA Appendix B).

    Attributes:
        factor: 0 to 1; low, high: its 95 % Wilson interval.
        n: number of pairs answered yes or no.
        name, above: the discriminator, and its threshold for a match.
    """

    factor: float
    low: float
    high: float
    n: int
    name: str
    above: float


def correction_of(labels: Sequence[Labels], judged: Judged | None = None) -> Correction:
    """Compute the correction from the labels of one or several annotators.

    Several answers for the same pair count as one draw. Labels that were drawn from all pairs
    require ``judged`` and are weighted.

    Raises:
        ValueError: if labels cannot be pooled, or no pair was answered yes or no.
    """
    first = consistent(labels)
    hits, weight, above = np.array(list(pooled(labels).values())), None, first.above
    if judged is not None or above is None:
        if judged is None:
            raise ValueError(
                "these labels were drawn from all pairs, not only from matches: also give the "
                "judged file, `lavis-mafa label correct LABELS --judged FILE`"
            )
        rows, hits, weight = weights(labels, judged)
        above = judged.thresholds[0] if above is None else above
        called = judged.probability_by(first.name)[rows] > above
        hits, weight = hits[called], weight[called]
    factor, low, high = weighted_share(hits, weight)
    if factor is None:
        raise ValueError("no match was answered yes or no")
    return Correction(factor, low, high, len(hits), first.name, above)


def correction_by_judgements(judged: Judged, name: str, above: float) -> Correction | None:
    """Compute the correction of a discriminator from the judgements in ``judged.truth``.

    Only hard negatives count: other pairs in the file were chosen by those who collected the
    judgements.

    Args:
        above: threshold for a match.

    Returns:
        None if no match among the hard negatives has a judgement.
    """
    matches = (judged.probability_by(name) > above) & (judged.from_image | judged.from_text)
    truth = judged.truth[matches & (judged.truth != UNKNOWN)]
    factor, low, high = weighted_share(truth == VALID)
    return None if factor is None else Correction(factor, low, high, len(truth), name, above)


def read_correction(path: str | os.PathLike[str]) -> Correction:
    """Read ``correction.json``, or compute the correction of a ``labels.json``.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is another file, or gives no factor.
    """
    content = read_content(path)
    if content.get("kind") == LABELS:
        try:
            return correction_of([read_labels(path)])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    require_kind(content, CORRECTION, path)
    try:
        factor, low, high, above = (
            finite(content[key]) for key in ("factor", "low", "high", "above")
        )
        n, name = checked(int, content["n"]), checked(str, content["name"])
        if n < 1 or not 0.0 <= low <= factor <= high <= 1.0:
            raise ValueError("expected 0 <= low <= factor <= high <= 1 and n above 0")
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged: {what}") from error
    return Correction(factor, low, high, n, name, above)


def write_correction(paths: Sequence[Path], judged_path: Path | None, output: Path) -> None:
    """Compute the correction of files of labels, print and write it.

    Args:
        paths: ``labels.json`` of the annotators.
        judged_path: judged pairs, for the confirmed share by probability; None: without it.
        output: file to write.
    """
    labels = [read_labels(path) for path in paths]
    judged = None if judged_path is None else Judged.load(judged_path)
    one = correction_of(labels, judged)
    people = _people(paths, labels)
    content: dict[str, Any] = {"kind": CORRECTION, "version": VERSION, **asdict(one), **people}
    print(
        f"annotators confirm {100 * one.factor:.1f} % (95 %: {100 * one.low:.1f}–"
        f"{100 * one.high:.1f}) of {one.n} matches of {one.name} above {one.above:g}\n"
    )
    columns = ["labels", "yes", "no", "unsure"]
    rows = [[p[column] for column in columns] for p in people["people"]]
    print(markdown_table(Table("", columns, rows)))
    for two in people["agreement"]:
        kappa = "–" if two["kappa"] is None else f"{two['kappa']:.3f}"
        agreed = "–" if two["agreed"] is None else f"{100 * two['agreed']:.1f} %"
        print(
            f"\n{two['first']} and {two['second']} agree on {agreed} of {two['pairs']} pairs that "
            f"both answered yes or no; Cohen's kappa {kappa}"
        )
    if judged is not None:
        content["bins"] = by_probability(labels, judged)
        rows = [
            [f"{b['low']:g}–{b['high']:g}", b["n"]]
            + [None if b["yes"] is None else f"{100 * b[k]:.1f}" for k in ("yes", "from", "to")]
            for b in content["bins"]
        ]
        print("\n" + markdown_table(Table("", ["probability", "n", "yes %", "from", "to"], rows)))
    write_json(output, content)
    print(f"\nwritten: {output}")


def by_probability(labels: Sequence[Labels], judged: Judged) -> list[dict[str, Any]]:
    """Return the share of ``yes`` by tenth of probability, with its interval ``from``, ``to``."""
    rows, yes, _ = weights(labels, judged)
    place = bin_of(judged.probability_by(consistent(labels).name)[rows])
    bins = []
    for k in range(TENTHS):
        share, low, high = weighted_share(yes[place == k])
        n = int((place == k).sum())
        bins.append(
            {
                "low": k / TENTHS,
                "high": (k + 1) / TENTHS,
                "n": n,
                "yes": share,
                "from": low,
                "to": high,
            }
        )
    return bins


def _people(paths: Sequence[Path], labels: Sequence[Labels]) -> dict[str, Any]:
    """Return the answers of each annotator, and the agreement of all who had the same page."""
    people = [
        {"labels": str(path), "pairs": len(pooled([one]))}
        | {a: sum(answer == a for answer in one.answers.values()) for a in ("yes", "no", "unsure")}
        for path, one in zip(paths, labels, strict=True)
    ]
    return {"people": people, "agreement": _agreements(list(zip(paths, labels, strict=True)))}


def _agreements(given: Sequence[tuple[Path, Labels]]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for (path, one), (other_path, other) in itertools.combinations(given, 2):
        if one.page != other.page:
            continue
        both = [pair for pair in one.decided() if pair in other.decided()]
        answers = [
            np.array([own[pair] for pair in both]) for own in (one.decided(), other.decided())
        ]
        a = agreement(*(each > 0.5 for each in answers))
        files = {"first": str(path), "second": str(other_path), "pairs": a.pairs}
        found.append({**files, "agreed": a.agreed, "kappa": a.kappa})
    return found
