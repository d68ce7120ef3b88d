"""Arguments for the analysis commands on real photographs with a small vocabulary and a tiny
model.
"""

from __future__ import annotations

import json

from conftest import ROOT

from lavis_mafa.data.make_vocab import make_vocab

CONFIG = str(ROOT / "projects/mafa/train/albef_own_data.yaml")


def own_arguments(command, output, folder, photographs, *options, missing=0):
    """Return arguments for a hundred captions of the photographs, plus ``missing`` ones without
    image.
    """
    pairs = json.loads((photographs / "train.json").read_text())[:100]
    table, words = folder / "train.json", folder / "vocab.txt"
    table.write_text(json.dumps(pairs))
    make_vocab([str(table)], str(words), size=300)
    names = [f"images/missing_{k}.jpg" for k in range(missing)]
    pairs += [{**pairs[0], "image": name, "image_id": name} for name in names]
    table.write_text(json.dumps(pairs))
    info = "datasets.image_text_json.build_info"
    return [
        *(command, "--cfg-path", CONFIG, "--output", str(output), "--options"),
        f"{info}.annotations.train.storage={table}",
        *(f"{info}.annotations.{s}.storage={photographs}/{s}.json" for s in ("val", "test")),
        *(f"{info}.images.storage={photographs}", f"model.tokenizer={words}"),
        *("model.model_type=tiny", "model.load_pretrained=False", "model.image_size=32"),
        *("run.device=cpu", "run.amp=False", "run.num_workers=0", "run.batch_size_train=12"),
        *("run.grit.search_space=48", "run.grit.queue_size=96"),
        *options,
    ]
