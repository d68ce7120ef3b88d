"""Tiny models of ALBEF's downstream tasks, and LAVIS's classes in their sizes."""

from __future__ import annotations

import json
import shutil

import torch
from conftest import tiny_config

from lavis_mafa.io.project_files import CONFIGS


def build(cls, seed=0, **changes):
    torch.manual_seed(seed)
    return cls.from_config(tiny_config(cls, **changes))


def save(model, path, **content):
    torch.save({"model": model.state_dict(), **content}, path)
    return str(path)


def write_vocabulary(folder):
    """Write the tiny vocabulary where LAVIS, in this folder, looks for ``bert-base-uncased``."""
    (folder / "bert-base-uncased").mkdir()
    shutil.copy(CONFIGS / "models/tiny_vocab.txt", folder / "bert-base-uncased/vocab.txt")


def write_lavis_sizes(path, **changes):
    """Write BERT's tiny config with the numbers of layers that LAVIS's classes assume."""
    tiny = json.loads((CONFIGS / "models/med_config_tiny.json").read_text())
    path.write_text(json.dumps({**tiny, "num_hidden_layers": 12, "fusion_layer": 6, **changes}))
    return str(path)
