"""Check that the files and folders that a config names exist, and take the width of features."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from lavis.common.registry import registry
from lavis.common.utils import is_url
from lavis.datasets.builders.base_dataset_builder import BaseDatasetBuilder

from lavis_mafa.compat.traits import traits_of
from lavis_mafa.data.feature_folder import FeatureFolder
from lavis_mafa.data.image_text_json import ImageTextShardsBuilder
from lavis_mafa.io.problems import ConfigView, Problem
from lavis_mafa.settings.check import Report, listed
from lavis_mafa.settings.contradictions import used_splits
from lavis_mafa.settings.schema import SPLITS

Problems = Iterator[Problem]
_FOLDERS = ("images", "videos", "features")


def check_files(config: MutableMapping[str, Any], report: Report) -> None:
    """Check that what the run reads exists; set ``model.feature_width`` if it is not given."""
    cfg = ConfigView(config, report.bad, machine=report.machine)
    for name in cfg["datasets"] or {}:
        report.take(_features(name, cfg))
        if report.machine:
            report.take(_data(name, cfg))
    if report.machine:
        report.take(_folder(cfg))
        report.take(_named(cfg))


def _features(name: str, cfg: ConfigView) -> Problems:
    """Take the width of the features of a data set; yield why they cannot be read."""
    builder, key = registry.get_builder_class(name), f"datasets.{name}.build_info.features.storage"
    if not (isinstance(builder, type) and issubclass(builder, ImageTextShardsBuilder)):
        return  # of other builders the samples are not known
    folder, reads = cfg[key], cfg["model.image_encoder"] == "features"
    if folder is not None and not reads:
        why = f"is not features: a vit reads pictures, and {key} gives features; set features"
        yield Problem("model.image_encoder", why)
    elif folder is not None and cfg.machine and os.path.isdir(folder):
        try:
            width = FeatureFolder(folder).shape[2]
        except (OSError, ValueError) as error:
            yield Problem(key, str(error))
            return
        model = cfg["model"]
        model["feature_width"] = model.get("feature_width") or width
        if model["feature_width"] != width:
            why = f"the features have width {width}, expected {model['feature_width']}, that of"
            yield Problem(key, f"{why} model.feature_width and of the other data sets")


def _data(name: str, cfg: ConfigView) -> Problems:
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
        sources = listed(cfg[f"{key}.url"])
        for i, file in enumerate(listed(cfg[f"{key}.storage"])):
            source = sources[i] if i < len(sources) else ""
            if not (is_url(source) or os.path.isfile(source) or found(file)):
                given = f"neither url {source!r} nor storage " if source else ""
                yield Problem(f"{key}.storage", f"no such file: {given}{file!r}; {start}")
    for kind in (*_FOLDERS, "detections"):
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


def _named(cfg: ConfigView) -> Problems:
    """Yield files that the schema does not check: a path that is not used need not exist."""
    given = cfg["run.annotation_file"]
    for path in given.values() if isinstance(given, Mapping) else [given]:
        if isinstance(path, str) and not os.path.isfile(path):
            yield Problem("run.annotation_file", f"no such file: {path!r}")
    for name in ("pretrained", "finetuned"):
        path, wanted = cfg[f"model.{name}"], cfg[f"model.load_{name}"] is not False
        is_file = traits_of(cfg["model.arch"] or "").pretrained_is_file and not is_url(path or "")
        if path and wanted and is_file and not os.path.exists(path):
            cure = f"name a file or URL, or set model.load_{name}: False"
            yield Problem(f"model.{name}", f"no such file: {path!r}; {cure}")
