"""Pictures as tensors of one size, for models with an image processor of their own."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

LONGEST = 512  # pixels of a picture's longer side, unless the config says otherwise


class WholePicture:
    """Turn a picture into a tensor from which `picture_of` makes it again.

    Mini-batches need tensors of one size, but a model with an image processor of its own needs the
    picture itself, with its proportions. It is put into the corner of a transparent square.

    Args:
        longest: side of the square in pixels; a larger picture is reduced to it.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest

    def __call__(self, picture: Image.Image) -> Tensor:
        """Return ``(4, longest, longest)`` uint8: the colours, and 255 where the picture is."""
        picture = picture.convert("RGB")
        if max(picture.size) > self.longest:
            scale = self.longest / max(picture.size)
            width, height = (max(1, round(side * scale)) for side in picture.size)
            picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        square = np.zeros((self.longest, self.longest, 4), np.uint8)
        square[: picture.height, : picture.width, :3] = np.asarray(picture)
        square[: picture.height, : picture.width, 3] = 255
        return torch.from_numpy(square).permute(2, 0, 1).contiguous()


def picture_of(square: Tensor) -> Image.Image:
    """Return the picture (RGB) in what `WholePicture` returned."""
    pixels = square.permute(1, 2, 0).cpu().numpy()
    height, width = int((pixels[:, 0, 3] > 0).sum()), int((pixels[0, :, 3] > 0).sum())
    return Image.fromarray(np.ascontiguousarray(pixels[:height, :width, :3]))


def is_whole(images: Tensor) -> bool:
    """Return whether a mini-batch's images come from `WholePicture`."""
    return images.dtype is torch.uint8 and images.ndim == 4 and images.shape[1] == 4
