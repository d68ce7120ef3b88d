"""LAVIS's captioning task with local references, on several ranks, with or without Java."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.datasets.datasets.coco_caption_datasets import COCOCapEvalDataset
from lavis.tasks.captioning import CaptionTask
from torchvision.datasets.utils import download_url

from lavis_mafa.downstream import task_records as results
from lavis_mafa.downstream.caption_metrics import (
    References,
    Tools,
    domain_name,
    find_tools,
    read_references,
    score_captions,
)
from lavis_mafa.downstream.row_values import Id, Ids, as_id, by_id, references_of
from lavis_mafa.io.processes import on_main_process
from lavis_mafa.problems import ConfigError

logger = logging.getLogger(__name__)

KARPATHY = (
    "https://storage.googleapis.com/sfr-vision-language-research/datasets/coco_karpathy_{}_gt.json"
)
_ID_KEYS = ("image_id", "index")  # of a sample, in this order
# Returns the references, given the generated records.
_Finder = Callable[[list[results.Record]], References]


@registry.register_task("mafa_captioning")
class MafaCaptionTask(results.InBatches, CaptionTask):
    """Captions images with any LAVIS model that has ``generate`` and scores the captions.

    References come from ``run.annotation_file``, else from the data set itself, else from LAVIS's
    download for COCO. Figures: see `lavis_mafa.downstream.caption_metrics.score_captions`.

    Attributes:
        prompt: text that generation starts with, given as ``samples["prompt"]``.
        annotation_file: JSON in COCO's caption format, or one for each split.
        tools: metrics to score with; None: all available ones.
        options: further arguments of the model's ``generate``: ``length_penalty``,
            ``repetition_penalty``, ``top_p`` (samples instead of beam search).
    """

    doing = "captioning"
    asks_of_model = "generate"
    needs = "captions"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt = ""
        self.annotation_file: str | Mapping[str, str | None] | None = None
        self.tools: Tools | None = None
        self.options: dict[str, float] = {}
        self._built: Mapping[str, Mapping[str, Any]] = {}
        self._finder: _Finder | None = None
        self._prompt_checked = False
        self._ids = Ids()

    @classmethod
    def setup_task(cls, cfg: Any) -> MafaCaptionTask:
        """Return the task of a config.

        Raises:
            ConfigError: if ``run.metrics`` names a metric that this machine cannot score.
        """
        run, task = cfg.run_cfg, super().setup_task(cfg)
        if task.report_metric:
            metrics = run.get("metrics")
            try:
                # Only rank 0 scores, and asking Java takes a second: the config check does not do
                # it.
                task.tools = on_main_process(
                    lambda: find_tools(None if metrics is None else list(metrics))
                )
            except ValueError as error:
                path = getattr(getattr(cfg, "args", None), "cfg_path", "file")
                raise ConfigError(str(path), [str(error)]) from error
        task.prompt, task.annotation_file = run.get("prompt") or "", run.get("annotation_file")
        names = ("length_penalty", "repetition_penalty", "top_p")
        task.options = {name: run.get(name) for name in names if run.get(name) is not None}
        return task

    def build_datasets(self, cfg: Any) -> Any:
        """Build the data sets and check ``run.annotation_file``, before there is a model."""
        self._built = super().build_datasets(cfg)
        splits = {(name, split) for name, parts in self._built.items() for split in parts}
        files = (self._file_of(name, split) for name, split in splits if split != "train")
        # All ranks in the same order.
        for path in sorted(filter(None, files)) if self.report_metric else ():
            on_main_process(partial(read_references, path))
        return self._built

    def _file_of(self, name: str, split: str) -> str | None:
        """Return the ``run.annotation_file`` of a split."""
        path = self.annotation_file
        if path is None or isinstance(path, str):
            return path
        return path.get(f"{name}.{split}", path.get(split))

    def before_evaluation(self, model: Any, dataset: Any, **kwargs: Any) -> None:
        """Check before anything is generated that the model and the references fit.

        Raises:
            ValueError: if the model cannot take an option, or there are no references.
            FileNotFoundError: if ``run.annotation_file`` does not exist.
        """
        super().before_evaluation(model=model, dataset=dataset, **kwargs)
        self._ids = Ids()
        for name in self.options:
            results.require_argument(model, "generate", name, name)
        if not self.report_metric:
            return
        if self.tools is None and is_main_process():
            self.tools = find_tools()
        self._finder = on_main_process(lambda: self._find_references(dataset))

    def valid_step(self, model: Any, samples: Any) -> list[results.Record]:
        """Caption a mini-batch.

        Raises:
            ValueError: if samples have neither ``image_id`` nor ``index``, or different ids are the
                same number.
        """
        ids = results.required_column(samples, *_ID_KEYS)
        if wrong := next(filter(None, map(self._ids.add, ids)), None):
            raise ValueError(f"image id {wrong}")
        places = results.column(samples, "instance_id", "index") or [None] * len(ids)
        # Some of LAVIS's models ignore samples["prompt"], which shows only when they run.
        given = _RecordingDict(samples, prompt=self.prompt) if self.prompt else samples
        captions = model.generate(
            given,
            use_nucleus_sampling="top_p" in self.options,
            num_beams=self.num_beams,
            max_length=self.max_len,
            min_length=self.min_len,
            **self.options,
        )
        results.check_length(captions, len(ids), f"{type(model).__name__}.generate()")
        if isinstance(given, _RecordingDict) and not self._prompt_checked:
            self._prompt_checked = True  # warn only once
            if "prompt" not in given.read and is_main_process():
                logger.warning(
                    'run.prompt is set, but %s.generate() did not read samples["prompt"], so it '
                    "is ignored; set model.prompt for such a model",
                    type(model).__name__,
                )
        return [
            {"image_id": as_id(image), "caption": caption, "place": place}
            for image, caption, place in zip(ids, captions, places, strict=True)
        ]

    def after_evaluation(
        self, val_result: list[results.Record], split_name: str, epoch: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Write ``<split>_epoch<epoch>.json`` and score it, on the main process.

        Returns:
            The figures; empty if ``run.report_metric`` is False.
        """
        keys, name = ("image_id", "caption"), f"{split_name}_epoch{epoch}"
        records, _ = results.write_result(
            val_result, "image_id", name, lambda record: {key: record[key] for key in keys}
        )
        if not self.report_metric:
            return {}
        assert self._finder is not None and self.tools is not None
        captions = {record["image_id"]: record["caption"] for record in records}
        return score_captions(captions, self._finder(val_result), self.tools)

    def _find_references(self, dataset: Any) -> _Finder:
        names = [
            (name, split)
            for name, splits in self._built.items()
            for split, built in splits.items()
            if built is dataset
        ]
        name, split = names[0] if names else ("", "")
        path = self._file_of(name, split)
        if path is not None:
            if not os.path.isfile(path):
                raise FileNotFoundError(f"run.annotation_file: no such file: {path!r}")
            from_file = read_references(path)
            results.check_known(
                dataset, _ID_KEYS, from_file.captions, f"run.annotation_file: {path}"
            )
            return lambda records: from_file
        if hasattr(dataset, "references"):
            own = _with_captions(dataset.references().items())
            return lambda records: References(own, source=type(dataset).__name__)
        if any(_own_captions(row) for row in getattr(dataset, "annotation", ())):
            return lambda records: _from_annotation(dataset.annotation, records)
        if hasattr(dataset, "img2txt") and hasattr(dataset, "text"):
            texts = {i: [dataset.text[t] for t in ts] for i, ts in dataset.img2txt.items()}
            return lambda records: References(texts, source=type(dataset).__name__)
        if type(dataset) is COCOCapEvalDataset and name == "coco_caption" and split != "train":
            downloaded = read_references(_karpathy(split))
            return lambda records: downloaded
        raise ValueError(
            f"no captions to score {split or type(dataset).__name__} of {name or 'the data'} "
            "against: give a JSON file in COCO's caption format as run.annotation_file, or set "
            "run.report_metric: False to write captions only"
        )


class _RecordingDict(dict[str, Any]):
    """A mini-batch that records which keys are read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: set[Any] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def _own_captions(row: Any) -> list[str]:
    return references_of(row.get("caption")) if isinstance(row, Mapping) else []


def _with_captions(items: Iterable[tuple[Any, Any]]) -> dict[Id, list[str]]:
    """Return the captions of every image that has any, by `as_id`.

    Raises:
        ValueError: if different ids are one number, or a caption is no text.
    """
    given = ((i, list(own) if isinstance(own, tuple) else own) for i, own in items)
    captions = {image: references_of(own) for image, own in by_id(given).items()}
    return {image: own for image, own in captions.items() if own}


def _from_annotation(
    annotation: Sequence[Mapping[str, Any]], records: Sequence[results.Record]
) -> References:
    """Return the references of a data set that has them in its own annotation.

    An image may have several rows, one a caption.

    Raises:
        ValueError: if different images have the same id, or samples lack their row's number.
    """
    captions: dict[Id, dict[int, list[str]]] = {}
    domains: dict[Id, str] = {}
    shown: dict[Id, Any] = {}
    for record in records:
        if record["place"] is None:
            raise ValueError(
                "samples have no instance_id, the row of their captions in the annotation; give "
                "the captions as run.annotation_file"
            )
        image, place = record["image_id"], int(record["place"])
        row = annotation[place]
        if shown.setdefault(image, row.get("image")) != row.get("image"):
            raise ValueError(
                f"{shown[image]} and {row.get('image')} have the same image id {image!r}; the "
                "data set must give every image its own id"
            )
        found = _own_captions(row)
        if found:
            captions.setdefault(image, {})[place] = found
        if row.get("domain"):
            domains[image] = domain_name(row["domain"])
    merged = {image: [c for one in rows.values() for c in one] for image, rows in captions.items()}
    return References(merged, domains, "the annotation of the data set")


def _karpathy(split: str) -> str:
    """Return the path of LAVIS's references of COCO's Karpathy split, downloaded once."""
    folder = os.path.join(registry.get_path("cache_root"), "coco_gt")
    url = KARPATHY.format(split)
    path = os.path.join(folder, url.rsplit("/", 1)[1])
    if not os.path.isfile(path):
        try:
            download_url(url, folder)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{url} cannot be downloaded ({error}); give a local JSON file in COCO's caption "
                f"format as run.annotation_file, or put the file at {path}"
            ) from error
    return path
