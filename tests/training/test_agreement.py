"""Ranks with different data, settings, weights or code do not start; ranks that agree end with the
same model.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from runs import (
    CONFIG,
    PROCESSORS,
    TOY,
    command,
    finish,
    launcher,
    options,
    spawn,
    write_toy_config,
)

from lavis_mafa import load_model
from lavis_mafa.training.agreement import of_config

SCRIPT = Path(__file__).with_name("runs_of_ranks.py")
STORAGE = "datasets.image_text_json.build_info.annotations.{}.storage"
PLUGIN = """
from lavis_mafa.algorithm.losses import LOSSES

@LOSSES.register("own")
def own(step):
    return {} * step.batch.own.float().mean() + 0 * step.compared.i2t.mean()
"""
# Equal code and settings: only what the judge takes of the data differs.
JUDGE = """
import os
import numpy as np
from lavis_mafa.judges.discriminators import DISCRIMINATORS, SampleJudge

@DISCRIMINATORS.register("drawn")
class Drawn(SampleJudge):
    needs_self_check = False

    def know(self, train_set):
        self.vectors = np.random.default_rng(int(os.environ["RANK"])).normal(size=9)

    def probability(self, images, texts):
        return np.full(len(images), 0.5)
"""
CON_D = {"model__mafa__con_d__arch": "albef_mafa", "model__mafa__con_d__model_type": "tiny"}
FNE = {
    **{f"run__grit__{name}": None for name in ("queue_size", "search_space", "start_epoch")},
    "model__mafa__con_d__arch": None,
    "run__k_test": None,
    "model__plain_epochs": 1,
    "model__memory_size": 20,
    "model__posterior__minimum": 5,
}
# Runs whose buffers change: queues of momentum encoders, thresholds, memory and distributions.
AGREEING = {
    "momentum and queue": {
        "model__mafa__soft_labels__type": "momentum",
        "model__queue_size": 24,
    },
    "thresholds": {
        "model__mafa__connections__score": "similarity",
        "model__mafa__connections__rule": "global_threshold",
        "model__mafa__connections__action": "drop",
        "model__mafa__con_d__arch": None,
        "model__mafa__con_d": "null",
    },
    "memory": {**FNE, "config": str(ROOT / "projects/mafa/train/fne_toy.yaml")},
}


def annotated(folder: Path) -> tuple[str, dict[str, Path]]:
    """Write 24 pictures and annotation files; return a config, and the files by what they are."""
    colours = np.random.default_rng(0).integers(0, 255, (24, 3))
    for k, colour in enumerate(colours):
        Image.new("RGB", (8, 6), tuple(map(int, colour))).save(folder / f"{k}.png")
    rows = [{"image": f"{k}.png", "caption": f"a circle {k % 7}"} for k in range(24)]
    other = [*rows[:3], rows[4], rows[3], *rows[5:]]
    caption = [*rows[:-1], {**rows[-1], "caption": "a square"}]
    lists = {"train": rows, "other order": other, "fewer": rows[:-2], "other caption": caption}
    files = {}
    for name, content in {**lists, "val": rows[:6], "other val": rows[1:7]}.items():
        files[name] = folder / f"{name.replace(' ', '_')}.json"
        files[name].write_text(json.dumps(content))
    (folder / "copy").mkdir()
    files["copy"] = Path(shutil.copy(files["train"], folder / "copy" / "other_name.json"))
    splits = {split: {"storage": str(files[split])} for split in ("train", "val")}
    info = {"annotations": {**splits, "test": None}, "images": {"storage": str(folder)}}
    data = {**PROCESSORS, "build_info": {**info, "cache_dir": str(folder / "cache")}}
    return write_toy_config(folder / "config.yaml", {"image_text_json": data}), files


def starting_files(folder: Path) -> dict[str, Path]:
    """Write two checkpoints that differ in one weight, two vocabularies and two plugins."""
    torch.manual_seed(0)
    model = load_model("albef_mafa", "tiny")
    files = {}
    for name in ("con_d", "other_con_d"):
        content = {"model": {"arch": "albef_mafa", "model_type": "tiny"}}
        files[name] = folder / f"{name}.pth"
        torch.save({"model": model.state_dict(), "config": content}, files[name])
        with torch.no_grad():
            model.itm_head.bias[0] += 0.01
    words = (ROOT / "lavis_mafa/configs/models/tiny_vocab.txt").read_text().split()
    for name, order in (("words", words), ("other_words", [*words[:-2], words[-1], words[-2]])):
        files[name] = folder / f"{name}.txt"
        files[name].write_text("\n".join(order))
    for seed, name in enumerate(("vectors", "other vectors")):
        files[name] = folder / f"vectors{seed}.npy"
        np.save(files[name], np.random.default_rng(seed).normal(size=(24, 8)).astype(np.float32))
    for name, factor in (("plugin", 1), ("other_plugin", 2)):
        files[name] = folder / name / "own.py"
        files[name].parent.mkdir()
        files[name].write_text(PLUGIN.format(factor))
    files["judge"] = folder / "judge.py"
    files["judge"].write_text(JUDGE)
    return files


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """How runs on two ranks ended, by case: what rank 0 and rank 1 report."""
    folder = tmp_path_factory.mktemp("ranks")
    own, files = annotated(folder)
    files |= starting_files(folder)
    plain = {**TOY, "config": own, "model__mafa__con_d__arch": None, "run__max_steps": 1}
    judged = {**CON_D, "model__mafa__con_d__checkpoint": files["con_d"], "run__max_steps": 1}
    plugin = {"run__plugins": f"[{files['plugin']}]", "model__mafa__loss_weights__own": 0.1}
    train, val = STORAGE.format("train"), STORAGE.format("val")
    captions = {"model__mafa__con_d__arch": "captions"}
    captions["model__mafa__con_d__captions__vectors"] = files["vectors"]
    cases = {
        **{name: (changes, []) for name, changes in AGREEING.items()},
        # Of three equal epochs the first is the best; only rank 0's disk has its checkpoint.
        "another disk": (
            {
                **AGREEING["momentum and queue"],
                "run__init_lr": 1e-12,
                "run__min_lr": 1e-12,
                "run__max_epoch": 3,
                "run__valid_splits": '["val"]',
                "run__test_splits": '["test"]',
            },
            [f"run.output_dir={folder / 'of_rank_1'}"],
        ),
        "another place": (plain, [f"{train}={files['copy']}", "run.num_workers=0"]),
        "another order": (plain, [f"{train}={files['other order']}"]),
        "fewer rows": (plain, [f"{train}={files['fewer']}"]),
        "another caption": (plain, [f"{train}={files['other caption']}"]),
        "other evaluation rows": (
            {**plain, "run__valid_splits": '["val"]'},
            [f"{val}={files['other val']}"],
        ),
        "another learning rate": ({}, ["run.init_lr=2e-4"]),
        "other Con-D weights": (
            judged,
            [f"model.mafa.con_d.checkpoint={files['other_con_d']}"],
        ),
        "another vocabulary": (
            {"model__tokenizer": files["words"]},
            [f"model.tokenizer={files['other_words']}"],
        ),
        "other vectors of captions": (
            {**plain, **captions},
            [f"model.mafa.con_d.captions.vectors={files['other vectors']}"],
        ),
        "a judge of other content": (
            {**plain, "run__plugins": f"[{files['judge']}]", "model__mafa__con_d__arch": "drawn"},
            [],
        ),
        "another plugin": (plugin, [f"run.plugins=[{files['other_plugin']}]"]),
        "another toy world": ({}, ["datasets.toy_scenes.build_info.seed=5"]),
    }
    written = []
    for name, (changes, of_rank) in cases.items():
        config = changes.get("config", CONFIG)
        short = {"run__batch_size_train": 4, "run__max_epoch": 2, "run__job_id": name.split()[-1]}
        given = {k: v for k, v in {**short, **changes}.items() if k != "config"}
        start = {"config": str(config), "options": options(folder, **given)}
        written.append({**start, "of_rank": {"1": of_rank}})
    (folder / "cases.json").write_text(json.dumps(written))
    finish(spawn(folder, [*launcher(2), SCRIPT, folder]), seconds=400)
    ended = [json.loads((folder / f"ended{rank}.json").read_text()) for rank in (0, 1)]
    return {name: both for name, *both in zip(cases, *ended, strict=True)}


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "case, named",
    [
        ("another order", "rows of datasets.image_text_json, split train: 24 samples"),
        ("fewer rows", "split train: 24 samples, .* on rank 0, 22 samples, .* on rank 1"),
        ("another caption", "rows of datasets.image_text_json, split train"),
        ("other evaluation rows", "rows of datasets.image_text_json, split val"),
        ("another learning rate", "run.init_lr: .* on rank 0, 0.0002 on rank 1"),
        ("other Con-D weights", "weights of model.mafa.con_d: AlbefMafa"),
        ("another vocabulary", "model.tokenizer: .*content"),
        ("another plugin", r"run.plugins\[0\]: a file with content"),
        ("other vectors of captions", "model.mafa.con_d.captions.vectors: a file with content"),
        ("a judge of other content", "content of model.mafa.con_d: Drawn"),
        ("another toy world", "datasets.toy_scenes.build_info.seed: .* 5 on rank 1"),
    ],
)
def test_ranks_that_differ_do_not_start(outcomes, case, named):
    first, second = outcomes[case]
    assert first == second, "every rank ends, with the same message"
    assert first.get("error") == "DisagreementError", first
    assert re.search(named, first["message"]), first["message"]


@pytest.mark.parametrize("case", [*AGREEING, "another disk", "another place"])
def test_ranks_that_agree_end_with_equal_weights_and_buffers(outcomes, case):
    """DDP averages gradients only: every rank keeps its buffers equal by itself."""
    first, second = outcomes[case]
    assert "tensors" in first, first
    assert first == second


def test_command_ends_on_all_ranks_and_names_the_setting(tmp_path):
    script = tmp_path / "train_of_rank.py"
    script.write_text(
        "import os, sys, runpy\n"
        "sys.argv += [f'run.weight_decay={os.environ[\"RANK\"]}']\n"
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
    )
    arguments = command(script, tmp_path, ranks=2)
    output = finish(spawn(tmp_path, arguments), status=1, seconds=120)  # the launcher's status
    assert "run.weight_decay: 0.0 on rank 0, 1.0 on rank 1" in output, output[-3000:]
    assert "Traceback" not in output.split("Sending process")[0], output[-3000:]
    assert not (tmp_path / "job" / "log.jsonl").exists()


def test_names_are_compared_as_text_and_environment_values_are_not_shown():
    def shown(checkpoint):
        config = {"run": {"prompt": "secret"}, "model": {"con_d": {"checkpoint": checkpoint}}}
        recorded = {**config, "run": {"prompt": "${oc.env:X}"}}
        cfg = SimpleNamespace(to_dict=lambda: config, unresolved=lambda: recorded)
        return dict(of_config(cfg))

    one, other, folder = (shown(name) for name in ("org/a", "org/b", "/data/org/a"))
    assert one["model.con_d.checkpoint"] == "'org/a'" != other["model.con_d.checkpoint"]
    assert folder["model.con_d.checkpoint"] == "a path"
    assert one["run.prompt"].startswith("'${oc.env:X}', ") and "secret" not in str(one)
