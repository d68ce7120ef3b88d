"""BLIP-2's Q-Former (stage 1), trained by this package's step."""

from __future__ import annotations

import math
from typing import Any

from lavis.common.registry import registry
from lavis.models.blip2_models.blip2_qformer import Blip2Qformer

from lavis_mafa.algorithm.discriminator import Discriminator, NegativesEncoder
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.families.blip2_driver import Blip2Backbone, precision_of
from lavis_mafa.families.blip2_parts import PREFIX, SIZES, Blip2Parts, Parts
from lavis_mafa.families.feature_encoder import FeatureOptions
from lavis_mafa.families.mafa_model import MafaModel, checkpoint_of, step_parts
from lavis_mafa.io.project_files import model_yamls


@registry.register_model("blip2_mafa")
class Blip2Mafa(MafaModel, Blip2Parts, Blip2Qformer):
    """BLIP-2's stage 1 (ITC, ITM, LM) by `lavis_mafa.algorithm.step.run_step`.

    Its state dict has the keys of LAVIS's ``blip2``, and it generates captions and extracts
    features as that model does. In addition, it runs without a process group, on a CPU, and with
    mini-batches of one pair.

    Supported model types:
        - pretrain: EVA ViT-g, with LAVIS's published weights of stage 1.
        - pretrain_vitL: CLIP ViT-L, with LAVIS's published weights of stage 1.
        - coco: fine-tuned for retrieval on COCO, LAVIS's published weights.
        - tiny: random weights, no files needed, for small images and tests.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("blip2_mafa", "tiny")
    """

    temperature_range = -math.inf, math.inf  # LAVIS's BLIP-2 does not clamp it
    model_options = FeatureOptions
    PRETRAINED_MODEL_CONFIG_DICT = model_yamls(
        "blip2_mafa", "pretrain", "pretrain_vitL", "coco", "tiny"
    )

    def __init__(
        self,
        parts: Parts | None = None,
        settings: StepSettings | None = None,
        con_d: Discriminator | None = None,
        negatives_encoder: NegativesEncoder | None = None,
        **sizes: Any,
    ) -> None:
        """
        Args:
            parts: sources of the image encoder, the Q-Former and the tokenizer.
            settings: the settings of the step.
            con_d: the discriminator.
            negatives_encoder: the frozen model whose similarities pick hard negatives.
            sizes: LAVIS's arguments (``vit_model``, ``img_size``, ``freeze_vit``, ...).
        """
        self.parts = parts or Parts()
        Blip2Qformer.__init__(self, **sizes)
        self.attach_step(Blip2Backbone(self), settings, con_d, negatives_encoder)

    def generate(self, samples: Any, *args: Any, **options: Any) -> list[str]:
        """Generate captions as LAVIS's ``blip2``, also with an image encoder in fp16."""
        with precision_of(self.visual_encoder, samples["image"].device):
            captions: list[str] = super().generate(samples, *args, **options)
        return captions

    @classmethod
    def from_config(cls, cfg: Any = None) -> Blip2Mafa:
        """Build from a ``model`` config.

        The image encoder starts from ``vit_weights`` and the Q-Former from ``bert_weights``,
        whatever ``load_pretrained`` says, as in LAVIS; a checkpoint (``pretrained`` with
        ``load_pretrained``, ``finetuned`` with ``load_finetuned``) overrides both.

        Raises:
            OSError: if weights or a tokenizer must be downloaded and cannot be.
        """
        checkpoint = checkpoint_of(cfg)
        content = read_checkpoint(checkpoint) if checkpoint else {}
        model = cls(
            parts=Parts.from_config(cfg).without(content),
            img_size=cfg.get("image_size", 224),
            **{name: cfg[name] for name in (*SIZES, "embed_dim") if name in cfg},
            **step_parts(cfg),
        )
        model.load_and_share(cfg, content)
        model._report_random_encoder(cfg)
        return model

    def _after_loading(self, missing: list[str]) -> None:
        super()._after_loading(missing)
        if not any(name.startswith(PREFIX) for name in missing):
            self.random_parts = ()
