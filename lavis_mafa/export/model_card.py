"""The model card of an exported folder, written from what a run has recorded.

A card is public. Nothing is copied into it as a whole: settings only where their permitted values
are known, names only if they look like names, and otherwise numbers. Paths, host names, captions
and free texts have no way in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from lavis_mafa.config.key import UNSET, Keys, keys_in, kind_of
from lavis_mafa.config.registered import mafa_key, run_key
from lavis_mafa.export.hub_form import HubForm
from lavis_mafa.io.checkpoints import model_config
from lavis_mafa.io.files import is_number
from lavis_mafa.problems import Registered
from lavis_mafa.runners.con_d_check import RECORD as SELF_CHECK
from lavis_mafa.runners.run_log import LOG, read_json_lines

CARD = "README.md"
UNKNOWN_LICENCE = "unknown"
# What a registered name, a split or a metric may look like; a path or an address does not.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,39}")
LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,39}")
BEST = "best"  # epoch of an evaluation of the best checkpoint

PAPERS = {
    "mafa": (
        "byun2024mafa",
        "MAFA: Managing False Negatives for Vision-Language Pre-training",
        "Byun, Jaeseok and Kim, Dohoon and Moon, Taesup",
        "IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)",
        2024,
    ),
    "grit": (
        "byun2022gritvlp",
        "GRIT-VLP: Grouped Mini-batch Sampling for Efficient Vision and Language Pre-training",
        "Byun, Jaeseok and Hwang, Taebaek and Fu, Jianlong and Moon, Taesup",
        "European Conference on Computer Vision (ECCV)",
        2022,
    ),
    "blip": (
        "li2022blip",
        "BLIP: Bootstrapping Language-Image Pre-training for Unified Vision-Language "
        "Understanding and Generation",
        "Li, Junnan and Li, Dongxu and Xiong, Caiming and Hoi, Steven",
        "International Conference on Machine Learning (ICML)",
        2022,
    ),
    "blip2": (
        "li2023blip2",
        "BLIP-2: Bootstrapping Language-Image Pre-training with Frozen Image Encoders and Large "
        "Language Models",
        "Li, Junnan and Li, Dongxu and Savarese, Silvio and Hoi, Steven",
        "International Conference on Machine Learning (ICML)",
        2023,
    ),
    "lavis": (
        "li2023lavis",
        "LAVIS: A One-stop Library for Language-Vision Intelligence",
        "Li, Dongxu and Li, Junnan and Le, Hung and Wang, Guangsen and Savarese, Silvio and Hoi, "
        "Steven C. H.",
        "Annual Meeting of the Association for Computational Linguistics: System Demonstrations",
        2023,
    ),
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

    @property
    def model(self) -> dict[str, Any]:
        """The ``model`` section of the config."""
        return model_config({"config": self.config})

    @property
    def grit(self) -> dict[str, Any]:
        """The section ``run.grit``."""
        return _mapping(_mapping(self.config.get("run")).get("grit"))


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
    return epoch != BEST or Path(checkpoint).stem.endswith(BEST)


def model_card(form: HubForm, facts: RunFacts, licence: str | None = None) -> str:
    """Return the text of a model card, with front matter in YAML.

    Args:
        form: of the exported model.
        facts: see `facts_of`.
        licence: its identifier on the hub, such as ``bsd-3-clause``; None: unknown.

    Raises:
        ValueError: if ``licence`` does not look like an identifier.
    """
    from huggingface_hub import ModelCardData

    if licence is not None and not LICENCE.fullmatch(licence):
        raise ValueError(f"--license {licence!r}: expected an identifier such as bsd-3-clause")
    front = ModelCardData(
        license=(licence or UNKNOWN_LICENCE).lower(),
        library_name="transformers",
        pipeline_tag="image-to-text" if form.generates else "feature-extraction",
        tags=["vision-language", form.family, "lavis", "mafa"],
    )
    title = f"{form.names.title} trained with lavis_mafa"
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {title}",
        _use(form),
        *_base(facts),
        *_data(facts),
        *_settings(facts),
        *_con_d(facts),
        *_metrics(facts),
        f"## Licence\n\n{licence or 'Not stated.'}",
        _citation(form, bool(facts.grit.get("enabled", False))),
    ]
    return "\n\n".join(parts) + "\n"


def _use(form: HubForm) -> str:
    note = form.note().replace("`", "'")  # which would end the block
    lines = [
        "from transformers import AutoProcessor, " + form.class_name,
        "",
        'processor = AutoProcessor.from_pretrained("FOLDER_OR_NAME")',
        f'model = {form.class_name}.from_pretrained("FOLDER_OR_NAME")',
        *([f"# {note}"] if note else []),
    ]
    return "\n".join(["```python", *lines, "```"])


def _base(facts: RunFacts) -> Iterator[str]:
    model = facts.model
    arch, model_type = _name(model.get("arch")), _name(model.get("model_type"))
    if arch:
        kind = f", model type `{model_type}`" if model_type else ""
        steps = f", {facts.step:,} steps" if facts.step is not None else ""
        size = model.get("image_size")
        image = f", images of {size} px" if is_number(size) else ""
        yield f"Model `{arch}`{kind}{image}{steps}. Library: lavis_mafa, a plugin for LAVIS."


def _data(facts: RunFacts) -> Iterator[str]:
    names = [name for name in map(_name, _mapping(facts.config.get("datasets"))) if name]
    samples, images = facts.data.get("samples"), facts.data.get("images")
    if not names and not is_number(samples):
        return
    of = ", ".join(f"`{name}`" for name in names) or "not recorded"
    counts = f": {samples:,} pairs" if is_number(samples) else ""
    counts += f" of {images:,} images" if counts and is_number(images) else ""
    yield f"## Training data\n\n{of}{counts}."


def _settings(facts: RunFacts) -> Iterator[str]:
    grit = keys_in(run_key({"grit": facts.grit}))["grit"]
    rows = [
        *_changed("model.mafa", _mapping(facts.model.get("mafa")), keys_in(mafa_key())),
        *_changed("run.grit", facts.grit, keys_in(grit)),
    ]
    if rows:
        table = _table(("setting", "value"), rows)
        yield f"## Settings that differ from the defaults\n\n{table}"


def _changed(path: str, given: Mapping[str, Any], keys: Keys) -> Iterator[tuple[str, str]]:
    """Yield the settings that differ from their defaults and that are no free texts."""
    for name, value in given.items():
        key = keys.get(name)
        if key is None:
            continue
        if keys_in(key):
            yield from _changed(f"{path}.{name}", _mapping(value), keys_in(key))
        elif value != key.default and key.default is not UNSET or path.endswith("con_d"):
            text = _shown(value, key)
            if text:
                yield f"`{path}.{name}`", text


def _shown(value: Any, key: FieldInfo) -> str | None:
    """Return a setting's value as text; None if it could be anything."""
    if isinstance(value, bool) or is_number(value):
        return str(value)
    option, items = kind_of(key).option, kind_of(key).items
    if isinstance(value, str) and not option.path:
        any_name = isinstance(option.choices, Registered) and _name(value)
        return value if any_name or value in (*option.choices, *option.words) else None
    if isinstance(value, list) and items is not None and value:
        texts = [_shown(one, items) for one in value]
        return ", ".join(map(str, texts)) if all(texts) else None
    return None


def _con_d(facts: RunFacts) -> Iterator[str]:
    arch = _name(_mapping(_mapping(facts.model.get("mafa")).get("con_d")).get("arch"))
    if not arch:
        return
    lines = [f"False negatives were found by a connection discriminator (Con-D): `{arch}`."]
    check = facts.self_check
    if is_number(check.get("auc")):
        lines.append(
            f"Before training it told own from random pairs of the training data with an AUC of "
            f"{check['auc']:.3f} ({check.get('pairs', 0):,} of each)."
            if is_number(check.get("pairs", 0))
            else f"Its self-check before training: AUC {check['auc']:.3f}."
        )
        above = check.get("above")
        rows = [
            (f"{one['threshold']:g}", f"{one['own']:.1%}", f"{one['random']:.1%}")
            for one in (above if isinstance(above, list) else [])
            if isinstance(one, dict)
            and all(is_number(one.get(name)) for name in ("threshold", "own", "random"))
        ]
        if rows:
            header = ("threshold", "own pairs above", "random pairs above")
            lines += ["", _table(header, rows)]
    yield "## Con-D\n\n" + "\n".join(lines)


def _metrics(facts: RunFacts) -> Iterator[str]:
    rows = []
    for split, figures in facts.evaluations.items():
        for name, value in figures.items():
            counted = name not in ("time", "epoch", "kind", "split")
            if counted and _name(name) and is_number(value) and math.isfinite(value):
                rows.append((_name(split) or "another", f"`{name}`", f"{value:.4g}"))
    if rows:
        yield f"## Evaluation\n\n{_table(('split', 'metric', 'value'), rows)}"


def _citation(form: HubForm, grit: bool) -> str:
    names = ["mafa", *(["grit"] if grit else []), form.family, "lavis"]
    entries = []
    for name in names:
        label, title, authors, place, year = PAPERS[name]
        entries.append(
            f"@inproceedings{{{label},\n  title = {{{title}}},\n  author = {{{authors}}},\n"
            f"  booktitle = {{{place}}},\n  year = {{{year}}}\n}}"
        )
    text = "\n".join(entries)
    return f"## Citation\n\n```bibtex\n{text}\n```"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '') for cell in row)} |" for row in lines)


def _name(value: Any) -> str | None:
    """Return a value that is a plain name."""
    return value if isinstance(value, str) and NAME.fullmatch(value) else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
