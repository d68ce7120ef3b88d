"""LAVIS's image augmentation, corrected and faster."""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from lavis.common.registry import registry
from lavis.processors import randaugment
from lavis.processors.blip_processors import (
    Blip2ImageTrainProcessor,
    BlipImageEvalProcessor,
    BlipImageTrainProcessor,
)
from PIL import Image
from torch import Tensor
from torchvision import transforms

# On other CPUs PyTorch resizes 8-bit images more slowly than Pillow.
FAST_RESIZE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")

# The steps of training processors, except for those of `_OPTIONAL` in the middle.
_STEPS = [
    transforms.RandomResizedCrop,
    transforms.RandomHorizontalFlip,
    transforms.ToTensor,
    transforms.Normalize,
]

_lavis_auto_contrast = randaugment.func_dict["AutoContrast"]


def _auto_contrast(image: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Stretch each channel of ``(H, W, 3)`` uint8 to 0..255, as Pillow's ``autocontrast``.

    LAVIS negates a uint8, which wraps around: a channel without a 0 would become white.
    """
    stretched: Any = _lavis_auto_contrast(image.astype(np.int32))
    return np.asarray(stretched).astype(np.uint8)


randaugment.func_dict["AutoContrast"] = _auto_contrast


class _RandomTurn:
    """Turn a picture by 0, 90, 180 or 270 degrees, each with probability 1/4.

    It takes an image of Pillow, or an array ``(H, W, 3)``.
    """

    def __call__(self, picture: Any) -> Any:
        turns = int(torch.randint(4, (1,)))
        turned = np.ascontiguousarray(np.rot90(np.asarray(picture), turns))
        return Image.fromarray(turned) if isinstance(picture, Image.Image) else turned


@registry.register_processor("turned_image_train")
class TurnedImageTrainProcessor(Blip2ImageTrainProcessor):  # type: ignore[misc]
    """``blip2_image_train`` (crop and flip) and a `_RandomTurn`, for pictures without an up side,
    such as aerial photographs. It has the same parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain: Any = self.transform
        crop, flip, *rest = plain.transforms
        self.transform: Any = transforms.Compose([crop, flip, _RandomTurn(), *rest])


@registry.register_processor("albef_image_train")
class AlbefImageTrainProcessor(BlipImageTrainProcessor):  # type: ignore[misc]
    """``blip_image_train`` with the RandAugment of ALBEF, GRIT-VLP, MAFA and FNE: two operations at
    level 7 of 10, LAVIS's are at level 5.

    At level 5 the factor of Brightness and Sharpness is 1, so that both leave an image as it is.
    Its counterpart in evaluation, ``albef_image_eval``, is LAVIS's ``blip_image_eval``.

    Args:
        crop: False: images are resized to a square and not cropped, as ALBEF trains grounding.
        Others: those of ``blip_image_train``.
    """

    # In the authors' order, which random draws refer to; LAVIS has the same ones in another order.
    operations = (
        "Identity",
        "AutoContrast",
        "Equalize",
        "Brightness",
        "Sharpness",
        "ShearX",
        "ShearY",
        "TranslateX",
        "TranslateY",
        "Rotate",
    )

    def __init__(
        self,
        image_size: int = 384,
        mean: Any = None,
        std: Any = None,
        min_scale: float = 0.5,
        max_scale: float = 1.0,
        crop: bool = True,
    ) -> None:
        super().__init__(image_size, mean, std, min_scale, max_scale)
        plain: Any = self.transform
        part, flip, _, *rest = plain.transforms
        if not crop:
            part = transforms.Resize(
                (image_size, image_size), interpolation=transforms.InterpolationMode.BICUBIC
            )
        augment = randaugment.RandomAugment(2, 7, isPIL=True, augs=list(self.operations))
        self.transform: Any = transforms.Compose([part, flip, augment, *rest])

    @classmethod
    def from_config(cls, cfg: Any = None) -> AlbefImageTrainProcessor:
        """Build from a config with any of the arguments."""
        names = ("image_size", "mean", "std", "min_scale", "max_scale", "crop")
        return cls(**{name: cfg[name] for name in names if cfg is not None and name in cfg})


registry.register_processor("albef_image_eval")(BlipImageEvalProcessor)

_QUICK = (
    BlipImageTrainProcessor,
    Blip2ImageTrainProcessor,
    AlbefImageTrainProcessor,
    TurnedImageTrainProcessor,
)
_OPTIONAL = (randaugment.RandomAugment, _RandomTurn)  # steps between the flip and the tensor


class ImageBytes(NamedTuple):
    """Images that become what their processor returns where the model is: a quarter of the bytes.

    A named tuple, as data loaders pass these between processes and pin their memory.

    Attributes:
        values: ``(B, 3, H, W)`` uint8.
        mean, std: ``(3, 1, 1)`` of the processor's normalisation, for values from 0 to 1.
    """

    values: Tensor
    mean: Tensor
    std: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tensor:
        """Return the normalised images ``(B, 3, H, W)`` float32 on a device.

        On a CPU they equal torchvision's ``ToTensor`` and ``Normalize`` bit for bit.
        """
        values, mean, std = (one.to(device, non_blocking=non_blocking) for one in self)
        return values.to(torch.float32).div_(255).sub_(mean).div_(std)


class QuickAugmentation:
    """Apply a processor of `_STEPS` to a picture in mode RGB, in less time.

    It draws the same random numbers. About 0.4 % of a crop's values differ from Pillow's by 1 of
    255, and a few in a million by 2; all other steps are equal bit for bit. RandAugment can amplify
    a difference: of some pictures' finished values 0.006 % differ by more than 1 of 255.

    Attributes:
        as_bytes: True: return uint8 ``(3, H, W)`` before ``ToTensor``, for `ImageBytes`.
    """

    as_bytes = False

    def __init__(self, processor: Any) -> None:
        self.crop, self.flip, *self.augment, to_tensor, normalize = processor.transform.transforms
        self.mean, self.std = (
            torch.as_tensor(one, dtype=torch.float32).view(3, 1, 1)
            for one in (normalize.mean, normalize.std)
        )
        values = np.arange(256, dtype=np.uint8).repeat(3).reshape(256, 1, 3)
        self.normalised = normalize(to_tensor(values)).flatten(1).numpy()  # (3, 256)

    def __call__(self, picture: Image.Image) -> Tensor:
        image: Any = self._cropped(picture)
        if torch.rand(1) < self.flip.p:
            image = cv2.flip(image, 1)
        for step in self.augment:
            image = step(image)
        if self.as_bytes:
            return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).contiguous()
        made = np.empty((3, *image.shape[:2]), np.float32)
        for channel, table, values in zip(cv2.split(image), self.normalised, made, strict=True):
            cv2.LUT(channel, table, dst=values)
        return torch.from_numpy(made)

    def scales_as(self, other: QuickAugmentation) -> bool:
        """Return whether another one normalises in the same way."""
        return torch.equal(self.mean, other.mean) and torch.equal(self.std, other.std)

    def _cropped(self, picture: Image.Image) -> npt.NDArray[np.uint8]:
        """Return a random part of the picture, resized, ``(H, W, 3)``."""
        top, left, height, width = self.crop.get_params(picture, self.crop.scale, self.crop.ratio)
        part = picture.crop((left, top, left + width, top + height))
        high, wide = self.crop.size
        # Pillow 13 resizes a height first that shrinks far more than the width; PyTorch never does.
        tall = height > high and height - high >= 2 * (width - wide)
        if tall or not FAST_RESIZE:
            return np.array(part.resize((wide, high), Image.Resampling.BICUBIC))
        # Channels last: several times as fast as channels first.
        channels = torch.from_numpy(np.array(part))[None].permute(0, 3, 1, 2)
        resized = F.interpolate(channels, self.crop.size, mode="bicubic", antialias=True)
        return resized[0].permute(1, 2, 0).numpy()


def quick(processor: Any) -> Any:
    """Return a faster processor in place of one of `_QUICK`; other processors unchanged."""
    if type(processor) not in _QUICK:
        return processor
    steps = processor.transform.transforms
    kinds = [type(step) for step in steps if not isinstance(step, _OPTIONAL)]
    if kinds != _STEPS or steps[0].interpolation != transforms.InterpolationMode.BICUBIC:
        return processor
    return QuickAugmentation(processor)
