"""Checks of data sets: their splits, files, processors and toy worlds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from lavis.common.registry import registry

from lavis_mafa.config.check import Report, Settings, is_url, listed
from lavis_mafa.config.run import evaluates_nothing
from lavis_mafa.config.schema import SPLITS

PHASES = {"train": "train", "val": "eval", "test": "eval"}  # whose processors a split takes
FOLDERS = ("images", "videos", "features")
OTHER_FILES = ("detections", "references", "instances")
# What the samples of known data sets hold beside images, and what tasks need.
HOLD = {
    "questions": ("coco_vqa", "vg_vqa", "ok_vqa", "aok_vqa", "gqa", "toy_vqa"),
    "labels": ("snli_ve", "toy_ve", "nlvr", "nlvr_mafa", "toy_nlvr"),
    "boxes": ("refcoco_plus", "toy_grounding"),
    "captions": ("coco_caption", "vg_caption", "sbu_caption", "coco_retrieval", "flickr30k")
    + ("conceptual_caption_3m", "conceptual_caption_12m", "nocaps", "image_text_json")
    + ("image_text_shards", "toy_scenes", "toy_caption"),
}
NEED = {
    **dict.fromkeys(("mafa_vqa", "mafa_gqa"), "questions"),
    "mafa_classification": "labels",
    "mafa_grounding": "boxes",
    **dict.fromkeys(("mafa_captioning", "mafa_retrieval"), "captions"),
}
OF_DATA = ("seed", "train_size", "val_size", "test_size", "captions_per_image")  # of a toy world
CLASSES = {"snli_ve": 3, "toy_ve": 3, "nlvr": 2, "nlvr_mafa": 2, "toy_nlvr": 2}
TWO_IMAGES = ("nlvr", "nlvr_mafa", "toy_nlvr")
CAPTIONED = ("captioning", "mafa_captioning")  # tasks whose evaluation reads no text


def check_data(config: Mapping[str, Any], report: Report) -> None:
    """Checks ``datasets`` and the splits that ``run`` names; single keys have been checked."""
    s = Settings(config, report)
    training = s["run.evaluate"] is False
    _check_splits(s, report, training)
    _check_image_sizes(s, report, training)
    for name in s["datasets"] or {}:
        _check_what_it_holds(name, s, report)
        _check_toy_world(name, s, report)
        _check_processors(name, s, report, training)
        _check_files(name, s, report)


def _splits_of(name: str, s: Settings) -> list[str]:
    """The splits that a data set's config tells of; none where the builder makes them itself."""
    info = f"datasets.{name}.build_info"
    splits = [split for split, files in (s[f"{info}.annotations"] or {}).items() if files]
    return [*map(str, [*splits, *listed(s[f"{info}.splits"])])]


def _used_splits(s: Settings, training: bool) -> set[str]:
    """The splits that a run reads."""
    names = [*(["train_splits"] if training else []), "valid_splits", "test_splits"]
    named = [split for name in names for split in listed(s[f"run.{name}"])]
    return {split for split in named if isinstance(split, str)}


def _check_splits(s: Settings, report: Report, training: bool) -> None:
    if training and s["run.train_splits"] == []:
        report.add("run.train_splits", "is empty; name one (train), or set run.evaluate: True")
    names = ("train_splits", "valid_splits", "test_splits")
    asked = {name: s[f"run.{name}"] or [] for name in names}
    if s["run.evaluate"]:
        del asked["train_splits"]
        if not any(asked.values()):
            report.add("run.test_splits", "is empty and so is run.valid_splits: nothing to do")
    for key, splits in asked.items():
        for i, split in enumerate(splits):
            if split in splits[:i]:
                report.add(f"run.{key}[{i}]", f"{split!r} is named twice; name it once")
    there: set[str] = set()
    for name in s["datasets"] or {}:
        splits = _splits_of(name, s)
        if not splits:
            return  # the builder makes its splits otherwise
        there.update(splits)
    for key, splits in asked.items():
        for i, split in enumerate(splits):
            if split in SPLITS and split not in there:
                have = ", ".join(sorted(there))
                report.add(f"run.{key}[{i}]", f"no dataset has a split {split!r}; they have {have}")


def _check_image_sizes(s: Settings, report: Report, training: bool) -> None:
    image = s["model.image_size"]
    for name in s["datasets"] or {}:
        for part in ("train", "eval") if s.traits.loads_with_our_loader else ():
            key = f"datasets.{name}.vis_processor.{part}.image_size"
            size = s[key]
            if image and size and size != image and not (part == "train" and not training):
                report.add(key, f"{size} differs from model.image_size {image}")
        info = f"datasets.{name}.build_info"
        cell, grid = s[f"{info}.cell_size"], s[f"{info}.grid"]  # pictures that are rendered
        resized = s[f"datasets.{name}.vis_processor"]
        if image and cell and grid and image != cell * grid and not resized:
            why = f"{image}, but pictures of {name} are {cell} * {grid} = {cell * grid} pixels wide"
            report.add("model.image_size", f"{why}; use that, or give a vis_processor")


def _check_what_it_holds(name: str, s: Settings, report: Report) -> None:
    """Tasks and models need samples of their kind."""
    path, task = f"datasets.{name}", s["run.task"]
    holds = next((kind for kind, names in HOLD.items() if name in names), None)
    needed = NEED.get(task or "")
    if holds and needed and holds != needed:
        why = f"holds {holds}, and task {task} needs {needed}; use such as {HOLD[needed][-1]}"
        report.add(path, why)
    seen, shown = s.traits.images_per_sample, 2 if name in TWO_IMAGES else 1
    if holds == "labels" and seen and seen != shown:
        number = {1: "one image", 2: "two images"}
        why = f"samples show {number[shown]}, and {s['model.arch']} sees"
        report.add(path, f"{why} {number[seen]}; use another of them")
    classes = s["model.num_classes"]
    if name in CLASSES and task == "mafa_classification" and classes is not None:
        if classes < CLASSES[name]:
            why = f"{classes} is too few; {name} has labels of {CLASSES[name]} classes"
            report.add("model.num_classes", f"{why}; use {CLASSES[name]}")


def _check_toy_world(name: str, s: Settings, report: Report) -> None:
    """What the toy world's builders refuse when they make the data."""
    from lavis_mafa.toyworld.builder import ToyBuilder, read_build_info
    from lavis_mafa.toyworld.world import WorldConfig

    path, builder = f"datasets.{name}.build_info", registry.get_builder_class(name)
    given = s[path]
    if not isinstance(given, Mapping) or not builder or not issubclass(builder, ToyBuilder):
        return
    info = {key: value for key, value in given.items() if f"{path}.{key}" not in report.bad}

    def told(read: Callable[[dict[str, Any]], Any], part: dict[str, Any]) -> None:
        try:
            read(part)
        except (TypeError, ValueError) as error:
            for problem in str(error).split("; "):
                found = re.search(r"(?:^|: )(\w+) is (.*)", problem)
                key = f"{path}.{found[1]}" if found and found[1] in given else path
                report.add(key, f"is {found[2]}" if found and key != path else problem)

    told(builder.take_own, info)  # takes its keys out, or tells of one
    sizes = {key: info.pop(key) for key in OF_DATA if key in info}
    known = {*OF_DATA, "preset", "cache_dir", *(field.name for field in fields(WorldConfig))}
    told(read_build_info, sizes)
    told(read_build_info, {key: value for key, value in info.items() if key in known})


def _check_processors(name: str, s: Settings, report: Report, training: bool) -> None:
    """Pictures read from files need a processor in every phase that the run has."""
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
                report.add(key, f"{chosen} is a {other}_processor; use such as {example}")
    pictures = s[f"{path}.data_type"] == "images" and s[f"{path}.build_info.images"] is not None
    if not pictures or builder is None:
        return
    there = _splits_of(name, s)
    phases = {PHASES[split] for split in _used_splits(s, training) & set(there) & set(PHASES)}
    if evaluates_nothing(s["run.task"]):
        phases.discard("eval")
    for phase in sorted(phases):
        for kind, needed in (("vis", True), ("text", s["run.task"] not in CAPTIONED)):
            key = f"{path}.{kind}_processor"
            # LAVIS passes texts on as they are where no text processor is named at all.
            lacks = s[f"{key}.{phase}"] is None and (kind == "vis" or s[key] is not None)
            known_bad = any(bad.startswith(key) for bad in report.bad)
            if needed and lacks and not known_bad:
                why = f"run reads splits of {name} that need it; name one"
                example = {"vis": f"blip_image_{phase}", "text": "blip_caption"}[kind]
                report.missing(f"{key}.{phase}", f"the {why}, such as {{name: {example}}}")


def _makes(processor: str) -> str:
    """``vis``, ``text``, or "" for what is not known, as somebody's own."""
    module = getattr(registry.get_processor_class(processor), "__module__", "")
    if not module.startswith(("lavis.", "lavis_mafa.")):
        return ""
    if processor.endswith(("_caption", "_question")):
        return "text"
    return "vis" if "_image_" in processor or "_video_" in processor else ""


def _check_files(name: str, s: Settings, report: Report) -> None:
    path = f"datasets.{name}.build_info"
    builder = registry.get_builder_class(name)
    lavis_own = builder is not None and builder.__module__.startswith("lavis.")
    root = registry.get_path("cache_root") if lavis_own else ""

    files_named = getattr(builder, "files_named", lambda file: [file])  # by a pattern

    def places(file: str) -> list[str]:
        return list(files_named(os.path.expanduser(os.path.join(root, file))))

    def there(file: str) -> bool:
        return bool(places(file)) and all(map(os.path.exists, places(file)))

    annotations = s[f"{path}.annotations"]
    if annotations == {}:
        report.add(f"{path}.annotations", "is empty; name a split: train: {storage: ...}")
    for split in annotations or ():
        where = f"{path}.annotations.{split}"
        storage, url = listed(s[f"{where}.storage"]), listed(s[f"{where}.url"])
        if storage and url and len(storage) != len(url):
            report.add(where, f"{len(url)} url for {len(storage)} storage; give as many of both")
            continue
        for i, file in enumerate(storage):
            source = url[i] if url else ""
            found = is_url(source) or os.path.isfile(source) or there(file)
            if report.machine and not found:
                lost = f"neither url {source!r} nor storage {file!r}" if source else repr(file)
                report.add(f"{where}.storage", f"no such file: {lost}")
    for key, folder in _named(path, FOLDERS, s):
        if report.machine and not there(folder):
            report.add(key, f"no such folder: {folder!r}")
        elif report.machine and any(map(os.path.isfile, places(folder))):
            report.add(key, f"{folder!r} is a file; expected a folder")
    for key, file in _named(path, OTHER_FILES, s):
        if report.machine and not there(file):
            report.add(key, f"no such file: {file!r}")
    kind = s[f"datasets.{name}.data_type"]
    folders = [one for one in FOLDERS if isinstance(s[f"{path}.{one}"], Mapping)]
    if kind and folders and kind not in folders and f"{path}.{kind}" not in report.bad:
        why = f"{kind}, but {path} has {' and '.join(folders)}"
        report.add(f"datasets.{name}.data_type", f"{why}; use {folders[0]}")
    elif kind in folders and s[f"{path}.{kind}.storage"] is None:
        if annotations:
            why = f"expected the folder that paths of {kind} are relative to"
            report.missing(f"{path}.{kind}.storage", why)


def _named(path: str, kinds: tuple[str, ...], s: Settings) -> Iterator[tuple[str, str]]:
    """Keys and values of what ``build_info`` names under some kinds."""
    for kind in kinds:
        for value in listed(s[f"{path}.{kind}.storage"]):
            yield f"{path}.{kind}.storage", value
