"""Data sets of image-text pairs: one sample per pair for training, one per image otherwise."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data.dataloader import default_collate

from lavis_mafa.data.caption_reading import is_readable
from lavis_mafa.data.caption_truth import CaptionTruth, PairTruth
from lavis_mafa.data.feature_folder import FeatureFolder, FeatureView, KeptImage, processed
from lavis_mafa.data.image_reading import read_file, read_rgb, require_below
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.data.picture_identity import PictureFolder

_LOOKED_FOR = 50  # images, spread over the data


class PairSource(NamedTuple):
    """What a training pair was made from.

    Attributes:
        path: of the image's file; None if it has no file of its own.
        caption: unprocessed.
        name: of the image, as in the annotation file.
        image_id, group_id: as in the annotation file; None without one.
        anchor: the text in the place of the image, in pairs of two texts.
    """

    path: str | None
    caption: str
    name: str | None = None
    image_id: str | int | None = None
    group_id: str | int | None = None
    anchor: str | None = None


class _Pairs(Dataset[dict[str, Any]]):
    """Pairs from annotation files or shards, whose images are files in a folder, or inside them.

    Args:
        vis_processor: PIL image (RGB) -> tensor.
        text_processor: caption -> caption.
        vis_root: folder that the image paths are relative to; None if there are no paths.
        ann_paths: annotation files, shards, globs and folders, read as one.
        table_options: of `converted`.

    Raises:
        FileNotFoundError: if an annotation file does not exist.
        ValueError: if the annotation files have rows that cannot be used.
    """

    features: FeatureFolder | None = None
    vis_processor: Callable[[Any], Any]

    def __init__(
        self,
        vis_processor: Callable[[Image.Image], Any],
        text_processor: Callable[[str], str],
        vis_root: str | os.PathLike[str] | None,
        ann_paths: Collection[str | os.PathLike[str]],
        **table_options: Any,
    ) -> None:
        root = None if vis_root is None else os.path.abspath(os.path.expanduser(vis_root))
        self.table, self.vis_root = converted(ann_paths, root=root, **table_options), root
        self._folder = PictureFolder(root)
        self.vis_processor, self.text_processor = vis_processor, text_processor

    def picture(self, row: int) -> Image.Image:
        """Return the image (RGB) of pair `row` of the table.

        Raises:
            OSError: naming the image, if it cannot be read, or lies outside of the image root.
        """
        path = self._path_of(row)
        if path is None:
            return read_rgb(self.table.place(row), self.table.image_bytes(row))
        if self.vis_root is None:
            raise OSError(f"{path}: build_info.images.storage names no folder of pictures")
        require_below(path, self.vis_root)
        return read_rgb(path)

    def require_pictures(self) -> None:
        """Refuse image paths without an image root, and most images missing in it.

        Raises:
            FileNotFoundError, ValueError: if it is so.
        """
        meta = self.table.meta
        if not meta["with_paths"]:
            return
        what = (
            f"{', '.join(meta['sources'])}: {meta['with_paths']} pairs give the path of their "
            f"image, such as {meta['first_path'][0]!r}; "
        )
        cure = (
            "set build_info.images.storage (train --images) to the folder that the paths are "
            "relative to"
        )
        if self.vis_root is None:
            raise ValueError(what + cure)
        rows = range(0, len(self.table), -(-len(self.table) // _LOOKED_FOR))
        paths = [path for row in rows if (path := self._path_of(row)) is not None]
        missing = [path for path in paths if not os.path.isfile(path)]
        if len(missing) > len(paths) / 2:
            raise FileNotFoundError(
                f"{what}{len(missing)} of {len(paths)} that were looked for are not in root "
                f"{self.vis_root}, first {missing[0]!r}; {cure}"
            )

    def use_features(self, folder: FeatureFolder, draw: bool) -> None:
        """Replace pictures by their features.

        Args:
            draw: whether to draw one of the views at random; else the first is taken.

        Raises:
            ValueError: if an image of the table has no features.
        """
        names = self.table.image_names()
        rows = pc.index_in(names, value_set=pa.array(folder.names(), pa.string()))
        self._feature_rows = rows.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        missing = np.flatnonzero(self._feature_rows < 0)
        if len(missing):
            raise ValueError(
                f"{folder.folder} has no features of the images of {len(missing)} of "
                f"{len(self.table)} pairs of {', '.join(self.table.meta['sources'])}, first "
                f"{names[int(missing[0])].as_py()!r}. Add them, or remove these pairs"
            )
        self.features, self.vis_processor = folder, FeatureView(draw)

    def _image(self, row: int) -> Any:
        """Return what the image processor makes of the image of pair `row`.

        Raises:
            OSError: if the picture cannot be read, or could not when its features were made.
        """
        if self.features is None:
            return self.vis_processor(self.picture(row))
        views = self.features.row(int(self._feature_rows[row]))
        if np.isnan(views.flat[0]):
            raise OSError(f"{self.table.place(row)}: its features are NaN: an unreadable picture")
        return processed(self.vis_processor, KeptImage(views, partial(self.picture, row)))

    def _path_of(self, row: int) -> str | None:
        """Return the path of the image of pair `row` of the table, including the image root; None
        if the image lies in another file."""
        if not self.table.has_path(row):
            return None
        return self._folder.path(self.table.image(row))

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return default_collate(samples)


class TrainPairs(_Pairs):
    """One sample per pair, in the order of the table.

    An item is `{"image": tensor, "text_input": str, "image_id": int}`; pairs with the same
    `image_id` show the same image. An unreadable image raises OSError naming it.

    Attributes:
        truth: which of the pairs are valid; None if it is not known.
    """

    truth: PairTruth | None = None

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": self._image(index),
            "text_input": self.text_processor(self.table.caption(index)),
            "image_id": int(self.image_ids[index]),
        }

    def know(self, truth: CaptionTruth) -> None:
        """Take over which pairs of the table are valid."""
        self.truth = truth

    @property
    def image_ids(self) -> npt.NDArray[np.int64]:
        """The image of each pair, a number from 0 to n_images - 1: (N,) int64, memory-mapped."""
        return self.table.image_ids

    @property
    def group_ids(self) -> npt.NDArray[np.int64] | None:
        """The group of each pair, a number from 0 on, -1 for none: (N,) int64, memory-mapped; None
        if the data have no groups."""
        return self.table.group_ids

    @property
    def parts(self) -> list[TrainPairs]:
        """The data as a `TrainingSet` has them: in one part."""
        return [self]

    def image_bytes(self, index: int) -> bytes:
        """Return the image file of pair `index`."""
        path = self._path_of(index)
        if path is not None:
            return read_file(path, self.vis_root or "")
        data = self.table.image_bytes(index)
        assert data is not None
        return data

    def source(self, index: int) -> PairSource:
        """Return what pair `index` was made from."""
        value = self.table.value
        return PairSource(
            self._path_of(index),
            self.table.caption(index),
            self.table.image(index),
            value("image_id", index),
            value("group_id", index),
        )

    def show(self, index: int) -> tuple[Image.Image, str]:
        """Return the unprocessed image (RGB) and caption of pair `index`."""
        return self.picture(index), self.table.caption(index)


class EvalPairs(_Pairs):
    """One sample per image, with all its captions, as in LAVIS's RetrievalEvalDataset.

    Attributes:
        text: processed captions, image by image.
        image: names of the images in the table, in order of first appearance.
        txt2img: index of a caption -> index of its image.
        img2txt: index of an image -> indices of its captions.
        truth_matrix: returns which captions are valid for which images, bool ``(I, T)``; absent if
            only the pairs themselves are known.

    An item is `{"image": tensor, "index": int}`.

    Raises:
        ValueError: if several files have the same `image_id`: all their captions would be scored
            against the first file.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if conflict := self.table.meta["id_conflict"]:
            raise ValueError(
                f"{', '.join(self.table.meta['sources'])}: {conflict}; give each file a different "
                "image_id, or remove image_id"
            )
        self.text: list[str] = []
        self.image: list[str] = []
        self.txt2img: dict[int, int] = {}
        self.img2txt: dict[int, list[int]] = {}
        self._rows: list[int] = []
        image_ids = np.asarray(self.table.image_ids)
        self._row_of_text = np.argsort(image_ids, kind="stable")
        for row in self._row_of_text.tolist():
            image = int(image_ids[row])
            if image == len(self.image):
                self.image.append(self.table.image(row))
                self._rows.append(row)
                self.img2txt[image] = []
            self.img2txt[image].append(len(self.text))
            self.txt2img[len(self.text)] = image
            self.text.append(self.text_processor(self.table.caption(row)))
        if unreadable := sum(not any(map(is_readable, text)) for text in self.text):
            logging.warning(
                "%s: %d captions without readable text after the text processor are scored too",
                ", ".join(self.table.meta["sources"]),
                unreadable,
            )

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self._image(self._rows[index]), "index": index}

    def know(self, truth: CaptionTruth) -> None:
        """Take over which pairs of the table are valid."""
        self.truth_matrix = partial(truth.matrix, self._row_of_text)
