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
from tqdm import tqdm

from lavis_mafa.analysis.belongs import fingerprint, require_same
from lavis_mafa.analysis.corpus import Corpus, Opened, options_of, tell
from lavis_mafa.analysis.features import Features
from lavis_mafa.analysis.judged import UNKNOWN, Judged, pair_keys
from lavis_mafa.analysis.nominate import Nominations
from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.config.con_d import check_con_d
from lavis_mafa.connections.build import ORACLE, build_discriminator
from lavis_mafa.connections.con_d import ModelDiscriminator
from lavis_mafa.processes import barrier

TRUTH = "truth"
PAIRS = 256  # judged at once
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
    return judge


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
    share them, and get all.

    Args:
        features: knows the captions.
        image, text: ``(P,)`` numbers of samples in the training set, each pair once.
        discriminator: who judges.

    Raises:
        ValueError: if ``folder`` holds the verdicts of another discriminator.
    """
    size = len(opened.data)
    keys = pair_keys(image, text, size)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = getattr(discriminator.model, "max_txt_len", None)
    seen_as = f"{discriminator.image_size} px, {discriminator.precision}, {tokens} tokens"
    name = f"{fingerprint(discriminator.model)}, {seen_as}"
    data = f"{size} samples, {opened.data.fingerprint(discriminator.processor)}"
    require_same(folder / "of.json", {"discriminator": name, "data": data})
    images, texts, _ = _read(folder)
    known = pair_keys(images, texts, size)
    missing = np.flatnonzero(~np.isin(keys, known))
    # Pairs of one image stand together, so that it is encoded once.
    missing = missing[np.lexsort((text[missing], image[missing]))]
    rank, world = get_rank(), get_world_size()
    mine = np.array_split(missing, world)[rank]
    tell("%d pairs, %d of them to be judged", len(keys), len(missing))
    barrier()  # all have read before one writes
    discriminator.model.to(opened.device)
    with open(folder / f"verdicts_rank{rank}.bin", "ab") as file:
        file.truncate(file.tell() // RECORD.itemsize * RECORD.itemsize)  # a torn record
        bar = tqdm(total=len(mine), unit=" pairs", desc="judging", disable=not is_main_process())
        chunks = [mine[i : i + PAIRS] for i in range(0, len(mine), PAIRS)]
        verdicts = _judged(opened, features, discriminator, image, text, chunks)
        for chunk, probability in zip(chunks, verdicts, strict=True):
            records = np.empty(len(chunk), RECORD)
            records["image"], records["text"] = image[chunk], text[chunk]
            records["probability"] = probability
            file.write(records.tobytes())
            file.flush()
            bar.update(len(chunk))
        bar.close()
    barrier()
    images, texts, probabilities = _read(folder)
    found, first = np.unique(pair_keys(images, texts, size), return_index=True)
    return probabilities[first][np.searchsorted(found, keys)]


def _judged(
    opened: Opened,
    features: Features,
    discriminator: ModelDiscriminator,
    image: np.ndarray,
    text: np.ndarray,
    chunks: Sequence[np.ndarray],
) -> Iterator[np.ndarray]:
    data: Corpus = opened.data
    images = [np.unique(image[chunk]) for chunk in chunks]
    pictures = data.batches(images, discriminator.processor)
    for chunk, numbers, batch in zip(chunks, images, pictures, strict=True):
        texts, text_of = np.unique(text[chunk], return_inverse=True)
        samples = {
            "image": batch["image"].to(opened.device),
            "text_input": [features.captions[place] for place in features.places(texts)],
        }
        image_of = np.searchsorted(numbers, image[chunk])
        told = discriminator.judge(
            samples,
            torch.from_numpy(image_of).to(opened.device),
            torch.from_numpy(text_of.reshape(-1)).to(opened.device),
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
