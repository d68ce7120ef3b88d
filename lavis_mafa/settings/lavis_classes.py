"""Class attributes of LAVIS's tasks and builders, which we cannot edit.

Attributes of tasks:
    asks_of_model: method of the model that evaluation calls; None: no particular method.
    needs: what its samples must contain in addition to images, see `holds`.
    requires_k_test: whether ``run.k_test`` must be given for models that re-rank.
    run_options: settings class whose fields are further keys of ``run``.
    reads_texts: whether evaluation reads texts that a text processor must process.
Attributes of builders:
    holds: what samples contain in addition to images: ``captions``, ``questions``, ``labels`` or
        ``boxes``.
    num_classes: number of classes of the labels.
    images_per_sample: 2 if a sample has two images.
Models have traits, see `lavis_mafa.compat.traits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis.common.registry import registry

_NLVR = {"holds": "labels", "num_classes": 2, "images_per_sample": 2}
LAVIS_CLASSES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "task": {
        "captioning": {"asks_of_model": "generate", "reads_texts": False},
        "vqa": {"asks_of_model": "predict_answers"},
        "gqa": {"asks_of_model": "predict_answers"},
        "aok_vqa": {"asks_of_model": None},
        "retrieval": {"requires_k_test": True},
        "multimodal_classification": {"asks_of_model": "predict"},
    },
    "builder": {
        **dict.fromkeys(("coco_vqa", "vg_vqa", "ok_vqa", "aok_vqa", "gqa"), {"holds": "questions"}),
        "snli_ve": {"holds": "labels", "num_classes": 3},
        "nlvr": _NLVR,
        **dict.fromkeys(
            ("coco_caption", "vg_caption", "sbu_caption", "coco_retrieval", "flickr30k")
            + ("conceptual_caption_3m", "conceptual_caption_12m", "nocaps"),
            {"holds": "captions"},
        ),
    },
}


def declared(kind: str, name: Any, attribute: str, default: Any = None) -> Any:
    """Return an attribute that a registered class declares or inherits.

    Args:
        kind: ``task`` or ``builder``, a table of LAVIS's registry.
        name: the class's registered name.
    """
    known: Mapping[str, Any] = registry.mapping[f"{kind}_name_mapping"]
    cls = known.get(name) if isinstance(name, str) else None
    table = {known.get(one): values for one, values in LAVIS_CLASSES[kind].items()}
    for base in () if cls is None else cls.__mro__:
        for values in (vars(base), table.get(base, {})):
            if attribute in values:
                return values[attribute]
    return default
