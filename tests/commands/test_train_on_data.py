"""`lavis-mafa train --data`: pairs in any form train without another option."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from shard_files import write_rows, write_shards

from lavis_mafa.cli import main
from lavis_mafa.commands.own_data import write_config
from lavis_mafa.data.pair_conversion import converted
from lavis_mafa.settings import load_config

IMAGES = 60
COLOURS = ("red", "green", "blue", "grey", "white")


def picture(n):
    stream = io.BytesIO()
    Image.new("RGB", (40, 32), (4 * n, 250 - 4 * n, 30)).save(stream, "PNG")
    return stream.getvalue()


def captions(n):
    return [f"a {COLOURS[n % 5]} square number {n % 7}", f"square {n} in {COLOURS[n % 5]}"]


def make(form, folder):
    """Write 60 images with two captions each; return the arguments of the command."""
    folder.mkdir()
    if form not in ("parquet", "tar"):
        for n in range(IMAGES):
            (folder / f"{n}.png").write_bytes(picture(n))
    rows = [(f"{n}.png", caption) for n in range(IMAGES) for caption in captions(n)]
    file = folder / f"pairs.{form}"
    if form in ("json", "csv"):
        write_rows(file, [{"image": name, "caption": text} for name, text in rows])
    elif form == "parquet":
        columns = {"image": [picture(n) for n in range(IMAGES)]}
        columns["caption"] = [captions(n) for n in range(IMAGES)]
        pq.write_table(pa.table(columns), file)
    elif form == "tar":
        samples = [
            (f"{n}_{k}", picture(n), "png", caption, {"image_id": str(n)})
            for n in range(IMAGES)
            for k, caption in enumerate(captions(n))
        ]
        write_shards(folder / "shards", samples)
        file = folder / "shards" / "pairs-{000000..000000}.tar"
    else:
        for n in range(IMAGES):
            (folder / f"{n}.txt").write_text("\n".join(captions(n)))
        file = folder
    return [str(file)]


@pytest.mark.parametrize("form", ["json", "csv", "parquet", "tar", "folder"])
def test_every_form_becomes_a_config_that_is_complete(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, chosen = write_config(make(form, tmp_path / "mine"), None)
    assert "120 pairs of 60 images, about 18 of which are held out" in chosen
    config = load_config(file, [])  # checks all of it, and the files
    (builder,) = config.datasets_cfg
    assert builder == ("image_text_shards" if form == "tar" else "image_text_json")
    assert file.parent.name == {"tar": "pairs-", "folder": "mine"}.get(form, "pairs")
    assert config.run_cfg.batch_size_train == 8 and config.run_cfg.max_epoch == 30
    assert config.run_cfg.rerank_by == "odds"
    assert config.run_cfg.device == ("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary = Path(config.model_cfg.tokenizer).read_text().split()
    assert {"square", "green", "[MASK]"} <= set(vocabulary)
    second = load_config(file.with_name("train_on.yaml"), [], machine=False)
    assert second.run_cfg.max_epoch == 6 and second.run_cfg.init_lr == 0.0005
    # run.resume_ckpt_path=auto would find the checkpoint of the first run.
    assert second.run_cfg.output_dir != config.run_cfg.output_dir


def test_vocabulary_of_an_earlier_run_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = make("csv", tmp_path / "mine")
    first = Path(load_config(write_config(data, None)[0], []).model_cfg.tokenizer)
    before = first.read_text()
    text = Path(data[0]).read_text().replace("square", "cube")
    Path(data[0]).write_text(text.replace("image,caption", "File,Words", 1))
    with pytest.raises(ValueError, match="option --image-key"):
        write_config(data, None)
    words = ["--dry-run", "--image-key", "File", "--caption-key", "Words"]
    assert main(["train", "--data", *data, *words]) == 0
    config = load_config("output/pairs/config.yaml", [])
    assert "cube" in Path(config.model_cfg.tokenizer).read_text() and first.read_text() == before


@pytest.mark.parametrize("images", [300_000, 25_000_000])
def test_of_many_images_a_thousand_are_held_out(tmp_path, monkeypatch, images):
    monkeypatch.chdir(tmp_path)
    table = converted(make("json", tmp_path / "mine"), root=tmp_path / "mine")
    table.meta["images"] = images
    monkeypatch.setattr("lavis_mafa.data.pair_conversion.converted", lambda *_, **__: table)
    file, chosen = write_config([str(tmp_path / "mine/pairs.json")], None)
    (builder,) = OmegaConf.load(file).datasets.values()
    assert builder.build_info.holdout * images == pytest.approx(1000, rel=0.01)
    assert "about 1,000 of which" in chosen


def test_train_evaluate_and_count_need_files_and_folders_only(tmp_path, monkeypatch, capsys):
    tmp_path = tmp_path / "my photographs"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    data = make("json", tmp_path / "mine")
    assert main(["train", "--data", *data, "--options", "run.max_epoch=1", "run.job_id=run"]) == 0
    printed = capsys.readouterr().out
    assert "output/pairs/config.yaml; edit it and pass it as --cfg-path" in printed
    run = tmp_path / "output/pairs/run"
    log = [json.loads(line) for line in open(run / "log.jsonl", encoding="utf-8")]
    assert any("txt_r1" in key for line in log for key in line), log[-1].keys()
    assert any(line.get("judged_pairs", 0) > 0 for line in log)
    assert main(["evaluate", "--run", str(run)]) == 0
    assert main(["count", "--run", str(run), "--output", "counted"]) == 0
    # The config that was written is the whole of the command.
    written = str(tmp_path / "output/pairs/config.yaml")
    assert main(["train", "--cfg-path", written, "--dry-run"]) == 0
    # So is that of the second run, which groups and mines.
    command = next(line for line in printed.splitlines() if "train_on.yaml" in line)
    program, *words = shlex.split(command.replace("RUN", "run"))
    assert program == "lavis-mafa" and main([*words, "run.job_id=then", "run.max_epoch=1"]) == 0
    then = run.parent / "train_on/then/log.jsonl"
    log = [json.loads(line) for line in then.read_text().splitlines()]
    grit = log[0]["config"]["run"]["grit"]
    assert grit["enabled"] and grit["hardness"] == 0.95
    assert log[0]["config"]["model"]["mafa"]["negatives"] == "hardest"
    assert any(line.get("judged_pairs", 0) > 0 for line in log)


def test_one_caption_per_image_is_not_grouped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("folder", tmp_path / "mine")
    for text in (tmp_path / "mine").glob("*.txt"):
        text.write_text(f"a square of {text.stem}")
    file, chosen = write_config([str(tmp_path / "mine")], None)
    assert "train on" not in chosen and not (file.parent / "train_on.yaml").exists()


def test_pictures_without_text_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("folder", tmp_path / "mine")
    (tmp_path / "mine/3.txt").unlink()
    (tmp_path / "mine/4.txt").rename(tmp_path / "mine/other.txt")  # a text without a picture
    _, chosen = write_config([str(tmp_path / "mine")], None)
    assert "3 files belong to no sample and are left out\n116 pairs of 58 images" in chosen
    for text in (tmp_path / "mine").glob("*.txt"):
        text.unlink()
    with pytest.raises(ValueError, match="or pictures, each with a text file"):
        write_config([str(tmp_path / "mine")], None)


def test_two_folders_of_pictures_with_equal_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [*make("folder", tmp_path / "one"), *make("folder", tmp_path / "two")]
    (tmp_path / "two/0.png").write_bytes(picture(IMAGES))  # the others are copies
    file, chosen = write_config(folders, None)
    assert "240 pairs of 61 images" in chosen and f"storage: {tmp_path}\n" in file.read_text()


def test_gpu_and_many_pairs_train_vit_b(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("lavis_mafa.commands.own_data._LARGE", 100)
    file, chosen = write_config(make("json", tmp_path / "mine"), None)
    assert "ViT-B" in chosen and not list(file.parent.glob("vocab*"))
    config = load_config(file, [], machine=False)
    assert config.model_cfg.model_type == "base" and config.run_cfg.device == "cuda"
    second = load_config(file.with_name("train_on.yaml"), [], machine=False)
    assert second.run_cfg.grit.hardness == 0.95 and second.model_cfg.load_pretrained


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "no image-text pair in"),
        (
            '[{"image": "a.png", "conversations": []}]',
            "conversations, as of LLaVA or ShareGPT, which are not read",
        ),
        ('{"data": [{"image": "a.png", "caption": "a"}]}', "no image column: expected image or"),
        ('[{"image": "a.png", "caption": "a"}]', "1 images: at least 20"),
        (None, "does not exist"),
    ],
)
def test_unusable_data_are_one_sentence(content, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pairs.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as error:
        main(["train", "--data", str(file)])
    printed = capsys.readouterr().err
    assert error.value.code == 2 and message in printed and printed.count("\n") == 1


def test_images_of_a_config_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--cfg-path", "albef_toy", "--images", "."])
    assert "--images needs --data" in capsys.readouterr().err
