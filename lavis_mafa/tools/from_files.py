"""Analyse pairs in files by any encoder and any judge: without a config, and without LAVIS."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.grit import GritSettings
from lavis_mafa.algorithm.mining import MiningRule
from lavis_mafa.data.annotation_rows import MAX_UNUSABLE
from lavis_mafa.data.data_identity import DataIdentity
from lavis_mafa.data.pairs import PairSource, TrainPairs
from lavis_mafa.integrations.cross_encoders import PairEncoder
from lavis_mafa.integrations.pair_encoders import load_pair_encoder
from lavis_mafa.io.identity import digest, fingerprint
from lavis_mafa.io.launcher import usable_cores
from lavis_mafa.judges import caption_judge  # noqa: F401  registers it
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.judges.pretrained_judge import load_pretrained_judge
from lavis_mafa.tools.analysed_pairs import AnalysedPairs, Encoded, Usual

_BATCH = 64  # samples that are encoded at once: of a picture each, decoded
_LARGEST_BATCH, _BATCHES = 256, 16  # B at most, and mini-batches in the data at least
_SPACE = 32  # mini-batches in a search space
_NEIGHBOURS = 10  # candidates of an anchor that `mine` judges
_SIMILARITY = "similarity"
_NOT_LOADED = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)
_RECORDED = ("data", "text_keys", "image_key", "caption_key", "image_id_key")
_BY_SIMILARITY = (
    "No judge: P is the share of own pairs that are less similar than a pair, by the encoder that "
    "also picks the hard negatives. A high P says that it cannot tell the pair from own pairs; "
    "whether the two match it cannot say, and a match that it finds dissimilar is missed. Give a "
    "--judge, such as captions, or label some pairs."
)


class _TextPairs(TrainPairs):
    """Pairs of two texts, the first in the place of the image."""

    def source(self, index: int) -> PairSource:
        source = super().source(index)
        return source._replace(path=None, anchor=source.name)


class _StoredFeatures:
    """Features ``(N, E)`` in .npy files, with a row for each pair, or for each image.

    Args:
        files: of images (or anchors), and of captions.

    Raises:
        OSError, ValueError: if they are no such files, or do not fit the pairs.
    """

    def __init__(self, files: Sequence[str], image_ids: NDArray[Any]) -> None:
        self._files = files
        self._images, self._texts = (np.load(file, mmap_mode="r") for file in files)
        self._image_ids = image_ids
        size, images = len(image_ids), int(image_ids.max()) + 1
        shapes = [one.shape for one in (self._images, self._texts)]
        fits = all(one.ndim == 2 and one.dtype.kind == "f" for one in (self._images, self._texts))
        fits = fits and shapes[0][1] == shapes[1][1] and shapes[1][0] == size
        if not fits or shapes[0][0] not in (size, images):
            raise ValueError(
                f"features of the shapes {shapes[0]} and {shapes[1]}, expected real numbers "
                f"({size}, E) twice, or ({images}, E) for images in the order in which the data "
                "first name them"
            )
        self._by_image = shapes[0][0] != size

    def rows(self, numbers: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Return the features of images and captions of samples.

        Raises:
            ValueError: naming rows that are zero or not finite, which have no similarity.
        """
        of = self._image_ids[numbers] if self._by_image else numbers
        images, texts = self._files
        return self._read(images, self._images, of), self._read(texts, self._texts, numbers)

    @staticmethod
    def _read(file: str, stored: NDArray[Any], rows: NDArray[Any]) -> Tensor:
        found = torch.from_numpy(np.asarray(stored[rows], np.float32))
        good = found.any(dim=1) & found.isfinite().all(dim=1)
        if not good.all():
            wrong = np.unique(rows[~good.numpy()])[:5].tolist()
            raise ValueError(
                f"{file}: rows {wrong} are zero, NaN or infinite: make the features of their "
                "pictures or captions again, or leave these pairs out"
            )
        return found

    def identity(self) -> str:
        """Return a hash of some of the rows."""
        some = [one[:: max(1, len(one) // 4096)] for one in (self._images, self._texts)]
        return f"features {self._images.shape}, {digest(*some)}"


class _FilesAndEncoder(AnalysedPairs):
    """Pairs in files and an encoder.

    Args:
        pairs: the samples.
        encoder: a model, or stored features.
    """

    most_unreadable = MAX_UNUSABLE
    images_at_once = 32  # in their full size

    def __init__(self, pairs: TrainPairs, encoder: Any, device: torch.device) -> None:
        self.data, self._encoder, self.device = pairs, encoder, device
        self.batch_size = _BATCH

    @property
    def usual(self) -> Usual:
        """Sizes that suit the number of pairs."""
        size = len(self.data)
        batch = min(_LARGEST_BATCH, 2 ** max(1, (size // _BATCHES).bit_length() - 1))
        space = min(_SPACE * batch, size)
        rule = MiningRule(top_k=_NEIGHBOURS)
        grit = GritSettings(queue_size=space, search_space=space)
        return Usual(batch, grit, rule)

    def encode(self, batches: Sequence[NDArray[Any]]) -> Iterator[Encoded]:
        """Yield the features of mini-batches of samples; an image is encoded once in each."""
        with ThreadPool(usable_cores()) as pool:
            for numbers in batches:
                captions = [self.data.source(int(one)).caption for one in numbers]
                if isinstance(self._encoder, _StoredFeatures):
                    anchors, texts = self._encoder.rows(numbers)
                    errors = ["" for _ in numbers]
                else:
                    with torch.inference_mode():
                        texts = self._encoder.encode_texts(captions).float()
                        anchors, errors = self._anchors(pool, numbers, texts)
                anchors, texts = (F.normalize(one, dim=1) for one in (anchors, texts))
                yield Encoded(anchors, texts, None, captions, errors)

    def pictures(self, drawn: Sequence[NDArray[Any]], judge: Any) -> Iterator[dict[str, Any]]:
        """Yield mini-batches of samples with their images, or anchor texts, in a list."""
        with ThreadPool(usable_cores()) as pool:
            for numbers in drawn:
                read = pool.map(self._anchor, numbers.tolist())
                yield {
                    "image": [anchor for anchor, _ in read],
                    "image_id": self.data.image_ids[numbers],
                    "text_input": [self.data.source(int(one)).caption for one in numbers],
                    "load_error": [error for _, error in read],
                }

    def _anchors(
        self, pool: ThreadPool, numbers: NDArray[Any], like: Tensor
    ) -> tuple[Tensor, list[str]]:
        """Return the features of images or anchor texts, zero where one cannot be read, and why."""
        ids = self.data.image_ids[numbers]
        _, first, place = np.unique(ids, return_index=True, return_inverse=True)
        read = pool.map(self._prepared, numbers[first].tolist())
        good = [row for row, (_, error) in enumerate(read) if not error]
        found = like.new_zeros(len(first), like.shape[1])
        if good:
            found[good] = self._encoder.encode_anchors([read[row][0] for row in good]).to(found)
        return found[torch.from_numpy(place)], [read[row][1] for row in place]

    def _prepared(self, number: int) -> tuple[Any, str]:
        anchor, error = self._anchor(number)
        return (anchor if error else self._encoder.prepare(anchor)), error

    def _anchor(self, number: int) -> tuple[Any, str]:
        try:
            return self.data.source(number).anchor or self.data.picture(number), ""
        except OSError as error:
            return None, str(error)

    def identity(self) -> dict[str, str]:
        """Return what the features depend on, by name."""
        data, encoder = DataIdentity.of(self.data), self._encoder  # type: ignore[arg-type]
        is_stored = isinstance(encoder, _StoredFeatures)
        return {
            "model": encoder.identity() if is_stored else fingerprint(encoder.model),
            "data": f"{data.samples} samples, {data.image_rows} {data.caption_rows}",
        }


def load_files(args: argparse.Namespace) -> _FilesAndEncoder:
    """Open the pairs, the encoder and the judge that the arguments name.

    Raises:
        FileNotFoundError, ValueError: for files that cannot be read, and for models of other forms.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("with --data the command runs in one process: start it without a launcher")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {name: getattr(args, name) for name in _RECORDED} | {
        "images": args.images and str(args.images)
    }
    pairs = pairs_of(about)
    with _explain_not_loaded(f"--encoder {' '.join(args.encoder)}"):
        encoder = _encoder_of(args, pairs, device)
    if not (args.text_keys or isinstance(encoder, _StoredFeatures)):
        pairs.require_pictures()
    loaded = _FilesAndEncoder(pairs, encoder, device)
    name, _, vectors = (args.judge or _SIMILARITY).partition(":")
    config: dict[str, Any] = {"arch": name}
    if args.judge is None:
        loaded.judges, loaded.notes = {_SIMILARITY: None}, [_BY_SIMILARITY]
    with _explain_not_loaded(f"--judge {args.judge}"):
        if name == "captions":
            kind: Any = DISCRIMINATORS.entry(name)
            units = kind.settings(units=vectors) if vectors == "characters" else None
            config["checkpoint"] = None if units else vectors or None
            loaded.judges = {name: kind.value(units, config["checkpoint"])}
            loaded.judges[name].know(pairs)
        elif args.judge is not None:
            name, config = "judge", {"arch": "judge", "checkpoint": args.judge}
            loaded.judges = {name: load_pretrained_judge(args.judge, bool(args.text_keys), device)}
    loaded.configs = {name: config}
    loaded.about = about
    loaded.encoder = {"encoder": list(args.encoder), "judge": args.judge}
    return loaded


def pairs_of(about: Mapping[str, Any]) -> TrainPairs:
    """Open the pairs that arguments, or the record of an earlier analysis, name.

    Raises:
        FileNotFoundError, ValueError: for files that cannot be read.
    """
    files, keys, texts = about["data"], column_keys(about), about["text_keys"]
    try:
        if texts:
            return _TextPairs(None, str, None, files, **keys)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"--text-keys {' '.join(texts)}: {error}") from error
    # Pictures are read unprocessed.
    pairs = TrainPairs(None, str, about["images"], files, **keys)  # type: ignore[arg-type]
    if not pairs.table.meta["with_paths"]:  # shards and parquet hold their pictures
        pairs.vis_root = None
    return pairs


def column_keys(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that arguments, or the record of an earlier analysis, name."""
    image, caption = about["text_keys"] or (about["image_key"], about["caption_key"])
    return {"image_key": image, "caption_key": caption, "image_id_key": about["image_id_key"]}


def _encoder_of(
    args: argparse.Namespace, pairs: TrainPairs, device: torch.device
) -> PairEncoder | _StoredFeatures:
    names = args.encoder
    if all(name.endswith(".npy") for name in names):
        if len(names) != 2:
            raise ValueError("expected two .npy files, of images and of captions")
        return _StoredFeatures(names, np.asarray(pairs.image_ids))
    if len(names) != 1:
        raise ValueError("expected one model, or two .npy files, of images and of captions")
    found = load_pair_encoder(names[0], device)
    if args.text_keys and not found.reads_texts:
        raise ValueError("pairs of two texts (--text-keys) need a SentenceTransformer")
    if not args.text_keys and not found.reads_images:
        raise ValueError(
            "this SentenceTransformer reads only texts: name the columns of pairs of two texts by "
            "--text-keys, or for images name a CLIP or a SigLIP"
        )
    return found


@contextmanager
def _explain_not_loaded(given: str) -> Iterator[None]:
    """Name the argument whose model libraries cannot load, with the first line of what they say."""
    try:
        yield
    except _NOT_LOADED as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{given}: {lines[0]}") from error
