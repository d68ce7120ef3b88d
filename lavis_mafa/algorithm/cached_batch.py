"""Mini-batches larger than memory, by recomputing activations (GradCache, Gao et al. 2021).

Every anchor is compared with the whole mini-batch, but encoders store no activations: the backward
pass recomputes them, chunk by chunk, when the gradient of the features is known. GradCache does so
in two passes over the mini-batch. PyTorch's activation checkpointing of a whole encoder does the
same within one backward pass, so that losses, mining and optimizer need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lavis_mafa.algorithm.backbone import Backbone, Images, Teacher, Texts
from lavis_mafa.algorithm.tokens import Captions, Tokens


class _CachedBatch:
    """A backbone that encodes, matches and predicts text in chunks, and recomputes activations.

    Losses and gradients equal the backbone's up to rounding, except for random numbers: dropout and
    MLM's masks are drawn separately for every chunk. Encoded images and texts of the whole
    mini-batch stay in memory, and everything is computed twice.

    Args:
        backbone: the backbone that computes the chunks.
        size: pairs in a chunk.
    """

    match_and_predict = None  # chunks of ITM's pairs are not those of the language loss
    encode_pairs = None  # images and captions are encoded in chunks of their own

    def __init__(self, backbone: Backbone, size: int) -> None:
        self.backbone, self.size = backbone, size

    def __getattr__(self, name: str) -> Any:
        # Everything that needs no chunks, and methods that only some families have (`regions`).
        return getattr(self.backbone, name)

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        parts = [
            self._recomputed(
                self.backbone.encode_images,
                images[rows],
                None if seen is None else seen[rows],
                for_matching,
            )
            for rows in self._chunks(len(images))
        ]
        return Images(
            torch.cat([part.embeds for part in parts]),
            _joined([part.features for part in parts]),
            _joined([part.seen for part in parts]),
        )

    def encode_texts(
        self, captions: Captions, max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        parts = [
            self._recomputed(self.backbone.encode_texts, some, max_length, for_matching)
            for some in self._captions(captions)
        ]
        longest = max(part.ids.shape[1] for part in parts)
        parts = [_padded(part, longest) for part in parts]
        return Texts(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.mask for part in parts]),
            _joined([part.embeds for part in parts]),
            _joined([part.features for part in parts]),
        )

    def match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        if len(image_of) <= self.size:
            logits: Tensor = self._recomputed(self._match, images, texts, image_of, text_of)
            return logits
        # Keep the pairs of an image in one chunk, so that its keys and values are computed once.
        order = torch.argsort(image_of, stable=True)
        parts = [
            self._recomputed(self._match, images, texts, image_of[rows], text_of[rows])
            for rows in self._split(order)
        ]
        return torch.cat(parts)[torch.argsort(order)]

    def _match(self, images: Images, texts: Texts, image_of: Tensor, text_of: Tensor) -> Tensor:
        # The recomputation must not reuse keys and values that the first computation kept.
        return self.backbone.match(replace(images, memory={}), texts, image_of, text_of)

    def language_losses(
        self,
        images: Images,
        texts: Texts,
        image_of: Tensor,
        text_of: Tensor,
        teacher: Teacher | None = None,
    ) -> Tensor:
        def losses(rows: slice) -> Tensor:
            fresh = replace(images, memory={})  # as in `_match`
            return self.backbone.language_losses(
                fresh, texts, image_of[rows], text_of[rows], teacher
            )

        chunks = self._chunks(len(image_of))
        return torch.cat([self._recomputed(losses, rows) for rows in chunks])

    def _recomputed(self, function: Callable[..., Any], *args: Any) -> Any:
        return recomputed(self.backbone.temperature.detach(), function, *args)

    def _captions(self, captions: Captions) -> Iterator[Captions]:
        if isinstance(captions, Tokens):
            for ids, mask in zip(*map(self._split, captions), strict=True):
                yield Tokens(ids, mask)
        else:
            for rows in self._chunks(len(captions)):
                yield captions[rows]

    def _chunks(self, count: int) -> Iterator[slice]:
        for begin in range(0, max(1, count), self.size):
            yield slice(begin, begin + self.size)

    def _split(self, tensor: Tensor) -> Sequence[Tensor]:
        return torch.split(tensor, self.size)


def recomputed(place: Tensor, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without storing activations; the backward pass calls it again.

    Args:
        place: any tensor on the device on which the function computes. Checkpointing restores the
            random state of the devices of tensor arguments, but captions and slices have no device.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(lambda _, *given: function(*given), place, *args, use_reentrant=False)


def in_chunks(backbone: Backbone, size: int | None) -> Backbone:
    """Return a backbone that computes in chunks of ``size`` pairs; without a size, the given
    one."""
    return _CachedBatch(backbone, size) if size else backbone


def _joined(parts: list[Any]) -> Tensor | None:
    """Concatenate tensors; None stays None."""
    return None if parts[0] is None else torch.cat(parts)


def _padded(texts: Texts, length: int) -> Texts:
    """Return captions padded to a number of tokens."""
    missing = length - texts.ids.shape[1]
    if not missing:
        return texts
    return replace(
        texts,
        ids=F.pad(texts.ids, (0, missing)),
        mask=F.pad(texts.mask, (0, missing)),
        embeds=None if texts.embeds is None else F.pad(texts.embeds, (0, 0, 0, missing)),
    )
