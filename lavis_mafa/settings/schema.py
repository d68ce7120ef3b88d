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
from lavis_mafa.algorithm.options import option
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.families.vit import VitOptions
from lavis_mafa.io.problems import Registered
from lavis_mafa.judges.con_d_settings import ConDSettings, FrozenSettings
from lavis_mafa.settings.loggers import LOGGERS
from lavis_mafa.tasks.mafa_retrieval import RetrievalOptions
from lavis_mafa.tasks.metrics import MetricNames

SPLITS = ("train", "val", "test")
ALWAYS, TRAINING = ("always",), ("training",)
GENERATION = ("captioning", "mafa_captioning", "dialogue")
BLANK = ("",)  # the empty string is permitted
LARGEST_SEED = 4_000_000_000  # NumPy's limit is 2**32 - 1, and the rank is added to the seed


def ours(
    doc: str, default: Any = dataclasses.MISSING, source: str = "lavis_mafa", **about: Any
) -> Any:
    """Return the field of a key of this package; without a default, the key stays absent."""
    if isinstance(default, list | dict):
        return option(doc=doc, factory=lambda: default, source=source, **about)
    return option(default, doc, source=source, **about)


def lavis(doc: str, default: Any = dataclasses.MISSING, **about: Any) -> Any:
    """Return the field of a key of LAVIS; without a default, the key stays absent."""
    return ours(doc, default, "LAVIS", **about)


# fmt: off
@dataclass(kw_only=True)
class RunOptions(RetrievalOptions):
    """Keys of ``run``; those of loggers are added."""

    task: str = lavis("what to train or evaluate", choices=Registered("task"), needed=ALWAYS)
    runner: str = lavis("the training loop (runner_mafa if absent)", choices=Registered("runner"))
    evaluate: bool = lavis("evaluate only, no training", False)
    train_splits: list[str] = lavis("splits to train on", [], choices=SPLITS, needed=TRAINING)
    valid_splits: list[str] = lavis("splits evaluated after every epoch", [])
    test_splits: list[str] = lavis("splits evaluated at the end", [])
    output_dir: str = lavis("folder of checkpoints, logs and results", needed=ALWAYS,
        also=("out_dir", "save_dir"))
    seed: int = lavis("random seed", 42, low=0, high=LARGEST_SEED, also=("random_seed",))
    resume_ckpt_path: str | None = lavis("checkpoint to resume; auto: the newest in output_dir",
        None, path="file or URL", words=("auto",), also=("resume", "resume_from"))
    # optimizer
    lr_sched: str = lavis("learning rate schedule", choices=Registered("lr_scheduler"),
        needed=TRAINING, also=("scheduler",))
    init_lr: float = lavis("learning rate after warm-up", low=0, above=True, needed=TRAINING,
        also=("lr", "learning_rate"))
    min_lr: float = lavis("learning rate at the end", low=0, needed=TRAINING)
    warmup_steps: int = lavis("steps of warm-up", 0, low=0)
    weight_decay: float = lavis("AdamW's weight decay", low=0, needed=TRAINING, also=("wd",))
    max_epoch: int = lavis("epochs to train", low=1, also=("epochs", "num_epochs"))
    accum_grad_iters: int = lavis("mini-batches per optimizer step", 1, low=1,
        also=("gradient_accumulation_steps",))
    amp: bool = lavis("mixed precision", False, also=("fp16", "mixed_precision"))
    # data
    batch_size_train: int = lavis("B: pairs in a mini-batch of one rank", low=1, needed=TRAINING,
        also=("batch_size", "B"))
    batch_size_eval: int = lavis("mini-batch of one rank in evaluation", low=1, needed=ALWAYS)
    num_workers: int = lavis("worker processes of a data loader", low=0, high=1024, needed=ALWAYS,
        also=("workers",))
    # devices
    device: str = lavis("cuda or cpu", "cuda", choices=("cuda", "cpu"))
    # evaluation
    num_beams: int = lavis("beams of generation", low=1, needed=GENERATION)
    max_len: int = lavis("maximum length of generated texts, in tokens", low=1, needed=GENERATION)
    min_len: int = lavis("minimum length of generated texts, in tokens", low=0, needed=GENERATION)
    # of this package
    plugins: list[str] = ours("Python files or modules with your own code, imported first", [])
    metrics: list[str] | None = ours(
        "caption metrics; null: the standard ones whose tools are installed",
        choices=MetricNames("caption"))
    gradcam_tokens: str = ours("mafa_grounding: tokens over which a heat map is averaged",
        source="ALBEF 6.4", choices=("all", "words"))
    amp_dtype: str = ours("number format of amp", "fp16", choices=("fp16", "bf16"))
    max_grad_norm: float | None = ours("clip gradients to this norm; null: no clipping", None,
        low=0, above=True, also=("clip_grad",))
    warmup_share: float | None = ours("longest warm-up as a share of all steps; null: no limit",
        None, low=0, high=1)
    lr_horizon: int | None = ours("epochs that the cosine spans; null: max_epoch", None,
        source="GRIT-VLP 5.1", low=1)
    max_steps: int | None = ours("stop after this many steps of the whole run", None, low=1)
    save_every_steps: int | None = ours("steps between checkpoints inside an epoch", None, low=1)
    keep_every_epochs: int | None = ours("epochs between checkpoints that are kept", None, low=1)
    job_id: str | None = ours("folder under output_dir; null: a time stamp; '': output_dir itself",
        None, words=BLANK)
    max_failed_saves: int = ours("consecutive failed checkpoint writes before training stops", 3,
        low=0)
    skip_bad_steps: int = ours(
        "steps with a non-finite loss or gradient to skip before the run stops", 0, low=0)
    max_unreadable: float = ours("permitted share of unreadable samples, by rank and epoch", 0.01,
        low=0, high=1)
    log_connections: int = ours("number of mined connections to log per epoch", 64, low=0)
    loggers: list[str] = ours("where figures go besides log.jsonl", ["tensorboard"],
        choices=LOGGERS)
    dist_timeout_minutes: float = ours("how long ranks wait for each other", 30.0, low=0,
        high=1000000.0, above=True)
    find_unused_parameters: bool | None = ours("passed to DDP; null: chosen by the model", None)
    compile: bool = ours("torch.compile the image encoders; not with activation checkpointing",
        False)
    fsdp: str | None = ours(
        "frozen: shard frozen image encoders and language models over the ranks (FSDP2)", None,
        choices=("frozen",), also=("shard", "shard_frozen", "zero"))
    cached_batch: int | None = ours(
        "pairs whose activations are stored at a time, the others recomputed; null: all", None,
        source="GradCache", low=1, also=("grad_cache", "gc_chunk_size", "mini_batch_size"))
    grit: GritSettings = ours("grouped mini-batch sampling", {}, source="GRIT-VLP 4.1")


# Further keys that LAVIS reads, by their types; those in the table of defaults are always there.
LAVIS_RUN: Mapping[Any, tuple[str, ...]] = {
    int: ("rank", "gpu", "world_size", "log_freq", "max_iters", "iters_per_inner_epoch",
        "num_ans_candidates", "num_captions", "num_captions_fid", "num_patches", "cap_max_length",
        "cap_min_length", "internal_bsz_fid", "top_k"),
    int | None: ("block_num",),
    float: ("warmup_lr", "beta2", "length_penalty", "top_p", "repetition_penalty"),
    float | None: ("lr_decay_rate",),
    bool: ("distributed", "use_dist_eval_sampler", "report_metric"),
    str: ("dist_url", "prompt", "inference_method"),
    Mapping[str, float] | None: ("train_dataset_ratios",),
    Any: ("annotation_file",),
}
LAVIS_DEFAULTS = {"world_size": 1, "log_freq": 50, "warmup_lr": -1.0, "beta2": 0.999,
    "lr_decay_rate": None, "distributed": True, "use_dist_eval_sampler": True,
    "dist_url": "env://", "train_dataset_ratios": None}
LAVIS_MODEL: Mapping[Any, tuple[str, ...]] = {
    int: ("vit_ckpt_layer", "embed_dim", "num_classes", "hidden_size", "num_query_token",
        "cross_attention_freq"),
    float: ("vit_drop_path_rate", "vit_layer_norm_epsilon", "momentum", "alpha", "mlm_mask_prob",
        "drop_path_rate"),
    bool: ("vit_grad_ckpt", "use_grad_checkpoint", "use_distill", "negative_all_rank",
        "freeze_vit", "apply_lemmatizer"),
    str: ("vit_type", "vit_precision", "precision", "vit_model"),
    str | None: ("prompt",),
}
LAVIS_DATASET: Mapping[Any, tuple[str, ...]] = {
    str | None: ("data_dir", "dataset_card"),
    float: ("sample_ratio",),
}


@dataclass(frozen=True, kw_only=True)
class MafaOptions(StepSettings):
    """Keys of ``model.mafa``; those of registered entries are added."""

    detach_other: bool = ours("image to text trains images only, text to image texts only", True,
        source="MAFA 4.2")
    learn_temperature: bool = ours(
        "False: the temperature stays at model.temp (0.07) and is not saved in checkpoints", True)
    con_d: ConDSettings | None = ours("connection discriminator; null: no mining", None,
        source="MAFA 4.1")
    negatives_encoder: FrozenSettings | None = ours(
        "frozen model that picks negatives and groups mini-batches; null: the model in training",
        None, source="GRIT-VLP Table 1")


@dataclass(kw_only=True)
class ModelOptions:
    """Keys of ``model`` of LAVIS's models; ours take those of them that a default YAML has."""

    arch: str = lavis("registered name of the model", choices=Registered("model"), needed=ALWAYS)
    model_type: str = lavis("name of the arch's default YAML", needed=ALWAYS)
    load_pretrained: bool = lavis("start from `pretrained`")
    pretrained: str | None = lavis("pre-trained checkpoint: file, URL, or folder of transformers",
        words=BLANK)
    load_finetuned: bool = lavis("start from `finetuned`")
    finetuned: str | None = lavis("fine-tuned checkpoint: file, URL, or folder of transformers",
        words=BLANK)
    image_size: int = lavis("image side in pixels", low=1, also=("img_size", "resolution"))
    med_config_path: str = lavis("JSON config of the text encoder", path="library file")
    ramp_epochs: float = ours("epochs over which alpha grows from 0 (ALBEF: 1, LAVIS and BLIP: 2)",
        source="ALBEF, LAVIS", low=0)
    momentum_start: str = ours("what momentum encoders that the checkpoint lacks start from: its "
        "encoders, or the initial weights (BERT, ImageNet)", source="GRIT-VLP S.M. 3",
        choices=("encoders", "initial"))
    temp: float = lavis("initial ITC temperature, clamped to this range", low=0.001, high=0.5,
        also=("temperature",))
    max_txt_len: int = lavis("maximum caption length in tokens", low=3, also=("max_words",))
    queue_size: int = lavis("features in the momentum queue", low=0)
    q_former_model: str = lavis("checkpoint of the Q-Former", path="file or URL")
    opt_model: str = lavis("OPT: a name on the hub or a folder", path="path or name")
    t5_model: str = lavis("T5: a name on the hub or a folder", path="path or name")


@dataclass(kw_only=True)
class OurModelOptions:
    """Keys of ``model`` of models with our loader, see `lavis_mafa.compat.traits`."""

    tokenizer: str | None = ours("vocab.txt, folder or name on the hub; null: the arch's default",
        path="path or name")
    vit: VitOptions | None = ours("a ViT of any size")
    mafa: MafaOptions = ours("the training step", {}, source="MAFA 4")


@dataclass(kw_only=True)
class ModelParts:
    """Keys of ``model`` of models with our loader whose default YAML has the key."""

    vit_weights: str | None = ours("weights of the image encoder; null: random",
        path="file, folder, URL or timm/NAME", words=("published",))
    bert_weights: str | None = ours(
        "BERT to initialise the Q-Former or text encoder from; null: random", path="path or name")
    q_former_config: str | None = ours("JSON of the Q-Former's sizes; null: BERT-base's",
        path="library file")
    llm_precision: str = ours("number format of OPT; a CPU uses fp32",
        choices=("fp16", "bf16", "fp32"))


@dataclass(kw_only=True)
class ProcessorArguments:
    """Arguments of processors, by their names."""

    image_size: int = lavis("image side in pixels", low=1)
    max_words: int = lavis("maximum number of words of a caption; the rest is cut", low=1)
    min_scale: float = lavis("minimum share of the image's area that a crop covers", low=0, high=1,
        above=True)
    max_scale: float = lavis("maximum share of the image's area that a crop covers", low=0, high=1,
        above=True)
    crop: bool = ours("False: images are resized to a square, not cropped")
    prompt: str = lavis("text before every caption", words=BLANK)
    mean: list[float] | None = lavis("mean of the colours; null: CLIP's")
    std: list[float] | None = lavis("standard deviation of the colours; null: CLIP's", low=0,
        above=True)


@dataclass(kw_only=True)
class AnnotationFiles:
    """Annotation files of one split."""

    url: str | list[str] | None = lavis("source to download or copy from")
    md5: str | list[str] | None = lavis("checksum of the download")
    storage: str | list[str] = lavis("path of the file", needed=ALWAYS)


@dataclass(kw_only=True)
class Splits:
    """Keys of ``annotations``."""

    train: AnnotationFiles | None = lavis("files of training")
    val: AnnotationFiles | None = lavis("files of validation")
    test: AnnotationFiles | None = lavis("files of the test")


@dataclass(kw_only=True)
class Folder:
    """Keys of ``images``, ``videos`` and ``features``."""

    storage: str | list[str] = lavis("path of the folder")


@dataclass(kw_only=True)
class BuildInfo:
    """Keys of ``build_info``; a builder adds its ``build_options``."""

    annotations: Splits = lavis("annotation files by split")
    images: Folder = lavis("folder of images")
    features: Folder = lavis("folder of features")


@dataclass(kw_only=True)
class ProcessorName:
    """Keys of one processor; it takes its arguments as further keys."""

    name: str = lavis("registered name; further keys are its arguments",
        choices=Registered("processor"), needed=ALWAYS)


@dataclass(kw_only=True)
class Processors:
    """Keys of ``vis_processor`` and ``text_processor``."""

    train: ProcessorName | None = lavis("in training")
    eval: ProcessorName | None = lavis("in evaluation")


@dataclass(kw_only=True)
class DatasetOptions:
    """Keys of ``datasets.BUILDER``; those of the builder's default YAML are added."""

    type: str = lavis("name of the builder's default YAML")
    data_type: str = lavis("kind of visual input", choices=("images", "videos", "features"))
    vis_processor: Processors = lavis("image or video processors")
    text_processor: Processors = lavis("text processors")
    build_info: BuildInfo = lavis("the files")


@dataclass(kw_only=True)
class FileOptions:
    """The sections of a config file."""

    run: RunOptions = lavis("what to run and how", needed=ALWAYS)
    model: ModelOptions = lavis("the model", needed=ALWAYS)
    datasets: Mapping[str, Any] = lavis("datasets, by registered builder", needed=ALWAYS)
