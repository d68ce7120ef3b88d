"""Give LAVIS's models a base class and a tokenizer with the methods that newer transformers
lack."""

from __future__ import annotations

import importlib
from typing import Any

# LAVIS's classes that derive from PreTrainedModel, by module.
_HEIRS = {
    "lavis.models.med": "BertPreTrainedModel",
    "lavis.models.blip2_models.Qformer": "BertPreTrainedModel",
    "lavis.models.blip_models.nlvr_encoder": "BertPreTrainedModel",
    "lavis.models.blip2_models.modeling_opt": "OPTPreTrainedModel",
    "lavis.models.blip2_models.modeling_t5": "T5PreTrainedModel",
}
# LAVIS's modules that load BERT's tokenizer.
_READERS = (
    "lavis.models.albef_models",
    "lavis.models.blip_models.blip",
    "lavis.models.blip2_models.blip2",
)


def adopt() -> None:
    """Replace the base class and the tokenizer of LAVIS's models after their import, if needed."""
    modeling_utils = importlib.import_module("transformers.modeling_utils")
    if hasattr(modeling_utils.PreTrainedModel, "get_head_mask"):
        return
    from lavis_mafa.compat.base_class import LavisPreTrainedModel
    from lavis_mafa.compat.lavis_tokenizers import LavisBertTokenizer

    for module, name in _HEIRS.items():
        heir: Any = getattr(importlib.import_module(module), name)
        if modeling_utils.PreTrainedModel in heir.__bases__:
            heir.__bases__ = (LavisPreTrainedModel,)
    for module in _READERS:
        importlib.import_module(module).BertTokenizer = LavisBertTokenizer  # type: ignore[attr-defined]
