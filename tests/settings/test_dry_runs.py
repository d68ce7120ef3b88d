"""Every shipped config passes the real ``--dry-run`` offline, with its own keys and tiny sizes.

What a config names and this machine lacks is created where the config expects it: annotation files
and images in the layout of each builder, checkpoints of the configs that it follows, language
models. Only sizes, device and dtype are changed.
"""

from __future__ import annotations

import functools
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from lavis.common.registry import registry
from omegaconf import OmegaConf
from PIL import Image
from shard_files import write_shards
from shipped import SHIPPED, loaded, required_options

from lavis_mafa.cli import main
from lavis_mafa.compat.traits import traits_of
from lavis_mafa.downstream.tiny_language_models import tiny_opt, tiny_t5

sys.path.append(str(Path(__file__).resolve().parents[1] / "training"))
from runs import put_small_lavis  # noqa: E402

PAIRS, SIZE, BATCH = 12, 32, 4
SMALL = {
    "run.device": "cpu",
    "run.amp_dtype": "bf16",  # no fp16 on a CPU
    "run.num_workers": 0,
    "run.batch_size_train": BATCH,
    "run.batch_size_eval": BATCH,
    "run.loggers": "[]",
}
TOY_SIZES = {"train_size": 24, "val_size": 10, "test_size": 10}
PHOTOS = [f"COCO_val2014_{number:012d}.jpg" for number in range(1, 7)]
# Proposals of RefCOCO+ by image.
BOXES = {str(number): [[0, 0, 20, 20], [5, 5, 9, 9]] for number in range(len(PHOTOS))}
# Con-Ds of LAVIS's classes, whose image encoder has a fixed size, are replaced by the same
# family's.
JUDGES = {"albef_retrieval": "albef_mafa", "blip_retrieval": "blip_mafa"}
LANGUAGE_MODELS = {"opt_model": tiny_opt, "t5_model": tiny_t5}


# Data in the layouts of the builders


def row(builder, split, number):
    """Return one row of an annotation file."""
    photo, train = PHOTOS[number % len(PHOTOS)], split == "train"
    text = f"a photo of {number} red circles"
    caption = text if train else [text, f"another caption {number}"]
    question = {"image": photo, "question": "how many circles?", "question_id": number}
    if builder in ("coco_vqa", "ok_vqa"):
        return {**question, "answer": ["two", "two", "three"], "dataset": "vqa"}
    if builder in ("gqa", "vg_vqa_mafa"):
        return {**question, "answer": "two"}
    if builder == "snli_ve":
        label = ("contradiction", "neutral", "entailment")[number % 3]
        return {"image": Path(photo).stem, "sentence": text, "label": label}
    if builder == "nlvr_mafa":
        pair = [PHOTOS[number % 6], PHOTOS[(number + 1) % 6]]
        return {"images": pair, "sentence": text, "label": ("True", "False")[number % 2]}
    if builder == "refcoco_plus":
        return {"image": photo, "text": text, "bbox": [1, 1, 9, 9], "image_id": str(number % 6)}
    if builder == "nocaps":
        return {"image": photo, "img_id": number}
    captioned = ("coco_caption", "coco_retrieval", "flickr30k", "vg_caption", "sbu_caption")
    if builder in (*captioned, "image_text_json") or builder.startswith("conceptual_caption_"):
        return {"image": photo, "image_id": f"{photo}_{number}", "caption": caption}
    raise NotImplementedError(f"tell here what a row of {builder}'s annotation files looks like")


def content(builder, split, position):
    """Return the file at a position of a split's list: rows, then answers and VQA's formats of
    both.
    """
    rows = [row(builder, split, number) for number in range(PAIRS)]
    if builder in ("coco_retrieval", "flickr30k") and split != "train":
        return rows[: len(PHOTOS)]  # one row an image
    if split == "train" or position == 0:
        return rows
    asked = [{"question_id": r.get("question_id")} for r in rows]
    return [
        ["two", "three", "red"],
        {"questions": asked, "info": {}},
        {"annotations": [{**one, "answers": ["two"]} for one in asked], "info": {}},
    ][position - 1]


def write(path, what):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(what))


def write_images(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(PHOTOS):
        Image.new("RGB", (48, 40), (40 * number, 90, 200)).save(folder / name)


def shards(path, split):
    image = io.BytesIO()
    Image.new("RGB", (48, 40), (9, 90, 200)).save(image, "JPEG")
    texts = [f"{split}: a photo of {number} red circles" for number in range(PAIRS)]
    samples = [(f"{n:06d}", image.getvalue(), "jpg", text, {}) for n, text in enumerate(texts)]
    write_shards(path.parent, samples)
    (path.parent / "pairs-000000.tar").rename(path)


def put_data(builder, dataset, folder):
    """Write the files that a data set's config names; return the options for the rest."""
    info, section = dataset.build_info, f"datasets.{builder}.build_info"
    if builder.startswith("toy_"):
        return [f"{section}.{name}={size}" for name, size in TOY_SIZES.items()]
    for split, files in info.annotations.items():
        files_of_split = [files.storage] if isinstance(files.storage, str) else files.storage
        for position, file in enumerate(files_of_split):
            if builder == "image_text_shards":
                shards(folder / file.replace("*", "0"), split)
            else:
                write(folder / file, content(builder, split, position))
    options = []
    if "detections" in info:
        write(folder / info.detections.storage, BOXES)
    if "images" in info:
        images = info.images.storage
        if Path(images).is_absolute():  # an absolute path of another machine
            images = "images"
            options = [f"{section}.images.storage={folder / images}"]
        write_images(folder / images)
    return options


# Checkpoints and language models


@functools.cache
def producers():
    """Return {output_dir: arch} of every config that writes checkpoints."""
    cfgs = [OmegaConf.load(path) for path in SHIPPED if path.parent.name != "eval"]
    return {str(cfg.run.output_dir): str(cfg.model.arch) for cfg in cfgs}


def arch_that_wrote(checkpoint, arch, name):
    """Return the arch of the config whose run writes a checkpoint. For external checkpoints: the
    model's own arch, or the family's stage 1 for pre-trained weights.
    """
    for folder, producer in producers().items():
        if str(checkpoint).startswith(f"{folder}/"):
            return producer
    stage_2 = hasattr(registry.get_model_class(arch), "llm_key")
    if name == "finetuned" or stage_2:
        return arch
    return f"{re.match('albef|blip2|blip', arch)[0]}_mafa"


@pytest.fixture(scope="module")
def language_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language_models")
    return {key: str(make(folder / key)) for key, make in LANGUAGE_MODELS.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, language_models):
    """``checkpoint(arch)``: path of a checkpoint of a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def save(arch):
        torch.manual_seed(0)
        cls = registry.get_model_class(arch)
        cfg = OmegaConf.load(cls.default_config_path("tiny")).model
        key = getattr(cls, "llm_key", None)
        if key:
            cfg[key] = language_models[key]
        torch.save({"model": cls.from_config(cfg).state_dict()}, folder / f"{arch}.pth")
        return str(folder / f"{arch}.pth")

    return save


def put_weights(model, checkpoint):
    """Return options that replace the starting weights of a model by tiny ones."""
    ours, used, options = traits_of(model.arch).loads_with_our_loader, False, []
    for name in ("finetuned", "pretrained"):  # only the first enabled one is loaded
        wanted = model.get(f"load_{name}", not ours) and not used
        if wanted and (model.get(name) or name == "finetuned"):
            arch = arch_that_wrote(model.get(name), model.arch, name)
            options += [f"model.load_{name}=True", f"model.{name}={checkpoint(arch)}"]
            used = True
        elif ours:
            options += [f"model.load_{name}=False", f"model.{name}=null"]
    if model.get("vit_weights"):  # a tiny encoder, or a random one as in stage 1
        begins = hasattr(registry.get_model_class(model.arch), "llm_key")
        weights = checkpoint("blip2_mafa") if begins else "null"
        options += [f"model.vit_weights={weights}"]
    return options


def put_con_d(con_d, checkpoint):
    if con_d is None or con_d.arch in ("oracle", "captions"):
        return []
    arch = JUDGES.get(con_d.arch, con_d.arch)
    own = {"arch": arch, "model_type": "tiny", "checkpoint": checkpoint(arch)}
    own |= {"image_size": 2 * SIZE} if con_d.image_size else {}
    return [f"model.mafa.con_d.{key}={value}" for key, value in own.items()]


@pytest.fixture
def small_lavis(tmp_path, monkeypatch):
    """Options for LAVIS's own ALBEF with tiny image encoder, text encoder and vocabulary."""
    med = put_small_lavis(tmp_path, monkeypatch)
    return [f"model.med_config_path={med}", "model.queue_size=64", "model.embed_dim=64"]


def options_for(path, folder, language_models, checkpoint, lavis_own):
    """Return all options that make a shipped config runnable on this machine."""
    cfg = loaded(path)
    model, ours = cfg.model_cfg, traits_of(cfg.model_cfg.arch).loads_with_our_loader
    options = [*required_options(path), *(f"{key}={value}" for key, value in SMALL.items())]
    options += ["model.model_type=tiny"] if ours else lavis_own
    options += [f"model.image_size={SIZE}"]
    # the tiny text encoders have 64 positions
    options += ["model.max_txt_len=64"] if model.get("max_txt_len", 0) > 64 else []
    for builder, dataset in cfg.datasets_cfg.items():
        root = folder / "cache"
        lavis_builder = registry.get_builder_class(builder).__module__.startswith("lavis.")
        options += put_data(builder, dataset, root if lavis_builder else folder)
        for phase in dataset.get("vis_processor") or ():
            options += [f"datasets.{builder}.vis_processor.{phase}.image_size={SIZE}"]
    options += put_weights(model, checkpoint)
    options += put_con_d((model.get("mafa") or {}).get("con_d"), checkpoint)
    key = getattr(registry.get_model_class(model.arch), "llm_key", None)
    options += [f"model.{key}={language_models[key]}"] if key else []
    # the tiny models have fewer layers
    options += ["run.block_num=2"] if cfg.run_cfg.get("block_num") else []
    truth = cfg.run_cfg.get("annotation_file")
    if truth:
        captions = [{"image_id": number, "caption": "a photo"} for number in range(PAIRS)]
        write(folder / truth, {"images": [], "annotations": captions})
    return options


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_config_passes_dry_run(
    path, tmp_path, monkeypatch, capsys, caplog, language_models, checkpoint, request
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(registry.mapping["paths"], "cache_root", str(tmp_path / "cache"))
    ours = traits_of(OmegaConf.load(path).model.arch).loads_with_our_loader
    lavis_own = [] if ours else request.getfixturevalue("small_lavis")
    options = options_for(path, tmp_path, language_models, checkpoint, lavis_own)
    run = loaded(path).run_cfg
    evaluates = run.evaluate
    assert run.runner == "runner_mafa" and run.output_dir.startswith("output/")
    assert evaluates is (path.parent.name == "eval")
    command = "evaluate" if evaluates else "train"
    status = main([command, "--cfg-path", str(path), "--dry-run", "--options", *options])
    output = capsys.readouterr().out
    assert status == 0, caplog.text[-3000:]
    assert "dry run: nothing is trained" in output
    assert ("one mini-batch:" in output) is not evaluates
    assert ("evaluation only" in output) is evaluates
    assert not list(tmp_path.rglob("checkpoint*.pth"))
