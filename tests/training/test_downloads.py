"""Files that a config names by URL: fetched once each, and explained without a network."""

from __future__ import annotations

import functools
import http.server
import threading
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch
from lavis.common.registry import registry
from lavis.models.base_model import BaseModel
from omegaconf import OmegaConf

import lavis_mafa
from lavis_mafa.checkpoints.checkpoints import read_checkpoint
from lavis_mafa.cli import main
from lavis_mafa.training.session import _only_splits, build_model


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server on this machine, with its folder; torch's cache is empty."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None, raising=False)
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    one = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=one.serve_forever, daemon=True).start()
    yield folder, f"http://localhost:{one.server_port}"
    one.shutdown()


def test_two_urls_with_one_file_name_are_two_files(server):
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
    run = {"device": "cpu", "num_workers": 0}
    for url, value in zip(urls, read, strict=True):
        model = OmegaConf.create({"arch": "albef_retrieval", "finetuned": url})
        built = build_model(SimpleNamespace(model_cfg=model, run_cfg=run), task)
        assert built.a.weight.item() == value
        assert model.finetuned == url


def test_recorded_config_keeps_the_files_of_unused_splits():
    files = {split: {"storage": f"{split}.json"} for split in ("train", "val", "test", "other")}
    built = OmegaConf.create({"mine": {"build_info": {"annotations": files}}})
    cfg = type("Cfg", (), {"datasets_cfg": built})
    with _only_splits(cfg, {"train", "val"}):
        assert list(built.mine.build_info.annotations) == ["train", "val", "other"]
    assert OmegaConf.to_container(built.mine.build_info.annotations) == files


def test_a_url_without_network_is_explained(monkeypatch):
    def fail(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr("torch.hub.download_url_to_file", fail)
    with pytest.raises(OSError, match="is not in the cache and cannot be downloaded"):
        read_checkpoint("https://nowhere.invalid/weights.pth")


def test_a_tokenizer_without_network_is_explained(tmp_path, monkeypatch, caplog):
    """As every error of a user, without a traceback."""
    monkeypatch.setattr("lavis_mafa.families.tokenizers.answers", lambda server: False)
    options = ["model.tokenizer=no-such/tokenizer", f"run.output_dir={tmp_path}"]
    assert main(["train", "--cfg-path", "albef_toy", "--options", *options]) == 1
    assert "no-such/tokenizer is neither a directory nor in the Hugging Face cache" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("name, kind", [("blip2_mafa", "coco"), ("albef_mafa", "base")])
def test_published_weights_are_never_silently_random(monkeypatch, name, kind):
    cls = registry.get_model_class(name)

    def fail(cfg):
        raise OSError("no network")

    monkeypatch.setattr(cls, "from_config", fail)
    with pytest.raises(OSError, match="random_weights=True"):
        lavis_mafa.load_model(name, kind)
