"""Contradictions between keys that are valid one by one, and missing files, before any building.

Each rule catches a mistake that someone made, which would end a run hours after its start, or
silently train something else than the config says. A class checks by `problems_of` what only it
knows, see `lavis_mafa.io.problems`. What fails while the data and the model are built, or at the
first step, is left to the code that fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lavis.common.optims  # noqa: F401  registers the learning rate schedules
import lavis.runners  # noqa: F401  registers the runners
import torch
from lavis.common.registry import registry
from lavis.common.utils import is_url
from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder

from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SOFT_LABELS
from lavis_mafa.algorithm.options import suggest
from lavis_mafa.algorithm.scores import CON_D, SCORES
from lavis_mafa.compat.traits import Traits, traits_of
from lavis_mafa.data.feature_folder import FeatureFolder
from lavis_mafa.data.image_text_json import ImageTextShardsBuilder
from lavis_mafa.io.problems import ConfigView, Problem
from lavis_mafa.io.project_files import read_config
from lavis_mafa.settings.check import Report, listed
from lavis_mafa.settings.loggers import LOGGERS
from lavis_mafa.settings.registered import declared
from lavis_mafa.settings.schema import SPLITS

Problems = Iterator[Problem]
_FOLDERS, _FILES = ("images", "videos", "features"), ("detections", "references", "instances")
_MAFA, _GRIT, _RULE = "model.mafa", "run.grit", "model.mafa.connections"
_WEIGHTS, _SOFT = f"{_MAFA}.loss_weights", f"{_MAFA}.soft_labels"
# Activations of compiled blocks cannot be recomputed.
_NOT_COMPILED = ("model.vit_grad_ckpt", "model.use_grad_checkpoint", "run.cached_batch")


def ask_all(config: Mapping[str, Any], report: Report) -> None:
    """Report the contradictions in a config, missing files, and what its classes find."""
    cfg = ConfigView(config, report.bad, machine=report.machine)
    for rule in (*_RULES, *(_OF_MACHINE if report.machine else ())):
        report.take(rule(cfg))
    for section, owner in _owners(cfg):
        ask = getattr(owner, "problems_of", None)
        if ask is not None:
            report.take(ask(ConfigView(config, report.bad, section, report.machine)))


def _owners(cfg: ConfigView) -> Iterator[tuple[str, Any]]:
    """Yield the classes that a config names, with the section of each."""
    yield "run", _runner_of(cfg)
    yield "run", registry.get_task_class(cfg["run.task"] or "")
    for name in cfg["run.loggers"] or ():
        yield "run", LOGGERS.get(name)
    if cfg.training and cfg[f"{_GRIT}.enabled"]:
        yield "run", HARDNESS.get(cfg[f"{_GRIT}.schedule"] or "")
    yield "model", registry.get_model_class(cfg["model.arch"] or "")
    for name in cfg["datasets"] or {}:
        yield f"datasets.{name}", registry.get_builder_class(name)


def _traits(cfg: ConfigView) -> Traits:
    return traits_of(cfg["model.arch"] or "")


def _runner_of(cfg: ConfigView) -> Any:
    return registry.get_runner_class(cfg["run.runner"] or "runner_mafa")


def _not_above(cfg: ConfigView, key: str, limit: str) -> Problems:
    value, most = cfg[key], cfg[limit]
    if None not in (value, most) and value > most:
        yield Problem(key, f"{value} is more than {limit} {most}; use at most {most}")


def _machine(cfg: ConfigView) -> Problems:
    if cfg["run.device"] == "cuda" and cfg.machine and not torch.cuda.is_available():
        why = "cuda is not available on this machine; use run.device: cpu"
        yield Problem("run.device", why)
    if cfg["run.device"] == "cpu" and cfg["run.amp"] and cfg["run.amp_dtype"] == "fp16":
        why = "fp16 is not supported on cpu; use run.amp_dtype: bf16 or run.amp: False"
        yield Problem("run.amp", why)
    for other in _NOT_COMPILED:
        if cfg["run.compile"] and cfg[other]:
            why = f"is not supported together with {other}; switch one off"
            yield Problem("run.compile", why)


def _grouping(cfg: ConfigView) -> Problems:
    if not cfg.training or not cfg[f"{_GRIT}.enabled"]:
        return
    runner, arch = _runner_of(cfg), cfg["model.arch"]
    groups = getattr(runner, "groups_mini_batches", False) and _traits(cfg).trains_by_step
    if runner and arch and not groups:
        why = f"is True, but {cfg['run.runner'] or 'runner_mafa'} cannot group the pairs of {arch}"
        cure = "use runner_mafa and a model that reads model.mafa, or set it to False"
        yield Problem(f"{_GRIT}.enabled", f"{why}; {cure}")
    yield from _not_above(cfg, f"{_GRIT}.search_space", f"{_GRIT}.queue_size")


def _schedule(cfg: ConfigView) -> Problems:
    yield from _not_above(cfg, "run.min_lr", "run.init_lr")
    yield from _not_above(cfg, "run.max_epoch", "run.lr_horizon")
    if cfg["run.lr_sched"] == "linear_warmup_step_lr" and cfg["run.lr_decay_rate"] is None:
        why = "linear_warmup_step_lr needs it; use for example 0.9"
        yield Problem("run.lr_decay_rate", why, is_missing=True)
    length = "run.max_iters" if cfg["run.runner"] == "runner_iter" else "run.max_epoch"
    if cfg.training and cfg["run.max_epoch"] is None and cfg[length] is None:
        yield Problem(
            length, "expected a whole number >= 1, the length of training", is_missing=True
        )


def _job(cfg: ConfigView) -> Problems:
    job = cfg["run.job_id"]
    if job and (job in (".", "..") or "/" in job):
        why = f"{job!r:.80} is not the name of one folder; put its parents into run.output_dir"
        yield Problem("run.job_id", why)


def _weights(cfg: ConfigView) -> Problems:
    if cfg["run.evaluate"] and cfg["run.resume_ckpt_path"]:
        why = "has no effect with run.evaluate: True; use model.finetuned"
        yield Problem("run.resume_ckpt_path", f"{why} and model.load_finetuned: True")
    for name in ("pretrained", "finetuned"):
        path, wanted = cfg[f"model.{name}"], cfg[f"model.load_{name}"] is not False
        if not path or is_url(path):
            continue
        if not wanted and _traits(cfg).loads_with_our_loader:
            why = f"is given, but model.load_{name} is False: nothing is loaded"
            yield Problem(f"model.{name}", why)
        is_file = cfg.machine and _traits(cfg).pretrained_is_file
        if wanted and is_file and not os.path.exists(path):
            cure = f"name a file or URL, or set model.load_{name}: False"
            yield Problem(f"model.{name}", f"no such file: {path!r}; {cure}")


def _encoders(cfg: ConfigView) -> Problems:
    names = ("med_config_path", "q_former_config", "bert_config")
    key = next((f"model.{name}" for name in names if cfg[f"model.{name}"]), None)
    longest = cfg["model.max_txt_len"]
    most = (read_config(cfg[key]) if key else {}).get("max_position_embeddings")
    if longest and most and longest > most and _traits(cfg).llm_key is None:
        why = f"{longest} is more than the {most} positions of the text encoder in {key}"
        yield Problem("model.max_txt_len", f"{why}; use at most {most}")


def _evaluation(cfg: ConfigView) -> Problems:
    task, name = cfg["run.task"], cfg["model.arch"]
    arch, method = registry.get_model_class(name or ""), declared("task", task, "asks_of_model")
    evaluates = cfg["run.valid_splits"] or cfg["run.test_splits"]
    if arch and evaluates and method and not hasattr(arch, method):
        why = f"{task} evaluates by {method}(), which {name} lacks; use another model or task"
        yield Problem("run.task", why)
    requires_k_test = _traits(cfg).reranks and declared("task", task, "requires_k_test")
    if cfg["run.k_test"] is None and requires_k_test:
        why = f"task {task} needs it; use for example 128"
        yield Problem("run.k_test", why, is_missing=True)


def used_splits(get: Callable[[str], Any]) -> set[str]:
    """Return the splits that a run reads; ``get`` returns a key of ``run``, or None."""
    splits = [split for name in _split_keys(get("evaluate")) for split in get(name) or ()]
    return {split for split in splits if isinstance(split, str)}


def _split_keys(evaluate: Any) -> list[str]:
    return [*([] if evaluate else ["train_splits"]), "valid_splits", "test_splits"]


def _splits(cfg: ConfigView) -> Problems:
    own = [_splits_of(name, cfg) for name in cfg["datasets"] or {}]
    # A builder whose config names no splits creates some that are not known here.
    known = set(SPLITS).intersection(set().union(*own) if own and all(own) else SPLITS)
    for name in cfg["datasets"] or {}:
        # Builders may have further splits, such as other captions of the test images.
        known.update(declared("builder", name, "splits", ()))
    for key in _split_keys(cfg["run.evaluate"]):
        for i, split in enumerate(cfg[f"run.{key}"] or ()):
            if isinstance(split, str) and split not in known:
                why = f"no dataset has a split {split!r}; {suggest(split, known)}"
                yield Problem(f"run.{key}[{i}]", why)


def _splits_of(name: str, cfg: ConfigView) -> set[str]:
    """Return the splits in a dataset's config; none if the builder creates them otherwise."""
    info = f"datasets.{name}.build_info"
    splits = [split for split, files in (cfg[f"{info}.annotations"] or {}).items() if files]
    return {str(one) for one in splits + listed(cfg[f"{info}.splits"])}


def _processors(cfg: ConfigView) -> Problems:
    """Yield processors that differ from the model, or are missing: evaluation, which comes after an
    epoch, is the first to use its own."""
    image, used = cfg["model.image_size"], used_splits(lambda key: cfg[f"run.{key}"])
    for name in cfg["datasets"] or {}:
        path, splits = f"datasets.{name}", used & _splits_of(name, cfg)
        pictures = cfg[f"{path}.data_type"] == "images" and cfg[f"{path}.build_info.images"]
        pictures = pictures and f"{path}.vis_processor" not in cfg.wrong
        for phase, read in (("train", splits & {"train"}), ("eval", splits & {"val", "test"})):
            key = f"{path}.vis_processor.{phase}"
            size, ours = cfg[f"{key}.image_size"], _traits(cfg).loads_with_our_loader
            unused = phase == "train" and not cfg.training
            if image and size and size != image and ours and not unused:
                if cfg["model.image_encoder"] != "features":
                    why = f"{size} differs from model.image_size {image}"
                    yield Problem(f"{key}.image_size", why)
            if read and pictures and cfg[key] is None and key not in cfg.wrong:
                why = f"the run reads splits of {name} that need this processor; name one"
                why = f"{why}, such as {{name: blip_image_{phase}}}"
                yield Problem(key, why, is_missing=True)


def _form_of_itc(cfg: ConfigView) -> Problems:
    """Yield what the chosen form of ITC cannot be combined with."""
    key = f"{_MAFA}.itc_loss"
    form, kind = cfg[key], cfg[f"{_SOFT}.type"]
    if form not in ITC_LOSSES or cfg[f"{_WEIGHTS}.itc"] == 0:
        return
    traits = ITC_LOSSES.entry(form).traits
    with_momentum = kind in SOFT_LABELS and SOFT_LABELS.entry(kind).traits.needs_momentum
    if with_momentum and not traits.queue and cfg["model.queue_size"]:
        why = f"{form} cannot use the candidates of the momentum queue, which {_SOFT}.type: {kind}"
        yield Problem(key, f"{why} has; use softmax, other labels, or model.queue_size: 0")
    smoothing = kind == "one_hot" and cfg[f"{_SOFT}.label_smoothing"]
    if not traits.soft_labels and (kind not in (None, "one_hot") or smoothing):
        given = f"label_smoothing is {smoothing}" if smoothing else f"type is {kind}"
        why = f"{form} ignores soft labels, but {_SOFT}.{given}"
        yield Problem(key, f"{why}; use type: one_hot without label_smoothing")
    if traits.fixed_temperature and cfg.training:
        if cfg[f"{_MAFA}.learn_temperature"] is not False:
            why = f"must be False with itc_loss: {form}, which has no best temperature"
            yield Problem(f"{_MAFA}.learn_temperature", why)


def _mining(cfg: ConfigView) -> Problems:
    score, con_d = cfg[f"{_RULE}.score"], cfg[f"{_MAFA}.con_d"]
    if score in SCORES and con_d:
        why = f"{score} judges in Con-D's place; remove model.mafa.con_d, or use score: {CON_D}"
        yield Problem(f"{_RULE}.score", why)
    used = [one for one in cfg[f"{_RULE}.use_in"] or () if cfg[f"{_WEIGHTS}.{one}"] != 0]
    excused = f"{_RULE}.use_in" in cfg.wrong or cfg[f"{_RULE}.action"] == "keep"
    if (con_d or score in SCORES) and cfg.training and not used and not excused:
        why = "no loss with a weight uses connections; name one, or set action: keep"
        yield Problem(f"{_RULE}.use_in", why)


# Files and folders that a config names


def _features(cfg: ConfigView) -> Problems:
    """Yield why features of images cannot be read; set ``model.feature_width`` if it is not
    given."""
    for name in cfg["datasets"] or {}:
        builder, info = registry.get_builder_class(name), f"datasets.{name}.build_info"
        if not (isinstance(builder, type) and issubclass(builder, ImageTextShardsBuilder)):
            continue  # of other builders the samples are not known
        key, model = f"{info}.features.storage", cfg["model"]
        folder = cfg[key]
        if folder is not None and cfg["model.image_encoder"] != "features":
            why = f"is not features: a vit reads pictures, and {key} gives features; set features"
            yield Problem("model.image_encoder", why)
        elif folder is not None and cfg.machine and os.path.isdir(folder):
            try:
                width = FeatureFolder(folder).shape[2]
            except (OSError, ValueError) as error:
                yield Problem(key, str(error))
                continue
            model["feature_width"] = model.get("feature_width") or width
            if model["feature_width"] != width:
                why = f"the features have width {width}, expected {model['feature_width']}, that of"
                yield Problem(key, f"{why} model.feature_width and of the other data sets")


def _data(cfg: ConfigView) -> Problems:
    for name in cfg["datasets"] or {}:
        yield from _data_of(name, cfg)


def _data_of(name: str, cfg: ConfigView) -> Problems:
    info, builder = f"datasets.{name}.build_info", registry.get_builder_class(name)
    # LAVIS's `build_datasets` resolves relative paths in LAVIS's cache, others in the working
    # directory.
    built = getattr(builder, "build_datasets", None)
    root = registry.get_path("cache_root") if built is BaseDatasetBuilder.build_datasets else ""
    expand = getattr(builder, "files_named", lambda file: [file])  # expands a pattern

    def found(file: str) -> list[str]:
        """Return the files that a path stands for; none unless all exist."""
        files = list(expand(os.path.expanduser(os.path.join(root, file))))
        return files if all(map(os.path.exists, files)) else []

    start = f"relative paths start at {root or os.getcwd()}"

    splits = cfg[f"{info}.annotations"] or {}
    used = used_splits(lambda key: cfg[f"run.{key}"])
    for split in splits:
        if split in SPLITS and split not in used and used & set(splits):
            continue  # `only_splits` hides it
        key = f"{info}.annotations.{split}"
        files, sources = (listed(cfg[f"{key}.{name}"]) for name in ("storage", "url"))
        for file, source in zip_longest(files, sources[: len(files)], fillvalue=""):
            if not (is_url(source) or os.path.isfile(source) or found(file)):
                given = f"neither url {source!r} nor storage " if source else ""
                yield Problem(f"{key}.storage", f"no such file: {given}{file!r}; {start}")
    for kind in (*_FOLDERS, *_FILES):
        what = "folder" if kind in _FOLDERS else "file"
        for place in listed(cfg[f"{info}.{kind}.storage"]):
            if not found(place):
                yield Problem(f"{info}.{kind}.storage", f"no such {what}: {place!r}; {start}")
            elif what == "folder" and any(map(os.path.isfile, found(place))):
                why = f"{place!r} is a file; expected a folder"
                yield Problem(f"{info}.{kind}.storage", why)


def _folder(cfg: ConfigView) -> Problems:
    """Yield why nothing can be written to the output folder, which need not exist yet."""
    given = cfg["run.output_dir"]
    if not given:
        return
    folder = Path(os.path.abspath(os.path.expanduser(given)))
    # It is made where its nearest parent can be written to.
    nearest = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    if not nearest.is_dir():
        yield Problem("run.output_dir", f"{nearest} is a file; name a folder")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} is not writable; name another folder, or change its permissions"
        yield Problem("run.output_dir", why)


def _annotations(cfg: ConfigView) -> Problems:
    given = cfg["run.annotation_file"]
    for path in given.values() if isinstance(given, Mapping) else [given]:
        if isinstance(path, str) and not os.path.isfile(path):
            yield Problem("run.annotation_file", f"no such file: {path!r}")


_RULES = (
    _machine,
    _grouping,
    _schedule,
    _job,
    _weights,
    _encoders,
    _evaluation,
    _splits,
    _processors,
    _form_of_itc,
    _mining,
    _features,
)
_OF_MACHINE = (_data, _folder, _annotations)
