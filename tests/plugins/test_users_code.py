"""Check a user's code outside the package: its keys are checked, listed, built and trained.

`users_code/` adds one component of each kind by `run.plugins`. Every check runs in a separate
process, so that nothing stays registered for other tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from runs import run_python

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "users_code"
ADDITIONS, FAMILY = str(HERE / "additions.py"), str(HERE / "family.py")
TOYS = str(ROOT / "tests/downstream/toys.py")  # data sets of downstream tasks

# Of every run.
COMMON = {"seed": 1, "batch_size_eval": 8, "num_workers": 0, "device": "cpu"}
COMMON |= {"test_splits": ["test"], "output_dir": "output", "job_id": ""}
TOY_SIZES = {"build_info": {"train_size": 16, "val_size": 8, "test_size": 8}}
GRIT = {"queue_size": 32, "search_space": 16}
ADDED = {
    "run": {
        **COMMON,
        "plugins": [ADDITIONS],
        "task": "greeting_pretrain",
        "greeting": "welcome",
        "times": 2,
        "runner": "runner_mafa",
        "lr_sched": "linear_warmup_cosine_lr",
        "init_lr": 1e-3,
        "min_lr": 1e-4,
        "weight_decay": 0.02,
        "max_epoch": 3,
        "batch_size_train": 8,
        "train_splits": ["train"],
        "log_freq": 1,
        "k_test": 4,
        "retrieval_metrics": ["mean_rank"],
        "loggers": ["notebook"],
        "grit": {**GRIT, "hardness": 0.9, "schedule": "swing", "swing": {"low": 0.25}},
    },
    "model": {
        "arch": "albef_mine",
        "model_type": "tiny",
        "mafa": {
            "negatives": "nearest_to",
            "nearest_to": {"target": 0.25},
            "soft_labels": {"type": "self_taught", "start_epoch": 0},
            "self_taught": {"power": 3},
            "loss_weights": {"spread": 0.5},
            "spread": {"modality": "texts"},
            "con_d": {"arch": "coin", "coin": {"probability": 0.9}},
        },
    },
    "datasets": {"toy_scenes": TOY_SIZES},
}
OWN_FAMILY = {
    "run": {
        **{key: value for key, value in ADDED["run"].items() if key not in ("greeting", "times")},
        "plugins": [FAMILY],
        "task": "mafa_pretrain",
        "test_splits": [],
        "loggers": [],
        "max_epoch": 1,
        "retrieval_metrics": [],
        "grit": GRIT,
    },
    "model": {"arch": "averages_tiny", "model_type": "tiny", "channels": 8},
    "datasets": {"squares": {"build_info": {"count": 32}}},
}

CAPTIONING = {
    "run": {
        **COMMON,
        "plugins": [ADDITIONS, TOYS],
        "task": "mafa_captioning",
        "evaluate": True,
        "num_beams": 1,
        "max_len": 6,
        "min_len": 1,
        "metrics": ["rouge", "words"],
        "loggers": [],
    },
    "model": {"arch": "blip_mafa", "model_type": "tiny"},
    "datasets": {"toy_caption": TOY_SIZES},
}


def changed_config(config, **values):
    """Copy a config with changed values, by dotted path with `__` for dots."""
    config = yaml.safe_load(yaml.safe_dump(config))
    for path, value in values.items():
        *parents, last = path.split("__")
        section = config
        for name in parents:
            section = section[name]
        section[last] = value
    return config


# Trains by several configs in one process: importing LAVIS takes longest.
TRAIN = """
import yaml
from lavis_mafa.cli import main
for name, options in yaml.safe_load(open("runs.yaml")):
    given = [*options, f"run.output_dir={name}"]
    print("==", name, main(["train", "--cfg-path", f"{name}.yaml", "--options", *given]))
"""
SHARPENED = {
    "run__test_splits": [],
    "run__max_epoch": 2,
    "run__amp": False,
    "model__mafa__itc_loss": "sharpened",
    "model__mafa__sharpened": {"start": 1.5},
}
JUDGED = {
    "model__mafa__con_d": None,
    "model__mafa__connections": {
        "score": "length",
        "rule": "share_of_own",
        "low": 0.0,
        "high": 0.0,
        "top_k": 3,
    },
    "model__mafa__length": {"scale": 5},
    "run__max_epoch": 1,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train all configs; return the folder, with a folder for each, and what was printed."""
    folder = tmp_path_factory.mktemp("trained")
    configs = {
        "added": ADDED,
        "whole": changed_config(ADDED, **SHARPENED),
        "cut": changed_config(ADDED, **SHARPENED),
        "judged": changed_config(ADDED, **JUDGED),
        "family": OWN_FAMILY,
        "captions": CAPTIONING,
    }
    for name, config in configs.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    runs = [[name, []] for name in configs]
    resumed = "run.resume_ckpt_path=auto"
    runs[2:3] = [["cut", ["run.max_steps=1"]], ["cut", [resumed]]]
    (folder / "runs.yaml").write_text(yaml.safe_dump(runs), encoding="utf-8")
    status, printed = run_python(folder, "-c", TRAIN)
    assert status == 0 and printed.count("==") == len(runs), printed[-5000:]
    assert all(line.endswith(" 0") for line in printed.splitlines() if line.startswith("==")), (
        printed[-5000:]
    )
    return folder, printed


def log_of(folder):
    text = (folder / "log.jsonl").read_text(encoding="utf-8")
    return text, [json.loads(line) for line in text.splitlines()]


def test_training_uses_every_added_component(trained):
    folder, printed = trained[0] / "added", trained[1]
    assert "welcome welcome" in printed
    log, records = log_of(folder)
    assert log.count('"kind": "step"') == 6 and "loss_spread" in log
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert [epoch.get("hardness") for epoch in epochs] == [None, 0.9, 0.25]
    assert '"found_i2t": 8.0' in log  # the discriminator's probability is above the threshold
    evaluated = [path.read_text(encoding="utf-8") for path in folder.rglob("evaluate.txt")]
    assert any("mean_rank" in text for text in evaluated), evaluated
    logged = (folder / "notebook.txt").read_text(encoding="utf-8").splitlines()
    assert {"global_step 1 train/loss_spread", "epoch 0 epoch/loss"} <= set(logged)
    assert logged[-1] == "finished"


def test_a_form_of_itc_with_a_parameter_is_trained_saved_and_resumed(trained):
    whole, cut = (
        torch.load(trained[0] / name / "checkpoint_last.pth", weights_only=True)["model"]
        for name in ("whole", "cut")
    )
    assert whole["sharpened.factor"].item() != 1.5
    assert int(whole["sharpened.calls"]) == 8  # 4 steps, both directions
    assert len(whole["sharpened.of_samples"]) == 16
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


def test_added_score_and_rule_judge(trained):
    records = log_of(trained[0] / "judged")[1]
    steps = [record for record in records if record["kind"] == "step"]
    assert steps and all(step["found_i2t"] == step["picked_i2t"] == 24 for step in steps)
    assert all(0 < step["score_i2t"] <= 1 and "con_d_probability_i2t" not in step for step in steps)
    (epoch,) = (record for record in records if record["kind"] == "epoch")
    assert epoch["false_negative_rate_by_score_i2t"] == 1.0


def test_added_family_is_trained(trained):
    log, _ = log_of(trained[0] / "family")
    assert "loss_itm" in log and "loss_lm" in log


def test_a_users_caption_metric_is_reported(trained):
    folder = trained[0] / "captions"
    (figures,) = [record for record in log_of(folder)[1] if record["kind"] == "eval"]
    written = json.loads(next(folder.rglob("test_epoch*.json")).read_text(encoding="utf-8"))
    assert len(written) == 8 and "ROUGE_L" in figures and "CIDEr" not in figures
    from lavis_mafa.downstream.caption_metrics import tokens_of

    captions = {number: [one["caption"]] for number, one in enumerate(written)}
    tokens = tokens_of(captions, figures["tokenizer"])  # which a metric is given
    assert figures["Words"] == sum(len(text.split()) for (text,) in tokens.values()) / 8
    assert figures["Images"] == 8


WRONG = {
    "model.mafa.nearest_to.target": (2, "2 is out of range; expected a number from -1 to 1"),
    "model.mafa.self_taught.power": ("high", "'high' is not a number >= 1"),
    "model.mafa.length": ({"scal": 5}, "unknown key; did you mean model.mafa.length.scale?"),
    "model.mafa.self_taught.powr": (2, "unknown key; did you mean model.mafa.self_taught.power?"),
    "model.mafa.negatives": ("nearest", "did you mean nearest_to?"),
    "model.mafa.soft_labels.type": ("selftaught", "did you mean self_taught?"),
    "model.mafa.loss_weights.spraed": (1, "did you mean model.mafa.loss_weights.spread?"),
    "model.mafa.loss_weights.spread": (-1, "out of range"),
    "model.mafa.spread.modality": ("both", "is not one of images, texts"),
    "model.mafa.con_d.coin.probability": (1.5, "out of range; expected a number from 0 to 1"),
    "model.mafa.con_d.arch": ("coins", "did you mean coin?"),
    "run.grit.schedule": ("swim", "did you mean swing?"),
    "run.grit.swing.low": (0, "0 is out of range; expected a number > 0"),
    "run.retrieval_metrics": (["mean_rnk"], "did you mean mean_rank?"),
    "run.metrics": (["wrds"], "did you mean words?"),
    "run.greeting": (3, "3 is not a string"),
    "run.times": (9, "9 is out of range; expected a whole number from 1 to 3"),
}
CHECK = """
import sys, yaml
from lavis_mafa.io.plugins import load_plugins
load_plugins(sys.argv[2:])
import lavis, lavis_mafa.compat.registration
from lavis_mafa.settings.load import complete
for config in yaml.safe_load_all(open(sys.argv[1])):
    print("==", *complete(config)[1], sep="\\n")
"""


OF_CLASSES = {
    "unchanged": OWN_FAMILY,  # its `margin: strict` and `preset: slow` have names of ours
    "odd count": changed_config(OWN_FAMILY, datasets__squares__build_info={"count": 33}),
    "unknown preset": changed_config(OWN_FAMILY, datasets__squares__build_info={"preset": "dense"}),
    "no channels": changed_config(OWN_FAMILY, model__channels=0),
    "other task": changed_config(OWN_FAMILY, run__greeting="hello"),  # a key of another task
    "without Con-D": changed_config(
        ADDED, model__mafa__con_d=None, model__mafa__negatives="hardest"
    ),
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return the problems of all configs, found in one process."""
    configs = {
        **{k: changed_config(ADDED, **{k.replace(".", "__"): v}) for k, (v, _) in WRONG.items()},
        **OF_CLASSES,
    }
    folder = tmp_path_factory.mktemp("checked")
    (folder / "configs.yaml").write_text(yaml.safe_dump_all(configs.values()), encoding="utf-8")
    status, printed = run_python(folder, "-c", CHECK, "configs.yaml", ADDITIONS, FAMILY)
    assert status == 0, printed
    parts = [part.strip().splitlines() for part in printed.split("==\n")[1:]]
    return dict(zip(configs, parts, strict=True))


@pytest.mark.parametrize("key", WRONG)
def test_wrong_values_of_added_keys_are_rejected(problems, key):
    message = WRONG[key][1]
    assert any(line.startswith(key) and message in line for line in problems[key]), problems[key]


def test_added_classes_check_their_keys(problems):
    assert problems["unchanged"] == [] and problems["without Con-D"] == []
    assert problems["odd count"] == ["datasets.squares.build_info.count: 33 is odd; use 34"]
    (unknown_preset,) = problems["unknown preset"]
    assert "'dense' is not one of slow, fast" in unknown_preset
    out_of_range = "model.channels: 0 is out of range; expected a whole number >= 1"
    assert problems["no channels"] == [out_of_range]
    (other_task,) = problems["other task"]
    assert other_task.startswith("run.greeting: unknown key")


@pytest.mark.parametrize("content", ["value = undefined_name", "import no_such_module"])
def test_an_error_in_a_plugin_ends_with_its_line(tmp_path, content):
    (tmp_path / "mine.py").write_text(content, encoding="utf-8")
    given = ("train", "--cfg-path", "albef_toy", "--plugin", "mine.py")
    status, printed = run_python(tmp_path, "-m", "lavis_mafa", *given)
    assert status == 1 and 'mine.py", line 1' in printed, printed


def test_file_is_imported_once_and_module_by_name(tmp_path, monkeypatch):
    from lavis_mafa.io.plugins import PluginError, load_plugins

    monkeypatch.setattr(sys, "ran", [], raising=False)
    text = "import sys\nsys.ran.append(__name__)\n"
    for name in ("once_only.py", "as_module.py"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    load_plugins(["once_only.py", str(tmp_path / "once_only.py"), "as_module", "as_module"])
    assert len(sys.ran) == 2 and sys.ran[1] == "as_module"
    assert sys.ran[0].startswith("lavis_mafa_plugin_once_only_")
    with pytest.raises(PluginError, match="no module named 'as_modul'; install its package"):
        load_plugins(["as_modul"])


def test_failing_plugin_is_a_config_problem(tmp_path):
    from lavis_mafa.settings import ConfigError, load_config

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(changed_config(ADDED, run__plugins=["nowhere.py"])), "utf-8")
    with pytest.raises(ConfigError, match="run.plugins: no such Python file: 'nowhere.py'"):
        load_config(path)
