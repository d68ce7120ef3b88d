"""The model card of an exported folder, written from what a run has recorded.

A card is public. Nothing is copied into it as a whole: numbers and plain names only, so that paths,
host names, captions and free texts have no way in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lavis_mafa.algorithm.grit import GritSettings
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.export.hub_form import HubForm
from lavis_mafa.io.checkpoints import model_config
from lavis_mafa.io.files import flat, is_number
from lavis_mafa.runners.con_d_check import RECORD as SELF_CHECK
from lavis_mafa.runners.run_log import LOG, read_json_lines

CARD = "README.md"
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
class RunFacts:
    """What a card says of the run that trained a model.

    Attributes:
        config: recorded in the checkpoint.
        data: numbers of ``samples`` and ``images``.
        step: mini-batches trained.
        self_check: the figures of Con-D's self-check; {} if there are none.
        evaluations: figures of the last evaluation, by split.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    self_check: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def facts_of(content: Mapping[str, Any], checkpoint: str) -> RunFacts:
    """Collect what a checkpoint has recorded, and the log if it lies in the folder of a run."""
    config, run = _mapping(content.get("config")), _mapping(content.get("run"))
    check: dict[str, Any] = {}
    evaluations: dict[str, dict[str, Any]] = {}
    for record in read_json_lines(Path(checkpoint).parent / LOG):
        if record.get("kind") == SELF_CHECK:
            check = record
        elif record.get("kind") == "eval" and _is_of(record.get("epoch"), run, checkpoint):
            evaluations[str(record.get("split"))] = record
    step = run.get("global_step")
    steps = step if isinstance(step, int) else None
    return RunFacts(config, _mapping(run.get("data")), steps, check, evaluations)


def _is_of(epoch: Any, run: Mapping[str, Any], checkpoint: str) -> bool:
    """Return whether an evaluation is not of a later epoch, or of the best checkpoint if it is
    another."""
    if isinstance(epoch, int):
        following = run.get("epoch")  # of the checkpoint, in which it resumes
        return not isinstance(following, int) or epoch < following
    return epoch != _BEST or Path(checkpoint).stem.endswith(_BEST)


def model_card(form: type[HubForm], facts: RunFacts, note: str, licence: str | None = None) -> str:
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
    grit = _mapping(_mapping(facts.config.get("run")).get("grit"))
    name = form.class_name
    use = [
        f"from transformers import AutoProcessor, {name}\n",
        'processor = AutoProcessor.from_pretrained("FOLDER_OR_NAME")',
        f'model = {name}.from_pretrained("FOLDER_OR_NAME")',
        *([f"# {note.replace('`', chr(39))}"] if note else []),  # a ` would end the block
    ]
    papers = ["mafa", *(["grit"] if grit.get("enabled") is True else []), form.family, "lavis"]
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {form.names.title} trained with lavis_mafa",
        "\n".join(["```python", *use, "```"]),
        *_training(model, facts),
        *_settings(model, grit),
        *_con_d(model, facts.self_check),
        *_metrics(facts.evaluations),
        f"## Licence\n\n{licence or 'Not stated.'}",
        "## References\n\n" + "\n".join(f"- {_PAPERS[paper]}" for paper in papers),
    ]
    return "\n\n".join(parts) + "\n"


def _training(model: Mapping[str, Any], facts: RunFacts) -> Iterator[str]:
    arch, model_type = _name(model.get("arch")), _name(model.get("model_type"))
    if arch:
        kind = f", model type `{model_type}`" if model_type else ""
        steps = f", {facts.step:,} steps" if facts.step is not None else ""
        yield f"Model `{arch}`{kind}{steps}. Library: lavis_mafa, a plugin for LAVIS."
    names = filter(None, map(_name, _mapping(facts.config.get("datasets"))))
    samples, images = facts.data.get("samples"), facts.data.get("images")
    of = ", ".join(f"`{name}`" for name in names)
    if of or is_number(samples):
        counts = f": {samples:,} pairs" if is_number(samples) else ""
        counts += f" of {images:,} images" if counts and is_number(images) else ""
        yield f"## Training data\n\n{of or 'not recorded'}{counts}."


def _settings(model: Mapping[str, Any], grit: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for path, given, settings in (
        ("model.mafa", _mapping(model.get("mafa")), StepSettings()),
        ("run.grit", grit, GritSettings()),
    ):
        default = dict(flat(asdict(settings)))
        for key, value in flat(given):
            plain = isinstance(value, bool) or is_number(value) or _name(value)
            if plain and key in default and value != default[key]:
                rows.append((f"`{path}.{key}`", str(value)))
    if rows:
        table = _table(("setting", "value"), rows)
        yield f"## Settings that differ from the defaults\n\n{table}"


def _con_d(model: Mapping[str, Any], check: Mapping[str, Any]) -> Iterator[str]:
    arch = _name(_mapping(_mapping(model.get("mafa")).get("con_d")).get("arch"))
    if arch:
        auc = check.get("auc")
        told = f" Before training its AUC was {auc:.3f}." if is_number(auc) else ""
        yield (
            "## Con-D\n\nFalse negatives were found by a connection discriminator (Con-D): "
            f"`{arch}`.{told}"
        )


def _metrics(evaluations: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        (_name(split) or "another", f"`{name}`", f"{value:.4g}")
        for split, figures in evaluations.items()
        for name, value in figures.items()
        if name not in ("time", "epoch", "kind", "split")
        and _name(name)
        and is_number(value)
        and math.isfinite(value)
    ]
    if rows:
        yield f"## Evaluation\n\n{_table(('split', 'metric', 'value'), rows)}"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '') for cell in row)} |" for row in lines)


def _name(value: Any) -> str | None:
    """Return a value that is a plain name."""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
