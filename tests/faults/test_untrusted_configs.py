"""The config that a file records is not trusted.

Of a checkpoint's only plain sizes of a real model are used, wherever it is read; no interpolation,
URL or path in it is resolved. Of a run's log and a file of judged pairs no plugin is imported, and
nothing is fetched or written that the user does not name.
"""

from __future__ import annotations

import copy
import http.server
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from lavis.common.registry import registry
from omegaconf import OmegaConf

import lavis_mafa
from lavis_mafa.checkpoints.hugging_face import _build
from lavis_mafa.checkpoints.recorded_sizes import recorded_model
from lavis_mafa.cli import main
from lavis_mafa.judges.build import build_discriminator
from lavis_mafa.settings import ConfigError, load_config
from lavis_mafa.settings.config_of_run import trusting
from lavis_mafa.tools.judged_pairs import UNKNOWN, Judged

SECRET = "hunter2"


@pytest.fixture(scope="module")
def content():
    """A checkpoint of the tiny model as the runner saves it, and its ``model`` config."""
    cfg = OmegaConf.load(lavis_mafa.families.AlbefMafa.default_config_path("tiny")).model
    torch.manual_seed(0)
    model = lavis_mafa.families.AlbefMafa.from_config(cfg)
    return {"model": model.state_dict(), "config": {"model": OmegaConf.to_container(cfg)}}


@pytest.fixture
def server(monkeypatch):
    """The attacker's server: its port, and all that was asked of it."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    monkeypatch.setenv("ATTACKED_TOKEN", SECRET)
    with http.server.ThreadingHTTPServer(("localhost", 0), Handler) as one:
        thread = threading.Thread(target=one.serve_forever, daemon=True)
        thread.start()
        yield one.server_port, asked
        one.shutdown()
        thread.join()


def readers(path):
    """Every way of building a checkpoint's model, by name."""
    con_d = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": str(path)}
    return {
        "load_model": lambda: lavis_mafa.load_model("albef_mafa", checkpoint=str(path)),
        "load_model of a type": lambda: lavis_mafa.load_model(
            "albef_mafa", "tiny", checkpoint=str(path)
        ),
        "Con-D": lambda: build_discriminator(con_d).model,
        "export": lambda: _build(str(path), None, None, ())[0],
    }


def saved(content, path, **model):
    changed = {**content, "config": copy.deepcopy(content["config"])}
    changed["config"]["model"].update(model)
    torch.save(changed, path)
    return path


SECRET_URL = "http://localhost:{port}/${{oc.env:ATTACKED_TOKEN}}/{name}.json"
PLACES = ["tokenizer", "med_config_path", "vit_weights", "bert_weights", "opt_model", "finetuned"]
PLACES += ["pretrained", "prompt", "vit_type", "an_unknown_key", "q_former_config"]


def test_no_url_or_interpolation_of_a_checkpoint_is_resolved(content, server, tmp_path):
    port, asked = server
    for key in PLACES:
        url = SECRET_URL.format(port=port, name=key)
        for value in (url, {"deep": [url]}, {"name": url}):
            changed = copy.deepcopy(content["config"])
            changed["model"][key] = value
            try:
                found = recorded_model({**content, "config": changed}, "albef_mafa")
            except ValueError as error:
                assert f"model.{key} is" in str(error) and SECRET not in str(error)
            else:
                assert "oc.env" not in repr(found) and key not in ("tokenizer", "med_config_path")
    assert asked == []


@pytest.mark.parametrize("key", ["tokenizer", "med_config_path"])
def test_no_path_of_a_checkpoint_is_opened_unless_the_user_names_it(
    content, tmp_path, key, monkeypatch
):
    shipped = Path(lavis_mafa.io.project_files.CONFIGS) / "models" / content["config"]["model"][key]
    own = tmp_path / f"mine{shipped.suffix}"
    own.write_bytes(shipped.read_bytes())
    monkeypatch.chdir(tmp_path)
    for place in (own.name, f"./{own.name}", f"../{tmp_path.name}/{own.name}", str(own)):
        path = saved(content, tmp_path / "c.pth", **{key: place})
        for read in readers(path).values():
            with pytest.raises(ValueError, match=f"model.{key} is .*not followed"):
                read()
    given = {key: str(own)}
    con_d = {"arch": "albef_mafa", "model_type": "tiny", "checkpoint": str(path)}
    models = [
        lavis_mafa.load_model("albef_mafa", checkpoint=str(path), model=given),
        build_discriminator({**con_d, "model": given}).model,
        build_discriminator(con_d, known=given).model,
        _build(str(path), None, None, [f"{key}={own}"])[0],
    ]
    for model in models:
        state = model.state_dict()
        assert all(torch.equal(state[name], content["model"][name]) for name in state)


SIZES = [
    ("embed_dim", 10**9),
    ("embed_dim", 0),
    ("embed_dim", -5),
    ("embed_dim", 64.0),
    ("embed_dim", "64"),
    ("embed_dim", True),
    ("embed_dim", [64]),
    ("image_size", 2048),
    ("queue_size", 2**40),
    ("max_txt_len", 2**40),
    ("vit", {"patch_size": 16, "width": 2**30, "depth": 3, "heads": 4}),
    ("vit", {"patch_size": 16, "width": 64, "depth": 2**30, "heads": 4}),
    ("vit", {"patch_size": 1, "width": 64, "depth": 3, "heads": 4}),
    ("vit", "${oc.env:HOME}"),
    ("vit", [16]),
]


@pytest.mark.parametrize("key, value", SIZES, ids=str)
def test_sizes_out_of_range_are_refused(content, tmp_path, monkeypatch, key, value):
    def fail(*_, **__):
        raise AssertionError("a model was built")

    path = saved(content, tmp_path / "c.pth", **{key: value})
    monkeypatch.setattr(lavis_mafa.families.AlbefMafa, "from_config", fail)
    for name, read in readers(path).items():
        with pytest.raises(ValueError, match=rf"c.pth contains .*model.{key}\S* is") as caught:
            read()
        assert "expected a" in str(caught.value), name
    # The user's own value replaces it, and is what counts.
    recorded_model(content, "albef_mafa", given={key: value})


def test_shipped_configs_are_used_as_recorded():
    """Every size and file of a shipped model type passes, so that real checkpoints load."""
    tried = 0
    for arch in registry.list_models():
        cls = registry.get_model_class(arch)
        for model_type in getattr(cls, "PRETRAINED_MODEL_CONFIG_DICT", {}):
            if not cls.__module__.startswith("lavis_mafa."):
                continue
            cfg = OmegaConf.to_container(OmegaConf.load(cls.default_config_path(model_type)).model)
            found = recorded_model({"model": {}, "config": {"model": cfg}}, arch)
            unused = {"mafa", "pretrained", "finetuned", "load_pretrained", "load_finetuned"}
            # Settings of training with keys of their own.
            assert cfg.keys() - found.keys() <= unused | {"posterior"}
            assert all(found[name] == cfg[name] for name in found)
            tried += 1
    assert tried > 20


# Configs of runs and of judged pairs

TOY = Path(__file__).resolve().parents[2] / "projects/mafa/train/albef_toy.yaml"
SMALL = ["datasets.toy_scenes.build_info.train_size=80", "run.batch_size_train=8"]
SMALL += ["run.grit.queue_size=16", "run.grit.search_space=16", "run.device=cpu", "run.amp=False"]


class Foreign:
    """A run and judged pairs of someone else, with a plugin that leaves a mark when imported."""

    def __init__(self, folder):
        self.folder, self.mark, self.plugin = folder, folder / "it_ran", folder / "evil.py"
        self.plugin.write_text(f"import os\nos.mkdir({str(self.mark)!r})\n")

    def run(self, base=TOY, options=SMALL, **changes):
        """Write the log of a run; ``changes`` to its config have dotted keys with __ for dots."""
        config = load_config(base, options, machine=False).to_dict()
        config = {name: config[name] for name in ("run", "model", "datasets")}
        for path, value in changes.items():
            *above, leaf = path.split("__")
            node = config
            for name in above:
                node = node.setdefault(name, {})
            node[leaf] = value
        card = {"direction": "i2t", "probability": 0.9, "truth": None, "epoch": 0, "step": 0}
        card |= {"state": "positive", "anchor_index": 0, "mined_index": 1}
        (self.folder / "log.jsonl").write_text(json.dumps({"kind": "config", "config": config}))
        (self.folder / "connections.jsonl").write_text(json.dumps(card))
        return str(self.folder)

    def pairs(self, cfg_path, *options):
        flags = np.ones(2, bool)
        folder = self.folder / "pairs"
        folder.mkdir(exist_ok=True)
        Judged(
            np.array([1, 0]),
            np.array([0, 1]),
            flags,
            flags,
            {"con_d": np.array([0.9, 0.8], np.float32)},
            np.full(2, UNKNOWN, np.int8),
            {"cfg_path": str(cfg_path), "options": list(options)},
        ).save(folder / "judged.npz")
        return str(folder)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    return Foreign(tmp_path / "theirs")


def test_plugins_of_a_run_are_imported_only_if_the_user_says_so(foreign):
    folder = foreign.run(run__plugins=[str(foreign.plugin)])
    with pytest.raises(ConfigError, match=r"run.plugins: .*evil.py.*--plugin .*--trust") as caught:
        load_config(folder)
    assert len(caught.value.problems) == 1 and not foreign.mark.exists()
    assert main(["report", folder]) == 0 and not foreign.mark.exists()
    assert "data:image" in (foreign.folder / "report.html").read_text()
    assert main(["train", "--cfg-path", folder, "--print-config"]) == 2
    assert not foreign.mark.exists()
    load_config(folder, [f"run.plugins=[{foreign.plugin}]"])
    assert foreign.mark.exists()
    foreign.plugin.write_text(foreign.plugin.read_text().replace("it_ran", "once_more"))
    load_config(folder)  # imported already: nothing is executed


@pytest.mark.parametrize("trusted", ["theirs", "."])
def test_trusted_folders_are_followed(foreign, trusted, monkeypatch):
    monkeypatch.chdir(foreign.folder.parent)
    folder = foreign.run(run__plugins=[str(foreign.plugin)], run__output_dir="elsewhere")
    with trusting([trusted]):
        assert load_config(folder).run_cfg.output_dir == "elsewhere"
    assert foreign.mark.exists()
    with pytest.raises(ValueError, match="--trust nowhere: no such folder"), trusting(["nowhere"]):
        pass


def test_nothing_of_a_run_is_fetched_or_written_elsewhere(foreign, server, caplog):
    port, asked = server
    url, place = f"http://localhost:{port}/a.json", foreign.folder.parent / "victim.json"
    info = {"annotations": {"train": {"url": url, "storage": str(place)}}}
    info["images"] = {"storage": str(foreign.folder)}
    processor = {"train": {"name": "blip_image_train", "image_size": 32}}
    data = {"coco_caption": {"build_info": info, "vis_processor": processor}}
    folder = foreign.run(datasets=data, run__output_dir=str(place))
    for command in (
        ["report", folder],
        ["count", "--run", folder, "--output", "out", "--checkpoint", str(TOY)],
        ["label", "page", foreign.pairs(folder)],
        ["report", foreign.pairs(folder)],
    ):
        caplog.clear()
        assert (main(command) == 0) == (command == ["report", folder])
        assert f"train.url: '{url}' is named by {folder}/log.jsonl, not by you" in caplog.text
        assert asked == [] and not place.exists()


REFUSED = {
    "model__tokenizer": "someone/model",
    "model__vit_weights": "https://example.org/vit.pth",
    "model__med_config_path": "s3://bucket/a.json",
    "run__annotation_file": "http://example.org/a.json",
    "datasets__toy_scenes__build_info__images": {"storage": "pipe:touch it_ran"},
    "model__mafa__con_d": {"arch": "albef_mafa", "checkpoint": "https://example.org/c.pth"},
    "model__mafa__negatives_encoder": {
        "arch": "albef_mafa", "checkpoint": str(TOY), "model": {"tokenizer": "someone/model"}
    },
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_places_elsewhere_that_a_run_names_are_refused(foreign, key):
    folder = foreign.run(**{key: REFUSED[key]})
    with pytest.raises(ConfigError) as caught:
        load_config(folder)
    name = key.replace("__", ".")
    line = next(one for one in caught.value.problems if one.startswith(name))
    assert "not by you" in line and f"--trust {folder}" in line


def test_own_files_that_a_run_names_are_read(foreign, tmp_path):
    """Local files are read; places to write are those that the user gives."""
    words = Path(lavis_mafa.io.project_files.CONFIGS) / "models/tiny_vocab.txt"
    (tmp_path / "words.txt").write_bytes(words.read_bytes())
    folder = foreign.run(
        model__tokenizer=str(tmp_path / "words.txt"),
        run__output_dir="/somewhere",
        run__resume_ckpt_path=str(tmp_path / "last.pth"),
        run__loggers=["tensorboard", "wandb"],
    )
    cfg = load_config(folder)
    assert cfg.model_cfg.tokenizer == str(tmp_path / "words.txt")
    assert (cfg.run_cfg.output_dir, cfg.run_cfg.resume_ckpt_path) == ("output", None)
    assert cfg.run_cfg.loggers == ["tensorboard"]
    assert [note.split(":")[0] for note in cfg.notes] == ["run.loggers", "run.output_dir"]
    assert load_config(folder, ["run.output_dir=here"]).run_cfg.output_dir == "here"
