"""Train on features of an image encoder of your own.

    python examples/own_features.py images/ features/ train.json val.json test.json
    lavis-mafa train ... model.image_encoder=features \\
        datasets.image_text_json.build_info.features.storage=features/

Replace `encode`. Rerun the script to resume it.
"""

from __future__ import annotations

import logging
import sys

import torch
from torch import Tensor

from lavis_mafa.tools.feature_making import Encoder, make_features, pictures_of

SIZE = 224


def encode(images: Tensor) -> Tensor:
    """Return features ``(B, S, V)`` of normalised images ``(B, 3, H, W)``, on any device.

    Here the mean colours of 7 x 7 parts. Average the map of a CNN like this too: S = 9 or 25
    positions suffice, and a folder needs 2 * S * V bytes an image and view.
    """
    return torch.nn.functional.adaptive_avg_pool2d(images, 7).flatten(2).transpose(1, 2)


def main(images: str, out: str, *files: str) -> int:
    logging.basicConfig(level=logging.INFO)
    encoder = Encoder(
        encode,
        SIZE,
        mean=(0.485, 0.456, 0.406),  # what the encoder was trained with
        std=(0.229, 0.224, 0.225),
        identity="mean colours",  # change it with the weights
    )
    unreadable = make_features(pictures_of(files, images), out, encoder)
    return 1 if unreadable else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
