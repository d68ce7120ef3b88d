"""Write further files that the studies of real pictures need.

    python -m research.picture_data labels --data FOLDER --output labels.json
    python -m research.picture_data verified --data FOLDER --share 0.4 --output pairs.jsonl
    python -m research.picture_data vocab --data FOLDER --size 600 --output vocab.txt

``labels`` writes the classes of the training images, for `research.image_start`; ``verified`` the
pairs of a share of the training images, on which a Con-D is tuned with known truth.

The folder of the data has ``train.json`` and ``test.json`` in the format of ``image_text_json``,
with image paths relative to the folder, and if known

- ``meta.json``: ``{"classes": {"a.jpg": "beach", ...}}``, a class for every image by its file name;
- ``judgements.json``: what people said of pairs, see `research.judgements`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lavis_mafa.data.annotation_files import read_rows, require_files
from lavis_mafa.data.annotation_rows import Problem, Row
from lavis_mafa.data.make_vocab import make_vocab
from lavis_mafa.io.files import write_json, write_text

TRAIN, CLASSES = "train.json", "meta.json"


def classes_of(folder: str | Path) -> dict[str, str]:
    """Return the class of each image of a data folder by file name; {} if there are no classes.

    Raises:
        ValueError: if ``meta.json`` has another form than this module describes.
    """
    path = Path(folder) / CLASSES
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    classes = content.get("classes") if isinstance(content, dict) else None
    if not isinstance(classes, dict) or not all(isinstance(one, str) for one in classes.values()):
        raise ValueError(f'{path}: expected {{"classes": {{"a.jpg": "beach", ...}}}}')
    return classes


def class_of(image: str, classes: Mapping[str, str]) -> str | None:
    """Return the class of an image path; None if it is unknown."""
    return classes.get(image, classes.get(PurePosixPath(image).name))


def labels_of(folder: Path) -> dict[str, str]:
    """Return the class of each training image by its path.

    Raises:
        FileNotFoundError, ValueError: if the folder lacks the classes or has unusable rows.
    """
    classes = classes_of(folder)
    labels = {}
    for row in _training_rows(folder):
        label = class_of(row.image, classes)
        if label is None:
            raise ValueError(f"{folder / CLASSES} has no class for {row.image}")
        labels[row.image] = label
    return labels


def verified_rows(folder: Path, share: float, seed: int) -> list[dict[str, Any]]:
    """Return the pairs of a share of the training images, in order.

    An image is chosen by a hash of its path and the seed, independently of other images.

    Args:
        share: above 0 and at most 1.

    Raises:
        FileNotFoundError, ValueError: for unusable rows, or if no image is chosen.
    """
    rows = [row for row in _training_rows(folder) if _place(row.image, seed) < share]
    if not rows:
        raise ValueError(f"--share {share:g} leaves no image of {folder / TRAIN}")
    return [{"image": row.image, "caption": row.captions, "image_id": row.image_id} for row in rows]


def _training_rows(folder: Path) -> list[Row]:
    """Return the records of the folder's training pairs.

    Raises:
        FileNotFoundError, ValueError: for a missing file and for records that cannot be used.
    """
    (path,) = require_files([folder / TRAIN])
    rows = []
    for row in read_rows(path):
        if isinstance(row, Problem):
            raise ValueError(f"{path}, {row}")
        rows += [row] if isinstance(row, Row) else []
    return rows


def _place(image: str, seed: int) -> float:
    """Return a number from 0 to below 1 for an image."""
    digest = hashlib.sha256(f"{seed}/{image}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def main(argv: list[str] | None = None) -> int:
    """Write the labels, the verified pairs or the vocabulary of a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m research.picture_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("labels", "verified", "vocab"))
    parser.add_argument("--data", type=Path, required=True, help="folder of the data")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--share", type=float, default=0.4, help="share of the images, for verified"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice, for verified")
    parser.add_argument("--size", type=int, default=600, help="number of tokens, for vocab")
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        if args.what == "labels":
            labels = labels_of(args.data)
            write_json(args.output, labels)
            print(f"{args.output}: {len(labels)} images, {len(set(labels.values()))} classes")
        elif args.what == "verified":
            rows = verified_rows(args.data, args.share, args.seed)
            write_text(args.output, "".join(f"{json.dumps(row)}\n" for row in rows))
            print(f"{args.output}: {len({row['image'] for row in rows})} images")
        else:
            make_vocab([args.data / TRAIN], args.output, size=args.size)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
