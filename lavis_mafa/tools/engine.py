"""Mine a data set: encode its samples, pick hard negatives, judge them, and return a table.

`count` and `mine` are two readings of the table. They share the search for candidates,
`lavis_mafa.algorithm.corpus_mining`, with `mine_hard_negatives`, whose features are of any encoder.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lavis_mafa.algorithm.discriminator import LEFT
from lavis_mafa.data.caption_truth import CaptionTruth
from lavis_mafa.data.data_identity import DataIdentity
from lavis_mafa.data.known_truth import known_pairs
from lavis_mafa.io.processes import (
    all_gather_objects,
    from_main_process,
    get_rank,
    get_world_size,
    progress,
)
from lavis_mafa.judges.discriminators import SampleJudge
from lavis_mafa.judges.self_check import SKIP, SelfCheck, drawn_samples, mode_of, self_check
from lavis_mafa.tools.analysed_pairs import AnalysedPairs, log_on_main
from lavis_mafa.tools.corpus_features import Features, make_features
from lavis_mafa.tools.hard_negatives import HardNegatives, Sampling, find_hard_negatives
from lavis_mafa.tools.judged_pairs import UNKNOWN, Judged, pair_keys
from lavis_mafa.training.termination import REQUEUE, Terminated, Termination

_CHUNK_PAIRS = 4096  # that are judged at once, or compared
_OWN = 10_000  # own pairs that give a scale


@dataclass
class Mined:
    """The table of judged pairs and what it was made from.

    Attributes:
        negatives: of each sampling, in order.
        checks: self-checks by name of the discriminator.
    """

    features: Features
    negatives: list[HardNegatives]
    judged: Judged
    checks: dict[str, SelfCheck]


def load(args: argparse.Namespace) -> AnalysedPairs:
    """Build what a command analyses: from files of pairs, or from a config of LAVIS.

    Judges are built first: a missing checkpoint is reported before hours are spent on features.
    """
    if args.data:
        from lavis_mafa.tools.from_files import load_files

        return load_files(args)
    from lavis_mafa.tools.model_and_data import load_judged

    return load_judged(args)


def mine(
    loaded: AnalysedPairs,
    args: argparse.Namespace,
    thresholds: tuple[float, ...],
    wanted: Sequence[Sampling],
    top_k: int = 1,
    new_only: bool = False,
) -> Mined:
    """Judge the hard negatives of samples; all ranks must call this function.

    Only the features are saved, in the folder ``features`` of ``args.output``: a rerun encodes only
    what is missing, and judges again.

    Args:
        thresholds: ascending, the lowest and highest are recorded.
        wanted: samplings, with the seed of ``args``.
        top_k: hard negatives of an anchor in a mini-batch.
        new_only: pick no pair that the data have, whatever the config says.

    Raises:
        ValueError: if too many samples cannot be read.
        Terminated: on a termination signal or Ctrl-C.
    """
    folder = args.output / "features"
    with _ending_resumable(folder):
        checks = _check_judges(loaded, thresholds, args)
        features = make_features(loaded, np.arange(len(loaded.data)), folder)
        _require_readable(loaded, features)
        negatives = [
            find_hard_negatives(loaded, features, one, args.seed, top_k, new_only) for one in wanted
        ]
        judged = _judge_all(loaded, features, negatives)
    judged.about = {**loaded.about, "low": thresholds[0], "high": thresholds[-1]}
    judged.about["lower_bound"] = isinstance(loaded.data.truth, CaptionTruth)
    judged.about["rows"] = asdict(DataIdentity.of(loaded.data))
    judged.about["self_check"] = {name: check.content() for name, check in checks.items()}
    judged.about["neighbours"] = wanted[-1].neighbours  # the whole data set comes last
    return Mined(features, negatives, judged, checks)


@contextmanager
def _ending_resumable(folder: Path) -> Iterator[None]:
    """Say after a termination signal what a rerun need not do again."""
    termination = Termination()
    try:
        with termination, termination.raise_at_once():
            yield
    except Terminated:
        raise Terminated(
            f"terminated by {termination.signal_name}, exit status {REQUEUE}: rerun the same "
            f"command to resume; {folder} keeps the samples that are encoded, and no verdicts"
        ) from None


def _require_readable(loaded: AnalysedPairs, features: Features) -> None:
    lost = features.unreadable
    if len(lost) > loaded.most_unreadable * len(loaded.data):
        listed = "\n  ".join(error for _, error in lost[:20])
        raise ValueError(
            f"the pictures of {len(lost)} of {len(loaded.data)} pairs cannot be read, at most "
            f"{loaded.most_unreadable:.0%} may be missing: repair the data, or correct --images, "
            f"and remove the folder features of --output; the first:\n  {listed}"
        )


def _check_judges(
    loaded: AnalysedPairs, thresholds: Sequence[float], args: argparse.Namespace
) -> dict[str, SelfCheck]:
    """Check every judge of a command on images as the command will process them.

    Args:
        thresholds: in use.
        args: with ``self_check`` (None: each config's own) and ``seed``.

    Returns:
        The checks by name, without those that are skipped.

    Raises:
        PoorDiscriminatorError: on all ranks, if one fails that is to be refused.
    """
    found = {}
    for name, judge in loaded.judges.items():
        cfg = loaded.configs[name]
        mode = args.self_check or mode_of(cfg)
        if mode == SKIP or judge is None:
            continue

        def check(name: str = name, judge: Any = judge, cfg: Any = cfg) -> SelfCheck:
            drawn = drawn_samples(len(loaded.data), cfg, args.seed)
            of_numbers = isinstance(judge, SampleJudge)
            batches = _numbers(loaded.data, drawn) if of_numbers else loaded.pictures(drawn, judge)
            return self_check(judge, batches, thresholds, name, args.seed)

        found[name] = from_main_process(check)
        found[name].settle(mode, "give --self-check {}")
    return found


def _numbers(data: Any, drawn: Sequence[NDArray[Any]]) -> Iterator[dict[str, Any]]:
    """Yield mini-batches that name samples, and hold no images."""
    for numbers in drawn:
        batch = {"image": numbers, "image_id": data.image_ids[numbers], "loaded_index": numbers}
        if data.group_ids is not None:
            batch["group_id"] = data.group_ids[numbers]
        yield {name: torch.from_numpy(np.asarray(values)) for name, values in batch.items()}


def _judge_all(
    loaded: AnalysedPairs, features: Features, negatives: Sequence[HardNegatives]
) -> Judged:
    """Judge all distinct pairs of hard negatives."""
    size = len(loaded.data)
    # Sorted in place, a pair's occurrences from its text before those from its image.
    keys = np.concatenate(
        [2 * pair_keys(one.image, one.text, size) + one.from_image for one in negatives]
    )
    keys.sort()
    begins = np.diff(keys // 2, prepend=-1) > 0
    by_text, by_image = keys[begins] % 2 == 0, keys[np.roll(begins, -1)] % 2 == 1
    image, text = np.divmod(keys[begins] // 2, size)
    del keys, begins
    probability = {
        name: np.asarray(_probability(loaded, features, judge, image, text), np.float32)
        for name, judge in loaded.judges.items()
    }
    return Judged(image, text, by_image, by_text, probability, _truth_of(loaded.data, image, text))


def _truth_of(data: Any, image: NDArray[Any], text: NDArray[Any]) -> NDArray[Any]:
    """Return the ground truth ``(P,)`` int8 of pairs; `UNKNOWN` where the data do not know it."""
    if data.truth is None:
        return np.full(len(image), UNKNOWN, np.int8)
    truth = np.asarray(data.truth(image, text)).astype(np.int8)
    return np.where(known_pairs(data.truth, image, text), truth, UNKNOWN).astype(np.int8)


def _probability(
    loaded: AnalysedPairs, features: Features, judge: Any, image: NDArray[Any], text: NDArray[Any]
) -> NDArray[Any]:
    """Return P(match) ``(P,)`` by a judge, see `AnalysedPairs.judges`; NaN where an image cannot be
    read."""
    if judge is None:
        return _rank_among_own(features, image, text)
    if isinstance(judge, SampleJudge):
        return judge.probability(image, text)
    first = getattr(judge, "first", None)
    found = np.ones(len(image)) if first is None else first.probability(image, text)
    left, found = found >= LEFT, np.asarray(found, np.float32)
    found[left] = _judge_by_image(loaded, features, image[left], text[left], judge)
    return found


def _rank_among_own(features: Features, image: NDArray[Any], text: NDArray[Any]) -> NDArray[Any]:
    """Return the shares ``(P,)`` of own pairs that are less similar than a pair."""
    own = np.random.default_rng(0).permutation(np.arange(len(features)))[:_OWN]
    scale = np.sort(_similarities(features, own, own))
    found = _similarities(features, features.positions(image), features.positions(text))
    return np.searchsorted(scale, found) / len(scale)


def _similarities(features: Features, image: NDArray[Any], text: NDArray[Any]) -> NDArray[Any]:
    """Return the similarities ``(P,)`` of pairs of positions."""
    found = np.empty(len(image), np.float32)
    for begin in range(0, len(image), _CHUNK_PAIRS):
        chunk = slice(begin, begin + _CHUNK_PAIRS)
        rows = [torch.from_numpy(one[chunk]) for one in (image, text)]
        found[chunk] = (features.images[rows[0]] * features.texts[rows[1]]).sum(1).numpy()
    return found


def _judge_by_image(
    loaded: AnalysedPairs, features: Features, image: NDArray[Any], text: NDArray[Any], judge: Any
) -> NDArray[Any]:
    """Return the probabilities ``(P,)`` float32 that pairs match; NaN if an image is unreadable.

    All ranks must call this function with the same pairs; they share the work, and each returns all
    probabilities. An image is read and encoded once.

    Args:
        features: captions, and which samples can be read.
        image, text: ``(P,)`` sample numbers in the training set, of distinct pairs by image.
        judge: has ``judge``, see `lavis_mafa.Discriminator`.

    Raises:
        ValueError: if too many images are unreadable.
    """
    images, texts = (np.array_split(one, get_world_size())[get_rank()] for one in (image, text))
    log_on_main("%d pairs to judge", len(image))
    own = np.empty(len(images), np.float32)
    chunks = _chunks_of(images, texts, loaded.images_at_once)
    shown = [np.unique(images[rows]) for rows in chunks]
    with progress(total=len(images), unit=" pairs", desc="judging") as bar:
        for rows, numbers, batch in zip(chunks, shown, loaded.pictures(shown, judge), strict=True):
            captions, text_of = np.unique(texts[rows], return_inverse=True)
            image_of = np.searchsorted(numbers, images[rows])
            samples = {
                "image": batch["image"],
                "text_input": [features.captions[k] for k in features.positions(captions)],
            }
            verdicts = judge.judge(
                samples, torch.from_numpy(image_of), torch.from_numpy(text_of.reshape(-1))
            )
            own[rows] = verdicts.float().cpu().numpy()
            unreadable = np.array([bool(error) for error in batch["load_error"]])
            own[rows[unreadable[image_of]]] = np.nan
            bar.update(len(rows))
    found = np.concatenate(all_gather_objects(own))
    lost = int(np.isnan(found).sum())
    if lost > loaded.most_unreadable * len(found):
        raise ValueError(
            f"{lost} of {len(found)} pairs have no verdict, because their pictures cannot be read: "
            "repair the data, or correct --images"
        )
    return found


def _chunks_of(image: NDArray[Any], text: NDArray[Any], most_images: int) -> list[NDArray[Any]]:
    """Return the rows of pairs that are judged together.

    All pairs of an image are in one chunk, so that it is encoded once; a chunk has up to
    ``most_images`` images and about `_CHUNK_PAIRS` pairs.

    Args:
        image, text: ``(P,)``, all pairs of this rank.
    """
    order = np.lexsort((text, image))
    begins = np.flatnonzero(np.diff(image[order], prepend=-1)).tolist()
    first, cuts = 0, []
    for number, begin in enumerate(begins):
        if number - first >= most_images or begin - begins[first] >= _CHUNK_PAIRS:
            cuts.append(begin)
            first = number
    return np.split(order, cuts) if len(order) else []
