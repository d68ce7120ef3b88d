"""The model card of an exported folder, written from what a run has recorded.

A card is public. Nothing is copied into it as a whole: numbers and plain names only, so that paths,
host names, captions and free texts have no way in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from lavis_mafa.export.hub_form import HubForm
from lavis_mafa.io.checkpoints import model_config
from lavis_mafa.io.files import is_number
from lavis_mafa.runners.run_log import LOG, read_json_lines

CARD = "README.md"
_TEMPLATE = Path(__file__).with_name("card_template.txt")
# What a registered name, a split or a metric may look like; a path or an address does not.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,39}")
_LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,39}")
_BEST = "best"  # epoch of an evaluation of the best checkpoint
_PAPERS = {
    "mafa": "Byun et al., MAFA: Managing False Negatives for Vision-Language Pre-training, "
    "CVPR 2024, arXiv:2312.06112",
    "grit": "Byun et al., GRIT-VLP: Grouped Mini-batch Sampling for Efficient Vision and Language "
    "Pre-training, ECCV 2022, arXiv:2208.04060",
    "blip": "Li et al., BLIP: Bootstrapping Language-Image Pre-training for Unified "
    "Vision-Language Understanding and Generation, ICML 2022, arXiv:2201.12086",
    "blip2": "Li et al., BLIP-2: Bootstrapping Language-Image Pre-training with Frozen Image "
    "Encoders and Large Language Models, ICML 2023, arXiv:2301.12597",
    "lavis": "Li et al., LAVIS: A One-stop Library for Language-Vision Intelligence, ACL 2023, "
    "arXiv:2209.09019",
}


@dataclass(frozen=True)
class _RunFacts:
    """What a card says of the run that trained a model.

    Attributes:
        config: recorded in the checkpoint.
        data: numbers of ``samples`` and ``images``.
        step: mini-batches trained.
        evaluations: figures of the last evaluation, by split.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def facts_of(content: Mapping[str, Any], checkpoint: str) -> _RunFacts:
    """Collect what a checkpoint has recorded, and the log if it lies in the folder of a run."""
    config, run = _mapping(content.get("config")), _mapping(content.get("run"))
    evaluations: dict[str, dict[str, Any]] = {}
    for record in read_json_lines(Path(checkpoint).parent / LOG):
        if record.get("kind") == "eval" and _is_of(record.get("epoch"), run, checkpoint):
            evaluations[str(record.get("split"))] = record
    step = run.get("global_step")
    steps = step if isinstance(step, int) else None
    return _RunFacts(config, _mapping(run.get("data")), steps, evaluations)


def _is_of(epoch: Any, run: Mapping[str, Any], checkpoint: str) -> bool:
    """Return whether an evaluation is not of a later epoch, or of the best checkpoint if it is
    another."""
    if isinstance(epoch, int):
        following = run.get("epoch")  # of the checkpoint, in which it resumes
        return not isinstance(following, int) or epoch < following
    return epoch != _BEST or Path(checkpoint).stem.endswith(_BEST)


def model_card(form: type[HubForm], facts: _RunFacts, note: str, licence: str | None = None) -> str:
    """Return the text of a model card, with front matter in YAML.

    Args:
        form: of the exported model.
        facts: see `facts_of`.
        note: how the exported model is used like LAVIS's; empty if there is nothing to know.
        licence: its identifier on the hub, such as ``bsd-3-clause``; None: unknown.

    Raises:
        ValueError: if ``licence`` does not look like an identifier.
    """
    from huggingface_hub import ModelCardData

    if licence is not None and not _LICENCE.fullmatch(licence):
        raise ValueError(f"--license {licence!r}: expected an identifier such as bsd-3-clause")
    front = ModelCardData(
        license=(licence or "unknown").lower(),
        library_name="transformers",
        pipeline_tag="image-to-text" if form.generation else "feature-extraction",
        tags=["vision-language", form.family, "lavis", "mafa"],
    )
    model = model_config({"config": facts.config})
    mafa = _mapping(model.get("mafa"))
    grit = _mapping(_mapping(facts.config.get("run")).get("grit"))
    papers = ["mafa", *(["grit"] if grit.get("enabled") is True else []), form.family, "lavis"]
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        front=front.to_yaml(),
        form=form,
        note=note,
        arch=_name(model.get("arch")),
        model_type=_name(model.get("model_type")),
        step=facts.step,
        datasets=list(filter(None, map(_name, _mapping(facts.config.get("datasets"))))),
        samples=_number(facts.data.get("samples")),
        images=_number(facts.data.get("images")),
        con_d=_name(_mapping(mafa.get("con_d")).get("arch")),
        metrics=[
            (_name(split) or "another", f"`{name}`", f"{value:.4g}")
            for split, figures in facts.evaluations.items()
            for name, value in figures.items()
            if name not in ("time", "epoch", "kind", "split") and _name(name) and is_number(value)
        ],
        licence=licence,
        papers=[_PAPERS[paper] for paper in papers],
    )


def _number(value: Any) -> Any:
    return value if is_number(value) else None


def _name(value: Any) -> str | None:
    """Return a value that is a plain name."""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
