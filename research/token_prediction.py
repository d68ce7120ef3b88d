"""Predict the tokens of captions with and without their images (usage of vision, GRIT-VLP 5.6).

Hits are counted for each sample, so the result does not depend on the mini-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lavis_mafa.algorithm.backbone import Backbone, Images, Texts
from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens
from lavis_mafa.models.families import AlbefBackbone, backbone_of
from lavis_mafa.models.families.family import tokenize

COUNTS = ("tokens", "hits_1", "hits_5", "hits_1_without", "hits_5_without")
Interval = Callable[[NDArray[Any], NDArray[Any]], tuple[float, float]]
_CROSS_ATTENTION = ".crossattention.self"  # its name in LAVIS's BERTs and Q-Former


@contextmanager
def without_image(model: torch.nn.Module) -> Iterator[None]:
    """Hide the image from the text: the weighted sum of every cross-attention is replaced by 0.

    This is attention to an empty set: the layer adds only the bias of its output projection. In
    BLIP-2 the queries attend to the image, instead of the text.

    Raises:
        ValueError: if the model has no cross-attention.
    """
    found = [part for name, part in model.named_modules() if name.endswith(_CROSS_ATTENTION)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no cross-attention that could be disabled")
    hooks = [part.register_forward_hook(_zero_attention) for part in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zero_attention(part: Any, given: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward hook that replaces the output of attention, not its further return values."""
    return torch.zeros_like(output[0]), *output[1:]


def mask_captions(
    model: Any, ids: Tensor, mask: Tensor, numbers: NDArray[Any], rate: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Mask captions for MLM as in training (80 % [MASK], 10 % random, 10 % unchanged).

    Each sample has its own seed, so its mask does not depend on the mini-batch, and a token that is
    masked at one rate is also masked at every higher rate.

    Args:
        model: an ALBEF, with its tokenizer and vocabulary.
        ids, mask: ``(B, L)``.
        numbers: ``(B,)``, sample numbers.
        rate: share of tokens to predict, 0 to 1.
        seed: of the whole measurement.

    Returns:
        ``(B, L)`` ids and targets on the CPU, targets `IGNORED` where no token is predicted.
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


class TokenPredictor:
    """Predicts the tokens of captions with and without their images.

    ALBEF predicts masked tokens (MLM); BLIP and BLIP-2 predict every next token (LM), without
    masking rates.

    Args:
        model: a model with a language head.
        seed: of masking.

    Raises:
        ValueError: if the family of the model is unknown, or it has no language head.
    """

    def __init__(self, model: Any, seed: int = 0) -> None:
        try:
            self.backbone: Backbone = backbone_of(model)
        except TypeError as error:
            raise ValueError(f"expected a model of ALBEF, BLIP or BLIP-2: {error}") from error
        self.model, self.seed = model, seed
        self.masks = isinstance(self.backbone, AlbefBackbone)
        names = ("text_encoder",) if self.masks else ("text_decoder", "Qformer")
        parts = [getattr(model, name, None) for name in names]
        heads = [getattr(part, "cls", None) for part in parts]
        self.head: Any = next((head for head in heads if head is not None), None)
        if self.head is None:
            raise ValueError(
                f"{type(model).__name__} has no language head: use a model for pre-training, such "
                "as albef_mafa"
            )

    def count(
        self, images: Tensor, captions: Sequence[str], numbers: NDArray[Any], rates: Sequence[Any]
    ) -> Tensor:
        """Return `COUNTS` ``(R, 5, B)`` int64 of the samples of a mini-batch at R rates.

        Args:
            images: ``(B, 3, H, W)``.
            numbers: ``(B,)``, sample numbers.
            rates: masking rates, 0 to 1; ``[None]`` for LM.
        """
        tokens = tokenize(self.model, captions, None)
        texts = Texts(tokens.input_ids, tokens.attention_mask)
        seen = self.backbone.encode_images(images)
        queries = []
        for rate in rates:
            ids, targets = texts.ids, texts.ids.masked_fill(texts.mask == 0, IGNORED)
            if self.masks:
                ids, targets = mask_captions(
                    self.model, texts.ids, texts.mask, numbers, rate, self.seed
                )
            else:
                targets[:, 0] = IGNORED  # the first token has no context to predict it from
            queries.append((Texts(ids.to(images.device), texts.mask), targets.to(images.device)))
        found = [self._hits(seen, *one) for one in queries]
        with without_image(self.model):
            # Encoded again: BLIP-2's queries attend to the image while it is encoded.
            unseen = self.backbone.encode_images(images, seen=seen.seen)
            blind = [self._hits(unseen, *one)[1:] for one in queries]
        return torch.stack([torch.cat(pair) for pair in zip(found, blind, strict=True)])

    def _hits(self, images: Images, texts: Texts, targets: Tensor) -> Tensor:
        """Count for each sample ``(3, B)`` the target tokens, and the top-1 and the top-5 hits."""
        predicted = targets != IGNORED
        guesses = self._logits(images, texts, predicted).topk(5, dim=1).indices
        right = guesses == targets[predicted][:, None]
        row = torch.nonzero(predicted)[:, 0]
        counted = torch.zeros(3, len(targets), dtype=torch.int64, device=targets.device)
        counted[0].index_add_(0, row, torch.ones_like(row))
        counted[1].index_add_(0, row, right[:, 0].long())
        counted[2].index_add_(0, row, right.any(dim=1).long())
        return counted

    def _logits(self, images: Images, texts: Texts, predicted: Tensor) -> Tensor:
        """Return the logits ``(T, V)`` at the T predicted tokens, row by row."""
        backbone: Any = self.backbone
        if self.masks:
            return backbone._predict(texts.ids, texts.mask, images.embeds, predicted)
        # The driver returns only losses; a hook on the head collects the logits.
        logits: list[Tensor] = []
        hook = self.head.register_forward_hook(lambda part, args, output: logits.append(output))
        try:
            every = torch.arange(len(texts.ids), device=texts.ids.device)
            backbone.language_losses(images, texts, every, every)
        finally:
            hook.remove()
        return logits[0].float()


def share_of(
    hits: NDArray[Any], counts: NDArray[Any], clusters: NDArray[Any], interval: Interval
) -> dict[str, float]:
    """Return ``hits.sum() / counts.sum()`` as ``share``, with its 95 % interval ``low``, ``high``.

    All are NaN if the counts are 0.

    Args:
        hits, counts: ``(S,)`` for each sample.
        clusters: ``(S,)`` int64, equal for samples that are not independent, such as the image id.
        interval: from `lavis_mafa.metrics.intervals`: `clustered` for shares of 0 to 1, `ratio` for
            values that may be negative.
    """
    total = counts.sum()
    if not total:
        return dict.fromkeys(("share", "low", "high"), float("nan"))
    cluster = np.unique(clusters, return_inverse=True)[1].reshape(-1)
    low, high = interval(*(np.bincount(cluster, weights=each) for each in (hits, counts)))
    return {"share": float(hits.sum() / total), "low": low, "high": high}
