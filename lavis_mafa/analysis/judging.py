"""Discriminators judge pairs of a data set; verdicts are kept as they come."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lavis.common.dist_utils import get_rank, get_world_size, is_main_process
from omegaconf import OmegaConf
from torch import Tensor
from tqdm import tqdm

from lavis_mafa.analysis.corpus import Corpus, Opened, options_of, tell
from lavis_mafa.analysis.features import Features
from lavis_mafa.analysis.judged import UNKNOWN, Judged, pair_keys
from lavis_mafa.analysis.nominate import Nominations
from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.config.con_d import check_con_d
from lavis_mafa.io.identity import claim_folder, fingerprint
from lavis_mafa.io.processes import barrier
from lavis_mafa.models.con_d.build import ORACLE, build_discriminator
from lavis_mafa.models.con_d.discriminator import ModelDiscriminator
from lavis_mafa.models.inference.many_pairs import ManyPairs

TRUTH = "truth"
CHUNK_IMAGES, CHUNK_PAIRS = 64, 4096  # after which verdicts are written
RECORD = np.dtype([("image", "<i8"), ("text", "<i8"), ("probability", "<f4")])


def add_con_d_arguments(parser: argparse.ArgumentParser) -> None:
    """``--con-d``."""
    parser.add_argument(
        "--con-d",
        nargs="+",
        default=[],
        metavar="NAME.key=value",
        help="discriminators by name, with the keys of model.mafa.con_d, such as "
        "blip.arch=blip_retrieval blip.model_type=coco mine.arch=albef_mafa mine.checkpoint=PATH; "
        "otherwise model.mafa.con_d of the config",
    )


def discriminators_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The configs of the discriminators that judge, by name; {} for none but the truth.

    Raises:
        ConfigError: with all that is wrong in them.
    """
    if not args.con_d:
        mafa = load_config(args.cfg_path, options_of(args)).model_cfg.get("mafa")
        own = mafa.get("con_d") if mafa else None
        if not own or own.arch == ORACLE:
            return {}
        return {"con_d": OmegaConf.to_container(own, resolve=True)}  # type: ignore[dict-item]
    given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(args.con_d)))
    found, problems = {}, []
    for name, one in given.items():
        if name == TRUTH or not str(name).isidentifier() or not isinstance(one, dict):
            problems.append(
                f"--con-d: {name!r}: write NAME.key=value with a name of letters, digits and _, "
                f"other than {TRUTH}"
            )
            continue
        found[name], wrong = check_con_d(one)
        problems += [f"--con-d {name}: {problem}" for problem in wrong]
        if one.get("arch") == ORACLE:
            problems.append(
                f"--con-d {name}.arch: the truth judges by itself where "
                "it is known; to mine by it give --options model.mafa.con_d.arch=oracle"
            )
    if problems:
        raise ConfigError(str(args.cfg_path), problems)
    return found


def build_judge(con_d: Mapping[str, Any]) -> ModelDiscriminator:
    """A discriminator from a config as ``model.mafa.con_d``, other than the oracle."""
    judge = build_discriminator(con_d)
    assert isinstance(judge, ModelDiscriminator)
    return matching_offline(judge)


def matching_offline(discriminator: ModelDiscriminator) -> ModelDiscriminator:
    """The same discriminator, in place, for more pairs at once than a mini-batch has."""
    matching: Any = ManyPairs(discriminator.backbone)
    discriminator.backbone = matching
    return discriminator


def judge_all(
    opened: Opened,
    features: Features,
    nominated: Sequence[Nominations],
    judges: Mapping[str, ModelDiscriminator],
    folder: Path,
) -> Judged:
    """All nominated pairs, each once, judged by all; all ranks must call it."""
    size = len(opened.data)
    keys = np.concatenate([pair_keys(one.image, one.text, size) for one in nominated])
    sides = np.concatenate([one.from_image for one in nominated])
    pairs, row = np.unique(keys, return_inverse=True)
    by_image, by_text = (
        np.bincount(row, weights=side, minlength=len(pairs)) > 0 for side in (sides, ~sides)
    )
    image, text = pairs // size, pairs % size
    probability = {}
    for name, discriminator in judges.items():
        place = folder / "verdicts" / name
        probability[name] = judge(opened, features, image, text, discriminator, place)
    return Judged(image, text, by_image, by_text, probability, truth_of(opened.data, image, text))


def judge(
    opened: Opened,
    features: Features,
    image: np.ndarray,
    text: np.ndarray,
    discriminator: ModelDiscriminator,
    folder: Path,
) -> np.ndarray:
    """Probabilities ``(P,)`` float32 that pairs match, NaN where an image cannot be read.

    What ``folder`` holds already is not judged again. All ranks must call it with the same pairs,
    share them, and get all. Samples of one image stand for each other: it is read and encoded once.

    Args:
        features: knows the captions, and which samples can be read.
        image, text: ``(P,)`` numbers of samples in the training set, each pair once.
        discriminator: who judges.

    Raises:
        ValueError: if ``folder`` holds the verdicts of another discriminator.
    """
    size = len(opened.data)
    shown_by = first_readable(opened.data.image_ids, features.numbers)
    keys = pair_keys(shown_by[image], text, size)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = getattr(discriminator.model, "max_txt_len", None)
    seen_as = f"{discriminator.image_size} px, {discriminator.precision}, {tokens} tokens"
    name = f"{fingerprint(discriminator.model)}, {seen_as}"
    data = f"{size} samples, {opened.data.fingerprint(discriminator.processor)}"
    claim_folder(folder, {"discriminator": name, "data": data})
    images, texts, _ = _read(folder)
    missing = np.setdiff1d(keys, pair_keys(shown_by[images], texts, size))
    rank, world = get_rank(), get_world_size()
    mine = np.array_split(missing, world)[rank]
    tell("%d pairs, %d of them to be judged", len(keys), len(missing))
    barrier()  # all have read before one writes
    discriminator.model.to(opened.device)
    with open(folder / f"verdicts_rank{rank}.bin", "ab") as file:
        file.truncate(file.tell() // RECORD.itemsize * RECORD.itemsize)  # a torn record
        bar = tqdm(total=len(mine), unit=" pairs", desc="judging", disable=not is_main_process())
        chunks = list(chunks_of(mine // size, mine % size, features))
        verdicts = _judged(opened, features, discriminator, chunks)
        for chunk, probability in zip(chunks, verdicts, strict=True):
            records = np.empty(len(probability), RECORD)
            records["image"], records["text"] = chunk
            records["probability"] = probability
            file.write(records.tobytes())
            file.flush()
            bar.update(len(records))
        bar.close()
    barrier()
    images, texts, probabilities = _read(folder)
    found, first = np.unique(pair_keys(shown_by[images], texts, size), return_index=True)
    return probabilities[first][np.searchsorted(found, keys)]


def first_readable(image_ids: np.ndarray, readable: np.ndarray) -> np.ndarray:
    """``(N,)`` for each of N samples the first readable one that shows its image; of an image that
    none of them shows, the first of all.

    Args:
        image_ids: ``(N,)``, equal where samples show one image.
        readable: ``(S,)`` ascending numbers of samples.
    """
    _, first, image = np.unique(image_ids, return_index=True, return_inverse=True)
    image = image.reshape(-1)
    first[image[readable[::-1]]] = readable[::-1]
    return first[image]


def chunks_of(
    image: np.ndarray, text: np.ndarray, features: Features
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images and texts ``(p,)`` of pairs to be judged together.

    An image has all its pairs in one chunk, to be encoded once; a chunk has up to `CHUNK_IMAGES`
    images and about `CHUNK_PAIRS` pairs. Similar images come near each other: they are paired with
    the same texts, which then need not be encoded for every chunk.

    Args:
        image, text: ``(P,)``, all pairs of this rank.
    """
    images, own = np.unique(image, return_inverse=True)
    place = np.empty(len(images), np.int64)
    place[_by_likeness(features.vectors[features.places(images)])] = np.arange(len(images))
    order = np.lexsort((text, place[own.reshape(-1)]))
    image, text = image[order], text[order]
    begins = np.flatnonzero(np.diff(image, prepend=-1)).tolist()
    first, cuts = 0, []
    for number, begin in enumerate(begins):
        if number - first >= CHUNK_IMAGES or begin - begins[first] >= CHUNK_PAIRS:
            cuts.append(begin)
            first = number
    if len(image):
        yield from zip(np.split(image, cuts), np.split(text, cuts), strict=True)


def _by_likeness(vectors: Tensor) -> np.ndarray:
    """An order of N vectors ``(N, E)``: those nearest to the same one of about sqrt(N) of them are
    together."""
    if not len(vectors):
        return np.empty(0, np.int64)
    some = vectors[:: max(1, round(len(vectors) ** 0.5))]
    nearest = torch.cat([(part @ some.t()).argmax(dim=1) for part in vectors.split(4096)])
    return nearest.argsort(stable=True).numpy()


def _judged(
    opened: Opened,
    features: Features,
    discriminator: ModelDiscriminator,
    chunks: Sequence[tuple[np.ndarray, np.ndarray]],
) -> Iterator[np.ndarray]:
    data: Corpus = opened.data
    images = [np.unique(image) for image, _ in chunks]
    pictures = data.batches(images, discriminator.processor)
    for (image, text), numbers, batch in zip(chunks, images, pictures, strict=True):
        texts, text_of = np.unique(text, return_inverse=True)
        samples = {
            "image": batch["image"].to(opened.device),
            "text_input": [features.captions[place] for place in features.places(texts)],
        }
        image_of = np.searchsorted(numbers, image)
        told = discriminator.judge(
            samples, torch.from_numpy(image_of), torch.from_numpy(text_of.reshape(-1))
        )
        lost = np.array([bool(error) for error in batch["load_error"]])
        probability = told.float().cpu().numpy()
        probability[lost[image_of]] = np.nan
        yield probability


def _read(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What all ranks of this and earlier calls have written."""
    parts = []
    for path in sorted(folder.glob("verdicts_rank*.bin")):
        content = path.read_bytes()
        whole = len(content) // RECORD.itemsize * RECORD.itemsize
        parts.append(np.frombuffer(content[:whole], RECORD))
    records = np.concatenate(parts) if parts else np.empty(0, RECORD)
    return records["image"], records["text"], records["probability"]


def truth_of(data: Corpus, image: np.ndarray, text: np.ndarray) -> np.ndarray:
    """``(P,)`` int8: whether pairs match, `UNKNOWN` where the data do not know."""
    if data.truth is None:
        return np.full(len(image), UNKNOWN, np.int8)
    return np.asarray(data.truth(image, text)).astype(np.int8)
