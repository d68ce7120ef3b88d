"""ALBEF for visual entailment, fine-tuned from a checkpoint of this package."""

from __future__ import annotations

from lavis.common.registry import registry
from lavis.models.albef_models.albef_classification import AlbefClassification

from lavis_mafa.downstream.albef_downstream import AlbefDownstream
from lavis_mafa.downstream.yamls import model_yamls


@registry.register_model("albef_ve_mafa")
class AlbefVeMafa(AlbefDownstream, AlbefClassification):
    """LAVIS's ``albef_classification``: classifies the relation of a sentence to a picture.

    An MLP on the fusion encoder's [CLS] predicts the class (ALBEF 4.2: three classes of SNLI-VE).

    Supported model types:
        - ve: ViT-B/16 at 384 px; by default with LAVIS's published weights for SNLI-VE.
        - tiny: built only from its config, for small images and tests.

    Usage:
        >>> from lavis_mafa import load_model
        >>> model = load_model("albef_ve_mafa", "tiny")
    """

    PRETRAINED_MODEL_CONFIG_DICT = model_yamls("albef_ve_mafa", "ve", "tiny")
    options = ("num_classes", "use_distill", "momentum", "alpha", "max_txt_len")
    heads = ("cls_head.",)
