"""Judge pairs of a data set with discriminators."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf

from lavis_mafa.algorithm.discriminator import LEFT
from lavis_mafa.families.many_pairs import ManyPairs
from lavis_mafa.io.processes import all_gather_objects, get_rank, get_world_size, progress
from lavis_mafa.judges.build import ORACLE, build_discriminator
from lavis_mafa.judges.discriminators import ModelDiscriminator, SampleJudge
from lavis_mafa.judges.pair_reader import PairReader
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.settings.load import check_con_d, plain_options
from lavis_mafa.settings.registered import mafa_key
from lavis_mafa.tools.analysed_pairs import log_on_main
from lavis_mafa.tools.corpus_features import Features
from lavis_mafa.tools.count_advice import TRUTH
from lavis_mafa.tools.judged_pairs import pair_keys
from lavis_mafa.tools.model_and_data import ModelAndData, load_model_and_data, options_of

_ModelJudge = ModelDiscriminator | PairReader
AnyJudge = _ModelJudge | SampleJudge
CHUNK_IMAGES, CHUNK_PAIRS = 64, 4096  # that are judged at once


def discriminators_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the configs of the discriminators by name; {} if only the ground truth judges.

    Raises:
        ConfigError: with all problems of the configs.
    """
    cfg = load_config(args.cfg_path, options_of(args), machine=False)
    model: Any = OmegaConf.to_container(cfg.model_cfg, resolve=True)
    if not args.con_d:
        own = (model.get("mafa") or {}).get("con_d")
        return {} if not own or own["arch"] == ORACLE else {"con_d": own}
    names = {option.partition(".")[0] for option in args.con_d}
    con_d = (mafa_key().keys or {})["con_d"]
    given = plain_options(args.con_d, dict.fromkeys(names, con_d), "--con-d")
    found, problems = {}, []
    for name, one in given.items():
        if name == TRUTH or not str(name).isidentifier() or not isinstance(one, dict):
            problems.append(f"--con-d {name}: expected NAME.key=value, NAME other than {TRUTH}")
            continue
        found[name], wrong = check_con_d(one)
        problems += [f"--con-d {name}: {problem}" for problem in wrong]
        if one.get("arch") == ORACLE:
            problems.append(
                f"--con-d {name}.arch: {ORACLE} is given by --options model.mafa.con_d.arch"
            )
    if problems:
        raise ConfigError(str(args.cfg_path), problems)
    return found


def _build_judge(con_d: Mapping[str, Any], known: Mapping[str, Any]) -> AnyJudge:
    """Build a discriminator from a config like ``model.mafa.con_d``, other than the oracle.

    Args:
        known: the ``model`` config of the command, as for `build_discriminator`.

    Raises:
        ValueError: for a user's discriminator, whose weights nobody knows.
    """
    judge: Any = build_discriminator(con_d, known)
    if isinstance(judge, PairReader | SampleJudge):
        return judge
    if not isinstance(judge, ModelDiscriminator):
        raise ValueError(
            f"{con_d['arch']} judges only in training, because its verdicts cannot be identified; "
            "name a model"
        )
    matching: Any = ManyPairs(judge.backbone)  # more pairs at once than a mini-batch has
    judge.backbone = matching
    return judge


def build_judges(
    loaded: ModelAndData, con_ds: Mapping[str, Mapping[str, Any]]
) -> dict[str, AnyJudge]:
    """Build the discriminators of a command by name, see `_build_judge`."""
    judges = {name: _build_judge(con_d, loaded.cfg.model_cfg) for name, con_d in con_ds.items()}
    for one in judges.values():
        if hasattr(one, "know"):  # a model has it of the discriminator before it
            one.know(loaded.data.pairs)
    return judges


class _ConfigJudge:
    """A discriminator of a config as a judge of samples by number."""

    def __init__(self, loaded: ModelAndData, con_d: AnyJudge) -> None:
        self.loaded, self.con_d = loaded, con_d

    def probability(
        self, features: Features, image: NDArray[Any], text: NDArray[Any]
    ) -> NDArray[Any]:
        """Return P(match) ``(P,)``; all ranks must call this method."""
        con_d = self.con_d
        if isinstance(con_d, SampleJudge):
            return con_d.probability(image, text)
        first = getattr(con_d, "first", None)
        found = np.ones(len(image)) if first is None else first.probability(image, text)
        left, found = found >= LEFT, np.asarray(found, np.float32)
        found[left] = _judge(self.loaded, features, image[left], text[left], con_d)
        return found

    def batches(self, drawn: Sequence[NDArray[Any]]) -> Iterator[dict[str, Any]]:
        """Yield mini-batches of samples with images in the discriminator's view."""
        for batch in self.loaded.data.batches(drawn, self.con_d.processor):
            yield {**batch, "image": batch["image"].to(self.loaded.device)}


def load_judged(args: argparse.Namespace) -> ModelAndData:
    """Build the model, the pairs and the discriminators of a config.

    Raises:
        ConfigError: with all problems of the config.
        ValueError: if there are no training pairs.
    """
    configs = discriminators_of(args)
    loaded = load_model_and_data(args)
    judges = build_judges(loaded, configs)
    loaded.configs = configs
    loaded.judges = {name: _ConfigJudge(loaded, one) for name, one in judges.items()}
    options = [str(option) for option in args.options]
    loaded.about = {"cfg_path": str(args.cfg_path), "options": options}
    loaded.encoder = {"checkpoint": args.checkpoint}
    own = (loaded.cfg.model_cfg.get("mafa") or {}).get("con_d") or {}
    loaded.by_truth = not judges and own.get("arch") == ORACLE
    return loaded


def _judge(
    loaded: ModelAndData,
    features: Features,
    image: NDArray[Any],
    text: NDArray[Any],
    discriminator: _ModelJudge,
) -> NDArray[Any]:
    """Return the probabilities ``(P,)`` float32 that pairs match; NaN if an image is unreadable.

    All ranks must call this function with the same pairs; they share the work, and each returns all
    probabilities. Samples with the same image share its verdicts: the image is read and encoded
    once.

    Args:
        features: captions, and which samples can be read.
        image, text: ``(P,)`` sample numbers in the training set.
    """
    size = len(loaded.data)
    shown_by = _first_readable(loaded.data.image_ids, features.numbers)
    pairs, place = np.unique(pair_keys(shown_by[image], text, size), return_inverse=True)
    images, texts = np.divmod(np.array_split(pairs, get_world_size())[get_rank()], size)
    log_on_main("%d pairs to judge", len(pairs))
    discriminator.model.to(loaded.device)
    own = np.empty(len(images), np.float32)
    chunks = _chunks_of(images, texts)
    shown = [np.unique(images[rows]) for rows in chunks]
    pictures = loaded.data.batches(shown, discriminator.processor)
    with progress(total=len(images), unit=" pairs", desc="judging") as bar:
        for rows, numbers, batch in zip(chunks, shown, pictures, strict=True):
            captions, text_of = np.unique(texts[rows], return_inverse=True)
            image_of = np.searchsorted(numbers, images[rows])
            samples = {
                "image": batch["image"].to(loaded.device),
                "text_input": [features.captions[k] for k in features.positions(captions)],
            }
            verdicts = discriminator.judge(
                samples, torch.from_numpy(image_of), torch.from_numpy(text_of.reshape(-1))
            )
            own[rows] = verdicts.float().cpu().numpy()
            unreadable = np.array([bool(error) for error in batch["load_error"]])
            own[rows[unreadable[image_of]]] = np.nan
            bar.update(len(rows))
    return np.concatenate(all_gather_objects(own))[place.reshape(-1)]


def _first_readable(image_ids: NDArray[Any], readable: NDArray[Any]) -> NDArray[Any]:
    """Return for each of N samples ``(N,)`` the first readable sample with the same image.

    If no sample with this image is readable, the first sample with it.

    Args:
        image_ids: ``(N,)``, equal for samples with the same image.
        readable: ``(S,)`` ascending sample numbers.
    """
    _, first, image = np.unique(image_ids, return_index=True, return_inverse=True)
    image = image.reshape(-1)
    first[image[readable[::-1]]] = readable[::-1]  # descending: the lowest number is written last
    return first[image]


def _chunks_of(image: NDArray[Any], text: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the rows of pairs that are judged together.

    All pairs of an image are in one chunk, so that it is encoded once; a chunk has up to
    `CHUNK_IMAGES` images and about `CHUNK_PAIRS` pairs.

    Args:
        image, text: ``(P,)``, all pairs of this rank.
    """
    order = np.lexsort((text, image))
    begins = np.flatnonzero(np.diff(image[order], prepend=-1)).tolist()
    first, cuts = 0, []
    for number, begin in enumerate(begins):
        if number - first >= CHUNK_IMAGES or begin - begins[first] >= CHUNK_PAIRS:
            cuts.append(begin)
            first = number
    return np.split(order, cuts) if len(order) else []
