"""Class attributes of LAVIS's tasks, which we cannot edit.

Attributes of tasks:
    asks_of_model: method of the model that evaluation calls; None: no particular method.
    requires_k_test: whether ``run.k_test`` must be given for models that re-rank.
    run_options: settings class whose fields are further keys of ``run``.
Attributes of builders:
    splits: names of the splits that a run may evaluate.
Models have traits, see `lavis_mafa.compat.traits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis.common.registry import registry

_TASKS: Mapping[str, Mapping[str, Any]] = {
    "captioning": {"asks_of_model": "generate"},
    "vqa": {"asks_of_model": "predict_answers"},
    "gqa": {"asks_of_model": "predict_answers"},
    "aok_vqa": {"asks_of_model": None},
    "retrieval": {"requires_k_test": True},
    "multimodal_classification": {"asks_of_model": "predict"},
}


def declared(kind: str, name: Any, attribute: str, default: Any = None) -> Any:
    """Return an attribute that a registered class declares or inherits.

    Args:
        kind: ``task`` or ``builder``, a table of LAVIS's registry.
        name: the class's registered name.
    """
    known: Mapping[str, Any] = registry.mapping[f"{kind}_name_mapping"]
    cls = known.get(name) if isinstance(name, str) else None
    of_lavis = {known.get(one): values for one, values in _TASKS.items()} if kind == "task" else {}
    for base in () if cls is None else cls.__mro__:
        for values in (vars(base), of_lavis.get(base, {})):
            if attribute in values:
                return values[attribute]
    return default
