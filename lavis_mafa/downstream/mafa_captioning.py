"""LAVIS's captioning task with local references, on several ranks, with or without Java."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

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
from lavis_mafa.downstream.row_values import Id, Ids, as_id, references_of
from lavis_mafa.io.processes import on_main_process

logger = logging.getLogger(__name__)

KARPATHY = (
    "https://storage.googleapis.com/sfr-vision-language-research/datasets/coco_karpathy_{}_gt.json"
)


@registry.register_task("mafa_captioning")
class MafaCaptionTask(results.InBatches, CaptionTask):
    """Captions images with any LAVIS model that has ``generate`` and scores the captions.

    References come from ``run.annotation_file``, else from the data set itself, else from LAVIS's
    download for COCO. Figures: see `lavis_mafa.downstream.caption_metrics.score_captions`.

    Attributes:
        prompt: text that generation starts with, given as ``samples["prompt"]``; some of LAVIS's
            models do not read it and have ``model.prompt``.
        annotation_file: JSON in COCO's caption format, or one for each split.
        tools: metrics to score with; None: all available ones.
        options: further arguments of the model's ``generate``: ``length_penalty``,
            ``repetition_penalty``, ``top_p`` (samples instead of beam search).
    """

    doing = "captioning"
    asks_of_model = "generate"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt = ""
        self.annotation_file: str | Mapping[str, str | None] | None = None
        self.tools: Tools | None = None
        self.options: dict[str, float] = {}
        self._built: Mapping[str, Mapping[str, Any]] = {}
        self._references: References | None = None
        self._annotation: Sequence[Mapping[str, Any]] = ()
        self._ids = Ids()

    @classmethod
    def setup_task(cls, cfg: Any) -> MafaCaptionTask:
        """Return the task of a config.

        Raises:
            ValueError: if ``run.metrics`` names a metric that this machine cannot score.
        """
        run, task = cfg.run_cfg, super().setup_task(cfg)
        if task.report_metric:
            # Only rank 0 scores, and asking Java takes a second: the config check does not do it.
            task.tools = on_main_process(lambda: find_tools(run.get("metrics")))
        task.prompt, task.annotation_file = run.get("prompt") or "", run.get("annotation_file")
        names = ("length_penalty", "repetition_penalty", "top_p")
        task.options = {name: run.get(name) for name in names if run.get(name) is not None}
        return task

    def build_datasets(self, cfg: Any) -> Any:
        self._built = super().build_datasets(cfg)
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
        self._annotation = getattr(dataset, "annotation", ())
        if self.report_metric:
            self._references = on_main_process(lambda: self._find_references(dataset))

    def valid_step(self, model: Any, samples: Any) -> list[results.Record]:
        """Caption a mini-batch.

        Raises:
            ValueError: if samples have neither ``image_id`` nor ``index``, or different ids are the
                same number.
        """
        ids = results.required_column(samples, "image_id", "index")
        if wrong := next(filter(None, map(self._ids.add, ids)), None):
            raise ValueError(f"image id {wrong}")
        places = results.optional_column(samples, len(ids), "instance_id", "index")
        captions = model.generate(
            {**samples, "prompt": self.prompt} if self.prompt else samples,
            use_nucleus_sampling="top_p" in self.options,
            num_beams=self.num_beams,
            max_length=self.max_len,
            min_length=self.min_len,
            **self.options,
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
        records, _ = results.write_result(
            val_result,
            "image_id",
            f"{split_name}_epoch{epoch}",
            lambda one: {"image_id": one["image_id"], "caption": one["caption"]},
        )
        if not self.report_metric:
            return {}
        captions = {record["image_id"]: record["caption"] for record in records}
        references = self._references or _from_annotation(self._annotation, val_result)
        return score_captions(captions, references, self.tools or find_tools())

    def _find_references(self, dataset: Any) -> References | None:
        """Return the references of a data set; None if they are in the rows of its annotation."""
        names = [
            (name, split)
            for name, splits in self._built.items()
            for split, built in splits.items()
            if built is dataset
        ]
        name, split = names[0] if names else ("", "")
        path = self._file_of(name, split)
        if path is not None:
            from_file = read_references(path)
            what = f"run.annotation_file: {path}"
            results.check_known(dataset, ("image_id", "index"), from_file.captions, what)
            return from_file
        if any(references_of(row.get("caption")) for row in self._annotation):
            if not {"instance_id", "index"} & dataset[0].keys():
                raise ValueError("samples have neither instance_id nor index, the number of a row")
            return None
        if hasattr(dataset, "img2txt") and hasattr(dataset, "text"):
            texts = {i: [dataset.text[t] for t in ts] for i, ts in dataset.img2txt.items()}
            return References(texts, source=type(dataset).__name__)
        if type(dataset) is COCOCapEvalDataset and name == "coco_caption" and split != "train":
            return read_references(_karpathy(split))
        raise ValueError(
            f"no captions to score {split or type(dataset).__name__} of {name or 'the data'} "
            "against: give a JSON file in COCO's caption format as run.annotation_file, or set "
            "run.report_metric: False to write captions only"
        )


def _from_annotation(
    annotation: Sequence[Mapping[str, Any]], records: Sequence[results.Record]
) -> References:
    """Return the references of a data set that has them in its own annotation.

    An image may have several rows, one a caption.

    Raises:
        ValueError: if different images have the same id.
    """
    captions: dict[Id, dict[int, list[str]]] = {}
    domains: dict[Id, str] = {}
    shown: dict[Id, Any] = {}
    for record in records:
        image, place = record["image_id"], int(record["place"])
        row = annotation[place]
        if shown.setdefault(image, row.get("image")) != row.get("image"):
            raise ValueError(f"{shown[image]} and {row['image']} have the same image id {image!r}")
        found = references_of(row.get("caption"))
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
        download_url(url, folder)
    return path
