"""Con-D: the frozen discriminator that says which hard negatives match after all (MAFA 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lavis_mafa.backbones import AlbefBackbone, MatchHead
from lavis_mafa.backbones.base import image_size_of

Truth = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Discriminator(Protocol):
    """Judges pairs of one mini-batch."""

    def judge(self, samples: dict[str, Any], image_of: Tensor, text_of: Tensor) -> Tensor:
        """Probability ``(P,)`` in [0, 1] that image ``image_of[p]`` and text ``text_of[p]`` match.

        Args:
            samples: the mini-batch: ``image`` ``(B, 3, H, W)`` and ``text_input``, B captions.
            image_of, text_of: ``(P,)`` rows of the mini-batch.
        """


class ModelDiscriminator:
    """Con-D as a LAVIS model with an ITM head: frozen, in evaluation and inference mode.

    The model keeps its own tokenizer and image size; images of another size are resized to it. It
    is no part of the training model's parameters or checkpoint.

    Args:
        model: a LAVIS model that a backbone can drive.
        precision: ``fp32``, or ``bf16`` for autocast.
    """

    def __init__(self, model: Any, precision: str = "fp32") -> None:
        self.model = model.eval().requires_grad_(False)
        self.precision = precision
        self.image_size = image_size_of(model)
        fused = hasattr(model, "itm_head") and hasattr(model, "text_encoder")
        if fused and hasattr(model.text_encoder.config, "fusion_layer"):
            _forget_momentum(model)
            self.backbone: AlbefBackbone | MatchHead = AlbefBackbone(model)
        elif "match_head" in model.forward.__code__.co_varnames:
            self.backbone = MatchHead(model)
        else:
            raise TypeError(
                f"{type(model).__name__} cannot serve as Con-D: expected an ALBEF with an ITM head "
                "or a LAVIS model whose forward takes match_head='itm' (blip_image_text_matching, "
                "blip2_image_text_matching)"
            )

    def judge(self, samples: dict[str, Any], image_of: Tensor, text_of: Tensor) -> Tensor:
        with torch.inference_mode():
            logits = self._logits(samples, image_of, text_of)
        # A copy made outside: autograd may not keep tensors of inference mode.
        return torch.softmax(logits.clone().float(), dim=1)[:, 1]

    def _logits(self, samples: dict[str, Any], image_of: Tensor, text_of: Tensor) -> Tensor:
        images, captions = samples["image"], samples["text_input"]
        device = images.device
        if next(self.model.parameters()).device != device:
            self.model.to(device)
        if self.image_size is not None and images.shape[-1] != self.image_size:
            size = (self.image_size, self.image_size)
            images = F.interpolate(
                images, size, mode="bicubic", align_corners=False, antialias=True
            )
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            if isinstance(self.backbone, MatchHead):
                asked = [captions[row] for row in text_of.tolist()]
                return self.backbone.match_captions(images[image_of], asked)
            encoded = self.backbone.encode_images(images), self.backbone.encode_texts(captions)
            return self.backbone.match(*encoded, image_of, text_of)


def _forget_momentum(model: Any) -> None:
    """Judging needs no momentum encoders and queues: half of the weights of a retrieval model."""
    for name in [name for name, _ in model.named_children() if name.endswith("_m")]:
        delattr(model, name)
    for name in ("image_queue", "text_queue", "idx_queue", "queue_ptr"):
        if name in model._buffers:
            delattr(model, name)


class Oracle:
    """Con-D that knows: exact truth of a data set that has it, such as ``toy_scenes``."""

    def __init__(self) -> None:
        self.truth: Truth | None = None

    def judge(self, samples: dict[str, Any], image_of: Tensor, text_of: Tensor) -> Tensor:
        if self.truth is None:
            raise RuntimeError(
                "the oracle needs a training set whose truth is known (toy_scenes); use a model as "
                "model.mafa.con_d, or train on such data"
            )
        numbers = samples["loaded_index"].cpu().numpy()
        valid = self.truth(numbers[image_of.cpu().numpy()], numbers[text_of.cpu().numpy()])
        return torch.from_numpy(np.asarray(valid)).float().to(image_of.device)
