"""Keys of a config file: LAVIS's, and those of ours that have no class to declare them.

Keys of a single model, task or dataset are those of its default YAML and of the settings class
that it declares (``model_options``, ``run_options``, ``build_options``); `registered` adds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lavis_mafa.algorithm.grit.grit_settings import GritSettings
from lavis_mafa.algorithm.options import Option, option
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.families.vit import VitOptions
from lavis_mafa.io.problems import Registered
from lavis_mafa.judges.con_d_settings import ConDSettings, FrozenSettings
from lavis_mafa.settings.check import Key, keys_of
from lavis_mafa.settings.loggers import LOGGERS
from lavis_mafa.tasks.mafa_retrieval import RetrievalOptions
from lavis_mafa.tasks.metrics import MetricNames

SPLITS = ("train", "val", "test")
ALWAYS, TRAINING = ("always",), ("training",)
GENERATION = ("captioning", "mafa_captioning", "dialogue")
BLANK = ("",)  # the empty string is permitted
LARGEST_SEED = 4_000_000_000  # NumPy's limit is 2**32 - 1, and the rank is added to the seed


def _ours(
    doc: str, default: Any = dataclasses.MISSING, source: str = "lavis_mafa", **about: Any
) -> Any:
    """Return the field of a key of this package; without a default, the key stays absent."""
    if isinstance(default, list | dict):
        return option(doc=doc, factory=lambda: default, source=source, **about)
    return option(default, doc, source=source, **about)


def _lavis(doc: str, default: Any = dataclasses.MISSING, **about: Any) -> Any:
    """Return the field of a key of LAVIS; without a default, the key stays absent."""
    return _ours(doc, default, "LAVIS", **about)


# fmt: off
@dataclass(kw_only=True)
class _RunOptions(RetrievalOptions):
    """Keys of ``run``."""

    task: str = _lavis("what to train or evaluate", choices=Registered("task"), needed=ALWAYS)
    runner: str = _lavis("the training loop (runner_mafa if absent)", choices=Registered("runner"))
    train_splits: list[str] = _lavis("splits to train on", [], choices=("train",), needed=TRAINING)
    valid_splits: list[str] = _lavis("splits evaluated after every epoch", [])
    test_splits: list[str] = _lavis("splits evaluated at the end", [])
    output_dir: str = _lavis("folder of checkpoints, logs and results", needed=ALWAYS,
        also=("out_dir", "save_dir"))
    seed: int = _lavis("random seed", 42, low=0, high=LARGEST_SEED, also=("random_seed",))
    resume_ckpt_path: str | None = _lavis("checkpoint to resume; auto: the newest in output_dir",
        None, path="file or URL", words=("auto",), also=("resume", "resume_from"))
    # optimizer
    lr_sched: str = _lavis("learning rate schedule", choices=Registered("lr_scheduler"),
        needed=TRAINING, also=("scheduler",))
    init_lr: float = _lavis("learning rate after warm-up", low=0, above=True, needed=TRAINING,
        also=("lr", "learning_rate"))
    min_lr: float = _lavis("learning rate at the end", low=0, needed=TRAINING)
    warmup_steps: int = _lavis("steps of warm-up", 0, low=0)
    weight_decay: float = _lavis("AdamW's weight decay", low=0, needed=TRAINING, also=("wd",))
    max_epoch: int = _lavis("epochs to train", low=1, also=("epochs", "num_epochs"))
    accum_grad_iters: int = _lavis("mini-batches per optimizer step", 1, low=1,
        also=("gradient_accumulation_steps",))
    amp: bool = _lavis("mixed precision", False, also=("fp16", "mixed_precision"))
    # data
    batch_size_train: int = _lavis("B: pairs in a mini-batch of one rank", low=1, needed=TRAINING,
        also=("batch_size", "B"))
    batch_size_eval: int = _lavis("mini-batch of one rank in evaluation", low=1, needed=ALWAYS)
    num_workers: int = _lavis("worker processes of a data loader", low=0, high=1024, needed=ALWAYS,
        also=("workers",))
    # devices
    device: str = _lavis("cuda or cpu", "cuda", choices=("cuda", "cpu"))
    # evaluation
    num_beams: int = _lavis("beams of generation", low=1, needed=GENERATION)
    max_len: int = _lavis("maximum length of generated texts, in tokens", low=1, needed=GENERATION)
    min_len: int = _lavis("minimum length of generated texts, in tokens", low=0, needed=GENERATION)
    # of this package
    plugins: list[str] = _ours("Python files or modules with your own code, imported first", [])
    metrics: list[str] | None = _ours(
        "caption metrics; null: the standard ones whose tools are installed",
        choices=MetricNames("caption"))
    amp_dtype: str = _ours("number format of amp", "fp16", choices=("fp16", "bf16"))
    max_grad_norm: float | None = _ours("clip gradients to this norm; null: no clipping", None,
        low=0, above=True, also=("clip_grad",))
    warmup_share: float | None = _ours("longest warm-up as a share of all steps; null: no limit",
        None, low=0, high=1)
    lr_horizon: int | None = _ours("epochs that the cosine spans; null: max_epoch", None,
        source="GRIT-VLP 5.1", low=1)
    max_steps: int | None = _ours("stop after this many steps of the whole run", None, low=1)
    save_every_steps: int | None = _ours("steps between checkpoints inside an epoch", None, low=1)
    keep_every_epochs: int | None = _ours("epochs between checkpoints that are kept", None, low=1)
    job_id: str | None = _ours("folder under output_dir; null: a time stamp; '': output_dir itself",
        None, words=BLANK)
    max_failed_saves: int = _ours("consecutive failed checkpoint writes before training stops", 3,
        low=0)
    max_unreadable: float = _ours("permitted share of unreadable samples, by rank and epoch", 0.01,
        low=0, high=1)
    loggers: list[str] = _ours("where figures go besides log.jsonl", ["tensorboard"],
        choices=LOGGERS)
    dist_timeout_minutes: float = _ours("how long ranks wait for each other", 30.0, low=0,
        high=1000000.0, above=True)
    compile: bool = _ours("torch.compile the image encoders; not with activation checkpointing",
        False)
    cached_batch: int | None = _ours(
        "pairs whose activations are stored at a time, the others recomputed; null: all", None,
        source="GradCache", low=1, also=("grad_cache", "gc_chunk_size", "mini_batch_size"))
    grit: GritSettings = _ours("grouped mini-batch sampling", {}, source="GRIT-VLP 4.1")


# Further keys that LAVIS reads, by their types; those in the table of defaults are always there.
LAVIS_RUN: Mapping[Any, tuple[str, ...]] = {
    int: ("rank", "gpu", "world_size", "log_freq", "max_iters", "iters_per_inner_epoch",
        "num_ans_candidates", "num_captions", "num_captions_fid", "num_patches", "cap_max_length",
        "cap_min_length", "internal_bsz_fid", "top_k"),
    int | None: ("block_num",),
    float: ("warmup_lr", "beta2", "length_penalty", "top_p", "repetition_penalty"),
    float | None: ("lr_decay_rate",),
    bool: ("evaluate", "distributed", "use_dist_eval_sampler", "report_metric"),
    str: ("dist_url", "prompt", "inference_method"),
    Mapping[str, float] | None: ("train_dataset_ratios",),
    Any: ("annotation_file",),
}
LAVIS_DEFAULTS = {"evaluate": False, "world_size": 1, "log_freq": 50, "warmup_lr": -1.0,
    "beta2": 0.999, "lr_decay_rate": None, "distributed": True, "use_dist_eval_sampler": True,
    "dist_url": "env://", "train_dataset_ratios": None}
LAVIS_MODEL: Mapping[Any, tuple[str, ...]] = {
    int: ("vit_ckpt_layer", "embed_dim", "num_classes", "hidden_size", "num_query_token",
        "cross_attention_freq"),
    float: ("vit_drop_path_rate", "vit_layer_norm_epsilon", "momentum", "alpha", "mlm_mask_prob",
        "drop_path_rate"),
    bool: ("load_pretrained", "load_finetuned", "vit_grad_ckpt", "use_grad_checkpoint",
        "use_distill", "negative_all_rank", "freeze_vit", "apply_lemmatizer"),
    str: ("vit_type", "vit_precision", "precision", "vit_model", "q_former_model"),
    str | None: ("prompt",),
}


@dataclass(frozen=True, kw_only=True)
class _MafaOptions(StepSettings):
    """Keys of ``model.mafa``; those of registered entries are added."""

    detach_other: bool = _ours("image to text trains images only, text to image texts only", True,
        source="MAFA 4.2")
    learn_temperature: bool = _ours(
        "False: the temperature stays at model.temp (0.07) and is not saved in checkpoints", True)
    con_d: ConDSettings | None = _ours("connection discriminator; null: no mining", None,
        source="MAFA 4.1")
    negatives_encoder: FrozenSettings | None = _ours(
        "frozen model that picks negatives and groups mini-batches; null: the model in training",
        None, source="GRIT-VLP Table 1")


@dataclass(kw_only=True)
class _ModelOptions:
    """Keys of ``model`` of LAVIS's models; ours take those of them that a default YAML has."""

    arch: str = _lavis("registered name of the model", choices=Registered("model"), needed=ALWAYS)
    model_type: str = _lavis("name of the arch's default YAML", needed=ALWAYS)
    pretrained: str | None = _lavis("pre-trained checkpoint: file, URL, or folder of transformers",
        words=BLANK)
    finetuned: str | None = _lavis("fine-tuned checkpoint: file, URL, or folder of transformers",
        words=BLANK)
    image_size: int = _lavis("image side in pixels", low=1, also=("img_size", "resolution"))
    med_config_path: str = _lavis("JSON config of the text encoder", path="library file")
    ramp_epochs: float = _ours("epochs over which alpha grows from 0 (ALBEF: 1, LAVIS and BLIP: 2)",
        source="ALBEF, LAVIS", low=0)
    momentum_start: str = _ours("what momentum encoders that the checkpoint lacks start from: its "
        "encoders, or the initial weights (BERT, ImageNet)", source="GRIT-VLP S.M. 3",
        choices=("encoders", "initial"))
    temp: float = _lavis("initial ITC temperature, clamped to this range", low=0.001, high=0.5,
        also=("temperature",))
    max_txt_len: int = _lavis("maximum caption length in tokens", low=3, also=("max_words",))
    queue_size: int = _lavis("features in the momentum queue", low=0)
    opt_model: str = _lavis("OPT: a name on the hub or a folder", path="path or name")
    t5_model: str = _lavis("T5: a name on the hub or a folder", path="path or name")


@dataclass(kw_only=True)
class _OurModelOptions:
    """Keys of ``model`` of models with our loader, see `lavis_mafa.compat.traits`."""

    tokenizer: str | None = _ours("vocab.txt, folder or name on the hub; null: the arch's default",
        path="path or name")
    vit: VitOptions | None = _ours("a ViT of any size")
    mafa: _MafaOptions = _ours("the training step", {}, source="MAFA 4")


@dataclass(kw_only=True)
class _ModelParts:
    """Keys of ``model`` of models with our loader whose default YAML has the key."""

    vit_weights: str | None = _ours("weights of the image encoder; null: random",
        path="file, folder, URL or timm/NAME", words=("published",))
    bert_weights: str | None = _ours(
        "BERT to initialise the Q-Former or text encoder from; null: random", path="path or name")
    q_former_config: str | None = _ours("JSON of the Q-Former's sizes; null: BERT-base's",
        path="library file")
    llm_precision: str = _ours("number format of OPT; a CPU uses fp32",
        choices=("fp16", "bf16", "fp32"))


# Keys of ``datasets.BUILDER``; those of the builder's default YAML and `build_options` are added.
_LAVIS = Option("see LAVIS", "LAVIS")
_PLACES = Key(str | list[str], _LAVIS)
_PLACE = Key(dict, _LAVIS, keys={"storage": _PLACES})
_FILES = Key(dict | None, _LAVIS, keys={
    "url": Key(str | list[str] | None, _LAVIS),  # to download or copy from
    "md5": Key(str | list[str] | None, _LAVIS),
    "storage": _PLACES.about(doc="path of the file", needed=ALWAYS),
})
_PROCESSOR = Key(dict | None, _LAVIS, keys={  # it takes its arguments as further keys
    "name": Key(str, Option("registered name", "LAVIS", choices=Registered("processor"),
        needed=ALWAYS)),
})
_PROCESSORS = Key(dict, _LAVIS, keys={"train": _PROCESSOR, "eval": _PROCESSOR})
DATASET: Mapping[str, Key] = {
    "type": Key(str, _LAVIS),
    "data_type": Key(str, Option("kind of visual input", "LAVIS",
        choices=("images", "videos", "features"))),
    "data_dir": Key(str | None, Option("see LAVIS", "LAVIS", words=BLANK)),
    "dataset_card": Key(str | None, Option("see LAVIS", "LAVIS", words=BLANK)),
    "sample_ratio": Key(float, _LAVIS),
    "vis_processor": _PROCESSORS,
    "text_processor": _PROCESSORS,
    "build_info": Key(dict, _LAVIS, keys={
        "annotations": Key(dict, _LAVIS, keys=dict.fromkeys(SPLITS, _FILES)),
        "images": _PLACE,
        "features": _PLACE,
    }),
}


@dataclass(kw_only=True)
class _FileOptions:
    """The sections of a config file."""

    run: _RunOptions = _lavis("what to run and how", needed=ALWAYS)
    model: _ModelOptions = _lavis("the model", needed=ALWAYS)
    datasets: Mapping[str, Any] = _lavis("datasets, by registered builder", needed=ALWAYS)


# Keys of these classes; those of LAVIS's tables and of registered entries are added.
FILE, OWN_RUN, OWN_MODEL = map(keys_of, (_FileOptions, _RunOptions, _ModelOptions))
OURS, PARTS = map(keys_of, (_OurModelOptions, _ModelParts))
