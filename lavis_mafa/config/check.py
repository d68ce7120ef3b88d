"""Checks a whole config against the schema and collects every problem.

`walk` knows nothing of single keys: it compares a nested dict with a `Key`. What concerns several
keys at once (L, M and B; device and precision; files of a dataset) follows below it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import lavis.common.optims  # noqa: F401  registers the learning rate schedules
import lavis.runners  # noqa: F401  registers the runners
import torch
from lavis.common.registry import registry
from lavis.models.base_model import SharedQueueMixin

from lavis_mafa.config import schema as keys
from lavis_mafa.config.schema import NUMBERS, UNSET, Key, describe, known_keys

CLOSE = 0.6
OUR_CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "models"


def suggest(word: str, names: Collection[str]) -> str:
    """Names the one of ``names`` that is most like ``word``."""
    if not names:
        return "there is none"
    best = max(sorted(names), key=lambda name: _alike(word, name))
    if _alike(word, best) >= CLOSE:
        return f"did you mean {best}?"
    return f"known: {', '.join(sorted(names))}"


def _alike(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower().replace("-", "_"), b.lower().replace("-", "_")).ratio()


class Report:
    """Collects what is wrong.

    Args:
        schema: the schema of this config; the right keys to suggest come from it.
        active: which keys must be there; see `Key.needed`.
        machine: check also files and devices of this machine.

    Attributes:
        problems: lines ``key: what is wrong and how to mend it``.
        notes: what is worth saying though it works.
        bad: keys with a problem of their own; later checks leave them alone.
    """

    def __init__(
        self, schema: Key, active: Collection[str] = ("always",), machine: bool = True
    ) -> None:
        self.known = dict(known_keys(schema))
        self.active = set(active)
        self.machine = machine
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
        """Adds ``message``, unless the key was there but wrong or misspelt."""
        if path not in self.bad | self.suggested:
            self.add(path, f"missing; {message}")

    def unknown(self, path: str) -> None:
        best, score = self.nearest(path)
        self.suggested.add(best)
        verb = "did you mean" if score >= CLOSE else "the nearest known key is"
        self.add(path, f"unknown key; {verb} {best}{'?' if score >= CLOSE else ''}")

    def nearest(self, path: str) -> tuple[str, float]:
        """The known key most like ``path`` and how alike their names are, 0 to 1."""
        *parents, leaf = path.split(".")

        def alike(known: str) -> float:
            name = known.rsplit(".", 1)[-1]
            return 1.0 if leaf in self.known[known].also else _alike(leaf, name)

        def near(known: str) -> float:
            above = known.split(".")[:-1]
            shared = len(os.path.commonprefix([parents, above]))
            return alike(known) + 0.1 * (above == parents) + 0.03 * shared - 0.01 * len(above)

        best = max(sorted(self.known), key=near)
        return best, alike(best)


def walk(value: Any, key: Key, path: str, report: Report, shipped: Any = UNSET) -> Any:
    """Checks ``value`` against ``key`` and returns it with number-like strings made numbers.

    Args:
        value: plain Python data.
        path: dotted name of the key, "" for the whole config.
        shipped: the value in the default YAML; what equals it is trusted.
    """
    if key.kind == "mapping" and value is not None:
        return _walk_mapping(value, key, path, report, shipped)
    if shipped is not UNSET and type(value) is type(shipped) and value == shipped:
        return value
    if value is None:
        if not key.nullable and key.kind != "any":
            report.add(path, f"is empty; expected {describe(key)}")
        return None
    if value == "???":
        report.add(path, f"is marked as missing (???); expected {describe(key)}")
        return value
    if key.kind in NUMBERS:
        return _number(value, key, path, report)
    if key.kind == "list" and isinstance(value, list):
        items = key.items or Key("any")
        return [walk(item, items, f"{path}[{i}]", report) for i, item in enumerate(value)]
    fits = {
        "any": True,
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
        "strs": all(isinstance(item, str) for item in _list(value)),
    }
    if not fits.get(key.kind, False):
        hints = {"list": f", such as [{value}]", "bool": ", written without quotes"}
        hint = hints.get(key.kind, "") if isinstance(value, str) else ""
        report.add(path, f"{value!r} is not {describe(key)}{hint}")
        return value
    if isinstance(value, str) and value not in key.words:
        _check_name(value, key, path, report)
        if key.path and report.machine and os.path.exists(value):
            return os.path.abspath(value)  # checkpoints remember it, wherever they are used
    return value


def _walk_mapping(value: Any, key: Key, path: str, report: Report, shipped: Any) -> Any:
    if not isinstance(value, dict):
        report.add(path, f"{value!r} is not {describe(key)}")
        return value
    shipped = shipped if isinstance(shipped, dict) else {}
    out = {}
    for name, child in value.items():
        child_path = f"{path}.{name}" if path else str(name)
        child_key = key.keys.get(name, key.other)
        if child_key is None:
            report.unknown(child_path)
        else:
            out[name] = walk(child, child_key, child_path, report, shipped.get(name, UNSET))
    for name, child_key in key.keys.items():
        child_path = f"{path}.{name}" if path else name
        if name not in value and report.active.intersection(child_key.needed):
            report.missing(child_path, f"expected {describe(child_key)} ({child_key.doc})")
    return out


def _number(value: Any, key: Key, path: str, report: Report) -> Any:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            pass
    fits = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not fits or not math.isfinite(number) or (key.kind == "int" and number != int(number)):
        report.add(path, f"{value!r} is not {describe(key)}")
        return value
    if key.kind == "int":
        number = int(number)
    elif key.kind == "float":
        number = float(number)
    below = key.low is not None and (number <= key.low if key.above else number < key.low)
    if below or (key.high is not None and number > key.high):
        report.add(path, f"{value!r} is out of range; expected {describe(key)}")
    elif isinstance(value, str):
        report.note(path, f"the string {value!r} is read as the number {number}")
    return number


def _check_name(value: str, key: Key, path: str, report: Report) -> None:
    if key.choices and value not in key.choices:
        report.add(path, f"{value!r} is not {describe(key)}; {suggest(value, key.choices)}")
    if key.registered:
        names = set(registry.mapping[f"{key.registered}_name_mapping"]).union(key.words)
        if value not in names:
            kind = key.registered.replace("_", " ")
            report.add(path, f"no {kind} {value!r} is registered; {suggest(value, names)}")
    if report.machine and key.path and not _exists(value, key.path):
        report.add(path, f"no such {key.path.replace('path or name', 'path')}: {value!r}")
    elif key.path == ".npy file" and not value.endswith(".npy"):
        report.add(path, f"{value!r} is not an index file; expected a path that ends in .npy")


def _exists(value: str, kind: str) -> bool:
    if kind == "file or URL" and is_url(value):
        return True
    if kind == "path or name":
        # Names on the hub have at most one slash and no suffix of a vocabulary.
        by_hub = not value.startswith((".", "/", "~")) and value.count("/") < 2
        if os.path.exists(value) or (by_hub and not value.endswith((".txt", ".json"))):
            return True
    shipped = ["", str(OUR_CONFIGS), registry.get_path("library_root")]
    roots = shipped if kind in ("library file", "path or name") else [""]
    return any(os.path.isfile(os.path.join(root, value)) for root in roots)


def is_url(value: str) -> bool:
    return value.lower().startswith(("http://", "https://"))


class Settings:
    """Reads a checked config by dotted path; keys that have a problem read as None."""

    def __init__(self, config: Mapping[str, Any], report: Report) -> None:
        self.config = config
        self.report = report

    def __getitem__(self, path: str) -> Any:
        value: Any = self.config
        seen: list[str] = []
        for name in path.split("."):
            seen.append(name)
            if not isinstance(value, Mapping) or ".".join(seen) in self.report.bad:
                return None
            value = value.get(name)
        return value


def is_ours(arch: Any) -> bool:
    """Whether models ``arch`` are of this package, and so are their checkpoints' loading."""
    cls = registry.get_model_class(arch) if isinstance(arch, str) else None
    named = str(arch).endswith(keys.MAFA_SUFFIX)
    return named or getattr(cls, "__module__", "").startswith("lavis_mafa.")


def trains_by_step(arch: Any) -> bool:
    """Whether models ``arch`` train by `lavis_mafa.step`: features for GRIT, ``model.mafa``."""
    cls = registry.get_model_class(arch) if isinstance(arch, str) else None
    return str(arch).endswith(keys.MAFA_SUFFIX) and getattr(cls, "trains_by_step", True)


def check_together(config: Mapping[str, Any], report: Report) -> None:
    """Checks what concerns several keys at once; single keys have been walked and filled."""
    settings = Settings(config, report)
    training = settings["run.evaluate"] is False
    _check_run(settings, report, training)
    _check_splits(settings, report, training)
    _check_device(settings, report)
    if training and settings["run.grit.enabled"]:
        _check_grit(settings, report)
    _check_weights(settings, report)
    _check_compile(settings, report)
    _check_language_model(settings, report, training)
    _check_sizes(settings, report, training)
    _check_mafa(settings, report)
    _check_generation(settings, report)
    for name in settings["datasets"] or {}:
        _check_files(name, settings, report)


def _check_run(s: Settings, report: Report, training: bool) -> None:
    if training and s["run.runner"] in (None, "runner_mafa"):
        if s["run.train_splits"] not in (None, [], ["train"]):
            report.add("run.train_splits", "LAVIS trains on the split train; use ['train']")
        if s["run.train_dataset_ratios"]:
            why = "an epoch of runner_mafa is every sample once; leave it out"
            report.add("run.train_dataset_ratios", why)
    by_steps = s["run.runner"] == "runner_iter" and s["run.max_iters"] is not None
    if training and s["run.max_epoch"] is None and not by_steps:
        report.missing("run.max_epoch", "expected a whole number >= 1 (epochs to train)")
    arch = registry.get_model_class(s["model.arch"] or "")
    if training and s["run.task"] == "mafa_pretrain" and arch and not hasattr(arch, "llm_key"):
        if not trains_by_step(s["model.arch"]):
            why = f"{s['model.arch']} does not; use mafa_retrieval or the task of its own"
            report.add("run.task", f"mafa_pretrain needs a model that trains by the step, {why}")
    if s["run.k_test"] == 0 and arch and arch.__module__.startswith("lavis."):
        report.add("run.k_test", f"0 (ITC alone) is for our models; {s['model.arch']} needs >= 1")
    if s["run.lr_sched"] == "linear_warmup_step_lr" and s["run.lr_decay_rate"] is None:
        report.missing("run.lr_decay_rate", "linear_warmup_step_lr needs it, such as 0.9")
    clip = str(s["model.arch"]).startswith("clip")
    if s["run.task"] == "retrieval" and not clip and s["run.k_test"] is None:
        report.missing("run.k_test", "task retrieval needs it, such as 128")


def _check_splits(s: Settings, report: Report, training: bool) -> None:
    if training and s["run.train_splits"] == []:
        report.add("run.train_splits", "is empty; name one (train), or set run.evaluate: True")
    names = ("train_splits", "valid_splits", "test_splits")
    asked = {name: s[f"run.{name}"] or [] for name in names}
    if s["run.evaluate"]:
        del asked["train_splits"]
        if not any(asked.values()):
            report.add("run.test_splits", "is empty and so is run.valid_splits: nothing to do")
    there: set[str] = set()
    for name in s["datasets"] or {}:
        info = f"datasets.{name}.build_info"
        splits = [split for split, files in (s[f"{info}.annotations"] or {}).items() if files]
        splits += _list(s[f"{info}.splits"])
        if not splits:
            return  # the builder makes its splits otherwise
        there.update(map(str, splits))
    for key, splits in asked.items():
        for i, split in enumerate(splits):
            if split in keys.SPLITS and split not in there:
                have = ", ".join(sorted(there))
                report.add(f"run.{key}[{i}]", f"no dataset has a split {split!r}; they have {have}")


def _check_device(s: Settings, report: Report) -> None:
    if s["run.device"] == "cuda" and report.machine and not torch.cuda.is_available():
        report.add("run.device", "cuda is not available on this machine; use run.device: cpu")
    if s["run.device"] == "cpu" and s["run.amp"] and s["run.amp_dtype"] == "fp16":
        report.add("run.amp", "no fp16 on cpu; use run.amp_dtype: bf16 or run.amp: False")
    if s["model.vit_precision"] == "fp16" and s["model.freeze_vit"] is False:
        report.add(
            "model.vit_precision", "fp16 is for a frozen ViT; train it in fp32 (run.amp: True)"
        )
    if s["run.device"] == "cpu" and s["model.vit_precision"] == "fp16":
        if str(s["model.arch"]).endswith(keys.MAFA_SUFFIX):
            report.note("model.vit_precision", "no fp16 on cpu; fp32 is used")
        else:
            report.add("model.vit_precision", "no fp16 on cpu; use fp32")


def _check_grit(s: Settings, report: Report) -> None:
    queue, search = s["run.grit.queue_size"], s["run.grit.search_space"]
    batch, epochs = s["run.batch_size_train"], s["run.max_epoch"]
    if None not in (queue, search) and search > queue:
        why = f"more than run.grit.queue_size {queue}; M is a part of L"
        report.add("run.grit.search_space", f"{search} is {why}")
    elif None not in (batch, search) and search < batch:
        why = f"less than run.batch_size_train {batch}: mini-batches join several search spaces"
        report.note("run.grit.search_space", f"{search} is {why}")
    elif None not in (batch, search) and search == batch:
        report.note("run.grit.search_space", "equals run.batch_size_train: nothing is grouped")
    start = s["run.grit.start_epoch"]
    if None not in (start, epochs) and start >= epochs:
        report.note("run.grit.start_epoch", f"{start} is not below max_epoch: no epoch is grouped")
    if start == 0 and not s["run.grit.naive"]:
        report.add("run.grit.start_epoch", "is 0: nothing is collected yet; use 1 or naive: True")
    off = "or set run.grit.enabled: False"
    if s["model.arch"] and not trains_by_step(s["model.arch"]):
        why = f"is True, but {s['model.arch']} gives no features to group by; set it False"
        report.add("run.grit.enabled", why)
    ours, chosen = (registry.get_runner_class(n) for n in ("runner_mafa", s["run.runner"] or ""))
    if ours and chosen and not issubclass(chosen, ours):
        why = "knows no grouped mini-batches; use runner_mafa,"
        report.add("run.runner", f"{s['run.runner']} {why} {off}")


def _check_weights(s: Settings, report: Report) -> None:
    if s["run.evaluate"] and s["run.resume_ckpt_path"]:
        why = "nothing is resumed when only evaluating; name it as model.finetuned"
        report.add("run.resume_ckpt_path", f"{why}, with model.load_finetuned: True")
    arch = str(s["model.arch"])
    if arch.startswith("clip"):
        return  # there `pretrained` is a tag
    for name in ("pretrained", "finetuned"):
        key, path, wanted = f"model.{name}", s[f"model.{name}"], s[f"model.load_{name}"]
        hint = f"name a file or URL, or set model.load_{name}: False"
        # Ours starts from the published weights of its parts if it names no pre-trained model.
        parts = name == "pretrained" and arch.endswith(keys.MAFA_SUFFIX)
        if wanted and not path and not parts and key not in report.bad:
            report.add(key, f"is empty; {hint}")
        elif path and wanted is False and is_ours(arch) and not is_url(path):
            report.add(key, f"is given, but model.load_{name} is False: nothing is loaded")
        elif path and wanted is not False and report.machine:
            if not is_url(path) and not os.path.isfile(path):
                report.add(key, f"no such file: {path!r}; {hint}")


def _check_compile(s: Settings, report: Report) -> None:
    for key in ("model.vit_grad_ckpt", "model.use_grad_checkpoint"):
        if s["run.compile"] and s[key]:
            why = f"is True, and {key} too: compiled blocks cannot be recomputed; set one to False"
            report.add("run.compile", why)


def _check_language_model(s: Settings, report: Report, training: bool) -> None:
    arch = registry.get_model_class(s["model.arch"] or "")
    key = getattr(arch, "llm_key", None)
    if key is None:
        return
    if s[f"model.{key}"] is None and f"model.{key}" not in report.bad:
        report.add(f"model.{key}", "is empty; name a folder or a model on the hub")
    if s["run.task"] == "mafa_pretrain":
        why = f"{s['model.arch']} compares no pairs; use image_text_pretrain"
        report.add("run.task", f"mafa_pretrain needs a model that trains by ITC and ITM; {why}")
    scaled = s["run.amp"] and s["run.amp_dtype"] == "fp16"
    if training and s["run.device"] == "cuda" and s["model.llm_precision"] == "fp16" and not scaled:
        why = "small gradients vanish on their way through it; use bf16, or run.amp in fp16"
        report.note("model.llm_precision", f"is fp16 without run.amp's loss scaling: {why}")


def _check_sizes(s: Settings, report: Report, training: bool) -> None:
    width, heads = s["model.vit.width"], s["model.vit.heads"]
    if width and heads and width % heads:
        report.add("model.vit.width", f"{width} is not a multiple of model.vit.heads {heads}")
    image, patch = s["model.image_size"], s["model.vit.patch_size"]
    if image and patch and image % patch:
        report.add("model.image_size", f"{image} is not a multiple of model.vit.patch_size {patch}")
    ours = is_ours(s["model.arch"])
    for name in (s["datasets"] or {}) if ours else {}:
        for part in ("train", "eval"):
            key = f"datasets.{name}.vis_processor.{part}.image_size"
            size = s[key]
            if image and size and size != image and not (part == "train" and not training):
                report.add(key, f"{size} differs from model.image_size {image}")
    for name in s["datasets"] or {}:
        info = f"datasets.{name}.build_info"
        cell, grid = s[f"{info}.cell_size"], s[f"{info}.grid"]  # pictures that are rendered
        resized = s[f"datasets.{name}.vis_processor"]
        if image and cell and grid and image != cell * grid and not resized:
            why = f"{image}, but pictures of {name} are {cell} * {grid} = {cell * grid} pixels wide"
            report.add("model.image_size", f"{why}; use that, or give a vis_processor")
    arch = registry.get_model_class(s["model.arch"] or "") or object
    queue, batch = s["model.queue_size"], s["run.batch_size_train"]
    # LAVIS's models with a momentum queue assert it at the first step.
    queued = arch.__module__.startswith("lavis.") and issubclass(arch, SharedQueueMixin)
    if training and queued and queue == 0:
        report.add("model.queue_size", f"0 (no queue) is for our models, not {s['model.arch']}")
    elif training and queued and queue and batch and queue % batch:
        report.add("model.queue_size", f"{queue} is not a multiple of run.batch_size_train {batch}")


def _check_mafa(s: Settings, report: Report) -> None:
    soft = "model.mafa.soft_labels"
    kind = s[f"{soft}.type"]
    if kind == "momentum" and s["model.arch"] and s["model.queue_size"] is None:
        why = f"{s['model.arch']} has no momentum encoders; use smoothed or one_hot"
        report.add(f"{soft}.type", f"momentum: {why}")
    for name in ("imc", "lmi"):
        if s[f"model.mafa.loss_weights.{name}"] and kind != "momentum":
            why = f"needs momentum encoders ({soft}.type: momentum), and that is {kind}"
            report.add(f"model.mafa.loss_weights.{name}", why)
    if s["model.mafa.loss_weights.lmi"] and s["model.arch"] != "albef_mafa":
        why = f"needs states of words, and {s['model.arch']} keeps none; use albef_mafa"
        report.add("model.mafa.loss_weights.lmi", why)
    random = s["run.evaluate"] is False and s["run.grit.enabled"] is False
    later = kind in ("smoothed", "consistency") and s[f"{soft}.start_epoch"] is None
    if random and later:
        why = "first grouped epoch, and run.grit.enabled is False: labels stay one-hot; use 0"
        report.note(f"{soft}.start_epoch", why)
    weights = [s[f"model.mafa.loss_weights.{name}"] for name in ("itc", "imc", "lmi", "itm", "lm")]
    if s["run.evaluate"] is False and weights == [0.0] * len(weights):
        report.add("model.mafa.loss_weights", "all are 0: nothing to train; give one of them 1")
    temp = s["model.temp"]
    if s["model.mafa.learn_temperature"] is False and temp and not 0.001 <= temp <= 0.5:
        report.add("model.temp", f"{temp} is out of range; a temperature is kept in [0.001, 0.5]")
    if weights[3] == 0 and s["run.k_test"] and s["run.evaluate"] is False:
        why = "re-ranks by an ITM head that loss_weights.itm: 0 does not train; 0: ITC alone"
        report.note("run.k_test", why)
    task = registry.get_task_class(s["run.task"] or "")
    if s["model.mafa.con_d.arch"] == "oracle" and not hasattr(task, "before_training"):
        report.add("model.mafa.con_d.arch", "only task mafa_pretrain tells the oracle the truth")
    rule = "model.mafa.connections"
    if s[f"{rule}.labels"] == "probability" and s[f"{rule}.action"] in ("drop", "keep"):
        report.add(f"{rule}.labels", "probability needs action: convert")
    several = (s[f"{rule}.top_k"] or 1) > 1
    if s["model.mafa.con_d"] is None and (several or s[f"{rule}.labels"] == "probability"):
        report.note(rule, "top_k and labels have no effect without model.mafa.con_d")
    low, high = s[f"{rule}.low"], s[f"{rule}.high"]
    if None not in (low, high) and low > high:
        report.add(f"{rule}.low", f"{low} is more than {rule}.high {high}")


def _check_generation(s: Settings, report: Report) -> None:
    if s["run.metrics"] == []:
        report.add("run.metrics", "is empty; name some, or set run.report_metric: False")
    prompt = s["run.prompt"]
    if s["run.task"] in ("mafa_vqa", "mafa_gqa") and prompt:
        problem = problem_of_prompt(prompt)
        if problem:
            report.add("run.prompt", problem)
    given = s["run.annotation_file"]
    by_split = given if isinstance(given, Mapping) else {"": given}
    for split, path in by_split.items():
        where = f"{split}: " if split else ""
        if path is not None and not isinstance(path, str):
            why = f"{where}{path!r} is not a path; give one, or a mapping {{val: path, test: path}}"
            report.add("run.annotation_file", why)
        elif path is not None and report.machine and not os.path.isfile(path):
            report.add("run.annotation_file", f"{where}no such file: {path!r}")


def problem_of_prompt(prompt: str) -> str | None:
    """Why a question cannot be put into a prompt, None if it can."""
    try:
        if prompt.count("{}") == 1 and "question?" in prompt.format("question?"):
            return None
    except (LookupError, ValueError):
        pass
    return (
        f"{prompt!r} needs exactly one {{}}, where the question goes, and no other braces; "
        "expected such as 'Question: {} Answer:'"
    )


def _check_files(name: str, s: Settings, report: Report) -> None:
    path = f"datasets.{name}.build_info"
    builder = registry.get_builder_class(name)
    lavis_own = builder is not None and builder.__module__.startswith("lavis.")
    root = registry.get_path("cache_root") if lavis_own else ""

    files_named = getattr(builder, "files_named", lambda file: [file])  # by a pattern

    def there(file: str) -> bool:
        files = files_named(os.path.expanduser(os.path.join(root, file)))
        return bool(files) and all(map(os.path.exists, files))

    annotations = s[f"{path}.annotations"]
    if annotations == {}:
        report.add(f"{path}.annotations", "is empty; name a split: train: {storage: ...}")
    for split in annotations or ():
        where = f"{path}.annotations.{split}"
        storage, url = _list(s[f"{where}.storage"]), _list(s[f"{where}.url"])
        if storage and url and len(storage) != len(url):
            report.add(where, f"{len(url)} url for {len(storage)} storage; give as many of both")
            continue
        for i, file in enumerate(storage):
            source = url[i] if url else ""
            found = is_url(source) or os.path.isfile(source) or there(file)
            if report.machine and not found:
                lost = f"neither url {source!r} nor storage {file!r}" if source else repr(file)
                report.add(f"{where}.storage", f"no such file: {lost}")
    for kind in ("images", "videos", "features"):
        for folder in _list(s[f"{path}.{kind}.storage"]):
            if report.machine and not there(folder):
                report.add(f"{path}.{kind}.storage", f"no such folder: {folder!r}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
