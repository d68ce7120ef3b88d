"""What a config fetches is listed at once, refused offline at once, and fetched by --prefetch."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from lavis.common.registry import registry
from runs import ROOT

import lavis_mafa
from lavis_mafa.checkpoints import downloads
from lavis_mafa.cli import main
from lavis_mafa.settings import load_config
from lavis_mafa.training import prefetch as prefetching
from lavis_mafa.training.prefetch import OfflineError, require_sources, sources_of

TRAIN = ROOT / "projects/mafa/train"
INFO = "datasets.image_text_json.build_info"
OWN = [f"{INFO}.images.storage=pictures", f"{INFO}.annotations.train.storage=train.json"]
OWN += ["run.valid_splits=[]", "run.test_splits=[]"]
EVAL = ROOT / "projects/mafa/eval"


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    """No file is there, and no server answers."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None, raising=False)
    monkeypatch.setitem(registry.mapping["paths"], "cache_root", str(tmp_path / "lavis"))
    monkeypatch.setattr(prefetching, "answers", lambda server: False)
    monkeypatch.setattr(downloads, "answers", lambda server: False)
    monkeypatch.setattr(downloads, "cached_file", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)


def origins(path, *options):
    cfg = load_config(path, list(options), machine=False)
    return {(one.key, one.origin.rpartition("/")[2]) for one in sources_of(cfg)}


def test_all_that_a_config_fetches_is_named():
    judge = [f"model.mafa.con_d.{key}" for key in ("arch=albef_retrieval", "model_type=coco")]
    judge += ["model.mafa.con_d.checkpoint=null", "model.mafa.con_d.image_size=null"]
    found = origins(TRAIN / "albef_4m.yaml", *judge)
    names = {name for _, name in found}
    assert {"bert-base-uncased", "deit_base_patch16_224-b5f2ef4d.pth"} <= names
    assert "albef_coco_retrieval_lavis.pt" in names  # Con-D's published weights
    assert "coco_karpathy_train.json" in names and "vg_caption.json" in names
    assert not {"coco_karpathy_val.json", "coco_karpathy_test.json"} & names  # not read
    assert len([one for one in found if one[1] == "bert-base-uncased"]) == 2


def test_missing_local_checkpoint_of_con_d_is_left_to_the_config_check():
    names = {name for _, name in origins(TRAIN / "albef_4m.yaml")}
    assert "bert-base-uncased" in names and "albef_coco_retrieval_lavis.pt" not in names


def test_toy_configs_fetch_nothing():
    for name in ("albef_toy", "blip_toy", "blip2_toy", "fne_toy"):
        cfg = load_config(TRAIN / f"{name}.yaml", machine=False)
        assert [one.key for one in sources_of(cfg) if "con_d" not in one.key] == [], name


def test_offline_run_is_refused_at_once_with_a_list(tmp_path, caplog):
    began = time.monotonic()
    cfg = load_config(EVAL / "retrieval_coco.yaml", ["run.device=cpu"], machine=False)
    cfg.args.cfg_path = "retrieval_coco"
    with pytest.raises(OfflineError, match="cannot be downloaded now") as error:
        require_sources(cfg)
    text = str(error.value)
    assert time.monotonic() - began < 20
    assert text.count("MISSING") >= 2 and "--prefetch" in text and str(tmp_path) in text, text
    assert "coco_karpathy_test.json" in text and "coco_karpathy_train.json" not in text, text


def test_the_command_prints_the_list_without_a_traceback(caplog, capfd):
    config = ["--cfg-path", str(TRAIN / "albef_own_data.yaml")]
    status = main(["train", *config, "--prefetch", "--options", *OWN])
    assert status == 1
    assert "deit_base_patch16_224-b5f2ef4d.pth" in caplog.text and "Traceback" not in caplog.text


@pytest.fixture
def server(tmp_path):
    """A server on this machine, with its folder."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    one = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=one.serve_forever, daemon=True).start()
    yield folder, f"http://localhost:{one.server_port}"
    one.shutdown()


def test_prefetch_downloads_what_is_missing(server, monkeypatch, capsys, tmp_path):
    folder, address = server
    (folder / "weights.pth").write_bytes(b"w" * 2500)
    (folder / "train.json").write_text(json.dumps([{"image": "a.jpg", "caption": "a"}]))
    monkeypatch.setattr(prefetching, "answers", lambda name: name == address)
    monkeypatch.setattr(downloads, "answers", lambda name: name == address)
    info = "datasets.coco_caption.build_info"
    options = [
        f"{info}.annotations.train.url=[{address}/train.json]",
        f"{info}.annotations.train.storage=[coco/train.json]",
        f"model.pretrained={address}/weights.pth",
        "model.load_pretrained=True",
        "model.tokenizer=tiny_vocab.txt",
        "run.valid_splits=[]",
        "run.test_splits=[]",
    ]
    path = tmp_path / "one.yaml"
    path.write_text((TRAIN / "albef_4m.yaml").read_text())
    from omegaconf import OmegaConf

    content = OmegaConf.load(path)
    content.datasets = {"coco_caption": content.datasets.coco_caption}
    content.model.mafa.con_d = None
    OmegaConf.save(content, path)
    assert main(["train", "--cfg-path", str(path), "--prefetch", "--options", *options]) == 0
    lines = capsys.readouterr().out
    assert lines.count("there ") == 2 and "MISSING" not in lines, lines
    (kept,) = (tmp_path / "torch/hub/checkpoints").glob("*_weights.pth")
    assert kept.stat().st_size == 2500
    assert (tmp_path / "lavis/coco/train.json").is_file()


def test_two_urls_with_one_file_name_are_two_files(server, tmp_path):
    from lavis.models.base_model import BaseModel
    from omegaconf import OmegaConf

    from lavis_mafa.checkpoints.checkpoints import read_checkpoint
    from lavis_mafa.training.session import build_model
    from lavis_mafa.training.sources import sources_of_model

    folder, address = server
    for name, value in (("one", 1.0), ("two", 2.0)):
        (folder / name).mkdir()
        torch.save({"model": {"a.weight": torch.tensor([[value]])}}, folder / name / "model.pth")
    urls = [f"{address}/{name}/model.pth" for name in ("one", "two", "one")]
    read = [float(read_checkpoint(url)["model"]["a.weight"]) for url in urls]
    assert read == [1.0, 2.0, 1.0]

    class Part(BaseModel):
        """Loads weights by the code of LAVIS's own models."""

        def __init__(self, url):
            super().__init__()
            self.a = torch.nn.Linear(1, 1, bias=False)
            self.load_checkpoint(url)

    task = SimpleNamespace(build_model=lambda cfg: Part(cfg.model_cfg.finetuned))
    for url, value in zip(urls, read, strict=True):
        model = OmegaConf.create({"arch": "albef_retrieval", "finetuned": url})
        assert build_model(SimpleNamespace(model_cfg=model), task).a.weight.item() == value
        assert model.finetuned == url
        (source,) = (one for one in sources_of_model(model) if one.origin == url)
        assert source.is_there


def test_recorded_config_keeps_the_files_of_unused_splits():
    from omegaconf import OmegaConf

    files = {split: {"storage": f"{split}.json"} for split in ("train", "val", "test", "other")}
    built = OmegaConf.create({"mine": {"build_info": {"annotations": files}}})
    cfg = type("Cfg", (), {"datasets_cfg": built})
    with prefetching.only_splits(cfg, {"train", "val"}):
        assert list(built.mine.build_info.annotations) == ["train", "val", "other"]
    assert OmegaConf.to_container(built.mine.build_info.annotations) == files


def test_a_url_without_network_is_explained(monkeypatch):
    from urllib.error import URLError

    from lavis_mafa.checkpoints import checkpoints

    def fail(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr("torch.hub.download_url_to_file", fail)
    with pytest.raises(OSError, match="is not in the cache and cannot be downloaded"):
        checkpoints.read_checkpoint("https://nowhere.invalid/weights.pth")


def test_missing_files_of_unused_splits_are_no_problem(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps([{"image": "a.jpg", "caption": "a"}]))
    info = "datasets.image_text_json.build_info"
    options = [
        "run.device=cpu",
        f"{info}.images.storage={tmp_path}",
        f"{info}.annotations.train.storage={tmp_path / 'train.json'}",
        f"{info}.annotations.val.storage=nowhere.json",
        f"{info}.annotations.test.storage=nowhere.json",
    ]
    path = TRAIN / "albef_own_data.yaml"
    load_config(path, [*options, "run.valid_splits=[]", "run.test_splits=[]"])
    with pytest.raises(ValueError, match="nowhere.json"):
        load_config(path, options)


@pytest.mark.parametrize("name, kind", [("blip2_mafa", "coco"), ("albef_mafa", "base")])
def test_published_weights_are_never_silently_random(monkeypatch, name, kind):
    cls = registry.get_model_class(name)

    def fail(cfg):
        raise OSError("no network")

    monkeypatch.setattr(cls, "from_config", fail)
    with pytest.raises(OSError, match="random_weights=True"):
        lavis_mafa.load_model(name, kind)
