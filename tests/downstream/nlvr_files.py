"""Small files in the format of NLVR2."""

from __future__ import annotations

import json

from lavis.datasets.builders.base_dataset_builder import load_dataset_config
from PIL import Image

from lavis_mafa.downstream import NlvrMafaBuilder


def nlvr_files(folder, rows=4):
    """Write images of two colours and annotations of every split; return a config that names
    them.
    """
    for name, colour in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
        (folder / "images" / "train").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), colour).save(folder / "images" / "train" / f"{name}.png")
    cfg = load_dataset_config(NlvrMafaBuilder.default_config_path())
    for split in ("train", "val", "test"):
        content = [
            {
                "images": ["train/red.png", "train/blue.png"],
                "sentence": f"The left image of {split} is bright red {i}.",
                "label": "True" if i % 2 else "False",
            }
            for i in range(rows)
        ]
        (folder / f"{split}.json").write_text(json.dumps(content))
        cfg.build_info.annotations[split].storage = f"{split}.json"
    cfg.build_info.images.storage = "images"
    phases = ("train", "eval")
    cfg.vis_processor = {phase: {"name": "blip_image_eval", "image_size": 32} for phase in phases}
    cfg.text_processor = {phase: {"name": "blip_caption"} for phase in phases}
    return cfg
