"""A small study of two rows with two values of M, its base, and logs of its runs."""

from __future__ import annotations

import json
from functools import cache

import yaml

from lavis_mafa.settings import load_config
from research import study as command
from research.studies.plan import make_plan
from research.studies.study_file import read_study

TOY = "projects/mafa/train/albef_toy.yaml"
MASKED, SPACE = "model.mlm_mask_prob", "run.grit.search_space"
BASE = {
    "seeds": [3, 5],
    "options": {"run.valid_splits": [], "run.test_splits": ["test"]},
    "settings": {
        "random": {"run.grit.enabled": False, "model.mafa.negatives": "sampled"},
        "con_d": {
            "model.mafa.con_d.arch": "albef_mafa",
            "model.mafa.con_d.model_type": "tiny",
            "model.mafa.con_d.checkpoint": "{con_d}",
        },
    },
    "shared": {
        "start": {
            "module": "research.toy_start",
            "arguments": ["--seed", "{seed}", "--output", "{folder}/start.pth"],
            "writes": "start.pth",
        },
        "con_d": {
            "config": TOY,
            "uses": ["random"],
            "options": {"model.load_pretrained": True, "model.pretrained": "{start}"},
        },
        "unused": {"config": TOY},
    },
    "stages": {
        "train": {"config": TOY},
        "test": {
            "config": TOY,
            "options": {"model.load_pretrained": True, "model.pretrained": "{train}"},
        },
    },
    "columns": {
        "tr1": {"title": "TR@1", "key": "txt_r1"},
        "loss": {"key": ["loss_itc", "loss_itm"], "stage": "train", "kind": "epoch", "scale": 10},
    },
}
OWN = {
    "base": "base_{at}.yaml",
    "title": "A title",
    "source": "Table 0",
    "rows": [
        {"name": "plain", "marks": {"Con-D": False}, "uses": ["random"]},
        {"name": "mined", "marks": {"Con-D": True}, "uses": ["con_d"], "options": {MASKED: 0.2}},
    ],
    "vary": {SPACE: [128, 256]},
    "titles": {SPACE: "M"},
    "paper": {
        "about": "Large",
        "columns": ["row", "M", "TR", "IR"],
        "rows": [["plain", 128, 76.6, 59.6], ["mined", "–", 1.25, None], ["both", 256, 77, 60.2]],
    },
}


def write_study(folder, base=BASE, **changes):
    """Write the study, changed, and its base ``small``; return its path."""
    (folder / "base_small.yaml").write_text(yaml.safe_dump(base, sort_keys=False))
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({**OWN, **changes}, sort_keys=False))
    return path


def read_small_study(folder, base=BASE, **changes):
    return read_study(write_study(folder, base, **changes), "small")


@cache
def _loaded(path, options):
    return load_config(path, list(options), machine=False)


def config_of(job):
    return _loaded(job.config, job.options)


def plan_for(*words):
    """Return the plan of ``python -m research study`` with these words, without checks."""
    given = command.parsed(*words)
    study = command.study_of(given)
    output, page = command._folders(given, study)
    return make_plan(study, output, given.seeds or study.file.seeds, page, "command")


def write_log(job, *records, done=True):
    """Write the log of a run; unless told otherwise it is done."""
    job.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (job.folder / "log.jsonl").write_text("".join(lines))
    if done:
        (job.folder / "done").write_text(job.key)
