"""Check the datasets: their splits, files and processors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from lavis.common.registry import registry
from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder
from lavis.processors.alpro_processors import AlproVideoBaseProcessor
from lavis.processors.blip_processors import (
    BlipCaptionProcessor,
    BlipImageBaseProcessor,
    BlipQuestionProcessor,
)
from lavis.processors.gpt_processors import GPTVideoFeatureProcessor

from lavis_mafa.config.check import Report, Settings, ask_class, listed, suggest
from lavis_mafa.config.key import is_url
from lavis_mafa.config.lavis_classes import declared
from lavis_mafa.config.run import evaluates_nothing
from lavis_mafa.config.schema import SPLITS
from lavis_mafa.datasets.feature_folder import FeatureFolder
from lavis_mafa.datasets.local_builder import ConvertingBuilder

PHASES = {"train": "train", "val": "eval", "test": "eval"}  # split to phase of its processors
FOLDERS = ("images", "videos", "features")
VISUAL = (BlipImageBaseProcessor, AlproVideoBaseProcessor, GPTVideoFeatureProcessor)
TEXTUAL = (BlipCaptionProcessor, BlipQuestionProcessor)
OTHER_FILES = ("detections", "references", "instances")


def check_data(config: Mapping[str, Any], report: Report) -> None:
    """Check ``datasets`` and the splits in ``run``, after single keys are checked."""
    s = Settings(config, report)
    _check_splits(s, report)
    _check_image_sizes(s, report)
    for name in s["datasets"] or {}:
        _check_samples(name, s, report)
        ask_class(registry.get_builder_class(name), f"datasets.{name}", config, report)
        _check_processors(name, s, report)
        _check_files(name, s, report)


def _splits_of(name: str, s: Settings) -> list[str]:
    """Return the splits in a dataset's config; none if the builder creates them otherwise."""
    info = f"datasets.{name}.build_info"
    splits = [split for split, files in (s[f"{info}.annotations"] or {}).items() if files]
    return [*map(str, [*splits, *listed(s[f"{info}.splits"])])]


def used_splits(get: Callable[[str], Any]) -> set[str]:
    """Return the splits that a run reads; ``get`` returns a key of ``run``, or None."""
    names = [*([] if get("evaluate") else ["train_splits"]), "valid_splits", "test_splits"]
    return {split for name in names for split in get(name) or () if isinstance(split, str)}


def _used_splits(s: Settings) -> set[str]:
    return used_splits(lambda key: s[f"run.{key}"])


def _check_splits(s: Settings, report: Report) -> None:
    if s.training and s["run.train_splits"] == []:
        report.add("run.train_splits", "is empty; name one (train), or set run.evaluate: True")
    names = ("train_splits", "valid_splits", "test_splits")
    chosen = {name: s[f"run.{name}"] or [] for name in names}
    if s["run.evaluate"]:
        del chosen["train_splits"]
        if not any(chosen.values()):
            report.add(
                "run.test_splits", "is empty and so is run.valid_splits; name a split to evaluate"
            )
    # Builders of the data may have further splits, such as other captions of the test images.
    more = [declared("builder", name, "splits", ()) for name in s["datasets"] or {}]
    known = list(dict.fromkeys([*SPLITS, *itertools.chain(*more)]))
    for key, splits in chosen.items():
        for i, split in enumerate(splits):
            if isinstance(split, str) and split not in known:
                why = f"{split!r} is not one of {', '.join(known)}; {suggest(split, known)}"
                report.add(f"run.{key}[{i}]", why)
            if split in splits[:i]:
                report.add(f"run.{key}[{i}]", f"{split!r} is named twice; name it once")
    available: set[str] = set()
    for name in s["datasets"] or {}:
        splits = _splits_of(name, s)
        if not splits:
            return  # the builder creates its splits without naming them in the config
        available.update(splits)
    for key, splits in chosen.items():
        for i, split in enumerate(splits):
            if split in SPLITS and split not in available:
                have = ", ".join(sorted(available))
                report.add(f"run.{key}[{i}]", f"no dataset has a split {split!r}; they have {have}")


def take_features(config: MutableMapping[str, Any], report: Report) -> None:
    """Check the folders of features of the data sets against the model, and set
    ``model.feature_width`` to their width if it is not given."""
    s = Settings(config, report)
    reads, width = s["model.image_encoder"] == "features", s["model.feature_width"]
    folders = {
        name: s[f"datasets.{name}.build_info.features.storage"] for name in s["datasets"] or {}
    }
    shapes: dict[str, tuple[int, int]] = {}
    for name, folder in folders.items():
        key, builder = f"datasets.{name}.build_info.features", registry.get_builder_class(name)
        if not _may_have_features(builder):
            continue  # of other builders the samples are not known
        processor = s[f"datasets.{name}.vis_processor.train.name"]
        if folder is None and reads and _makes(processor or "") == "vis":
            report.missing(key, "model.image_encoder: features reads them; {storage: FOLDER}")
        elif folder is not None and not reads:
            why = "is not features: a vit reads pictures, and the data give features. Set features"
            report.add("model.image_encoder", f"{why}, or remove {key}")
        elif folder is not None and report.machine and os.path.isdir(folder):
            try:
                shapes[f"{key}.storage"] = FeatureFolder(folder).shape[1:]
            except (OSError, ValueError) as error:
                report.add(f"{key}.storage", str(error))
    for key, shape in shapes.items():
        first, width = next(iter(shapes.values())), width or shape[1]
        if shape != first or shape[1] != width:
            given = "positions and width (S, V) of the features are"
            why = f"{given} {shape}, expected {(first[0], width)}, those of the others"
            report.add(key, f"{why} and of model.feature_width; make them by one encoder")
    if shapes and reads:
        config["model"]["feature_width"] = width


def _may_have_features(builder: Any) -> bool:
    """Return whether a builder reads features in the place of pictures if it is told so."""
    return isinstance(builder, type) and issubclass(builder, ConvertingBuilder)


def _check_image_sizes(s: Settings, report: Report) -> None:
    image = s["model.image_size"] if s["model.image_encoder"] != "features" else None
    for name in s["datasets"] or {}:
        for part in ("train", "eval") if s.traits.loads_with_our_loader else ():
            key = f"datasets.{name}.vis_processor.{part}.image_size"
            size = s[key]
            if image and size and size != image and (part == "eval" or s.training):
                report.add(key, f"{size} differs from model.image_size {image}")


def _check_samples(name: str, s: Settings, report: Report) -> None:
    """Check that samples are of the kind that the task and the model need."""
    path, task = f"datasets.{name}", s["run.task"]
    holds, needed = declared("builder", name, "holds"), declared("task", task, "needs")
    if holds and needed and holds != needed:
        known = registry.list_datasets()
        able = [one for one in known if declared("builder", one, "holds") == needed]
        why = f"holds {holds}, and task {task} needs {needed}; use one of {', '.join(able)}"
        report.add(path, why)
    seen, shown = s.traits.images_per_sample, declared("builder", name, "images_per_sample", 1)
    if holds == "labels" and seen and seen != shown:
        number = {1: "one image", 2: "two images"}
        why = f"samples have {number[shown]}, and {s['model.arch']} takes"
        report.add(path, f"{why} {number[seen]}; change one of them")
    given, classes = s["model.num_classes"], declared("builder", name, "num_classes")
    if given is not None and classes and needed == "labels" and given < classes:
        why = f"{given} is too few; {name} has labels of {classes} classes"
        report.add("model.num_classes", f"{why}; use {classes}")


def _check_processors(name: str, s: Settings, report: Report) -> None:
    """Check that images read from files have a processor in every phase of the run."""
    path, builder = f"datasets.{name}", registry.get_builder_class(name)
    for phase in ("train", "eval"):
        where = f"{path}.vis_processor.{phase}"
        low, high = s[f"{where}.min_scale"], s[f"{where}.max_scale"]
        if low and low > (high or 1.0):
            report.add(f"{where}.min_scale", f"{low} is more than max_scale {high or 1.0}")
    for kind, other in (("vis", "text"), ("text", "vis")):
        for phase in ("train", "eval"):
            key = f"{path}.{kind}_processor.{phase}.name"
            chosen = s[key]
            if chosen and _makes(chosen) == other:
                example = {"vis": f"blip_image_{phase}", "text": "blip_caption"}[kind]
                report.add(key, f"{chosen} is a {other}_processor; use for example {example}")
    pictures = s[f"{path}.data_type"] == "images" and s[f"{path}.build_info.images"] is not None
    if not pictures or builder is None:
        return
    splits = _splits_of(name, s)
    phases = {PHASES[split] for split in _used_splits(s) & set(splits) & set(PHASES)}
    if evaluates_nothing(s["run.task"]):
        phases.discard("eval")
    for phase in sorted(phases):
        reads_texts = declared("task", s["run.task"], "reads_texts", True)
        for kind, needed in (("vis", True), ("text", reads_texts)):
            key = f"{path}.{kind}_processor"
            # LAVIS leaves texts unprocessed if no text processor is named at all.
            lacks = s[f"{key}.{phase}"] is None and (kind == "vis" or s[key] is not None)
            known_bad = any(bad.startswith(key) for bad in report.bad)
            if needed and lacks and not known_bad:
                why = f"run reads splits of {name} that need this processor; name one"
                example = {"vis": f"blip_image_{phase}", "text": "blip_caption"}[kind]
                report.missing(f"{key}.{phase}", f"the {why}, such as {{name: {example}}}")


def _makes(processor: str) -> str:
    """Return ``vis`` or ``text``; "" for an unknown kind, such as a user's processor."""
    cls = registry.get_processor_class(processor)
    kinds = {"vis": VISUAL, "text": TEXTUAL}
    return next((kind for kind, bases in kinds.items() if cls and issubclass(cls, bases)), "")


def _check_files(name: str, s: Settings, report: Report) -> None:
    path = f"datasets.{name}.build_info"
    builder = registry.get_builder_class(name)
    # LAVIS's `build_datasets` resolves relative paths in LAVIS's cache, others in the working
    # directory.
    built = getattr(builder, "build_datasets", None)
    root = registry.get_path("cache_root") if built is BaseDatasetBuilder.build_datasets else ""

    files_named = getattr(builder, "files_named", lambda file: [file])  # expands a pattern

    def places(file: str) -> list[str]:
        return list(files_named(os.path.expanduser(os.path.join(root, file))))

    def exists(file: str) -> bool:
        return bool(places(file)) and all(map(os.path.exists, places(file)))

    def lost_at(file: str) -> str:
        """Return a path, and of a relative one the whole path and where it starts."""
        if os.path.isabs(os.path.expanduser(file)):
            return repr(file)
        start = f"the cache of LAVIS, {root}" if root else f"the working directory, {os.getcwd()}"
        whole = os.path.abspath(os.path.join(root, file))
        return f"{file!r}, which is {whole}: relative paths start at {start}"

    annotations = s[f"{path}.annotations"]
    if annotations == {}:
        report.add(f"{path}.annotations", "is empty; name a split: train: {storage: ...}")
    used = _used_splits(s)
    read: dict[str, list[str]] = {}  # files of the splits that the run reads
    lost: set[str] = set()  # splits of which files are missing
    for split in annotations or ():
        if split in PHASES and split not in used and used & set(annotations):
            continue  # `only_splits` hides it
        where = f"{path}.annotations.{split}"
        storage, url = listed(s[f"{where}.storage"]), listed(s[f"{where}.url"])
        if storage and url and len(storage) != len(url):
            report.add(where, f"{len(url)} url for {len(storage)} storage; give as many of both")
            continue
        for i, file in enumerate(storage):
            source = url[i] if url else ""
            found = is_url(source) or os.path.isfile(source) or exists(file)
            read.setdefault(split, []).append(os.path.join(root, file))
            if report.machine and not found:
                given = f"neither url {source!r} nor storage " if source else ""
                given += lost_at(file)
                report.add(f"{where}.storage", f"no such file: {given}")
                lost.add(split)
    if report.machine and hasattr(builder, "check_files"):
        for split in read.keys() - lost:
            try:
                builder.check_files(read[split], split, s[path])
            except (OSError, ValueError) as error:
                report.add(f"{path}.annotations.{split}.storage", str(error))
    for key, folder in _named(path, FOLDERS, s):
        if report.machine and not exists(folder):
            report.add(key, f"no such folder: {lost_at(folder)}")
        elif report.machine and any(map(os.path.isfile, places(folder))):
            report.add(key, f"{folder!r} is a file; expected a folder")
    for key, file in _named(path, OTHER_FILES, s):
        if report.machine and not exists(file):
            report.add(key, f"no such file: {lost_at(file)}")
    kind = s[f"datasets.{name}.data_type"]
    kinds = FOLDERS[:-1] if _may_have_features(builder) else FOLDERS
    folders = [one for one in kinds if isinstance(s[f"{path}.{one}"], Mapping)]
    if kind and folders and kind not in folders and f"{path}.{kind}" not in report.bad:
        why = f"{kind}, but {path} has {' and '.join(folders)}"
        report.add(f"datasets.{name}.data_type", f"{why}; use {folders[0]}")
    elif kind in folders and s[f"{path}.{kind}.storage"] is None:
        needed = getattr(builder, "needs_folder", lambda files, split, info: True)
        if annotations and (not read or any(needed(read[one], one, s[path]) for one in read)):
            why = f"expected the folder that paths of {kind} are relative to"
            report.missing(f"{path}.{kind}.storage", why)


def _named(path: str, kinds: tuple[str, ...], s: Settings) -> Iterator[tuple[str, str]]:
    """Yield the keys and paths under ``build_info`` for the given kinds."""
    for kind in kinds:
        for value in listed(s[f"{path}.{kind}.storage"]):
            yield f"{path}.{kind}.storage", value
