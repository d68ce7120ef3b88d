"""FNE: a dual encoder trained by a triplet loss that avoids false negatives.

Negatives are drawn by the posterior probability that they are false (Li et al., "Your Negative May
not Be True Negative", ACM MM 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from lavis.common.registry import registry
from lavis.models.base_model import BaseModel
from torch import Tensor
from transformers import BertModel
from transformers.models.bert.configuration_bert import BertConfig
from transformers.utils.generic import ModelOutput

from lavis_mafa.algorithm.backbone import Images, Texts
from lavis_mafa.algorithm.losses.triplet import similarity_of, triplet_losses
from lavis_mafa.algorithm.options import Checked, option
from lavis_mafa.algorithm.pair_memory import EMPTY, MovingCopies, PairMemory
from lavis_mafa.algorithm.pickers import NONE, hardest
from lavis_mafa.algorithm.posterior import PosteriorPicker, PosteriorRule, draw
from lavis_mafa.algorithm.ranks import Ranks
from lavis_mafa.algorithm.tokens import Captions, captions_of
from lavis_mafa.families.attention import fuse_attention
from lavis_mafa.families.blip2_parts import load_image_encoder
from lavis_mafa.families.family import tokenize
from lavis_mafa.families.mafa_model import MafaModel, checkpoint_of
from lavis_mafa.families.rerank import MAX_TOKENS, compute_sim_matrix
from lavis_mafa.families.tokenizers import build_tokenizer, from_hub
from lavis_mafa.families.vit import build_vit
from lavis_mafa.io.project_files import find_config, model_yamls

_PARTS = ("visual_encoder", "text_encoder")
_NEGATIVES = ("posterior", "hardest")
_PLAIN = ("hardest", "random")


_RULE = PosteriorRule(beginning="sampled")  # as in FNE's code


@dataclass(frozen=True)
class _FneSettings(Checked):
    """Settings for the search for negatives; the defaults are FNE's.

    Attributes:
        momentum: momentum of the copies.
        rule: settings of the posterior; the loss has the same margin.
    """

    negatives: str = option(
        "posterior",
        "how negatives are found: by the posterior, or the hardest of mini-batch and memory",
        source="FNE",
        choices=_NEGATIVES,
    )
    plain_epochs: int = option(
        1,
        "number of first epochs that use only the mini-batch, without momentum copies and memory",
        source="FNE",
        low=0,
    )
    # With the hardest negatives, random encoders collapse: all features become alike.
    plain_negatives: str = option(
        "hardest",
        "negatives of these epochs; random: for encoders that start with random weights",
        source="FNE",
        choices=_PLAIN,
    )
    memory_size: int = option(8224, "pairs in the memory of momentum features", source="FNE", low=0)
    momentum: float = 0.995
    rule: PosteriorRule = _RULE

    @classmethod
    def from_config(cls, cfg: Any) -> _FneSettings:
        """Read a ``model`` config.

        Raises:
            ValueError: for a value out of its range, or an unknown key of ``model.posterior``.
        """
        given = dict(cfg.get("posterior") or {})
        given["margin"] = float(cfg.get("margin", _RULE.margin))
        try:
            rule = replace(_RULE, **given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"model.posterior: {error}") from error
        names = {one.name for one in fields(cls)} - {"rule"}
        try:
            return cls(rule=rule, **{name: cfg[name] for name in names if name in cfg})
        except ValueError as error:
            raise ValueError(f"model.{error}") from error


@dataclass(frozen=True)
class _Posterior(PosteriorRule):
    margin: float = _RULE.margin  # not an option, as it is ``model.margin`` here


@dataclass(frozen=True)
class _FneOptions(_FneSettings):
    """Config keys of ``model`` that only FNE reads."""

    margin: float = option(
        _RULE.margin, "margin of the triplet loss and of the cut-down", source="FNE", low=0
    )
    posterior: _Posterior = option(
        _Posterior(beginning=_RULE.beginning),
        "how the posterior that a negative is false is estimated",
        source="FNE",
    )
    bert_config: str | None = option(
        None, "JSON of the text encoder's sizes; null: BERT-base's", path="library file"
    )


@dataclass
class _FneOutput(ModelOutput):
    """The output of a step.

    Attributes:
        loss: the sum of both directions (scalar).
        loss_i2t, loss_t2i: the means over the anchors that have a negative (scalars).
        negatives_i2t, negatives_t2i: ``(B,)`` ``loaded_index`` (or else ``image_id``) of the
            samples whose text or image was picked; -1 if none was picked.
    """

    loss: Tensor | None = None
    loss_i2t: Tensor | None = None
    loss_t2i: Tensor | None = None
    negatives_i2t: Tensor | None = None
    negatives_t2i: Tensor | None = None


@registry.register_model("fne_retrieval")
class FneRetrieval(MafaModel, BaseModel):
    """A ViT and a BERT whose averaged tokens are compared by cosine, without projection and fusion.

    After the plain epochs an anchor is compared with features of the momentum copies: of the
    mini-batches of all ranks, and of the pairs in the memory. One negative is drawn for every
    anchor and direction, never of the anchor's own image, and enters a triplet loss. The
    distributions of similarities are taken from the encoders themselves, as in FNE's code.

    There is no ITM head, so retrieval does not re-rank and ``run.k_test`` has no effect.

    Supported model types:
        - base: ViT-B/16 at 384 pixels and BERT, starting from DeiT's and BERT's weights like
          LAVIS's ALBEF (FNE: ViT of ImageNet-21k).
        - tiny: built only from its config, for small images and tests.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("fne_retrieval", "tiny")
    """

    model_options = _FneOptions
    family = "fne"
    trains_by_step = False
    can_judge = False
    PRETRAINED_MODEL_CONFIG_DICT = model_yamls("fne_retrieval", "base", "tiny")
    has_unused_parameters = False
    con_d = negatives_encoder = None
    momentum_encoders: Any = None

    def __init__(
        self,
        image_encoder: Any,
        text_encoder: Any,
        tokenizer: Any,
        max_txt_len: int = 30,
        settings: _FneSettings | None = None,
    ) -> None:
        super().__init__()
        width, text_width = image_encoder.vision_width, text_encoder.config.hidden_size
        if width != text_width:
            raise ValueError(
                f"images have width {width} and texts {text_width}: without projections both "
                "encoders need the same width"
            )
        self.tokenizer, self.max_txt_len = tokenizer, max_txt_len
        self.visual_encoder, self.text_encoder = image_encoder, text_encoder
        self.fne = settings or _FneSettings()
        self.backbone: Any = _DualBackbone(self)
        self.copies = _DualBackbone(self, "_m")
        self.momentum_encoders = MovingCopies(self, _PARTS, self.fne.momentum)
        self.memory = PairMemory(self.fne.memory_size, width)
        self.picker = PosteriorPicker(self.fne.rule)

    def allocate(self, size: int) -> None:
        """Do nothing, since no state depends on the number of samples."""

    @classmethod
    def from_config(cls, cfg: Any = None) -> FneRetrieval:
        """Build from a ``model`` config.

        The encoders start from ``vit_weights`` and ``bert_weights``, unless the config names a
        checkpoint of the whole model.

        Raises:
            OSError: if weights or a tokenizer must be downloaded and cannot be.
            ValueError: for invalid settings, or if a file of weights does not fit.
        """
        settings = _FneSettings.from_config(cfg)
        in_parts = not checkpoint_of(cfg)
        vit_weights = cfg.get("vit_weights") if in_parts else None
        tokenizer = build_tokenizer(cfg.get("tokenizer"))
        encoder = build_vit(cfg, from_pretrained=vit_weights == "published")
        if vit_weights not in (None, "published"):
            load_image_encoder(encoder, vit_weights)
        model = cls(
            image_encoder=encoder,
            text_encoder=_text_encoder(cfg, in_parts, tokenizer),
            tokenizer=tokenizer,
            max_txt_len=cfg.get("max_txt_len", 30),
            settings=settings,
        )
        model.load_and_share(cfg)
        return model

    def load_checkpoint(self, url_or_filename: str, content: dict[str, Any] | None = None) -> Any:
        """Load the weights of a checkpoint, but not its memory and distributions.

        Both depend on the data and step of the run that saved them, so only
        ``run.resume_ckpt_path`` restores them.
        """
        loaded = super().load_checkpoint(url_or_filename, content)
        self.memory.forget()
        self.picker.forget()
        return loaded

    def forward(self, samples: Mapping[str, Any]) -> Any:
        """Compute one step on a mini-batch and return an `_FneOutput`.

        Args:
            samples: ``image`` ``(B, 3, H, W)``, ``text_input`` (B captions), ``image_id`` ``(B,)``
                (at least 0, equal for captions of one image); optionally ``loaded_index`` ``(B,)``,
                `TOKENS` (the tokenised captions) and ``epoch`` (int). B must be the same on all
                ranks.

        Raises:
            ValueError: if there is no ``image_id``.
        """
        if "image_id" not in samples:
            raise ValueError(
                "samples need image_id (equal for captions of one image), or captions of the "
                "anchor's own image would be picked as negatives; runner_mafa gives it"
            )
        epoch = int(samples.get("epoch", 0))
        ranks = Ranks(together=True)
        images = self.backbone.encode_images(samples["image"]).features
        captions = captions_of(samples)
        texts = self.backbone.encode_texts(captions).features
        assert images is not None and texts is not None
        own = ranks.own(len(texts), texts.device)
        ids = torch.as_tensor(samples["image_id"], device=own.device)
        indices = torch.as_tensor(samples.get("loaded_index", ids), device=own.device)
        ids, indices = ranks.gather(torch.stack([ids, indices], dim=1)).unbind(dim=1)
        step = _Step(self, ranks, own, ids, indices, epoch)
        self.momentum_encoders.move()
        if epoch < self.fne.plain_epochs:
            return step.plain(images, texts)
        with torch.no_grad():
            copied_images = self.copies.encode_images(samples["image"]).features
            copied_texts = self.copies.encode_texts(captions).features
        assert copied_images is not None and copied_texts is not None
        copied_images, copied_texts = ranks.gather(copied_images), ranks.gather(copied_texts)
        output = step.with_memory(images, texts, copied_images, copied_texts)
        self.memory.remember(copied_images, copied_texts, ids, indices)
        return output

    def compute_sim_matrix(
        self, data_loader: Any, task_cfg: Any
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return cosine similarities ``(num_images, num_texts)`` and their transpose, float32."""
        length = task_cfg.get("retrieval_max_txt_len", MAX_TOKENS)
        return compute_sim_matrix(self.backbone, data_loader, k_test=0, max_tokens=length)


@dataclass
class _Step:
    """One step over the mini-batches of all ranks: C pairs, of which B are this rank's."""

    model: FneRetrieval
    ranks: Ranks
    own: Tensor
    ids: Tensor
    indices: Tensor
    epoch: int

    def plain(self, images: Tensor, texts: Tensor) -> _FneOutput:
        """Compute the loss with negatives from the mini-batch and gradients to both sides."""
        similarity = self.model.backbone.similarity
        sim_i2t = similarity(images, self.ranks.gather(texts, with_grad=True))
        sim_t2i = similarity(self.ranks.gather(images, with_grad=True), texts).t()
        excluded = self._of_one_image(self.ids)
        sims = sim_i2t.detach(), sim_t2i.detach()
        if self.model.fne.plain_negatives == "random":
            picked = [draw((~excluded).double(), sim, excluded) for sim in sims]
        else:
            picked = [hardest(sim, excluded) for sim in sims]
        return self._output(sim_i2t, sim_t2i, picked, self.indices)

    def with_memory(
        self, images: Tensor, texts: Tensor, copied_images: Tensor, copied_texts: Tensor
    ) -> _FneOutput:
        """Compute the loss with negatives from the momentum features of C pairs and from the
        memory."""
        model, memory = self.model, self.model.memory
        sim_i2t = model.backbone.similarity(images, torch.cat([copied_texts, memory.texts]))
        sim_t2i = model.backbone.similarity(torch.cat([copied_images, memory.images]), texts).t()
        excluded = self._of_one_image(torch.cat([self.ids, memory.image_ids]))
        excluded[:, len(self.ids) :] |= memory.empty
        if model.fne.negatives == "hardest":
            picked = [hardest(sim.detach(), excluded) for sim in (sim_i2t, sim_t2i)]
        else:
            self._observe(images, texts)
            picked = [
                model.picker.pick(sim.detach(), excluded, self._own(sim))
                for sim in (sim_i2t, sim_t2i)
            ]
        return self._output(sim_i2t, sim_t2i, picked, torch.cat([self.indices, memory.indices]))

    @torch.no_grad()
    def _observe(self, images: Tensor, texts: Tensor) -> None:
        similarity = self.model.backbone.similarity
        sim_i2t = similarity(images, self.ranks.gather(texts))
        sim_t2i = similarity(self.ranks.gather(images), texts).t()
        excluded = self._of_one_image(self.ids)
        self.model.picker.observe(sim_i2t, sim_t2i, excluded, self.own, self.epoch)

    def _of_one_image(self, ids: Tensor) -> Tensor:
        """Return which candidates show the anchor's own image: ``(B, N)`` bool."""
        return self.ids[self.own][:, None] == ids[None, :]

    def _own(self, sim: Tensor) -> Tensor:
        return sim.gather(1, self.own[:, None]).squeeze(1)

    def _output(
        self, sim_i2t: Tensor, sim_t2i: Tensor, picked: list[Tensor], indices: Tensor
    ) -> _FneOutput:
        losses = [
            self.ranks.mean(
                triplet_losses(self._own(sim), similarity_of(sim, one), self.model.fne.rule.margin)
            )
            for sim, one in zip((sim_i2t, sim_t2i), picked, strict=True)
        ]
        numbers = [torch.where(one == NONE, EMPTY, indices[one.clamp(min=0)]) for one in picked]
        return _FneOutput(losses[0] + losses[1], *losses, *numbers)


def _text_encoder(cfg: Any, in_parts: bool, tokenizer: Any) -> BertModel:
    path, weights = cfg.get("bert_config"), cfg.get("bert_weights")
    config = BertConfig.from_json_file(find_config(path)) if path else BertConfig()
    config.add_cross_attention = config.is_decoder = False
    if in_parts and weights:
        return from_hub(BertModel.from_pretrained, weights, config=config, add_pooling_layer=False)
    config.vocab_size = max(config.vocab_size, len(tokenizer))
    return BertModel(config, add_pooling_layer=False)


class _DualBackbone:
    """Driver of both encoders. There is no fusion, so it can neither match nor generate.

    Features are averages over all tokens of an image, and over the tokens of a caption except
    padding, normalised, without projection.

    Args:
        model: has ``visual_encoder``, ``text_encoder`` (both of one width), ``tokenizer`` and
            ``max_txt_len``.
        suffix: suffix of the encoders' names: ``_m`` drives the momentum copies.
    """

    def __init__(self, model: Any, suffix: str = "") -> None:
        fuse_attention(model)
        self.model, self.suffix = model, suffix

    def encode_images(
        self, images: Tensor, seen: Tensor | None = None, for_matching: bool = False
    ) -> Images:
        """Encode images ``(B, 3, H, W)``; ``embeds`` is the average token ``(B, 1, E)``."""
        if seen is None:
            seen = getattr(self.model, f"visual_encoder{self.suffix}").forward_features(images)
        average = seen.float().mean(dim=1)
        return Images(average[:, None], F.normalize(average, dim=-1), seen=seen)

    def encode_texts(
        self, captions: Captions, max_length: int | None = None, for_matching: bool = False
    ) -> Texts:
        """Tokenise and encode B captions, cut at ``max_length`` tokens (default: the model's)."""
        tokens = tokenize(self.model, captions, max_length)
        mask = tokens.attention_mask
        encoder = getattr(self.model, f"text_encoder{self.suffix}")
        hidden = encoder(tokens.input_ids, attention_mask=mask).last_hidden_state.float()
        # Unlike in FNE's code, padding is left out, so that features do not depend on other
        # captions.
        average = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return Texts(tokens.input_ids, mask, features=F.normalize(average, dim=-1))

    def similarity(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """Return cosine similarities ``(I, T)``, in float32."""
        with torch.autocast(image_features.device.type, enabled=False):
            return image_features.float() @ text_features.float().t()
