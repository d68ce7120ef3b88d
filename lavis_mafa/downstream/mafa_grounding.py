"""Visual grounding by Grad-CAM of models trained on image-text pairs without boxes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lavis.common.dist_utils import is_main_process
from lavis.common.registry import registry
from lavis.tasks.base_task import BaseTask
from PIL import Image, ImageDraw

from lavis_mafa.algorithm.backbone import backbone_of
from lavis_mafa.downstream import grounding_metrics as grounding
from lavis_mafa.downstream import task_records as results
from lavis_mafa.downstream.gradcam import TOKENS, default_layer, heat_maps
from lavis_mafa.io.files import lost_writes
from lavis_mafa.io.project_files import read_config
from lavis_mafa.models.traits import traits_of
from lavis_mafa.problems import ConfigView, Problem
from lavis_mafa.tasks.mafa_pretrain import StepFigures

logger = logging.getLogger(__name__)

TRUE, CHOSEN = (0, 200, 0), (255, 0, 0)  # colours of the boxes
_SHOWN_SIDE = 256  # pixels, at least, of the shorter side of an _overlay
_RESULT_KEYS = ("instance_id", "ref_id", "text", "split", "box", "score", "peak")


@registry.register_task("mafa_grounding")
class MafaGroundingTask(results.InBatches, StepFigures, BaseTask):
    """Locates what an expression refers to by the heat map of the ITM head (ALBEF 6.4, appendix A).

    Proposals are ranked by the heat inside over the square root of the area; a choice is right if
    its IoU with the true box is at least 0.5. Figures: `lavis_mafa.downstream.grounding_metrics`,
    with the parts that samples name (testA, testB).

    It evaluates any model whose texts attend to images in LAVIS's ``med.py``, and trains it by its
    own losses; a ``*_mafa`` model trains as with the task ``mafa_pretrain``.

    Samples of an evaluation set have ``image``, ``text_input``, ``index`` (their place in the set),
    ``size`` (``[height, width]`` of the picture in pixels), ``box`` (the true one,
    ``[x, y, width, height]``) and ``boxes`` (proposals, or None); optional are ``instance_id``,
    ``ref_id`` and ``split``. Overlays need the set's ``show(index)``.

    Args:
        layer: BERT's layer, from 0 (``run.block_num``); None: the third with cross-attention.
        tokens: see `heat_maps` (``run.gradcam_tokens``).
        save_maps: number of expressions for which an _overlay is written (``run.save_maps``).
    """

    doing = "grounding"
    needs = "boxes"

    @classmethod
    def problems_of(cls, cfg: ConfigView) -> Iterator[Problem]:
        """Yield contradictions in a config; see `lavis_mafa.problems`."""
        evaluates = cfg["run.valid_splits"] or cfg["run.test_splits"]
        arch, key = cfg["model.arch"], "model.med_config_path"
        if arch and evaluates and not traits_of(arch).attends_from_text:
            why = f"{arch} has no text encoder that attends to images; use albef_mafa or blip_mafa"
            yield Problem("run.task", f"mafa_grounding draws heat maps of one, and {why}")
        layer, path = cfg["run.block_num"], cfg[key]
        if layer is None or not path:
            return
        sizes = read_config(path)
        first, layers = sizes.get("fusion_layer", 0), sizes.get("num_hidden_layers")
        if layers and not first <= layer < layers:
            why = f"layer {layer} does not attend to images; layers of {key} that do"
            yield Problem("run.block_num", f"{why}: {first} to {layers - 1}")

    def __init__(
        self, layer: int | None = None, tokens: str = TOKENS[0], save_maps: int = 0
    ) -> None:
        super().__init__()
        self.layer, self.tokens, self.save_maps = layer, tokens, save_maps
        self._dataset: Any = None

    @classmethod
    def setup_task(cls, cfg: Any) -> MafaGroundingTask:
        run = cfg.run_cfg
        return cls(
            layer=run.get("block_num"),
            tokens=run.get("gradcam_tokens") or TOKENS[0],
            save_maps=int(run.get("save_maps") or 0),
        )

    def before_evaluation(self, model: Any, dataset: Any, **kwargs: Any) -> None:
        """Check before anything is computed that model and data fit.

        Raises:
            TypeError: if its texts do not attend to images, or it has no ITM head.
            ValueError: if samples have no boxes.
        """
        super().before_evaluation(model=model, dataset=dataset, **kwargs)
        backbone_of(model)
        layer = default_layer(model) if self.layer is None else self.layer
        self._dataset = dataset
        if len(dataset):
            sample = dataset[0]
            missing = [name for name in ("index", "size", "box", "boxes") if name not in sample]
            if missing:
                raise ValueError(
                    f"mafa_grounding needs {', '.join(missing)} in the samples of "
                    f"{type(dataset).__name__}; use refcoco_plus"
                )
        if is_main_process():
            logger.info("Grad-CAM of layer %d, averaged over %s tokens", layer, self.tokens)

    def valid_step(self, model: Any, samples: Any) -> list[results.Record]:
        """Choose a proposal for each expression of a mini-batch."""
        texts = list(samples["text_input"])
        maps = heat_maps(backbone_of(model), samples["image"], texts, self.layer, self.tokens)
        columns = {
            name: results.column(samples, name) or [None] * len(texts)
            for name in ("index", "size", "box", "boxes", "instance_id", "ref_id", "split")
        }
        records = []
        for number, heat in enumerate(maps.cpu()):
            own = {name: values[number] for name, values in columns.items()}
            record = {**own, "text": texts[number], "truth": own["box"], "box": None, "score": None}
            whole = grounding.stretch(heat, own["size"])
            record["peak"] = grounding.peak(whole)
            if own["boxes"]:
                scores = grounding.box_scores(whole, torch.tensor(own["boxes"]))
                chosen = grounding.choose(scores)
                if chosen is not None:
                    record.update(box=own["boxes"][chosen], score=float(scores[chosen]))
            if own["index"] < self.save_maps:
                record["heat"] = heat.tolist()
            records.append(record)
        return records

    def after_evaluation(
        self, val_result: list[results.Record], split_name: str, **kwargs: Any
    ) -> dict[str, float]:
        """Write ``<split>_grounding_result.json`` and overlays, and score, on the main process.

        Returns:
            The figures.
        """
        records, path = results.write_result(
            val_result,
            "index",
            f"{split_name}_grounding_result",
            lambda r: {k: r[k] for k in _RESULT_KEYS if r[k] is not None or k == "box"},
        )
        self._write_maps(records, path.parent / f"{split_name}_maps")
        figures = grounding.score_grounding(records)
        # A trained head leaves hardly any map without heat in the layers that work.
        if figures.get("undecided", 0) > 50:
            logger.warning(
                "%.0f %% of the maps are without heat: run.block_num may be the last layer with "
                "run.gradcam_tokens: words, or the ITM head may be untrained",
                figures["undecided"],
            )
        return figures

    def _write_maps(self, records: list[results.Record], folder: Path) -> None:
        shown = [record for record in records if "heat" in record]
        if not shown or not hasattr(self._dataset, "show"):
            return
        with lost_writes.allow(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for record in shown:
                picture, _ = self._dataset.show(record["index"])
                _overlay(picture, record).save(folder / f"{record['index']:06d}.png")
            logger.info("%d maps are in %s", len(shown), folder)


def _overlay(picture: Image.Image, record: Mapping[str, Any]) -> Image.Image:
    """Draw a picture next to its heat map, with the true box in green and the chosen one in red.

    Args:
        record: has ``heat`` (rows of numbers), ``truth`` and ``box`` (None if nothing was chosen).
    """
    heat = torch.tensor(record["heat"])
    scale = max(1, -(-_SHOWN_SIDE // min(picture.size)))
    size = (picture.width * scale, picture.height * scale)
    shown = picture.convert("RGB").resize(size, Image.Resampling.NEAREST)
    strength = grounding.stretch(heat, (size[1], size[0])).clamp(min=0)
    strength = strength / strength.max().clamp(min=1e-12)
    # Not 255: the picture stays visible where it is hottest.
    mask = Image.fromarray((strength * 200).byte().numpy())
    hot = Image.composite(Image.new("RGB", size, (255, 90, 0)), shown, mask)
    draw = ImageDraw.Draw(hot)
    # Inset the chosen box, so that both can be seen where they are equal.
    for box, colour, inset in ((record["truth"], TRUE, 0), (record["box"], CHOSEN, 3)):
        if box is not None:
            x, y, width, height = (side * scale for side in box)
            inset = min(inset, (width - 1) / 2, (height - 1) / 2)
            corners = [x + inset, y + inset, x + width - 1 - inset, y + height - 1 - inset]
            draw.rectangle(corners, outline=colour, width=2)
    both = Image.new("RGB", (2 * size[0], size[1]))
    both.paste(shown, (0, 0))
    both.paste(hot, (size[0], 0))
    return both
