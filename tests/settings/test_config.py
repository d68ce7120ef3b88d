"""Configuration: invalid configs are rejected with all problems named, valid ones are completed."""

from __future__ import annotations

import copy
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lavis.common.registry import registry
from omegaconf import OmegaConf

import lavis_mafa  # noqa: F401  registers models, tasks, runners and builders
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.settings import (
    ConfigError,
    MafaConfig,
    format_config,
    load_config,
)
from lavis_mafa.settings.check import Report, _known_keys, section_of
from lavis_mafa.settings.load import complete, read_options
from lavis_mafa.settings.registered import MODEL, RUN
from lavis_mafa.settings.schema import DATASET, FILE, OURS, PARTS

GOOD: dict[str, Any] = {
    "model": {"arch": "albef_mafa", "model_type": "tiny"},
    "datasets": {"toy_scenes": {"type": "dense"}},
    "run": {
        "task": "mafa_pretrain",
        "runner": "runner_mafa",
        "lr_sched": "linear_warmup_cosine_lr",
        "init_lr": 1e-3,
        "min_lr": 1e-4,
        "weight_decay": 0.02,
        "max_epoch": 4,
        "batch_size_train": 64,
        "batch_size_eval": 128,
        "num_workers": 0,
        "grit": {"queue_size": 3840, "search_space": 1280},
        "output_dir": "output",
        "device": "cpu",
        "train_splits": ["train"],
    },
}
LAVIS_PRETRAIN: dict[str, Any] = {
    "model": {"arch": "albef_pretrain", "model_type": "base", "load_pretrained": False},
    "datasets": {
        "coco_caption": {
            "vis_processor": {"train": {"name": "blip_image_train", "image_size": 256}},
            "text_processor": {"train": {"name": "blip_caption"}},
        }
    },
    "run": {**GOOD["run"], "task": "image_text_pretrain", "runner": "runner_base"},
}


def put(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``config`` with ``value`` at the dotted ``path``; `DELETE` removes the
    key.
    """
    config = copy.deepcopy(config)
    node = config
    *parents, leaf = path.split(".")
    for name in parents:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    if value is DELETE:
        node.pop(leaf, None)
    else:
        node[leaf] = value
    return config


DELETE = object()


def problems(config: dict[str, Any], machine: bool = True) -> list[str]:
    return complete(config, machine)[1]


def problems_at(found: list[str], path: str) -> list[str]:
    return [line for line in found if line.startswith((f"{path}:", f"{path}["))]


@pytest.fixture
def save(tmp_path: Path):
    def write(config: Any) -> str:
        path = tmp_path / "config.yaml"
        # JSON is YAML that keeps "1e-4" a string.
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return str(path)

    return write


def test_valid_configs_pass(save):
    assert problems(GOOD) == []
    assert problems(LAVIS_PRETRAIN, machine=False) == []
    assert isinstance(load_config(save(GOOD)), MafaConfig)


# Key, wrong value, text that the message must contain besides the key.
WRONG = [
    ("run.lr", 1e-4, "did you mean run.init_lr?"),
    ("run.queue_size", 480, "did you mean run.grit.queue_size?"),
    ("run.grit.M", 480, "did you mean run.grit.search_space?"),
    ("model.negatives", "hardest", "did you mean model.mafa.negatives?"),
    ("model.mafa.loss_weights.mlm", 1, "did you mean model.mafa.loss_weights.lm?"),
    ("modle", {"arch": "albef_mafa"}, "did you mean model?"),
    ("datasets.toy_scenes.vis_processor.train", {"image_size": 9}, "name: missing"),
    (
        "datasets.toy_scenes.vis_processor.eval",
        {"name": "blip_image_eval", "image_size": 48},
        "image_size: 48 differs from model.image_size 32",
    ),
    ("datasets.toy_scenes", 3, "is not a mapping"),
    ("datasets", DELETE, "missing"),
    ("run", None, "is empty"),
    ("run.train_splits", DELETE, "missing"),
    ("run.init_lr", DELETE, "missing"),
    ("run.train_splits", "train", "such as [train]"),
    ("run.train_splits", ["tran"], "did you mean train?"),
    ("run.grit.cosine", {"start": 0}, "expected a number > 0"),
    ("model.arch", DELETE, "missing"),
    ("model.model_type", DELETE, "albef_mafa has base, tiny"),
    ("model.model_type", ["tiny"], "is not a type"),
    ("model.pretrained", "nowhere.pth", "nothing is loaded"),
    ("model.num_query_token", 32, "unknown key"),
    ("model.mafa.connections.action", "???", "missing"),
    ("model.mafa.con_d", "oracle", "is not a mapping"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_wrong_values_are_rejected_by_name(path, value, message):
    config = put(GOOD, path, value)
    lines = [line for line in problems(config) if line.startswith(path)]
    assert lines, problems(config)
    assert any(message in line for line in lines), lines


# The keys of a file that names every kind of model and data set.
KEYS = {
    **FILE,
    "run": FILE["run"].having(RUN),
    "model": FILE["model"].having({**MODEL, **OURS, **PARTS}),
    "datasets": section_of({"mine": section_of(DATASET)}),
}


def test_all_problems_are_reported_at_once(save):
    config = put(GOOD, "run.batch_size_trian", 64)
    config = put(config, "run.batch_size_train", DELETE)
    config = put(config, "run.init_lr", -1)
    config = put(config, "model.mafa.negatives", "hard")
    config = put(config, "datasets.coco_captoin", {})
    with pytest.raises(ConfigError) as caught:
        load_config(save(config), ["run.grit.queue_size=64", "run.seeds=1", "broken"])
    keys = [line.split(":")[0] for line in caught.value.problems]
    assert sorted(keys) == [
        "--options",
        "datasets.coco_captoin",
        "model.mafa.negatives",
        "run.batch_size_trian",  # and no second line for the missing batch_size_train
        "run.grit.search_space",
        "run.init_lr",
        "run.seeds",
    ]
    text = str(caught.value)
    assert text.splitlines()[0].startswith("7 problems in the configuration ")
    assert "run.batch_size_trian: unknown key; did you mean run.batch_size_train?" in text
    assert len(text.splitlines()) == 8


def test_keys_of_other_sections_are_not_suggested():
    for name in ("preset", "margin", "max_unusable", "mode"):
        report = Report(KEYS)
        report._unknown(f"datasets.mine.build_info.{name}")
        unread = "unknown key; nothing reads it here: remove it"
        assert report.problems == [f"datasets.mine.build_info.{name}: {unread}"]
    for name, near in {"image_size": "model.image_size", "image_sizes": ""}.items():
        report = Report(KEYS)
        report._unknown(f"run.{name}")
        assert ("did you mean model.image_size" in report.problems[0]) is bool(near)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [", "is not YAML"),
        ("run: {seed: 1, seed: 2}", "is not YAML"),
        ("- 1", "is not a mapping"),
        ("", "run: missing"),
        ("run: ${nothing}", "run: Interpolation key 'nothing' not found"),
    ],
)
def test_files_that_are_not_configs_are_rejected(save, text, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace("$", r"\$")):
        load_config(save(text))


def test_options_override_the_file(save):
    path = save(GOOD)
    options = ["run.seed=7", "model.mafa.con_d.arch=oracle", "run.valid_splits=[val]"]
    cfg = load_config(path, options)
    assert (cfg.run_cfg.seed, cfg.model_cfg.mafa.con_d.arch) == (7, "oracle")
    assert list(cfg.run_cfg.valid_splits) == ["val"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["run.sead=7"], "run.sead: unknown key; did you mean run.seed?"),
        (["seed=7"], "seed: unknown key; did you mean run.seed?"),
        (["model.model_type=huge"], "model.model_type: 'huge' is not a type of AlbefMafa"),
        (["run.seed", "7"], "'run.seed' is not of the form key=value"),
        (["run.seed=[7"], "run.seed: '[7' is not a whole number"),
        (["run.job_id=${"], "run.job_id: 'run.job_id=${' cannot be read"),
        (["=7"], "'=7' is not of the form key=value"),
        (["run.seed.x=7"], "run.seed: {'x': 7} is not a whole number from 0 to 4e+09"),
        (["run.train_splits.x=7"], "run.train_splits: {'x': 7} is not a list"),
    ],
)
def test_invalid_options_are_rejected(save, options, message):
    with pytest.raises(ConfigError) as caught:
        load_config(save(GOOD), options)
    assert message in str(caught.value)


# One of every form that YAML would read as something else.
TEXT = ["Question: {} Short answer:", "/data/set #1/train.json", "{00000..00331}.tar", "C:\\data"]
TEXT += ["*.json", "- x", "a: b", "True", "12:30", "2024-01-01", "1e5", "it's", "| a"]
TEXT += ["#tag", "&x", "---"]


@pytest.mark.parametrize("text", TEXT)
def test_an_option_of_a_text_is_what_was_typed(save, text):
    """Also where only the data set's own class knows that its key takes a text."""
    data = "datasets.image_text_json"
    info = f"{data}.build_info"
    texts = ["run.prompt", f"{info}.caption_key", f"{info}.annotations.train.storage"]
    given = [f"{path}={text}" for path in texts] + [f"{info}.images.storage=images"]
    given += [f"{data}.vis_processor.{part}.image_size=32" for part in ("train", "eval")]
    cfg = load_config(save(put(GOOD, "datasets", {})), given, machine=False)
    assert [OmegaConf.select(cfg.config, path) for path in texts] == [text] * 3


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("run.prompt='Question: {} Answer: '", "Question: {} Answer: "),
        ("run.job_id=''", ""),
        ("run.job_id=", None),
        ("run.init_lr=1e-4", 1e-4),
        ("run.warmup_steps=2e3", 2000),
        ("run.seed= 7 ", 7),
        ("run.seed=0123", 123),
        ("run.amp=yes", True),
        ("run.valid_splits=[val, 'test']", ["val", "test"]),
        ("run.annotation_file={val: /a b.json}", {"val": "/a b.json"}),
    ],
)
def test_an_option_of_another_kind_is_read_as_yaml(option, value):
    config = put(GOOD, "run.amp_dtype", "bf16")
    typed: dict[str, str] = {}
    config["run"] |= read_options([option], [], typed)["run"]
    completed, found = complete(config, machine=False, typed=typed)
    read = completed["run"][option.partition("=")[0].removeprefix("run.")]
    assert found == [] and read == value and type(read) is type(value)


def test_options_choose_the_default_yaml(save):
    tiny = load_config(save(GOOD))
    base = load_config(save(GOOD), ["model.model_type=base", "model.image_size=32"])
    assert (tiny.model_cfg.embed_dim, base.model_cfg.embed_dim) == (64, 256)
    assert "vit" in tiny.model_cfg and "vit" not in base.model_cfg
    sparse = load_config(save(GOOD), ["datasets.toy_scenes.type=sparse"])
    assert sparse.datasets_cfg.toy_scenes.build_info.preset == "sparse"
    # An option adds a complete dataset with its defaults.
    more = load_config(
        save(GOOD),
        [
            "datasets.flickr30k.sample_ratio=2",
            "datasets.flickr30k.vis_processor.train.name=blip_image_train",
        ],
        machine=False,
    )
    assert more.datasets_cfg.flickr30k.build_info.images.storage == "flickr30k/images"


@pytest.mark.parametrize("name", ["con_d", "negatives_encoder"])
def test_an_evaluation_needs_no_checkpoint_of_a_frozen_model(name):
    """Only training uses them: the same config trains with them, and evaluates where they lack."""
    frozen = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": "nowhere.pth"}
    config = put(GOOD, f"model.mafa.{name}", frozen)
    assert problems(config) == [
        f"model.mafa.{name}.checkpoint: no such file, folder or URL: 'nowhere.pth'"
    ]
    config = put(put(config, "run.evaluate", True), "run.test_splits", ["test"])
    config = put(put(config, "run.task", "mafa_retrieval"), "run.k_test", 2)
    config = put(config, "model.load_pretrained", True)
    completed, found = complete(config)
    assert found == [] and completed["model"]["mafa"][name] is None


def test_defaults_are_filled_in():
    config, found = complete(GOOD)
    assert found == []
    run = config["run"]
    assert run["grit"]["enabled"] is True and run["grit"]["same_image"] == "apart"
    assert run["amp"] is False and run["evaluate"] is False and run["valid_splits"] == []
    assert run["resume_ckpt_path"] is None and run["job_id"] is None
    assert "k_test" not in run  # LAVIS has no default for it
    assert config["model"]["mafa"]["con_d"] is None
    found = StepSettings.from_config(config["model"]["mafa"])
    assert replace(found, own={}) == StepSettings(detach_other=True)
    assert all(own == type(own)() for own in found.own.values())
    lavis_own = complete(LAVIS_PRETRAIN, machine=False)[0]
    assert lavis_own["run"]["grit"]["enabled"] is False
    assert "mafa" not in lavis_own["model"]
    # Defaults are copies: changing a config does not change the next one.
    run["valid_splits"].append("val")
    assert complete(GOOD)[0]["run"]["valid_splits"] == []


def test_evaluation_needs_no_training_keys():
    run = {"task": "mafa_retrieval", "evaluate": True, "test_splits": ["test"], "device": "cpu"}
    run |= {"batch_size_eval": 8, "num_workers": 0, "output_dir": "o", "grit": {"search_space": 9}}
    assert problems({**GOOD, "run": run}) == []


def test_settings_of_the_chosen_hardness_schedule_are_filled_in():
    config, found = complete(put(GOOD, "run.grit.schedule", "linear"))
    grit = config["run"]["grit"]
    assert found == []
    assert grit["linear"] == {"start": 0.5, "epochs": 10} and "cosine" not in grit


def test_device_and_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda = put(put(GOOD, "run.device", "cuda"), "run.amp", True)
    assert problems(cuda) == [
        "run.device: cuda is not available on this machine; use run.device: cpu"
    ]
    assert problems(cuda, machine=False) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert problems(cuda) == []
    bf16 = put(put(GOOD, "run.amp", True), "run.amp_dtype", "bf16")
    assert problems(bf16) == []


def test_missing_files_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = put(put(GOOD, "model.tokenizer", "vocab.txt"), "run.resume_ckpt_path", "auto")
    assert problems_at(problems(own), "model.tokenizer")
    (tmp_path / "vocab.txt").touch()
    assert problems(own) == []
    assert problems(put(GOOD, "model.tokenizer", "org/some-tokenizer")) == []
    (tmp_path / "order.txt").touch()
    order = put(GOOD, "run.grit.first_order", "order.txt")
    assert "ends in .npy" in problems_at(problems(order), "run.grit.first_order")[0]


def test_annotation_files_of_own_data_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    info = {"annotations": {"train": {"storage": ["a.json", "b.json"]}}, "images": {"storage": "i"}}
    sizes = {part: {"name": f"blip_image_{part}", "image_size": 32} for part in ("train", "eval")}
    own = {"build_info": info, "vis_processor": sizes}
    config = put(GOOD, "datasets", {"image_text_json": own})
    (tmp_path / "a.json").touch()
    where = "datasets.image_text_json.build_info"
    start = f"relative paths start at {tmp_path}"
    assert problems(config) == [
        f"{where}.annotations.train.storage: no such file: 'b.json'; {start}",
        f"{where}.images.storage: no such folder: 'i'; {start}",
    ]
    (tmp_path / "b.json").touch()
    (tmp_path / "i").mkdir()
    assert problems(config) == []
    valid = problems(put(config, "run.valid_splits", ["val"]))
    assert valid == ["run.valid_splits[0]: no dataset has a split 'val'; known: train"]


def test_files_of_lavis_builders_are_searched_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.mapping["paths"], "cache_root", str(tmp_path))
    info = "datasets.coco_caption.build_info"
    config = LAVIS_PRETRAIN
    start = f"relative paths start at {tmp_path}"
    assert problems(config) == [f"{info}.images.storage: no such folder: 'coco/images/'; {start}"]
    (tmp_path / "coco" / "images").mkdir(parents=True)
    assert problems(config) == []
    with_url = put(
        config, f"{info}.annotations.train", {"url": "nowhere.json", "storage": "c/t.json"}
    )
    assert problems(with_url) == [
        f"{info}.annotations.train.storage: no such file: neither url 'nowhere.json' nor storage "
        f"'c/t.json'; {start}"
    ]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "t.json").touch()
    assert problems(with_url) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.mafa", {"negatives": "hardest"}, "model.mafa: unknown key"),
        ("run.lr_sched", "linear_warmup_step_lr", "run.lr_decay_rate: missing"),
        ("run.task", "retrieval", "run.k_test: missing"),
        ("run.task", "captioning", "run.num_beams: missing"),
        ("datasets.coco_caption.vis_processor.train", None, "train: missing; the run"),
        ("datasets.coco_caption.build_info.annotations.tarin", {}, "build_info.annotations.train?"),
        ("datasets.coco_caption.build_info.annotations.val.storage", 3, "is not a string"),
    ],
)
def test_configs_of_lavis_models_are_checked_too(path, value, message):
    found = problems(put(LAVIS_PRETRAIN, path, value), machine=False)
    assert any(message in line for line in found), found


def test_config_has_the_interface_that_lavis_reads(save, capsys):
    cfg = load_config(save(GOOD), ["run.seed=7"])
    assert registry.get("configuration") is cfg
    assert cfg.args.options == ["run.seed=7"]
    assert cfg.run_cfg.get("amp", None) is False
    assert cfg.config.preprocess.vis_processor.train.image_size == 32
    assert set(cfg.to_dict()) == {"run", "model", "datasets", "preprocess"}
    cfg.pretty_print()
    shown = yaml.safe_load(format_config(cfg))
    assert list(shown) == ["run", "model", "datasets"]
    assert shown["run"]["grit"]["search_space"] == 1280
    # The printed text is a valid config.
    assert problems(shown) == []


def test_loading_builds_nothing_and_uses_no_network(save, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("touched")

    monkeypatch.setattr(registry.get_model_class("albef_mafa"), "from_config", refuse)
    monkeypatch.setattr(registry.get_builder_class("toy_scenes"), "__init__", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    base = ["model.model_type=base", "model.image_size=32", "model.load_pretrained=True"]
    load_config(save(GOOD), base)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5000),
    st.floats(),
    st.sampled_from(["", "x", "train", "???", "1e3", "tiny", "oracle"]),
    st.lists(st.one_of(st.integers(), st.none(), st.text(max_size=3)), max_size=2),
    st.dictionaries(st.sampled_from(["name", "storage", "arch", "x"]), st.integers(), max_size=2),
)
PATHS = [path for path, _ in _known_keys(KEYS)] + [
    f"datasets.image_text_json{rest}"
    for rest in ("", ".type", ".build_info", ".build_info.annotations", ".vis_processor.train.name")
    + (".build_info.annotations.train", ".build_info.annotations.train.storage", ".text_processor")
]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(PATHS), JUNK), min_size=1, max_size=3))
def test_arbitrary_values_never_crash_the_check(changes):
    config = GOOD
    for path, value in changes:
        config = put(config, path, value)
    before = copy.deepcopy(config)
    _, found = complete(config)
    assert repr(config) == repr(before)
    assert all(line.split(":")[0] for line in found)
