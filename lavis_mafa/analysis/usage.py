"""Usage of vision: what a model's language side predicts with and without the image (GRIT-VLP 5.6).

Hits are counted sample by sample, so that neither the mini-batch nor the number of ranks matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens
from lavis_mafa.models.families import AlbefBackbone, backbone_of
from lavis_mafa.models.families.base import tokenize

COUNTS = ("asked", "hits_1", "hits_5", "hits_1_without", "hits_5_without")
Interval = Callable[[np.ndarray, np.ndarray], tuple[float, float]]
CROSS_ATTENTION = ".crossattention.self"  # as LAVIS's BERTs and Q-Former name it


@contextmanager
def without_image(model: torch.nn.Module) -> Iterator[None]:
    """Let nothing of an image reach the text: every cross-attention adds up nothing.

    A text token then attends to an empty set: the sum of values is 0, and the layer adds its output
    projection's bias alone. In BLIP-2 it is the queries that attend to the image.

    Raises:
        ValueError: if the model has no cross-attention.
    """
    found = [part for name, part in model.named_modules() if name.endswith(CROSS_ATTENTION)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no cross-attention to leave out")
    hooks = [part.register_forward_hook(_nothing_attended) for part in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _nothing_attended(part: Any, given: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.zeros_like(output[0]), *output[1:]


def mask_captions(
    model: Any, ids: Tensor, mask: Tensor, numbers: np.ndarray, rate: float, seed: int
) -> tuple[Tensor, Tensor]:
    """MLM's masking of captions as in training (80 % [MASK], 10 % random, 10 % left), seeded by
    sample: the same whatever stands beside it, and what is masked at a rate is at a higher one too.

    Args:
        model: an ALBEF; its tokenizer and vocabulary are used.
        ids, mask: ``(B, L)``.
        numbers: ``(B,)``, the samples' numbers.
        rate: share of tokens to predict, 0 to 1.
        seed: of the whole measurement.

    Returns:
        ``(B, L)`` ids and targets on the CPU, targets `IGNORED` where nothing is to be predicted.
    """
    tokenizer = model.tokenizer
    masked, targets = ids.cpu().clone(), torch.full(ids.shape, IGNORED)
    for row, number in enumerate(numbers):
        length = int(mask[row].sum())
        drawn = np.random.SeedSequence((seed, int(number))).generate_state(1, np.uint32)[0]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(drawn))
            masked[row, :length], targets[row, :length] = mask_tokens(
                masked[row, :length],
                rate,
                mask_id=tokenizer.mask_token_id,
                vocab_size=model.text_encoder.config.vocab_size,
                special_ids=(tokenizer.cls_token_id, tokenizer.pad_token_id),
            )
    return masked, targets


class Reader:
    """Predicts the tokens of captions with and without their images.

    ALBEF fills in masked tokens (MLM); BLIP and BLIP-2 say every next token (LM), for which there
    are no rates.

    Args:
        model: has a language head.
        seed: of masking.

    Raises:
        ValueError: if the model is of no known family or has no language head.
    """

    def __init__(self, model: Any, seed: int = 0) -> None:
        try:
            self.backbone: Backbone = backbone_of(model)
        except TypeError as error:
            raise ValueError(f"usage of vision needs ALBEF, BLIP or BLIP-2: {error}") from error
        self.model, self.seed = model, seed
        self.masks = isinstance(self.backbone, AlbefBackbone)
        names = ("text_encoder",) if self.masks else ("text_decoder", "Qformer")
        parts = [getattr(model, name, None) for name in names]
        heads = [getattr(part, "cls", None) for part in parts]
        self.head: Any = next((head for head in heads if head is not None), None)
        if self.head is None:
            raise ValueError(
                f"{type(model).__name__} has no language head to ask: take a model for "
                "pre-training, such as albef_mafa"
            )

    def count(
        self, images: Tensor, captions: Sequence[str], numbers: np.ndarray, rates: Sequence[Any]
    ) -> Tensor:
        """`COUNTS` ``(R, 5, B)`` int64 of a mini-batch's samples at R rates.

        Args:
            images: ``(B, 3, H, W)``.
            numbers: ``(B,)``, the samples' numbers.
            rates: shares of tokens to mask; ``[None]`` for LM.
        """
        tokens = tokenize(self.model, captions, None)
        texts = Texts(tokens.input_ids, tokens.attention_mask)
        seen = self.backbone.encode_images(images)
        asked_for = []
        for rate in rates:
            ids, targets = texts.ids, texts.ids.masked_fill(texts.mask == 0, IGNORED)
            if self.masks:
                ids, targets = mask_captions(
                    self.model, texts.ids, texts.mask, numbers, rate, self.seed
                )
            else:
                targets[:, 0] = IGNORED  # nothing stands before it
            asked_for.append((Texts(ids.to(images.device), texts.mask), targets.to(images.device)))
        found = [self._hits(seen, *one) for one in asked_for]
        with without_image(self.model):
            # BLIP-2's queries look at the image here.
            unseen = self.backbone.encode_images(images, seen=seen.seen)
            blind = [self._hits(unseen, *one)[1:] for one in asked_for]
        return torch.stack([torch.cat(pair) for pair in zip(found, blind, strict=True)])

    def _hits(self, images: Images, texts: Texts, targets: Tensor) -> Tensor:
        """``(3, B)``: tokens asked, and those among the first and the first five guesses."""
        asked = targets != IGNORED
        guesses = self._logits(images, texts, asked).topk(5, dim=1).indices
        right = guesses == targets[asked][:, None]
        row = torch.nonzero(asked)[:, 0]
        counted = torch.zeros(3, len(targets), dtype=torch.int64, device=targets.device)
        counted[0].index_add_(0, row, torch.ones_like(row))
        counted[1].index_add_(0, row, right[:, 0].long())
        counted[2].index_add_(0, row, right.any(dim=1).long())
        return counted

    def _logits(self, images: Images, texts: Texts, asked: Tensor) -> Tensor:
        """``(T, V)`` at the T tokens asked for, in the order of rows."""
        backbone: Any = self.backbone
        if self.masks:
            return backbone._predict(texts.ids, texts.mask, images.embeds, asked)
        told: list[Tensor] = []
        hook = self.head.register_forward_hook(lambda part, given, output: told.append(output))
        try:
            every = torch.arange(len(texts.ids), device=texts.ids.device)
            backbone.language_losses(images, texts, every, every)
        finally:
            hook.remove()
        return told[0].float()


def share_of(
    hits: np.ndarray, counts: np.ndarray, clusters: np.ndarray, interval: Interval
) -> dict[str, float]:
    """``hits.sum() / counts.sum()`` as ``share``, its 95 % interval as ``low`` and ``high``; NaN
    without counts.

    Args:
        hits, counts: ``(S,)`` per sample.
        clusters: ``(S,)`` int64, equal for what is not independent: the image of every sample.
        interval: of `lavis_mafa.analysis.intervals`: `clustered` for shares of 0 to 1, or `ratio`.
    """
    total = counts.sum()
    if not total:
        return dict.fromkeys(("share", "low", "high"), float("nan"))
    cluster = np.unique(clusters, return_inverse=True)[1].reshape(-1)
    low, high = interval(*(np.bincount(cluster, weights=each) for each in (hits, counts)))
    return {"share": float(hits.sum() / total), "low": low, "high": high}
