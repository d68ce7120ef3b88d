"""ALBEF for two images per text: text assignment (pre-training) and NLVR2 (fine-tuning).

Every fusion layer is doubled (ALBEF 4.2 and Figure 3b).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lavis.common.registry import registry
from lavis.models.albef_models import AlbefBase
from lavis.models.albef_models.albef_nlvr import AlbefNLVR
from lavis.models.med import BertModel
from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.utils.generic import ModelOutput

from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.downstream.albef_downstream import AlbefDownstream
from lavis_mafa.downstream.yamls import model_yamls
from lavis_mafa.families.family import all_visible, tokenize

_State = dict[str, Tensor]
_LAYER = re.compile(r"(text_encoder\.encoder\.layer\.)(\d+)(\..*)")
FIRST, SECOND, NEITHER = 0, 1, 2  # labels of text assignment


@dataclass
class _Judgement(ModelOutput):
    """``loss`` (a scalar), ``logits`` ``(B, classes)`` and their ``labels`` ``(B,)``."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    labels: Tensor | None = None


class _TwoImages(AlbefDownstream):
    """Mixin before a class of LAVIS that has ``visual_encoder`` and ``text_encoder``.

    The text encoder is a BERT whose fusion layers come in pairs: the first of a pair attends to the
    first image, the second to the second. Both start from the same weights, and they always share
    the projections of keys and values.
    """

    def share_cross_attention(self, encoder: Any) -> None:
        """Let both layers of each pair of a BERT encoder share their projections of images."""
        for first in range(encoder.config.fusion_layer, encoder.config.num_hidden_layers, 2):
            one, other = (encoder.layer[n].crossattention.self for n in (first, first + 1))
            for name in ("key", "value"):
                getattr(one, name).weight = getattr(other, name).weight
                getattr(one, name).bias = getattr(other, name).bias

    def fuse(
        self, captions: Sequence[str], first: Tensor, second: Tensor, text_encoder: Any = None
    ) -> Tensor:
        """Return the state ``(B, D)`` of [CLS] for B captions with two images each.

        Args:
            first, second: encoded images ``(B, S, V)``.
            text_encoder: default: the model's own.
        """
        model: Any = self
        tokens = tokenize(model, captions, None)
        hidden = (text_encoder or model.text_encoder)(
            tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=[first, second],
            encoder_attention_mask=[all_visible(first), all_visible(second)],
            return_dict=True,
        ).last_hidden_state
        first_token: Tensor = hidden[:, 0]
        return first_token

    @classmethod
    def _language_parts(cls, config: BertConfig) -> dict[str, Any]:
        """Build BERT with doubled fusion layers; ``config`` has the layers for one image."""
        double = deepcopy(config)
        double.num_hidden_layers += config.num_hidden_layers - config.fusion_layer
        return {"text_encoder": BertModel(config=double, add_pooling_layer=False)}

    def _convert_pretrained(self, state: _State, origin: str) -> _State:
        """Double the fusion layers of an ALBEF for one image.

        Its momentum copies are dropped: the model's own start equal to its encoders.
        """
        model: Any = self
        config = model.text_encoder.config
        # Pre-training models keep BERT below ``text_encoder.bert.``.
        state = {str(key).replace("encoder.bert.", "encoder.", 1): state[key] for key in state}
        found = [_LAYER.fullmatch(key) for key in state]
        layers = 1 + max((int(match[2]) for match in found if match), default=-1)
        double, fusion = config.num_hidden_layers, config.fusion_layer
        single = fusion + (double - fusion) // 2
        if layers != single:
            return state
        return _double_fusion_layers({k: v for k, v in state.items() if "_m." not in k}, fusion)


@dataclass
class _Assignment:
    """Two images for each of B texts, as positions in the mini-batch.

    Attributes:
        first, second: ``(B,)`` positions of the images.
        labels: ``(B,)`` `FIRST` or `SECOND` where the text is that image's, else `NEITHER`.
    """

    first: Tensor
    second: Tensor
    labels: Tensor


def _assign_texts(image_ids: Tensor, preference: Tensor | None = None) -> _Assignment:
    """Draw the two images of each text: `FIRST`, `SECOND` and `NEITHER` with probability 1/3 each.

    The other images are never the text's own. Where neither is the text's they differ from
    each other, unless the mini-batch has only two. All draws use PyTorch's CPU generator, so that
    they are the same on any device.

    Args:
        image_ids: ``(B,)``, equal where samples show one image.
        preference: ``(B, B)`` logits; row i draws its other images from their softmax. None: each
            sample of another image is equally likely.

    Raises:
        ValueError: if all samples show the same image.
    """
    ids = image_ids.cpu()
    size = len(ids)
    other = ids[:, None] != ids[None]
    if not other.any():
        raise ValueError(
            f"text assignment needs two different images in a mini-batch, got {size} sample(s) of "
            "one: use a larger run.batch_size_train"
        )
    scores = torch.zeros(size, size) if preference is None else preference.detach().float().cpu()
    # The best of logits plus Gumbel noise is a draw from their softmax; the next best of the same
    # sums is a second draw without replacement.
    scores = scores - torch.empty(size, size).exponential_().log()
    scores = scores.masked_fill(~other, -torch.inf)
    one = scores.argmax(dim=1)
    further = other & (ids[None] != ids[one][:, None])
    another = scores.masked_fill(~further, -torch.inf).argmax(dim=1)
    another = torch.where(further.any(dim=1), another, one)

    labels = torch.randint(3, (size,))
    own = torch.arange(size)
    first = torch.where(labels == FIRST, own, one)
    second = torch.where(labels == FIRST, one, torch.where(labels == SECOND, own, another))
    device = image_ids.device
    return _Assignment(first.to(device), second.to(device), labels.to(device))


@dataclass(frozen=True)
class _TextAssignment(Checked):
    """Config keys of ``model`` that only text assignment reads.

    Raises:
        ValueError: if a value is out of range.
    """

    ta_negatives: str = option(
        "similar",
        "other images of text assignment: likelier if similar, or random",
        source="ALBEF",
        choices=("similar", "random"),
    )


@registry.register_model("albef_nlvr_pretrain_mafa")
class AlbefNlvrPretrainMafa(_TwoImages, AlbefBase):
    """Text assignment, one epoch between pre-training and NLVR2 (ALBEF 4.2; MAFA F).

    A linear classifier on [CLS] predicts which of two images a text describes, if any. Other images
    are drawn from the mini-batch: with ``ta_negatives: similar`` by the similarity of features (as
    in ALBEF's published code), otherwise uniformly.

    It starts from a checkpoint of ``albef_mafa`` as ``pretrained``; ``albef_nlvr_mafa`` starts from
    its checkpoints. The projection of image features only measures similarity, so it is frozen.

    Supported model types:
        - base: ViT-B/16 and BERT with 6 text and 2 * 6 fusion layers.
        - tiny: built only from its config, for small images and tests.
    """

    PRETRAINED_MODEL_CONFIG_DICT = model_yamls("albef_nlvr_pretrain_mafa", "base", "tiny")
    model_options = _TextAssignment
    options = ("embed_dim", "temp", "max_txt_len", "ta_negatives")
    heads = ("ta_head.",)

    def __init__(
        self,
        image_encoder: Any,
        text_encoder: Any,
        tokenizer: Any,
        embed_dim: int = 256,
        temp: float = 0.07,
        max_txt_len: int = 25,
        ta_negatives: str = _TextAssignment.ta_negatives,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.max_txt_len = max_txt_len
        self.temp = temp
        self.ta_negatives = _TextAssignment(ta_negatives).ta_negatives
        if ta_negatives == "similar":
            self.random_parts = ("vision_proj.",)
        self.visual_encoder = image_encoder
        self.text_encoder = text_encoder
        self.share_cross_attention(text_encoder.encoder)
        self.vision_proj = nn.Linear(image_encoder.vision_width, embed_dim).requires_grad_(False)
        self.ta_head = nn.Linear(text_encoder.config.hidden_size, 3)

    def forward(self, samples: dict[str, Any]) -> _Judgement:
        """Compute the loss of text assignment, averaged over the mini-batch.

        Args:
            samples: ``image`` ``(B, 3, H, W)``, ``text_input`` (B strings), and optionally
                ``image_id`` ``(B,)``, equal for samples of one image; default: all different.

        Raises:
            ValueError: if all samples show one image, so that there is no other.
        """
        images = self.visual_encoder.forward_features(samples["image"])
        ids = samples.get("image_id")
        if ids is None:
            ids = torch.arange(len(images), device=images.device)
        drawn = _assign_texts(
            ids, self._likeness(images) if self.ta_negatives == "similar" else None
        )
        state = self.fuse(samples["text_input"], images[drawn.first], images[drawn.second])
        logits = self.ta_head(state)
        return _Judgement(F.cross_entropy(logits, drawn.labels), logits, drawn.labels)

    @torch.no_grad()
    def _likeness(self, images: Tensor) -> Tensor:
        """Return the logits ``(B, B)`` to draw other images by: similarity over temperature."""
        features = F.normalize(self.vision_proj(images[:, 0]).float(), dim=-1)
        return features @ features.t() / self.temp


@registry.register_model("albef_nlvr_mafa")
class AlbefNlvrMafa(_TwoImages, AlbefNLVR):
    """LAVIS's ``albef_nlvr``: predicts whether a text is true of two images.

    It starts from an unchanged checkpoint of ``albef_mafa``, ``albef_nlvr_pretrain_mafa`` or
    LAVIS's ``albef_nlvr``, has any size, and also trains without momentum distillation. It distils
    from the momentum text encoder, where LAVIS uses the trained one by mistake.

    Supported model types:
        - nlvr: ViT-B/16 and BERT with 6 text and 2 * 6 fusion layers; LAVIS's published weights.
        - tiny: built only from its config, for small images and tests.
    """

    PRETRAINED_MODEL_CONFIG_DICT = model_yamls("albef_nlvr_mafa", "nlvr", "tiny")
    options = ("num_classes", "momentum", "alpha", "use_distill", "max_txt_len")
    heads = ("cls_head.",)
    ramp_epochs = 2.0

    def forward(self, samples: dict[str, Any], is_train: bool = True) -> Any:
        """Return the loss, averaged over the mini-batch, or the predictions.

        Args:
            samples: ``image0`` and ``image1`` ``(B, 3, H, W)``, ``text_input`` (B strings) and
                ``label`` ``(B,)``; with ``use_distill`` also ``epoch``, ``iters`` and
                ``num_iters_per_epoch``.
            is_train: False: return ``predictions`` ``(B, classes)`` and ``targets`` ``(B,)``.
        """
        labels = samples["label"]
        logits = self._logits(samples, self.visual_encoder, self.text_encoder, self.cls_head)
        if not is_train:
            return {"predictions": logits, "targets": labels}
        loss = F.cross_entropy(logits, labels)
        if self.use_distill:
            with torch.no_grad():
                self._momentum_update()
                logits_m = self._logits(
                    samples, self.visual_encoder_m, self.text_encoder_m, self.cls_head_m
                )
                soft = logits_m.softmax(dim=1)
            keys = ("epoch", "iters", "num_iters_per_epoch")
            epoch, step, steps = (samples[key] for key in keys)
            weight = self.alpha * self._rampup_factor(epoch, step, steps)
            loss = (1 - weight) * loss + weight * F.cross_entropy(logits, soft)
        return _Judgement(loss, logits, labels)

    def _logits(
        self, samples: dict[str, Any], image_encoder: Any, text_encoder: Any, head: Any
    ) -> Tensor:
        images = torch.cat([samples["image0"], samples["image1"]])
        first, second = image_encoder.forward_features(images).chunk(2)
        logits: Tensor = head(self.fuse(samples["text_input"], first, second, text_encoder))
        return logits


def _double_fusion_layers(state: _State, fusion_layer: int) -> _State:
    """Repeat every layer of the text encoder from ``fusion_layer`` on: 6, 6, 7, 7, ..."""
    doubled: _State = {}
    for key, value in state.items():
        match = _LAYER.fullmatch(key)
        number = int(match[2]) if match else -1
        if match is None or number < fusion_layer:
            doubled[key] = value
            continue
        first = fusion_layer + 2 * (number - fusion_layer)
        for layer in (first, first + 1):
            doubled[f"{match[1]}{layer}{match[3]}"] = value
    return doubled
