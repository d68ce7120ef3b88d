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
from lavis_mafa.loggers import LOGGERS
from lavis_mafa.metrics import MetricNames
from lavis_mafa.models.con_d.con_d_settings import ConDSettings, FrozenSettings
from lavis_mafa.models.parts.vit import STEMS
from lavis_mafa.problems import Registered

SPLITS = ("train", "val", "test")
ALWAYS, TRAINING = ("always",), ("training",)
GENERATION = ("captioning", "mafa_captioning", "dialogue")
BLANK = ("",)  # the empty string is permitted


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
class RunOptions:
    """Keys of ``run``; those of loggers are added."""

    task: str = lavis("what to train or evaluate", choices=Registered("task"), needed=ALWAYS)
    runner: str = lavis("the training loop (runner_mafa if absent)", choices=Registered("runner"))
    evaluate: bool = lavis("evaluate only, no training", False)
    train_splits: list[str] = lavis("splits to train on", [], choices=SPLITS)
    valid_splits: list[str] = lavis("splits evaluated after every epoch", [])
    test_splits: list[str] = lavis("splits evaluated at the end", [])
    output_dir: str = lavis("folder of checkpoints, logs and results", needed=ALWAYS,
        also=("out_dir", "save_dir"))
    seed: int = lavis("random seed", 42, low=0, also=("random_seed",))
    resume_ckpt_path: str | None = lavis("checkpoint to resume; auto: the newest in output_dir",
        None, path="file or URL", words=("auto",), also=("resume", "resume_from"))
    # optimizer
    lr_sched: str = lavis("learning rate schedule", choices=Registered("lr_scheduler"),
        needed=TRAINING, also=("scheduler",))
    init_lr: float = lavis("learning rate after warm-up", low=0, above=True, needed=TRAINING,
        also=("lr", "learning_rate"))
    min_lr: float = lavis("learning rate at the end", low=0, needed=TRAINING)
    warmup_lr: float = lavis("learning rate at the first step; -1: init_lr", -1.0, low=-1)
    warmup_steps: int = lavis("steps of warm-up", 0, low=0)
    lr_decay_rate: float | None = lavis("factor per epoch of linear_warmup_step_lr", None, low=0,
        high=1, above=True)
    weight_decay: float = lavis("AdamW's weight decay", low=0, needed=TRAINING, also=("wd",))
    beta2: float = lavis("AdamW's second beta", 0.999, low=0, high=0.999999)
    max_epoch: int = lavis("epochs to train", low=1, also=("epochs", "num_epochs"))
    max_iters: int = lavis("steps to train, read by runner_iter", low=1, needed=("runner_iter",))
    iters_per_inner_epoch: int = lavis("steps between validations, read by runner_iter", low=1,
        needed=("runner_iter",))
    accum_grad_iters: int = lavis("mini-batches per optimizer step", 1, low=1,
        also=("gradient_accumulation_steps",))
    amp: bool = lavis("mixed precision", False, also=("fp16", "mixed_precision"))
    # data
    batch_size_train: int = lavis("B: pairs in a mini-batch of one rank", low=1, needed=TRAINING,
        also=("batch_size", "B"))
    batch_size_eval: int = lavis("mini-batch of one rank in evaluation", low=1, needed=ALWAYS)
    num_workers: int = lavis("worker processes of a data loader", low=0, high=1024, needed=ALWAYS,
        also=("workers",))
    train_dataset_ratios: Mapping[str, float] | None = lavis("share of every dataset in training",
        None, low=0)
    # devices
    device: str = lavis("cuda or cpu", "cuda", choices=("cuda", "cpu"))
    rank: int = lavis("set by the launcher", low=0)
    gpu: int = lavis("set by the launcher", low=0)
    world_size: int = lavis("processes; a launcher overrides it", 1, low=1)
    dist_url: str = lavis("rendezvous of the processes", "env://")
    distributed: bool = lavis("join the processes of a launcher, if there is one", True)
    use_dist_eval_sampler: bool = lavis("split evaluation over the ranks", True)
    log_freq: int = lavis("steps between points of the loggers", 50, low=1)
    # evaluation
    report_metric: bool = lavis("score the generated texts (default True)")
    annotation_file: Any = lavis(
        "COCO-format JSON of reference captions, one path or one a split; null: the dataset's",
        also=("gt_file", "coco_gt_file"))
    k_test: int = lavis("candidates re-ranked with ITM in retrieval; 0: ITC only", low=0)
    num_beams: int = lavis("beams of generation", low=1, needed=GENERATION)
    max_len: int = lavis("maximum length of generated texts, in tokens", low=1, needed=GENERATION)
    min_len: int = lavis("minimum length of generated texts, in tokens", low=0, needed=GENERATION)
    inference_method: str = lavis("how VQA answers are found", choices=("rank", "generate"))
    num_ans_candidates: int = lavis("answers ranked in VQA", low=1)
    prompt: str = lavis("prompt around a question, or before a caption", words=BLANK)
    length_penalty: float = lavis("exponent of the length in beam search; < 0: shorter texts")
    block_num: int | None = lavis("layer of GradCAM, from 0; null: the third with cross-attention",
        low=0)
    top_p: float = lavis("top-p of caption sampling (mafa_captioning: instead of beam search)",
        low=0, high=1)
    # of this package
    plugins: list[str] = ours("Python files or modules with your own code, imported first", [])
    retrieval_metrics: list[str] = ours("mafa_retrieval: further registered metrics to report", [],
        choices=MetricNames("retrieval"))
    metrics: list[str] | None = ours(
        "caption metrics; null: the standard ones whose tools are installed",
        choices=MetricNames("caption"))
    gradcam_tokens: str = ours("mafa_grounding: tokens over which a heat map is averaged",
        source="ALBEF 6.4", choices=("all", "words"))
    save_scores: bool = ours("retrieval: write scores_<split>.npz into the result folder")
    truth_file: str | None = ours("retrieval: JSON list of further valid [image, caption] pairs",
        path="file")
    save_maps: int = ours("mafa_grounding: number of heat maps to write as images", low=0)
    reduce_jpegs: bool = ours(
        "decode JPEGs of training at a fraction of their size where crops stay large enough", False)
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
    rerank_by: str = ours(
        "retrieval: order candidates by ITC similarity plus ITM logit, by the logit, or by ITC's "
        "logit plus ITM's log-odds", "sum", source="LAVIS, MAFA F", choices=("sum", "itm", "odds"))
    retrieval_max_txt_len: int = lavis("retrieval: tokens at which captions are cut", 35, low=2)
    pairs_per_pass: int | None = ours(
        "pairs in one forward pass of re-ranking; null: set by the device", None, low=1)
    compile: bool = ours("torch.compile the image encoders; not with activation checkpointing",
        False)
    fsdp: str | None = ours(
        "frozen: shard frozen image encoders and language models over the ranks (FSDP2)", None,
        choices=("frozen",), also=("shard", "shard_frozen", "zero"))
    cached_batch: int | None = ours(
        "pairs whose activations are stored at a time, the others recomputed; null: all", None,
        source="GradCache", low=1, also=("grad_cache", "gc_chunk_size", "mini_batch_size"))
    grit: GritSettings = ours("grouped mini-batch sampling", {}, source="GRIT-VLP 4.1")


@dataclass(kw_only=True)
class PnpVqaOptions:
    """Keys of ``run`` that only LAVIS's tasks of PNP-VQA read."""

    num_captions: int = lavis("captions per image (PNP-VQA)", low=1)
    num_captions_fid: int = lavis("captions per answer (PNP-VQA)", low=1)
    num_patches: int = lavis("patches kept (PNP-VQA)", low=1)
    cap_max_length: int = lavis("maximum caption length (PNP-VQA)", low=1)
    cap_min_length: int = lavis("minimum caption length (PNP-VQA)", low=0)
    internal_bsz_fid: int = lavis("mini-batch inside the reader (PNP-VQA)", low=1)
    top_k: int = lavis("top-k of caption sampling (PNP-VQA)", low=0)
    repetition_penalty: float = lavis("penalty on repeated tokens in captions", low=0)


@dataclass(frozen=True, kw_only=True)
class MafaOptions(StepSettings):
    """Keys of ``model.mafa``; those of registered entries are added."""

    learn_temperature: bool = ours(
        "False: the temperature stays at model.temp (0.07) and is not saved in checkpoints", True)
    con_d: ConDSettings | None = ours("connection discriminator; null: no mining", None,
        source="MAFA 4.1")
    negatives_encoder: FrozenSettings | None = ours(
        "frozen model that picks negatives and groups mini-batches; null: the model in training",
        None, source="GRIT-VLP Table 1")


@dataclass(kw_only=True)
class VitOptions:
    """Keys of ``model.vit``."""

    patch_size: int = ours("patch side in pixels", low=1)
    width: int = ours("width, a multiple of heads", low=1)
    depth: int = ours("layers", low=1)
    heads: int = ours("attention heads", low=1)
    stem: str = ours("how patches become tokens; conv: by small convolutions", "patch",
        source="Xiao et al. 2021", choices=STEMS)


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
    vit_type: str = lavis("size of the ViT", choices=("base", "large"))
    vit_ckpt_layer: int = lavis("layers with activation checkpointing", low=0)
    vit_drop_path_rate: float = lavis("stochastic depth rate of the ViT", low=0, high=0.99)
    vit_layer_norm_epsilon: float = lavis("epsilon of layer norm; -1: the ViT's default", low=-1)
    vit_grad_ckpt: bool = lavis("activation checkpointing in the ViT")
    use_grad_checkpoint: bool = lavis("activation checkpointing")
    med_config_path: str = lavis("JSON config of the text encoder", path="library file")
    embed_dim: int = lavis("width of the ITC features", low=1)
    momentum: float = lavis("momentum of the momentum encoders", low=0, high=1)
    alpha: float = lavis("weight of momentum distillation", low=0, high=1)
    ramp_epochs: float = ours("epochs over which alpha grows from 0 (ALBEF: 1, LAVIS and BLIP: 2)",
        source="ALBEF, LAVIS", low=0)
    temp: float = lavis("initial ITC temperature", low=0, above=True, also=("temperature",))
    max_txt_len: int = lavis("maximum caption length in tokens", low=3, also=("max_words",))
    mlm_mask_prob: float = lavis("share of masked tokens", low=0, high=1, also=("mlm_probability",))
    queue_size: int = lavis("features in the momentum queue", low=0)
    use_distill: bool = lavis("momentum distillation")
    negative_all_rank: bool = lavis("hard negatives from all ranks")
    num_classes: int = lavis("classes of the head", low=-1)
    hidden_size: int = lavis("width of the head", low=1)
    prompt: str | None = lavis("text before every caption or answer", words=BLANK)
    freeze_vit: bool = lavis("do not train the ViT")
    vit_precision: str = lavis("number format of the ViT", choices=("fp16", "fp32"))
    precision: str = lavis("number format of CLIP", choices=("fp16", "fp32"))
    vit_model: str = lavis("ViT of BLIP-2", choices=("eva_clip_g", "clip_L"))
    q_former_model: str = lavis("checkpoint of the Q-Former", path="file or URL")
    num_query_token: int = lavis("number of queries of the Q-Former", low=1)
    cross_attention_freq: int = lavis("layers from one cross-attention to the next", low=1)
    drop_path_rate: float = lavis("stochastic depth rate of BLIP-2's ViT", low=0, high=0.99)
    opt_model: str = lavis("OPT: a name on the hub or a folder", path="path or name")
    t5_model: str = lavis("T5: a name on the hub or a folder", path="path or name")
    apply_lemmatizer: bool = lavis("lemmatise VQA answers")


@dataclass(kw_only=True)
class OurModelOptions:
    """Keys of ``model`` of models with our loader, see `lavis_mafa.models.traits`."""

    tokenizer: str | None = ours("vocab.txt, folder or name on the hub; null: the arch's default",
        path="path or name")
    vit: VitOptions | None = ours("a ViT of any size")
    mafa: MafaOptions = ours("the training step", {}, source="MAFA 4")


@dataclass(kw_only=True)
class ModelParts:
    """Keys of ``model`` of models with our loader whose default YAML has the key."""

    vit_weights: str | None = ours("weights of the image encoder; null: random",
        path="checkpoint or timm name", words=("published",))
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
    videos: Folder = lavis("folder of videos")
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
    data_dir: str | None = lavis("not used by LAVIS's builders", words=BLANK)
    dataset_card: str | None = lavis("description of the dataset", words=BLANK)
    sample_ratio: float = lavis("share of this dataset in training", low=0)
    vis_processor: Processors = lavis("image or video processors")
    text_processor: Processors = lavis("text processors")
    build_info: BuildInfo = lavis("the files")


@dataclass(kw_only=True)
class FileOptions:
    """The sections of a config file."""

    run: RunOptions = lavis("what to run and how", needed=ALWAYS)
    model: ModelOptions = lavis("the model", needed=ALWAYS)
    datasets: Mapping[str, Any] = lavis("datasets, by registered builder", needed=ALWAYS)
