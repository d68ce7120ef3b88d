"""ITM of many pairs, grouped by image, so that an image's keys and values are computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.tokens import Captions, Tokens
from lavis_mafa.families.family import tokenize

# Batch sizes. Larger ones are slower on a CPU; the sizes for a GPU are estimates.
_PAIRS = {"cpu": 64, "cuda": 512}
IMAGES = {"cpu": 16, "cuda": 64}
_TEXTS = {"cpu": 64, "cuda": 256}
HELD = 32  # maximum number of images with keys and values in memory


class ManyPairs:
    """The matching methods of a backbone for more images, texts and pairs than fit into one pass.

    Results equal the backbone's. Only padding is removed, and the pairs of an image share its keys
    and values.

    Args:
        backbone: a `lavis_mafa.algorithm.backbone.Backbone`.
        progress: function called after every pass with its number of pairs.
    """

    def __init__(self, backbone: Any, progress: Callable[[int], object] | None = None) -> None:
        self.backbone, self.progress = backbone, progress

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        """Encode images ``(B, 3, H, W)``, in several passes if only for matching."""
        size = _of_device(IMAGES, images.device)
        if seen is not None or not for_matching or len(images) <= size:
            whole: Images = self.backbone.encode_images(images, seen, for_matching)
            return whole
        passes = torch.split(images, size)
        parts = [self.backbone.encode_images(part, for_matching=True) for part in passes]
        return Images(torch.cat([part.embeds for part in parts]))

    def encode_texts(
        self, captions: Captions, max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        """Encode captions of similar length together, and keep their order."""
        ids, mask = tokenize(self.backbone.model, captions, max_length)
        lengths, order = mask.sum(dim=1).cpu().sort()
        embeds = features = None
        size = _of_device(_TEXTS, ids.device)
        for rows, longest in zip(torch.split(order, size), torch.split(lengths, size), strict=True):
            rows, length = rows.to(ids.device), int(longest[-1])
            part = self.backbone.encode_texts(
                Tokens(ids[rows, :length], mask[rows, :length]), for_matching=for_matching
            )
            if part.embeds is not None:
                if embeds is None:
                    embeds = part.embeds.new_zeros(*ids.shape, part.embeds.shape[2])
                embeds[rows, :length] = part.embeds
            if part.features is not None:
                if features is None:
                    features = part.features.new_empty(len(ids), part.features.shape[1])
                features[rows] = part.features
        return Texts(ids, mask, embeds, features)

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        """Return ITM logits ``(P, 2)`` float32 on the device of the texts; images may be on
        another."""
        device = texts.ids.device
        size = _of_device(_PAIRS, device)
        image_of, text_of = image_of.cpu(), text_of.cpu()
        lengths = texts.mask.sum(dim=1).cpu()[text_of]
        logits = torch.empty(len(image_of), 2, device=device)
        for pairs in _blocks(image_of, size):
            numbers, own = torch.unique(image_of[pairs], return_inverse=True)
            block = Images(images.embeds[numbers.to(images.embeds.device)].to(device))
            order = lengths[pairs].argsort()
            # Passes have equal sizes, so that no pass has only a few pairs.
            for part in order.tensor_split(-(-len(pairs) // size)):
                rows = pairs[part]
                logits[rows.to(device)] = self.backbone.match(
                    block,
                    _cut(texts, int(lengths[rows[-1]])),
                    own[part].to(device),
                    text_of[rows].to(device),
                ).float()
                if self.progress is not None:
                    self.progress(len(rows))
        return logits


def _blocks(image_of: Tensor, pairs_per_pass: int) -> Iterator[Tensor]:
    """Yield blocks ``(p,)`` of indices into ``image_of`` ``(P,)``, of a few images each.

    All pairs of an image are in one block. An image with enough pairs for a pass of its own is
    alone in its block, so that its keys and values need not be copied. Other blocks have `HELD`
    images each.
    """
    order = image_of.argsort(stable=True)
    _, counts = torch.unique_consecutive(image_of[order], return_counts=True)
    by_image: Sequence[Tensor] = torch.split(order, counts.tolist())
    waiting: list[Tensor] = []
    # With fewer pairs than images, a pass takes only the images that it needs (`PairedImages`) and
    # shares no keys and values with the next pass.
    most = max(1, min(HELD, pairs_per_pass // 2))
    for pairs in by_image:
        if 4 * len(pairs) >= pairs_per_pass:
            yield pairs
            continue
        waiting.append(pairs)
        if len(waiting) == most:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


def _cut(texts: Texts, length: int) -> Texts:
    """Return the first ``length`` tokens of all texts."""
    embeds = None if texts.embeds is None else texts.embeds[:, :length]
    return Texts(texts.ids[:, :length], texts.mask[:, :length], embeds)


def _of_device(sizes: dict[str, int], device: torch.device) -> int:
    return sizes["cpu" if device.type == "cpu" else "cuda"]
