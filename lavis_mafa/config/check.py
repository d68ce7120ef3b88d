"""Check a config against the models of its keys, and collect every problem.

`validated` has no rule for any particular key. `check_together` checks constraints between keys,
such as device and precision, or image size and patch size.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import lavis.common.optims  # noqa: F401  registers the learning rate schedules
import lavis.runners  # noqa: F401  registers the runners
import torch
from lavis.common.registry import registry
from lavis.models.base_model import SharedQueueMixin
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from lavis_mafa.config.key import (
    UNSET,
    Keys,
    Section,
    describe,
    keys_in,
    kind_of,
    known_keys,
    option_of,
    section,
)
from lavis_mafa.io.checkpoints import read_config
from lavis_mafa.models.parts.vit import problem_of_stem
from lavis_mafa.models.traits import Traits, traits_of
from lavis_mafa.problems import ConfigView, Problem, Registered

CLOSE = 0.6  # names at least this similar are suggested
VERY_CLOSE = 0.75  # the same for short names, and for keys of another section
# What is missing, of kinds of paths whose name does not say it.
MISSING = {
    "path or name": "path",
    "checkpoint": "file, folder or URL",
    "checkpoint or timm name": "file, folder, URL or timm/NAME",
}
OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def suggest(word: str, names: Collection[str]) -> str:
    """Suggest the name most similar to ``word``; list all names if none is similar enough."""
    if not names:
        return "none is known"
    best = max(sorted(names), key=lambda name: _alike(word, name))
    if _alike(word, best) >= CLOSE:
        return f"did you mean {best}?"
    return f"known: {', '.join(sorted(names))}"


# A misspelt key is compared with every known key, several times over.
@functools.lru_cache(maxsize=8192)
def _alike(a: str, b: str) -> float:
    a, b = (name.lower().replace("-", "_") for name in (a, b))
    alike = SequenceMatcher(None, a, b).ratio()
    swapped = a != b and sorted(a) == sorted(b)  # SequenceMatcher ranks lm above lmi for lim
    return max(alike, 0.9) if swapped else alike


class Report:
    """Collect the problems and notes found in a config.

    Args:
        keys: all keys of this config; suggestions for misspelt keys are taken from them.
        active: conditions under which keys are required, see `Option.needed`, and names of the
            run's task, most specific first, see `Option.by_task`.
        machine: also check files and devices of this machine.

    Attributes:
        problems: lines ``key: what is wrong and how to fix it``.
        notes: warnings about a config that works nevertheless.
        bad: keys with a problem already reported, which later checks skip.
    """

    def __init__(
        self, keys: Keys, active: Collection[str] = ("always",), machine: bool = True
    ) -> None:
        self.keys, self.active, self.machine = keys, active, machine
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.bad: set[str] = set()
        self.suggested: set[str] = set()

    def add(self, path: str, message: str) -> None:
        self.problems.append(f"{path}: {message}")
        self.bad.add(path)

    def note(self, path: str, message: str) -> None:
        self.notes.append(f"{path}: {message}")

    def missing(self, path: str, message: str) -> None:
        """Report a missing key, unless it was given but wrong or misspelt."""
        if path not in self.bad | self.suggested:
            self.add(path, f"missing; {message}")

    def unknown(self, path: str) -> None:
        """Report an unknown key, with the keys it may be a misspelling of."""
        best = self.nearest(path)
        if not best:
            self.add(path, "unknown key; remove it (docs/config.md lists all keys)")
            return
        self.suggested.update(best)
        self.add(path, f"unknown key; did you mean {' or '.join(best)}?")

    def nearest(self, path: str) -> list[str]:
        """Return the known keys that ``path`` may be a misspelling of: those most similar to it."""
        *parents, leaf = path.split(".")
        keys = dict(known_keys(self.keys))
        # The key's part of a config: `run`, `model` or one data set.
        part = parents[: 2 if parents[:1] == ["datasets"] else 1]

        def alike(known: str) -> float:
            name = known.rsplit(".", 1)[-1]
            return 1.0 if leaf in option_of(keys[known]).also else _alike(leaf, name)

        def likely(known: str) -> bool:
            above = known.split(".")[:-1]
            if above[: len(part)] != part:
                # A key written in a wrong part; those of `build_info` are the builder's own.
                return alike(known) == 1.0 and "build_info" not in parents
            same_section = above == parents and len(leaf) > 4
            return alike(known) >= (CLOSE if same_section else VERY_CLOSE)

        def near(known: str) -> float:
            above = known.split(".")[:-1]
            shared = len(os.path.commonprefix([parents, above]))
            # Among equally similar names the same section wins, then the nearest, then the
            # shortest.
            return alike(known) + 0.1 * (above == parents) + 0.03 * shared - 0.01 * len(above)

        scores = {known: near(known) for known in sorted(keys) if likely(known)}
        most = max(scores.values(), default=0.0)
        return [known for known, score in scores.items() if score > most - 1e-9][:3]


def validated(
    given: Mapping[str, Any], report: Report, shipped: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a config with all defaults and with numeric strings read as numbers.

    Every problem goes into the report; the value of a wrong key is returned as given, and an
    unknown key is left out.

    Args:
        shipped: values of default YAMLs; keys that have them are not checked.
    """
    kept, model = copy.deepcopy(dict(given)), section(report.keys)
    try:
        found = model.model_validate(given, context=report)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            where = one["loc"]
            path = ".".join(str(part) for part in where if isinstance(part, str))
            _remove(kept, where)
            known = key_at(report.keys, where)
            value = value_at(given, where)
            if known is None or one["type"] in ("extra_forbidden", "invalid_key"):
                report.unknown(".".join(map(str, where)))
            elif not _is_same(value, value_at(shipped, where)):
                path += "".join(f"[{part}]" for part in where if isinstance(part, int))
                report.add(path, _message(one["type"], value, known))
        found = model.model_validate(kept, context=report)
    return _completed(found, given, kept, shipped, "", report)


def _remove(config: Any, where: Sequence[Any]) -> None:
    """Remove a key, or the whole list of an item."""
    for i, name in enumerate(where):
        if i + 1 == len(where) or isinstance(where[i + 1], int):
            config.pop(name, None)
            return
        config = config.get(name, {})


def key_at(keys: Keys, where: Sequence[Any]) -> FieldInfo | None:
    """Return the key at a path, or that of the items of a list or mapping; None if unknown."""
    found = None
    for name in where:
        inner = None if found is None else kind_of(found)
        found = inner.items if inner and inner.keys is None else keys.get(name)
        if found is None:
            return None
        keys = keys_in(found)
    return found


def value_at(config: Any, where: Sequence[Any]) -> Any:
    """Return a value of a config; `UNSET` if there is none."""
    for name in where:
        try:
            config = config[name]
        except (LookupError, TypeError):
            return UNSET
    return config


def _is_same(value: Any, shipped: Any) -> bool:
    # The type as well: True == 1 in Python.
    return shipped is not UNSET and type(value) is type(shipped) and value == shipped


def _message(error: str, value: Any, key: FieldInfo) -> str:
    """Return what was given and what is expected, for pydantic's type of an error."""
    expected, option = describe(key), option_of(key)
    if value is None or (isinstance(value, str) and not value.strip()):
        return f"is empty; expected {expected}"
    if value == "???":
        return f"is marked as missing (???); expected {expected}"
    if error in OUT_OF_RANGE:
        return f"{value!r} is out of range; expected {expected}"
    if error == "path":
        return f"no such {MISSING.get(option.path, option.path)}: {value!r}"
    if error == "npy":
        return f"{value!r} is not an index file; expected a path that ends in .npy"
    if error == "choice" and isinstance(option.choices, Registered):
        kind = option.choices.table.replace("_", " ")
        return f"no {kind} {value!r} is registered; {suggest(value, option.choices)}"
    if error == "choice":
        return f"{value!r} is not {expected}; {suggest(value, option.choices)}"
    hints = {"list": f", such as [{value}]", "bool": ", written without quotes"}
    hint = hints.get(kind_of(key).name, "") if isinstance(value, str) else ""
    return f"{value!r} is not {expected}{hint}"


def _completed(
    found: Section, given: Any, kept: Any, shipped: Any, path: str, report: Report
) -> dict[str, Any]:
    """Return a validated section as plain data: the given keys in their order, then defaults."""
    keys, out = found.keys, {}
    values = {**(found.__pydantic_extra__ or {})}
    values |= {str(one.alias): getattr(found, n) for n, one in type(found).model_fields.items()}
    for name, raw in given.items():
        where, below = f"{path}{name}", shipped.get(name, UNSET)
        if name not in kept:  # wrong or unknown
            out.update({name: raw} if name in keys else {})
        elif isinstance(values[name], Section):
            below = below if isinstance(below, dict) else {}
            out[name] = _completed(values[name], raw, kept[name], below, f"{where}.", report)
        else:
            out[name] = raw if _is_same(raw, below) else values[name]
            if isinstance(raw, str) and isinstance(out[name], int | float):
                report.note(where, f"the string {raw!r} is read as the number {out[name]}")
    for name, key in keys.items():
        if name in given:
            continue
        option, kind = option_of(key), kind_of(key)
        needed = ("always",) if option.needed is True else option.needed or ()
        if set(report.active).intersection(needed):
            report.missing(f"{path}{name}", f"expected {describe(key)} ({key.description})")
        by_task = [option.by_task[one] for one in report.active if one in option.by_task]
        default = by_task[0] if by_task else key.default
        if default is not UNSET:
            out[name] = copy.deepcopy(default)
        if kind.keys is not None and isinstance(default, dict):
            empty = section(kind.keys).model_construct()
            out[name] = _completed(empty, {}, {}, {}, f"{path}{name}.", report)
    return out


class Settings(ConfigView):
    """A checked config, with the problems found so far."""

    def __init__(self, config: Mapping[str, Any], report: Report, section: str = "") -> None:
        super().__init__(config, report.bad, section, report.machine)
        self.report = report

    @property
    def traits(self) -> Traits:
        """Traits of ``model.arch``; those of an unknown model if it is missing or wrong."""
        return traits_of(self["model.arch"] or "")


def ask_class(cls: Any, section: str, config: Mapping[str, Any], report: Report) -> None:
    """Report the problems that a class finds in a config; see `lavis_mafa.problems`.

    Args:
        section: where the config names the class: ``run``, ``model`` or ``datasets.NAME``.
    """
    problems_of = getattr(cls, "problems_of", None)
    for problem in problems_of(Settings(config, report, section)) if problems_of else ():
        key, message, is_note, is_missing = Problem(*problem)
        add = report.note if is_note else report.missing if is_missing else report.add
        add(key, message)


def check_together(config: Mapping[str, Any], report: Report) -> None:
    """Check constraints between keys, after single keys are checked and filled."""
    settings = Settings(config, report)
    _check_device(settings, report)
    _check_grit(settings, report)
    ask_class(_runner_of(settings), "run", config, report)
    _check_compile(settings, report)
    _check_cached_batch(settings, report)
    _check_sizes(settings, report)
    ask_class(registry.get_model_class(settings["model.arch"] or ""), "model", config, report)


def _runner_of(s: Settings) -> Any:
    return registry.get_runner_class(s["run.runner"] or "runner_mafa")


def _check_device(s: Settings, report: Report) -> None:
    if s["run.device"] == "cuda" and report.machine and not torch.cuda.is_available():
        report.add("run.device", "cuda is not available on this machine; use run.device: cpu")
    if s["run.device"] == "cpu" and s["run.amp"] and s["run.amp_dtype"] == "fp16":
        report.add(
            "run.amp", "fp16 is not supported on cpu; use run.amp_dtype: bf16 or run.amp: False"
        )
    if s["model.vit_precision"] == "fp16" and s["model.freeze_vit"] is False:
        report.add(
            "model.vit_precision",
            "fp16 requires a frozen ViT; to train it use fp32 with run.amp: True",
        )
    if s["run.device"] == "cpu" and s["model.vit_precision"] == "fp16":
        if s.traits.loads_with_our_loader:
            report.note("model.vit_precision", "fp16 is not supported on cpu; fp32 is used")
        else:
            report.add("model.vit_precision", "fp16 is not supported on cpu; use fp32")


def _check_grit(s: Settings, report: Report) -> None:
    """Check that the model provides features for grouping and that the runner supports it."""
    if not s.training or not s["run.grit.enabled"]:
        return
    if s["model.arch"] and not s.traits.trains_by_step:
        why = f"is True, but {s['model.arch']} provides no features for grouping; set it to False"
        report.add("run.grit.enabled", why)
    runner = _runner_of(s)
    if runner and not getattr(runner, "groups_mini_batches", False):
        why = "cannot group mini-batches; use runner_mafa, or set run.grit.enabled: False"
        report.add("run.runner", f"{s['run.runner']} {why}")


def _check_compile(s: Settings, report: Report) -> None:
    for key in ("model.vit_grad_ckpt", "model.use_grad_checkpoint", "run.cached_batch"):
        if s["run.compile"] and s[key]:
            why = f"is True, and {key} is set: compiled blocks cannot be recomputed; switch one off"
            report.add("run.compile", why)


def _check_cached_batch(s: Settings, report: Report) -> None:
    key, size = "run.cached_batch", s["run.cached_batch"]
    if not s.training or size is None:
        return
    if s["model.arch"] and not s.traits.trains_by_step:
        why = f"{s['model.arch']} does not train by the step that can recompute; set it to null"
        report.add(key, why)
    elif s["run.batch_size_train"] and size >= s["run.batch_size_train"]:
        why = f"{size} is not below run.batch_size_train: activations are only computed twice"
        report.note(key, why)


def _check_sizes(s: Settings, report: Report) -> None:
    width, heads = s["model.vit.width"], s["model.vit.heads"]
    if width and heads and width % heads:
        report.add("model.vit.width", f"{width} is not a multiple of model.vit.heads {heads}")
    image, patch = s["model.image_size"], s["model.vit.patch_size"]
    if image and patch and image % patch:
        report.add("model.image_size", f"{image} is not a multiple of model.vit.patch_size {patch}")
    if s.traits.trains_by_step and image and patch is None:
        patch = s.traits.patch_size
        if image % patch:
            report.add(
                "model.image_size", f"{image} is not a multiple of the ViT's patch size {patch}"
            )
    if s["model.vit.stem"] == "conv":
        why = problem_of_stem(patch, width) if patch and width else None
        if not s.traits.takes_conv_stem:
            why = f"{s['model.arch']} has no convolutional stem; use patch"
        if why:
            report.add("model.vit.stem", why)
    epsilon = s["model.vit_layer_norm_epsilon"]
    if epsilon is not None and epsilon < 0 and (epsilon != -1 or s["model.vit"]):
        usual = "1e-6" if s["model.vit"] else "1e-6, or -1 for the ViT's default"
        report.add("model.vit_layer_norm_epsilon", f"{epsilon} is below 0; use for example {usual}")
    _check_text_encoder(s, report)
    arch = registry.get_model_class(s["model.arch"] or "") or object
    queue, batch = s["model.queue_size"], s["run.batch_size_train"]
    # LAVIS's models with a momentum queue assert it at the first step.
    queued = issubclass(arch, SharedQueueMixin)
    if s.training and queued and queue == 0:
        report.add(
            "model.queue_size",
            f"0 (no queue) is supported by models of lavis_mafa, not by {s['model.arch']}",
        )
    elif s.training and queued and queue and batch and queue % batch:
        report.add("model.queue_size", f"{queue} is not a multiple of run.batch_size_train {batch}")


def _check_text_encoder(s: Settings, report: Report) -> None:
    """Check max_txt_len against the positions in the text encoder's JSON config."""
    names = ("med_config_path", "q_former_config", "bert_config")
    key = next((f"model.{name}" for name in names if s[f"model.{name}"]), None)
    sizes = read_config(s[key]) if key else {}
    longest, most = s["model.max_txt_len"], sizes.get("max_position_embeddings")
    reads_itself = s.traits.llm_key is None  # otherwise a language model reads the text
    if longest and most and longest > most and reads_itself:
        why = f"{longest} is more than the {most} positions of the text encoder in {key}"
        report.add("model.max_txt_len", f"{why}; use at most {most}")


def listed(value: Any) -> list[Any]:
    """Return ``value`` as a list; None gives an empty list."""
    return value if isinstance(value, list) else [] if value is None else [value]
