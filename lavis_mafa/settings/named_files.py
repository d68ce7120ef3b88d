"""Check the files that a config names, and take the width of features from them.

A checkpoint is memory-mapped: the checks look at names and plain values, but verifying its
checksums reads the whole file once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder
from lavis.processors.alpro_processors import AlproVideoBaseProcessor
from lavis.processors.blip_processors import BlipImageBaseProcessor
from omegaconf.errors import OmegaConfBaseException

from lavis_mafa.checkpoints.checkpoints import (
    not_resumable_message,
    problem_of_state,
    read_checkpoint,
    weights_of,
)
from lavis_mafa.checkpoints.weight_loading import config_of, problem_of_origin
from lavis_mafa.compat.traits import traits_of
from lavis_mafa.data.feature_folder import FeatureFolder
from lavis_mafa.data.local_builder import ConvertingBuilder
from lavis_mafa.io.problems import ConfigView, Problem
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.judges.frozen import FROZEN_MODELS
from lavis_mafa.settings.check import Report, listed
from lavis_mafa.settings.contradictions import used_splits
from lavis_mafa.settings.key import is_url
from lavis_mafa.settings.schema import SPLITS

Problems = Iterator[Problem]
FROZEN = tuple(f"model.mafa.{name}" for name in FROZEN_MODELS)
# Keys at any depth below ``model`` that name a weight file.
_WEIGHT_FILES = ("pretrained", "finetuned", "vit_weights", "q_former_model", "checkpoint")
# Keys that name a folder in which transformers may look for pickled weights.
_WEIGHT_FOLDERS = ("bert_weights", "opt_model", "t5_model")
_FOLDERS = ("images", "videos", "features")
_OF_PICTURES = (BlipImageBaseProcessor, AlproVideoBaseProcessor)
_OTHER_FILES = ("detections", "references", "instances")


def take_features(config: MutableMapping[str, Any], report: Report) -> None:
    """Check the folders of features of the data sets against the model, and set
    ``model.feature_width`` to their width if it is not given."""
    cfg = ConfigView(config, report.bad)
    reads, width = cfg["model.image_encoder"] == "features", cfg["model.feature_width"]
    first: tuple[int, ...] | None = None
    for name in cfg["datasets"] or {}:
        if not _may_have_features(name):
            continue  # of other builders the samples are not known
        key = f"datasets.{name}.build_info.features"
        folder = cfg[f"{key}.storage"]
        processor = cfg[f"datasets.{name}.vis_processor.train.name"] or ""
        pictures = issubclass(registry.get_processor_class(processor) or int, _OF_PICTURES)
        if folder is None and reads and pictures:
            why = "model.image_encoder: features reads them; {storage: FOLDER}"
            report.take([Problem(key, why, is_missing=True)])
        elif folder is not None and not reads:
            why = "is not features: a vit reads pictures, and the data give features. Set features"
            report.add("model.image_encoder", f"{why}, or remove {key}")
        elif folder is not None and report.machine and os.path.isdir(folder):
            try:
                shape = FeatureFolder(folder).shape[1:]
            except (OSError, ValueError) as error:
                report.add(f"{key}.storage", str(error))
                continue
            first, width = first or shape, width or shape[1]
            if shape != first or shape[1] != width:
                given = "positions and width (S, V) of the features are"
                why = f"{given} {shape}, expected {(first[0], width)}, those of the others"
                why = f"{why} and of model.feature_width; make them by one encoder"
                report.add(f"{key}.storage", why)
    if first and reads:
        config["model"]["feature_width"] = width


def _may_have_features(builder: str) -> bool:
    """Return whether a builder can read features instead of pictures."""
    cls = registry.get_builder_class(builder)
    return isinstance(cls, type) and issubclass(cls, ConvertingBuilder)


def check_files(config: Mapping[str, Any], report: Report) -> None:
    """Check that the files and folders that the run reads exist, and that its weights fit."""
    cfg = ConfigView(config, report.bad, machine=report.machine)
    for name in cfg["datasets"] or {}:
        report.take(_files_of_data(name, cfg))
    if report.machine:
        report.take(_folder(cfg))
        report.take(_annotations(cfg))
        report.take(_weights(cfg))
        report.take(frozen_weights(cfg))


# Data


def _files_of_data(name: str, cfg: ConfigView) -> Problems:
    path, builder = f"datasets.{name}.build_info", registry.get_builder_class(name)
    annotations = cfg[f"{path}.annotations"]
    if annotations == {}:
        yield Problem(f"{path}.annotations", "is empty; name a split: train: {storage: ...}")
    # LAVIS's `build_datasets` resolves relative paths in LAVIS's cache, others in the working
    # directory.
    built = getattr(builder, "build_datasets", None)
    root = registry.get_path("cache_root") if built is BaseDatasetBuilder.build_datasets else ""
    expand = getattr(builder, "files_named", lambda file: [file])  # expands a pattern

    def places(file: str) -> list[str]:
        return list(expand(os.path.expanduser(os.path.join(root, file))))

    def exists(file: str) -> bool:
        return bool(places(file)) and all(map(os.path.exists, places(file)))

    def lost_at(file: str) -> str:
        """Return a path, and of a relative one the whole path and where it starts."""
        if os.path.isabs(os.path.expanduser(file)):
            return repr(file)
        start = f"the cache of LAVIS, {root}" if root else f"the working directory, {os.getcwd()}"
        whole = os.path.abspath(os.path.join(root, file))
        return f"{file!r}, which is {whole}: relative paths start at {start}"

    used = used_splits(lambda key: cfg[f"run.{key}"])
    read: dict[str, list[str]] = {}  # files of the splits that the run reads
    for split in annotations or ():
        if split in SPLITS and split not in used and used & set(annotations):
            continue  # `only_splits` hides it
        where = f"{path}.annotations.{split}"
        storage, url = listed(cfg[f"{where}.storage"]), listed(cfg[f"{where}.url"])
        if storage and url and len(storage) != len(url):
            why = f"{len(url)} url for {len(storage)} storage; give as many of both"
            yield Problem(where, why)
            continue
        read[split] = [os.path.join(root, file) for file in storage]
        if not cfg.machine:
            continue
        lost = False
        for i, file in enumerate(storage):
            source = url[i] if url else ""
            if not (is_url(source) or os.path.isfile(source) or exists(file)):
                given = f"neither url {source!r} nor storage " if source else ""
                yield Problem(f"{where}.storage", f"no such file: {given}{lost_at(file)}")
                lost = True
        if storage and not lost and hasattr(builder, "check_files"):
            try:
                builder.check_files(read[split], split, cfg[path])
            except (OSError, ValueError) as error:
                yield Problem(f"{where}.storage", str(error))
    for kind in (*_FOLDERS, *_OTHER_FILES) if cfg.machine else ():
        what = "folder" if kind in _FOLDERS else "file"
        for place in listed(cfg[f"{path}.{kind}.storage"]):
            if not exists(place):
                yield Problem(f"{path}.{kind}.storage", f"no such {what}: {lost_at(place)}")
            elif what == "folder" and any(map(os.path.isfile, places(place))):
                why = f"{place!r} is a file; expected a folder"
                yield Problem(f"{path}.{kind}.storage", why)
    kind = cfg[f"datasets.{name}.data_type"]
    if isinstance(cfg[f"{path}.{kind}"], Mapping) and cfg[f"{path}.{kind}.storage"] is None:
        needed = getattr(builder, "needs_folder", lambda files, split, info: True)
        if annotations and (not read or any(needed(read[one], one, cfg[path]) for one in read)):
            why = f"expected the folder that paths of {kind} are relative to"
            yield Problem(f"{path}.{kind}.storage", why, is_missing=True)


def _annotations(cfg: ConfigView) -> Problems:
    given = cfg["run.annotation_file"]
    for path in given.values() if isinstance(given, Mapping) else [given]:
        if isinstance(path, str) and not os.path.isfile(path):
            yield Problem("run.annotation_file", f"no such file: {path!r}")


def _folder(cfg: ConfigView) -> Problems:
    """Yield why nothing can be written to the output folder, which need not exist yet."""
    given = cfg["run.output_dir"]
    if not given:
        return
    try:
        folder = Path(os.path.abspath(os.path.expanduser(given)))
        # It is made where its nearest parent can be written to.
        nearest = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    except (OSError, ValueError) as error:  # a name that is too long, or with NUL
        yield Problem("run.output_dir", f"{given!r:.80} cannot be a folder: {error}")
        return
    if not nearest.is_dir():
        yield Problem("run.output_dir", f"{nearest} is a file; name a folder")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} is not writable; name another folder, or change its permissions"
        yield Problem("run.output_dir", why)


# Weights


def _weights(cfg: ConfigView) -> Problems:
    """Yield weight files that are missing, damaged, or of a model that cannot be loaded."""
    arch, ours = str(cfg["model.arch"]), traits_of(cfg["model.arch"] or "").loads_with_our_loader
    for name in ("pretrained", "finetuned"):
        path, wanted = cfg[f"model.{name}"], cfg[f"model.load_{name}"]
        if path and wanted is not False and not is_url(path) and not os.path.exists(path):
            if traits_of(arch).pretrained_is_file:
                cure = f"name a file or URL, or set model.load_{name}: False"
                yield Problem(f"model.{name}", f"no such file: {path!r}; {cure}")
    for key, path in _files(cfg["model"] or {}, "model"):
        name = key.rpartition(".")[2]
        unread = cfg[f"{key.rpartition('.')[0]}.load_{name}"] is False
        # Our loader reads only one of `pretrained` and `finetuned`.
        unread |= ours and key == "model.pretrained" and cfg["model.load_finetuned"] is True
        if not unread and key not in cfg.wrong and not key.startswith(FROZEN):
            problem, content = _read(path)
            if content is not None and ours:
                own = key in ("model.pretrained", "model.finetuned")
                problem = _problem_of(content, path, arch if own else "")
            if problem:
                yield Problem(key, problem)
    key, path = "run.resume_ckpt_path", cfg["run.resume_ckpt_path"]
    if cfg["run.evaluate"] is False and path and os.path.isfile(path):
        problem, content = _read(path)
        if content is not None and not _is_whole(content, cfg["run.runner"]):
            problem = not_resumable_message(path)
        elif content is not None and ours:
            problem = _problem_of(content, path, arch)
        if problem:
            yield Problem(key, problem)


def frozen_weights(cfg: ConfigView) -> Problems:
    """Yield what is wrong with the weight files of Con-D and of the encoder of negatives."""
    for place in FROZEN:
        arch = cfg[f"{place}.arch"]
        cls = registry.get_model_class(arch or "")
        if arch in DISCRIMINATORS or cls is None:
            continue  # not a model, so it has no weights, or refused already
        for key, path in _files(cfg[place] or {}, place):
            problem, content = (None, None) if key in cfg.wrong else _read(path)
            model_type = cfg[f"{place}.model_type"] or next(iter(cls.PRETRAINED_MODEL_CONFIG_DICT))
            known = key == f"{place}.checkpoint" and model_type in cls.PRETRAINED_MODEL_CONFIG_DICT
            if content is not None and known:
                problem = _problem_of(content, path, arch)
                try:
                    given, own = cfg[f"{place}.model"] or {}, cfg["model"] or {}
                    config_of(arch, model_type, path, content, given=given, known=own)
                except (OmegaConfBaseException, ValueError) as error:
                    problem = problem or f"{str(error).splitlines()[0]} ({place}.model)"
            if problem:
                yield Problem(key, problem)


def _files(section: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and paths of local weight files below a section."""
    for name, value in section.items():
        key = f"{above}.{name}"
        if isinstance(value, Mapping):
            yield from _files(value, key)
        elif name in _WEIGHT_FILES and isinstance(value, str) and os.path.exists(value):
            yield key, value
        elif name in _WEIGHT_FOLDERS and isinstance(value, str) and os.path.isdir(value):
            for path in sorted(Path(value).glob("pytorch_model*.bin")):
                yield key, str(path)


def _read(path: str) -> tuple[str | None, dict[str, Any] | None]:
    """Return why a checkpoint cannot be read, or its content."""
    try:
        return None, read_checkpoint(path, mapped=True)
    except (ValueError, OSError, ImportError) as error:
        return str(error), None


def _problem_of(content: dict[str, Any], path: str, arch: str) -> str | None:
    """Return why the weights in a checkpoint cannot be those of a model.

    Args:
        arch: of the model; "": any, as for an image encoder.
    """
    state = weights_of(content)
    problem = problem_of_origin(content, arch, path) if arch else None
    problem = problem or problem_of_state(state, path)
    return problem or (None if state else f"{path} contains no weights")


def _is_whole(content: dict[str, Any], runner: str | None) -> bool:
    """Return whether a runner can resume from a checkpoint; LAVIS's save less than ours."""
    cls, ours = registry.get_runner_class(runner or ""), registry.get_runner_class("runner_mafa")
    if cls is None or (ours is not None and issubclass(cls, ours)):
        state = content.get("run")
        return isinstance(state, Mapping) and isinstance(state.get("ranks"), list)
    return {"model", "optimizer", "epoch"} <= content.keys()
