"""The reference: MAFA's training step in the order of Algorithm 1, on LAVIS's unmodified modules.

It is written from the paper (MAFA S.M., Algorithm 1), for simplicity and not for speed, with
LAVIS's modules and explicit attention. From this package it uses the functions that read a config,
and the masking of MLM, so that both sides can have the same random draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from lavis.models.albef_models import AlbefBase
from lavis.models.med import BertForMaskedLM
from torch import Tensor, nn
from transformers import BertConfig

from lavis_mafa.algorithm.losses.language import IGNORED, mask_tokens
from lavis_mafa.families.tokenizers import build_tokenizer
from lavis_mafa.families.vit import build_vit
from lavis_mafa.io.project_files import find_config

# Function that replaces Con-D's probabilities (P,) of the pairs (image_of[p], text_of[p]).
Verdicts = Callable[[Tensor, Tensor, Tensor], Tensor]


class PlainAlbef(AlbefBase):
    """ALBEF of LAVIS's modules with random weights and the state dict keys of ``albef_mafa``.

    Args:
        cfg: a ``model`` config of ``albef_mafa``.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.tokenizer = cast(Any, build_tokenizer(cfg.tokenizer))
        config = BertConfig.from_json_file(find_config(cfg.med_config_path))
        config.vocab_size = max(config.vocab_size, len(self.tokenizer))
        self.visual_encoder = build_vit(cfg, from_pretrained=False)
        self.text_encoder = BertForMaskedLM(config=config)
        self.vision_proj = nn.Linear(self.visual_encoder.vision_width, cfg.embed_dim)
        self.text_proj = nn.Linear(config.hidden_size, cfg.embed_dim)
        self.itm_head = nn.Linear(config.hidden_size, 2)
        self.temp = nn.Parameter(cfg.temp * torch.ones([]))
        self.mlm_probability = cfg.mlm_mask_prob
        self.max_txt_len = cfg.max_txt_len


def reference_step(
    model: PlainAlbef,
    con_d: PlainAlbef,
    samples: dict[str, Any],
    low: float = 0.5,
    high: float = 0.8,
    alpha: float = 0.5,
    verdicts: Verdicts | None = None,
) -> dict[str, Tensor]:
    """Compute the losses of one MAFA step of a grouped mini-batch.

    The caller runs the backward pass and sets the precision (``torch.autocast``) of both
    models.

    Args:
        model: in training.
        con_d: frozen, in evaluation mode.
        samples: ``image`` ``(B, 3, H, W)`` and ``text_input``, B captions; B is at least 3.
        low, high: thresholds of Con-D.
        alpha: alpha of S-ITC.
        verdicts: function that replaces Con-D's probabilities, which are computed nevertheless.

    Returns:
        ``loss``, ``loss_itc``, ``loss_itm``, ``loss_lm`` (scalars).
    """
    images = samples["image"]
    own = torch.arange(len(images), device=images.device)
    with torch.no_grad():
        model.temp.clamp_(0.001, 0.5)
    image_embeds, text_embeds, text = encode(model, samples)

    # ITC similarities; the labels follow from Con-D.
    image_features = F.normalize(model.vision_proj(image_embeds[:, 0]), dim=-1)
    text_features = F.normalize(model.text_proj(text_embeds[:, 0]), dim=-1)
    sim_i2t = image_features @ text_features.detach().t() / model.temp
    sim_t2i = text_features @ image_features.detach().t() / model.temp

    # Con-D encodes the whole mini-batch and judges each direction in a separate pass.
    with torch.no_grad():
        judge = _PairJudge(con_d, samples, verdicts)
        hard_text, label_text, found_text = _judge_hardest(
            sim_i2t, lambda text_of: judge(own, text_of), low, high
        )
        hard_image, label_image, found_image = _judge_hardest(
            sim_t2i, lambda image_of: judge(image_of, own), low, high
        )

    loss_itc = 0.5 * _smoothed_itc(sim_i2t, found_text, alpha)
    loss_itc = loss_itc + 0.5 * _smoothed_itc(sim_t2i, found_image, alpha)

    # ITM: the mini-batch's pairs, then the negatives.
    positives = fuse(model, image_embeds, text_embeds, text.attention_mask, own, own)
    negatives = fuse(
        model,
        image_embeds,
        text_embeds,
        text.attention_mask,
        torch.cat([hard_image, own]),
        torch.cat([own, hard_text]),
    )
    labels = torch.cat([torch.ones_like(own), label_image, label_text])
    loss_itm = F.cross_entropy(torch.cat([positives, negatives]), labels)

    # MLM on the mini-batch's pairs and on the distinct mined pairs.
    pairs = [(b, b) for b in own.tolist()]
    pairs += list(zip(*torch.nonzero(found_text).t().tolist(), strict=True))
    for b, image in torch.nonzero(found_image).tolist():
        if (image, b) not in pairs:
            pairs.append((image, b))
    image_of, text_of = torch.tensor(pairs, device=own.device).t()
    loss_lm = _masked_language(model, image_embeds[image_of], text, text_of)
    return {
        "loss": loss_itc + loss_itm + loss_lm,
        "loss_itc": loss_itc,
        "loss_itm": loss_itm,
        "loss_lm": loss_lm,
    }


def encode(model: PlainAlbef, samples: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
    """Return images ``(B, S, D)``, captions ``(B, L, D)``, and their tokens."""
    text = model.tokenizer(
        samples["text_input"],
        padding="longest",
        truncation=True,
        max_length=model.max_txt_len,
        return_tensors="pt",
    ).to(samples["image"].device)
    states = model.text_encoder.bert(
        text.input_ids, attention_mask=text.attention_mask, return_dict=True, mode="text"
    ).last_hidden_state
    return model.visual_encoder.forward_features(samples["image"]), states, text


def fuse(
    model: PlainAlbef,
    image_embeds: Tensor,
    text_embeds: Tensor,
    text_mask: Tensor,
    image_of: Tensor,
    text_of: Tensor,
) -> Tensor:
    """Return ITM logits ``(P, 2)`` of pairs."""
    image_states = image_embeds[image_of]
    states = model.text_encoder.bert(
        encoder_embeds=text_embeds[text_of],
        attention_mask=text_mask[text_of],
        encoder_hidden_states=image_states,
        encoder_attention_mask=_all_visible(image_states),
        return_dict=True,
        mode="fusion",
    ).last_hidden_state
    return model.itm_head(states[:, 0])


class _PairJudge:
    """Con-D's probabilities for pairs of one mini-batch."""

    def __init__(self, con_d: PlainAlbef, samples: dict[str, Any], verdicts: Verdicts | None):
        self.con_d, self.verdicts = con_d, verdicts
        self.image_embeds, self.text_embeds, self.text = encode(con_d, samples)

    def __call__(self, image_of: Tensor, text_of: Tensor) -> Tensor:
        mask = self.text.attention_mask
        logits = fuse(self.con_d, self.image_embeds, self.text_embeds, mask, image_of, text_of)
        probability = torch.softmax(logits.float(), dim=1)[:, 1]
        return self.verdicts(image_of, text_of, probability) if self.verdicts else probability


def _judge_hardest(
    sim: Tensor, judge: Callable[[Tensor], Tensor], low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Pick and judge the hardest candidate of every anchor (Algorithm 1, lines 9 to 18).

    Args:
        sim: ``(B, B)``.
        judge: from candidates ``(B,)`` to probabilities ``(B,)``.
        low, high: thresholds of Con-D.

    Returns:
        The candidates ``(B,)`` and labels ``(B,)`` for ITM, in which the second hardest replaces an
        ambiguous one; and the mined positives ``(B, B)`` bool.
    """
    rows = torch.arange(len(sim), device=sim.device)
    others = sim.detach().float().clone().fill_diagonal_(float("-inf"))
    hardest = others.argmax(dim=1)
    probability = judge(hardest)
    positive = probability > high
    ambiguous = (probability > low) & ~positive
    found = torch.zeros_like(others, dtype=torch.bool)
    found[rows, hardest] = positive
    others[rows, hardest] = float("-inf")
    return torch.where(ambiguous, others.argmax(dim=1), hardest), positive.long(), found


def _smoothed_itc(sim: Tensor, found: Tensor, alpha: float) -> Tensor:
    """Compute S-ITC of one direction (MAFA eq. 5) with mined positives (Algorithm 1, lines 13,
    20).
    """
    labels = torch.eye(len(sim), device=sim.device) + found.float()
    labels = labels / labels.sum(dim=1, keepdim=True)
    labels = (1 - alpha) * labels + alpha / len(sim)
    return -(labels * F.log_softmax(sim.float(), dim=1)).sum(dim=1).mean()


def _masked_language(model: PlainAlbef, image_states: Tensor, text: Any, text_of: Tensor) -> Tensor:
    """Compute MLM on pairs, with images repeated for each pair and the head at all positions."""
    ids, targets = mask_tokens(
        text.input_ids[text_of],
        model.mlm_probability,
        mask_id=model.tokenizer.mask_token_id,
        vocab_size=model.text_encoder.config.vocab_size,
        special_ids=(model.tokenizer.cls_token_id, model.tokenizer.pad_token_id),
    )
    logits = model.text_encoder(
        ids,
        attention_mask=text.attention_mask[text_of],
        encoder_hidden_states=image_states,
        encoder_attention_mask=_all_visible(image_states),
        return_dict=True,
    ).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _all_visible(embeds: Tensor) -> Tensor:
    return torch.ones(embeds.shape[:-1], dtype=torch.long, device=embeds.device)
