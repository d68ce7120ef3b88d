"""A config as a toy run: ``lavis-mafa train --toy`` tries any training config in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.compat.traits import traits_of
from lavis_mafa.io.files import write_text
from lavis_mafa.io.plugins import load_plugins
from lavis_mafa.io.project_files import check_yaml_file, config_named
from lavis_mafa.settings.config_of_run import is_run
from lavis_mafa.settings.registered import default_yaml, names_of, types_of
from lavis_mafa.toyworld.task_files import TASK_FILES, write_task_files

# Tasks that read image-text pairs, for which `toy_scenes` takes the place of all data sets.
_TASKS = {
    "image_text_pretrain",
    "mafa_captioning",
    "mafa_pretrain",
    "mafa_retrieval",
    "mafa_text_assignment",
}
_BATCH = 16
_SIZES = {"train_size": 1024, "val_size": 50, "test_size": 50}
# Keys of a model whose values the tiny type has of its own: sizes, and files with weights.
_OF_PARTS = (
    "load_pretrained",
    "pretrained",
    "load_finetuned",
    "finetuned",
    "tokenizer",
    "embed_dim",
    "max_txt_len",
    "vit",
    "vit_model",
    "vit_weights",
    "vit_precision",
    "freeze_vit",
    "drop_path_rate",
    "use_grad_checkpoint",
    "bert_weights",
    "bert_config",
    "med_config_path",
    "q_former_config",
    "num_query_token",
)


def write_toy_config(cfg_path: str) -> Path:
    """Write a config with the tiny type of its model, toy data and two epochs, for this machine.

    Nothing is downloaded: the model starts from random weights, and Con-D is the toy world's truth.
    All else is as in the config. The file lies in the config's output folder with ``_toy`` added.

    Raises:
        ValueError: if the model has no tiny type, or there are no toy data for the data sets.
    """
    if is_run(cfg_path):
        raise ValueError(f"--toy: {cfg_path} is the folder of a run; give a config file")
    path = config_named(cfg_path)
    try:
        check_yaml_file(path)
        config: Any = OmegaConf.load(path)
    except (yaml.YAMLError, OSError, UnicodeDecodeError):  # as below
        config = OmegaConf.create()
    if not OmegaConf.is_dict(config) or not all(
        OmegaConf.is_dict(config.get(one)) and config[one] for one in ("model", "datasets", "run")
    ):
        return Path(path)  # loading it says what is wrong
    model, run = config.model, config.run
    load_plugins(run.get("plugins") or [])
    cls = registry.get_model_class(model.get("arch"))
    if cls is None:
        return Path(path)
    if "tiny" not in types_of(cls):
        raise ValueError(
            f"--toy: {path}: {model.get('arch')} has no tiny type: it would train at its full size "
            "and download its parts"
        )
    pairs = bool(_TASKS & set(names_of("task", run.get("task"))))
    without = [] if pairs else [name for name in config.datasets if name not in TASK_FILES]
    if without:
        raise ValueError(f"--toy: {path}: there are no toy data in place of {', '.join(without)}")
    run.output_dir = f"{run.get('output_dir', 'output/run')}_toy"
    folder = Path(run.output_dir).absolute()
    for key in _OF_PARTS:
        model.pop(key, None)
    model.model_type = "tiny"
    model.image_size = default_yaml(cls, "tiny")["model"]["image_size"]
    if llm_key := traits_of(cls).llm_key:
        model[llm_key] = str(cls.write_tiny_llm(folder / llm_key))
    if model.get("queue_size"):
        model.queue_size = _SIZES["train_size"]
    mafa = model.get("mafa")
    if OmegaConf.is_dict(mafa) and mafa.get("con_d"):
        mafa.con_d = {"arch": "oracle"}
    if pairs:
        data = next(iter(config.datasets.values()))
        kept = ("vis_processor", "text_processor")
        processors = {name: data[name] for name in kept if data and data.get(name)}
        config.datasets = {"toy_scenes": {"type": "dense", **processors, "build_info": _SIZES}}
    config.datasets = {name: data or {} for name, data in config.datasets.items()}
    for name, data in config.datasets.items():
        if not pairs:
            own = data.get("build_info") or {}
            data.build_info = {**own, **write_task_files(name, folder / "data")}
        for processor in (data.get("vis_processor") or {}).values():
            if processor:
                processor.image_size = "${model.image_size}"
    run.pop("block_num", None)
    if OmegaConf.is_dict(run.get("grit")):
        run.grit.search_space = 10 * _BATCH
        if isinstance(run.grit.get("start_epoch"), int):
            run.grit.start_epoch = min(run.grit.start_epoch, 1)
    run.device = "cuda" if torch.cuda.is_available() else "cpu"
    run.amp = bool(run.get("amp")) and run.device == "cuda"  # no fp16 on a CPU
    run.warmup_share = 0.1  # the steps of warm-up are more than the whole run
    run.max_epoch, run.batch_size_train, run.num_workers = 2, _BATCH, 0
    run.pop("job_id", None)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    write_text(file, OmegaConf.to_yaml(config))
    return file
