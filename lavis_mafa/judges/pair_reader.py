"""Con-D as any model that reads a picture and a caption together, with its own processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from lavis_mafa.algorithm.discriminator import VIEW
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.io.processes import all_gather_objects
from lavis_mafa.judges.frozen import ModelBeside, keep_in_bf16

PLACE = "model.mafa.con_d"
_NOT_LOADED = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError)
_LONGEST = 512  # pixels of a picture's longer side, unless the config says otherwise
Pair = tuple[Image.Image, str]


class PairReader(ModelBeside):
    """A Con-D that reads pairs of a decoded picture and a caption, in batches.

    Unlike `ModelDiscriminator` it has no features of an image that serve several pairs: every pair
    costs a whole forward pass. Subclasses implement `probabilities`.

    Args:
        model: what is moved to the device and identified by its weights.
        precision: ``fp32`` or ``bf16``, see `ModelBeside.autocast`.
        longest: side in pixels to which pictures are reduced before the model's own processor.
        batch_size: pairs in one forward pass.
    """

    key, title, view = PLACE, "Con-D", VIEW
    # A folder or a name on the hub, rather than a checkpoint file of LAVIS.
    checkpoint_path: ClassVar[str] = "path or name"
    needs_view = True

    def __init__(
        self, model: nn.Module, precision: str, longest: int | None, batch_size: int
    ) -> None:
        self.model = model.eval().requires_grad_(False).float()
        self.precision, self.batch_size = precision, batch_size
        if precision == "bf16":
            keep_in_bf16(model)
        self.processor = _WholePicture(longest or _LONGEST)

    def wants_view(self, model: Any) -> bool:
        """Return True: the model's processor needs the picture itself."""
        return True

    def probabilities(self, pairs: Sequence[Pair]) -> Tensor:
        """Return the probability ``(P,)`` of at most ``batch_size`` pairs that each matches."""
        raise NotImplementedError

    def judge(
        self,
        samples: dict[str, Any],
        image_of: Tensor,
        text_of: Tensor,
        ranks: Ranks | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        ranks = ranks or Ranks(together=False)
        images, captions = samples.get(self.view, samples["image"]), list(samples["text_input"])
        if not _is_whole(images):
            raise ValueError(no_pictures(self.title))
        device = images.device
        if next(self.model.parameters()).device != device:
            self.model.to(device)
        if ranks.world > 1:
            images = ranks.gather(images)
            captions = [one for own in all_gather_objects(captions) for one in own]
        numbers = list(zip(image_of.tolist(), text_of.tolist(), strict=True))
        pictures = {image: _picture_of(images[image]) for image in {one for one, _ in numbers}}
        pairs = [(pictures[image], captions[text]) for image, text in numbers]
        parts = [torch.zeros(0, device=device)]
        with torch.inference_mode(), self.autocast(device):
            for first in range(0, len(pairs), self.batch_size):
                found = self.probabilities(pairs[first : first + self.batch_size])
                parts.append(found.float().to(device))
        # Concatenated outside, because autograd cannot save tensors of inference mode.
        return torch.cat(parts)


def no_pictures(title: str) -> str:
    """Return the message for data from which no pictures can be had."""
    return (
        f"{title} reads pictures with a processor of its own, but the data load their images "
        "without a processor, as tensors: set vis_processor of the data set, or use a LAVIS model "
        f"as {PLACE}.arch"
    )


def checkpoint_of(cfg: Mapping[str, Any]) -> str:
    """Return the folder or name of a model in a ``model.mafa.con_d`` config.

    Raises:
        ValueError: if there is none.
    """
    if not cfg.get("checkpoint"):
        raise ValueError(
            f"{PLACE}.checkpoint: missing; {cfg['arch']} needs a folder, or a name on the Hugging "
            "Face hub"
        )
    return str(cfg["checkpoint"])


@contextmanager
def explain_not_loaded(path: str, problem: str, cure: str = "") -> Iterator[None]:
    """Translate what libraries raise for a folder or name that they cannot load.

    Raises:
        ValueError: in its place, with the first line of its message.
    """
    try:
        yield
    except _NOT_LOADED as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        raise ValueError(f"{PLACE}.checkpoint: {path} {problem} ({told}){cure}") from error


class _WholePicture:
    """Turn a picture into a tensor from which `_picture_of` makes it again.

    Mini-batches need tensors of one size, but a model with an image processor of its own needs the
    picture itself, with its proportions. It is put into the corner of a transparent square.

    Args:
        longest: side of the square in pixels; a larger picture is reduced to it.
    """

    def __init__(self, longest: int = _LONGEST) -> None:
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


def _picture_of(square: Tensor) -> Image.Image:
    """Return the picture (RGB) in what `_WholePicture` returned."""
    pixels = square.permute(1, 2, 0).cpu().numpy()
    height, width = int((pixels[:, 0, 3] > 0).sum()), int((pixels[0, :, 3] > 0).sum())
    return Image.fromarray(np.ascontiguousarray(pixels[:height, :width, :3]))


def _is_whole(images: Tensor) -> bool:
    """Return whether a mini-batch's images come from `_WholePicture`."""
    return images.dtype is torch.uint8 and images.ndim == 4 and images.shape[1] == 4
