"""Build ALBEF's and BLIP's ViT in the sizes of a config."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lavis.models.vit import VisionTransformerEncoder
from torch import Tensor, nn

from lavis_mafa.algorithm.options import option
from lavis_mafa.families.feature_encoder import Features, feature_width_of
from lavis_mafa.io.project_files import read_config


@dataclass(kw_only=True)
class VitOptions:
    """Keys of ``model.vit``."""

    patch_size: int = option(doc="patch side in pixels", low=1)
    width: int = option(doc="width, a multiple of heads", low=1)
    depth: int = option(doc="layers", low=1)
    heads: int = option(doc="attention heads", low=1)
    stem: str = option(
        "patch",
        "how patches become tokens; conv: by small convolutions",
        source="Xiao et al. 2021",
        choices=("patch", "conv"),
    )


def build_vit(cfg: Any, from_pretrained: bool) -> VisionTransformerEncoder | _ProjectedFeatures:
    """Build a ViT of ``vit_type``, as LAVIS does, or of the sizes in ``vit``, or with
    ``image_encoder: features`` the encoder of features.

    Args:
        cfg: a ``model`` config.
        from_pretrained: download and load weights trained on ImageNet.
    """
    feature_width = feature_width_of(cfg)
    if feature_width:
        width = read_config(cfg.med_config_path)["encoder_width"]
        return _ProjectedFeatures(feature_width, width)
    sizes = cfg.get("vit")
    if sizes is None:
        return VisionTransformerEncoder.from_config(cfg, from_pretrained=from_pretrained)
    encoder = VisionTransformerEncoder(
        img_size=cfg.image_size,
        patch_size=sizes.patch_size,
        embed_dim=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.heads,
        drop_path_rate=cfg.get("vit_drop_path_rate", 0),
        use_grad_checkpointing=cfg.get("vit_grad_ckpt", False),
        ckpt_layer=cfg.get("vit_ckpt_layer", 0),
        norm_layer=partial(nn.LayerNorm, eps=float(cfg.get("vit_layer_norm_epsilon", 1e-6))),
    )
    encoder.vision_width = sizes.width
    if sizes.get("stem", "patch") == "conv":
        encoder.patch_embed = _ConvStem(cfg.image_size, sizes.patch_size, sizes.width)
    begin_narrow(encoder)
    return encoder


class _ConvStem(nn.Module):
    """Turn images into tokens by small convolutions instead of one large one.

    Xiao et al. 2021, "Early Convolutions Help Transformers See Better", section 3: convolutions of
    3 x 3 pixels and stride 2, each with twice the channels of the one before and the last as
    wide as the tokens, then one of 1 x 1. Two things differ from the paper: the depth of the ViT
    is left to the config, and the layers normalise over a group of all channels instead of
    over the mini-batch, whose pairs are similar if it is grouped.

    Args:
        image_size: side of the images in pixels.
        patch_size: 2 to the power of the number of convolutions.
        width: width of the tokens.

    Raises:
        ValueError: see `_require_stem`.
    """

    def __init__(self, image_size: int, patch_size: int, width: int) -> None:
        super().__init__()
        _require_stem(patch_size, width)
        # Attributes of timm's PatchEmbed, which LAVIS reads.
        self.img_size = (image_size, image_size)
        self.patch_size = (patch_size, patch_size)
        self.grid_size = (image_size // patch_size, image_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        channels = [3, *_channels(patch_size, width)]
        pairs = zip(channels, channels[1:], strict=False)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1, bias=False) for a, b in pairs)
        self.norms = nn.ModuleList(nn.GroupNorm(1, count) for count in channels[1:])
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens ``(B, patches, width)`` of images ``(B, 3, H, W)``."""
        if tuple(images.shape[2:]) != self.img_size:
            raise ValueError(
                f"images are {images.shape[2]} x {images.shape[3]} pixels, the model was built for "
                f"{self.img_size[0]} x {self.img_size[1]}"
            )
        hidden = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            hidden = F.relu(norm(conv(hidden)))
        tokens: Tensor = self.proj(hidden)
        return tokens.flatten(2).transpose(1, 2)


def _require_stem(patch_size: int, width: int) -> None:
    """Raise ValueError unless a convolutional stem of these sizes can be built."""
    if patch_size < 2 or patch_size & (patch_size - 1):
        raise ValueError(
            f"model.vit.stem: conv halves the image, and patch_size {patch_size} is not a power of "
            "2; use 16 or 8"
        )
    first = patch_size // 2
    if width % first:
        raise ValueError(
            f"model.vit.stem: conv has width / {first} channels first, and width is {width}; use a "
            f"multiple of {first}"
        )


def _channels(patch_size: int, width: int) -> list[int]:
    count = patch_size.bit_length() - 1
    return [width >> (count - 1 - place) for place in range(count)]


def begin_narrow(encoder: nn.Module) -> None:
    """Initialise the weights of a narrow ViT again, with a larger standard deviation.

    LAVIS's standard deviation of 0.02 suits a width of 768. With it, the tokens of a narrow encoder
    would be nearly equal.
    """
    for weight in encoder.parameters():
        if weight.ndim == 2:
            nn.init.xavier_uniform_(weight)
    for name in ("pos_embed", "cls_token"):
        nn.init.normal_(getattr(encoder, name), std=0.2)


class _ProjectedFeatures(Features):
    """ALBEF's and BLIP's image encoder of features: a projection and a normalisation.

    Args:
        feature_width: V.
        vision_width: D, the width to which the text encoder attends.
    """

    def __init__(self, feature_width: int, vision_width: int) -> None:
        super().__init__(feature_width)
        self.vision_width = vision_width
        self.proj = nn.Linear(feature_width, vision_width)
        self.norm = nn.LayerNorm(vision_width, eps=1e-6)

    def forward_features(self, features: Tensor) -> Tensor:
        """Return tokens ``(B, 1 + S, D)``; the first, the mean of the others, stands for the image
        as a ViT's [CLS] does."""
        tokens = self.proj(self(features))
        normalised: Tensor = self.norm(torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1))
        return normalised
