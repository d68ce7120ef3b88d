"""Every key of a config file: the one list of LAVIS's keys and ours, as data.

``check.py`` walks a config against `SCHEMA`; `known_keys` and `describe` tell it to people. Keys
that only one model type or dataset has (``t5_model``, ``build_info.splits``, ...) are not listed:
they are taken from its default YAML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class _Unset:
    def __repr__(self) -> str:
        return "no default"


UNSET: Any = _Unset()


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        kind: ``bool``, ``int``, ``float``, ``number`` (int or float, left as written), ``str``,
            ``strs`` (a string or a list of them), ``list``, ``mapping`` or ``any``.
        doc: one line.
        source: who brought it: ``LAVIS`` or a section of a paper.
        default: filled in when the key is absent; `UNSET`: nothing is filled in.
        nullable: null is a value.
        low, high, above: range, both ends included; with ``above`` the lower end is excluded.
        choices: the only values.
        registered: the value must be a name in this table of LAVIS's registry (``task``, ...).
        items: what a list holds.
        keys: the keys of a mapping, by name.
        other: what a mapping may hold under further names; None: nothing.
        needed: the key must be there ``always``, for ``training``, or for the tasks and runners
            named.
        by_task: defaults that differ for some tasks.
        path: the value names something that must exist: ``file``, ``file or URL``, ``.npy file``,
            ``library file`` (relative to LAVIS's package), ``path or name`` (a name on the hub
            unless it looks like a path).
        words: values of a path with a meaning of their own.
        blank: '' is a value.
        also: what people call the key elsewhere; used to suggest the right one.
    """

    kind: str
    doc: str = ""
    source: str = "LAVIS"
    default: Any = UNSET
    nullable: bool = False
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    registered: str = ""
    items: Key | None = None
    keys: Mapping[str, Key] = field(default_factory=dict)
    other: Key | None = None
    needed: tuple[str, ...] = ()
    by_task: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    words: tuple[str, ...] = ()
    blank: bool = False
    also: tuple[str, ...] = ()


NUMBERS = {"int": "a whole number", "float": "a number", "number": "a number"}
KINDS = {
    **NUMBERS,
    "bool": "True or False",
    "str": "a string",
    "strs": "a string or a list of strings",
    "list": "a list",
    "mapping": "a mapping of keys",
    "any": "anything",
}


def describe(key: Key) -> str:
    """What the key takes, in words: ``a whole number >= 1 or null``."""
    text = KINDS[key.kind]
    if key.choices:
        text = "one of " + ", ".join(key.choices)
    if key.items is not None:
        text += f" out of {', '.join(key.items.choices)}" if key.items.choices else ""
    if key.low is not None and key.high is not None and not key.above:
        text += f" from {key.low:g} to {key.high:g}"
    elif key.low is not None:
        text += f" {'>' if key.above else '>='} {key.low:g}"
        text += f" and <= {key.high:g}" if key.high is not None else ""
    return text + (" or null" if key.nullable else "")


def known_keys(key: Key, path: str = "") -> Iterator[tuple[str, Key]]:
    """All ``(path, key)`` below ``key``, such as ``("run.grit.enabled", Key(...))``."""
    for name, child in key.keys.items():
        child_path = f"{path}.{name}" if path else name
        yield child_path, child
        yield from known_keys(child, child_path)


OURS = "lavis_mafa"
SPLITS = ("train", "val", "test")
LOSSES = ("itc", "itm", "lm")
CAPTION_METRICS = ("bleu", "meteor", "rouge", "cider", "spice")
ANY = Key("any", "passed on as it is")
ALWAYS, TRAINING = ("always",), ("training",)
GENERATION = ("captioning", "mafa_captioning", "dialogue")


def _splits(doc: str) -> Key:
    return Key("list", doc, default=[], items=Key("str", choices=SPLITS))


GRIT = {
    "enabled": Key("bool", "group similar pairs into mini-batches", "GRIT-VLP 4.1",
                   default=False, by_task={"mafa_pretrain": True}),
    "queue_size": Key("int", "L: pairs a rank collects before it groups them", "GRIT-VLP 4.1",
                      default=48000, low=1, also=("L",)),
    "search_space": Key("int", "M: pairs among which neighbours are sought; at most L",
                        "GRIT-VLP 4.1, MAFA 5.1", default=4800, low=1, also=("M",)),
    "start_epoch": Key("int", "random epochs before the first grouped one; 0 only with naive",
                       "GRIT-VLP 4.1", default=1, low=0),
    "first_order": Key("str", "index file that orders the first epoch (warm start)", OURS,
                       default=None, nullable=True, path=".npy file"),
    "shuffle": Key("bool", "shuffle collected pairs before grouping and mini-batches after it",
                   "GRIT-VLP 4.1", default=True),
    "shuffle_across_ranks": Key("bool", "shuffle mini-batches over all ranks, not within each",
                                OURS, default=False),
    "naive": Key("bool", "extra forward pass each epoch to collect features", "GRIT-VLP 4.1",
                 default=False),
    "same_image": Key("str", "captions of one image: into different mini-batches or anywhere",
                      OURS, default="apart", choices=("apart", "together")),
    "save_order": Key("bool", "keep the newest grouped order in grit_order.npy, for first_order",
                      OURS, default=False),
}  # fmt: skip

RUN = {
    # LAVIS: what to run
    "task": Key("str", "what is trained or evaluated", registered="task", needed=ALWAYS),
    "runner": Key("str", "the training loop (runner_mafa if absent)", registered="runner"),
    "evaluate": Key("bool", "evaluate only, no training", default=False),
    "train_splits": _splits("splits to train on"),
    "valid_splits": _splits("splits evaluated after every epoch"),
    "test_splits": _splits("splits evaluated at the end"),
    "output_dir": Key("str", "where checkpoints, logs and results go", needed=ALWAYS,
                      also=("out_dir", "save_dir")),
    "seed": Key("int", "random seed", default=42, low=0, also=("random_seed",)),
    "resume_ckpt_path": Key("str", "checkpoint to go on from; auto: the newest of output_dir",
                            default=None, nullable=True, path="file or URL", words=("auto",),
                            also=("resume", "resume_from")),
    # LAVIS: optimiser
    "lr_sched": Key("str", "learning rate schedule", registered="lr_scheduler", needed=TRAINING,
                    also=("scheduler",)),
    "init_lr": Key("float", "learning rate after warm-up", low=0, above=True, needed=TRAINING,
                   also=("lr", "learning_rate")),
    "min_lr": Key("float", "learning rate at the end", low=0, needed=TRAINING),
    "warmup_lr": Key("float", "learning rate at the first step; -1: init_lr", default=-1.0, low=-1),
    "warmup_steps": Key("int", "steps of warm-up", default=0, low=0),
    "lr_decay_rate": Key("float", "factor per epoch of linear_warmup_step_lr", nullable=True,
                         default=None, low=0, high=1, above=True),
    "weight_decay": Key("float", "AdamW's weight decay", low=0, needed=TRAINING, also=("wd",)),
    "beta2": Key("float", "AdamW's second beta", default=0.999, low=0, high=0.999999),
    "max_epoch": Key("int", "epochs to train", low=1, also=("epochs", "num_epochs")),
    "max_iters": Key("int", "steps to train, read by runner_iter", low=1, needed=("runner_iter",)),
    "iters_per_inner_epoch": Key("int", "steps between validations, read by runner_iter", low=1,
                                 needed=("runner_iter",)),
    "accum_grad_iters": Key("int", "mini-batches per optimiser step", default=1, low=1,
                            also=("gradient_accumulation_steps",)),
    "amp": Key("bool", "mixed precision", default=False, also=("fp16", "mixed_precision")),
    # LAVIS: data loading
    "batch_size_train": Key("int", "B: pairs in a mini-batch of one rank", low=1, needed=TRAINING,
                            also=("batch_size", "B")),
    "batch_size_eval": Key("int", "mini-batch of one rank in evaluation", low=1, needed=ALWAYS),
    "num_workers": Key("int", "worker processes of a data loader", low=0, high=1024, needed=ALWAYS,
                       also=("workers",)),
    "train_dataset_ratios": Key("mapping", "share of every dataset in training", default=None,
                                nullable=True, other=Key("float", low=0)),
    # LAVIS: devices
    "device": Key("str", "cuda or cpu", default="cuda", choices=("cuda", "cpu")),
    "world_size": Key("int", "processes; a launcher overrides it", default=1, low=1),
    "dist_url": Key("str", "rendezvous of the processes", default="env://"),
    "distributed": Key("bool", "join the processes of a launcher, if there is one", default=True),
    "rank": Key("int", "set by the launcher", low=0),
    "gpu": Key("int", "set by the launcher", low=0),
    "use_dist_eval_sampler": Key("bool", "split evaluation over the ranks", default=True),
    "log_freq": Key("int", "steps between TensorBoard points", default=50, low=1),
    # LAVIS: tasks
    "report_metric": Key("bool", "score what was generated (default True)"),
    "annotation_file": Key("any", "captions to score against, JSON in COCO's format: a path, or "
                           "one for each split; null: the data set's own", nullable=True,
                           also=("gt_file", "coco_gt_file")),
    "k_test": Key("int", "candidates re-ranked with ITM in retrieval; 0: ITC alone", low=0),
    "num_beams": Key("int", "beams of generation", low=1, needed=GENERATION),
    "max_len": Key("int", "longest text generated, in tokens", low=1, needed=GENERATION),
    "min_len": Key("int", "shortest text generated, in tokens", low=0, needed=GENERATION),
    "inference_method": Key("str", "how VQA answers are found", choices=("rank", "generate")),
    "num_ans_candidates": Key("int", "answers ranked in VQA", low=1),
    "prompt": Key("str", "prompt around a question, or that a caption begins after",
                  blank=True),
    "length_penalty": Key("float", "exponent of the length in beam search; below 0: short texts"),
    "block_num": Key("int", "layer of GradCAM (PNP-VQA, mafa_grounding), from 0; null: the third "
                     "with cross-attention", nullable=True, low=0),
    "num_captions": Key("int", "captions per image (PNP-VQA)", low=1),
    "num_captions_fid": Key("int", "captions per answer (PNP-VQA)", low=1),
    "num_patches": Key("int", "patches kept (PNP-VQA)", low=1),
    "cap_max_length": Key("int", "longest caption (PNP-VQA)", low=1),
    "cap_min_length": Key("int", "shortest caption (PNP-VQA)", low=0),
    "internal_bsz_fid": Key("int", "mini-batch inside the reader (PNP-VQA)", low=1),
    "top_k": Key("int", "top-k of caption sampling (PNP-VQA)", low=0),
    "top_p": Key("float", "top-p of caption sampling (PNP-VQA, and mafa_captioning in the place of "
                 "beams)", low=0, high=1),
    "repetition_penalty": Key("float", "penalty of repetitions in captions", low=0),
    # ours
    "metrics": Key("list", "caption metrics; null: all that this machine can score", OURS,
                   nullable=True, items=Key("str", choices=CAPTION_METRICS)),
    "gradcam_tokens": Key("str", "mafa_grounding: tokens that a heat map is averaged over",
                          "ALBEF 6.4", choices=("all", "words")),
    "save_scores": Key("bool", "retrieval: write scores_<split>.npz into the result folder", OURS),
    "truth_file": Key("str", "retrieval: JSON list of valid [image, caption] pairs beyond the "
                      "original ones; null: none", OURS, nullable=True, path="file"),
    "save_maps": Key("int", "mafa_grounding: how many heat maps are written as pictures", OURS,
                     low=0),
    "amp_dtype": Key("str", "number format of amp", OURS, default="fp16", choices=("fp16", "bf16")),
    "max_grad_norm": Key("float", "clip gradients to this norm; null: no clipping", OURS,
                         default=None, nullable=True, low=0, above=True, also=("clip_grad",)),
    "lr_horizon": Key("int", "epochs that the cosine spans; null: max_epoch", "GRIT-VLP 5.1",
                      default=None, nullable=True, low=1),
    "max_steps": Key("int", "stop after that many steps of the whole run", OURS, default=None,
                     nullable=True, low=1),
    "save_every_steps": Key("int", "steps between checkpoints inside an epoch", OURS,
                            default=None, nullable=True, low=1),
    "keep_every_epochs": Key("int", "keep a checkpoint every that many epochs", OURS,
                             default=None, nullable=True, low=1),
    "job_id": Key("str", "folder under output_dir; null: a time stamp; '': output_dir itself",
                  OURS, default=None, nullable=True, blank=True),
    "max_failed_saves": Key("int", "checkpoints in a row that may fail to be written, as on a full "
                            "disk, while training goes on; 0: stop at the first", OURS, default=3,
                            low=0),
    "skip_bad_steps": Key("int", "optimizer steps of the whole run with a loss or gradient that "
                          "is not finite that are left out; the next one stops it", OURS,
                          default=0, low=0),
    "max_unreadable": Key("float", "share of the samples of a rank and epoch that may be "
                          "unreadable, image or caption", OURS, default=0.01, low=0, high=1),
    "log_connections": Key("int", "mined connections written per epoch", OURS, default=64, low=0),
    "tensorboard": Key("bool", "write TensorBoard event files", OURS, default=True),
    "dist_timeout_minutes": Key("float", "how long ranks wait for each other", OURS,
                                default=30.0, low=0, high=1e6, above=True),
    "find_unused_parameters": Key("bool", "passed to DDP; null: as the model needs", OURS,
                                  default=None, nullable=True),
    "pairs_per_pass": Key("int", "pairs fused at once in re-ranking; null: what suits the device",
                          OURS, default=None, nullable=True, low=1),
    "compile": Key("bool", "torch.compile the image encoders: minutes at the start, then fewer "
                   "kernels on a GPU; not with activation checkpointing", OURS, default=False),
    "grit": Key("mapping", "grouped mini-batch sampling", "GRIT-VLP 4.1", default={}, keys=GRIT),
}  # fmt: skip

CON_D = {
    "arch": Key("str", "arch of Con-D; oracle: the dataset's own truth", "MAFA 4.1",
                registered="model", words=("oracle",), needed=ALWAYS),
    "model_type": Key("str", "its model type; null: the first of its arch", "MAFA 4.1",
                      default=None, nullable=True),
    "checkpoint": Key("str", "its weights; null: those of its default YAML", "MAFA 4.1",
                      default=None, nullable=True, path="file or URL"),
    "precision": Key("str", "number format that it judges in", OURS, default="fp32",
                     choices=("fp32", "bf16")),
    "image_size": Key("int", "its image size in pixels; null: that of its model type", OURS,
                      default=None, nullable=True, low=1),
    "own_view": Key("bool", "its own transform of the decoded picture; null: where sizes differ",
                    OURS, default=None, nullable=True),
    "keep_images": Key("str", "folder where the output of its image encoder is kept, which then "
                       "runs once per image; needs own_view: True", OURS, default=None,
                       nullable=True),
    "model": Key("mapping", "further keys of its `model` config, such as tokenizer", OURS,
                 default={}, other=Key("any", "see its default YAML")),
}  # fmt: skip

MAFA = {
    "negatives": Key("str", "hardest in the mini-batch, sampled by similarity (ALBEF), or by the "
                     "posterior that they are false (FNE)", "MAFA 4.1, ALBEF 3.2, FNE",
                     default="hardest", choices=("hardest", "sampled", "posterior")),
    "posterior": Key("mapping", "with negatives: posterior", "FNE", default={}, keys={
        "prior": Key("float", "probability that a random pair matches", "FNE", default=1e-4, low=0,
                     high=0.5, above=True),
        "margin": Key("float", "cosine similarities that far below the mean of positives are not "
                      "drawn", "FNE", default=0.2, low=0),
        "minimum": Key("int", "positives seen before the posterior is used", "FNE", default=200,
                       low=0),
    }),
    "detach_other": Key("bool", "image to text trains images only, text to image texts only",
                        "MAFA 4.2", default=True),
    "learn_temperature": Key("bool", "False: the temperature stays at model.temp (0.07), "
                             "and checkpoints leave it out", OURS, default=True),
    "same_image": Key("str", "captions of one image: positives or negatives of each other", OURS,
                      default="positive", choices=("positive", "negative")),
    "loss_weights": Key("mapping", "weights of the losses; 0: none", OURS, default={}, keys={
        "itc": Key("float", "image-text contrastive", default=1.0, low=0, source=OURS),
        "imc": Key("float", "intra-modal contrastive (TCL: itc, imc and lmi 1/3 each)", "TCL",
                   default=0.0, low=0),
        "lmi": Key("float", "local mutual information", "TCL", default=0.0, low=0),
        "itm": Key("float", "image-text matching", default=1.0, low=0, source=OURS),
        "lm": Key("float", "masked or causal language modelling", default=1.0, low=0, source=OURS,
                  also=("mlm",)),
    }),
    "soft_labels": Key("mapping", "soft labels of ITC", "MAFA 4.2", default={}, keys={
        "type": Key("str", "one-hot, S-ITC, GRIT-VLP's consistency loss, momentum distillation",
                    "MAFA 4.2, GRIT-VLP 4.2, ALBEF 3.4", default="smoothed",
                    choices=("one_hot", "smoothed", "consistency", "momentum")),
        "alpha": Key("float", "share of the uniform distribution (BLIP-2: 0.2)", "MAFA 4.2",
                     default=0.5, low=0, high=1),
        "weight": Key("float", "lambda of the consistency loss", "GRIT-VLP 4.2", default=0.2,
                      low=0, also=("lambda",)),
        "start_epoch": Key("int", "first epoch of soft labels; null: the first grouped one",
                           "MAFA 4.2", default=None, nullable=True, low=0),
        "label_smoothing": Key("float", "share of the uniform distribution where alpha is not used "
                               "(BLIP-2: 0.1)", "BLIP-2 in LAVIS", default=0.0, low=0, high=1),
    }),
    "connections": Key("mapping", "what becomes of hard negatives that Con-D judged", "MAFA 4.1",
                       default={}, keys={
        "action": Key("str", "false negatives become positives, are dropped, or only counted",
                      "MAFA 4.1, Table 5", default="convert", choices=("convert", "drop", "keep")),
        "low": Key("float", "at most this probability: a negative", "MAFA 4.1", default=0.5,
                   low=0, high=1),
        "high": Key("float", "above this probability: a positive", "MAFA 4.1", default=0.8,
                    low=0, high=1, also=("threshold", "tau")),
        "resample": Key("bool", "second hardest in the place of an ambiguous one", "MAFA 4.1",
                        default=True),
        "top_k": Key("int", "hardest candidates of every anchor that Con-D judges", OURS, default=1,
                     low=1),
        "labels": Key("str", "0 and 1 by the thresholds, or Con-D's probability", OURS,
                      default="hard", choices=("hard", "probability")),
        "use_in": Key("list", "losses that use connections", "MAFA Table 14",
                      default=list(LOSSES), items=Key("str", choices=LOSSES)),
    }),
    "con_d": Key("mapping", "connection discriminator; null: no mining", "MAFA 4.1", default=None,
                 nullable=True, keys=CON_D),
}  # fmt: skip

MODEL = {
    "arch": Key("str", "registered name of the model", registered="model", needed=ALWAYS),
    "model_type": Key("str", "which default YAML of the arch", needed=ALWAYS),
    "load_pretrained": Key("bool", "start from `pretrained`"),
    "pretrained": Key("str", "pre-trained checkpoint, file or URL", nullable=True, blank=True),
    "load_finetuned": Key("bool", "start from `finetuned`"),
    "finetuned": Key("str", "fine-tuned checkpoint, file or URL", nullable=True, blank=True),
    "image_size": Key("int", "image side in pixels", low=1, also=("img_size", "resolution")),
    "vit_type": Key("str", "size of the ViT", choices=("base", "large")),
    "vit_ckpt_layer": Key("int", "layers with activation checkpointing", low=0),
    "vit_drop_path_rate": Key("float", "stochastic depth of the ViT", low=0, high=0.99),
    "vit_layer_norm_epsilon": Key("float", "epsilon of layer norm; -1: that of the ViT", low=-1),
    "vit_grad_ckpt": Key("bool", "activation checkpointing in the ViT"),
    "use_grad_checkpoint": Key("bool", "activation checkpointing"),
    "med_config_path": Key("str", "JSON config of the text encoder", path="library file"),
    "embed_dim": Key("int", "width of the ITC features", low=1),
    "momentum": Key("float", "momentum of the momentum encoders", low=0, high=1),
    "alpha": Key("float", "weight of momentum distillation", low=0, high=1),
    "temp": Key("float", "initial ITC temperature", low=0, above=True, also=("temperature",)),
    "max_txt_len": Key("int", "longest caption in tokens", low=3, also=("max_words",)),
    "mlm_mask_prob": Key("float", "share of masked tokens", low=0, high=1,
                         also=("mlm_probability",)),
    "queue_size": Key("int", "features in the momentum queue", low=0),
    "use_distill": Key("bool", "momentum distillation"),
    "negative_all_rank": Key("bool", "hard negatives from all ranks"),
    "num_classes": Key("int", "classes of the head", low=-1),
    "hidden_size": Key("int", "width of the head", low=1),
    "prompt": Key("str", "text before every caption or answer", nullable=True, blank=True),
    "freeze_vit": Key("bool", "do not train the ViT"),
    "vit_precision": Key("str", "number format of the ViT", choices=("fp16", "fp32")),
    "vit_model": Key("str", "ViT of BLIP-2", choices=("eva_clip_g", "clip_L")),
    "q_former_model": Key("str", "checkpoint of the Q-Former", path="file or URL"),
    "num_query_token": Key("int", "queries of the Q-Former", low=1),
    "cross_attention_freq": Key("int", "layers from one cross-attention to the next", low=1),
    "drop_path_rate": Key("float", "stochastic depth of BLIP-2's ViT", low=0, high=0.99),
    "opt_model": Key("str", "OPT: a name on the hub or a folder", path="path or name"),
    "t5_model": Key("str", "T5: a name on the hub or a folder", path="path or name"),
    "apply_lemmatizer": Key("bool", "lemmatise VQA answers"),
    "precision": Key("str", "number format of CLIP", choices=("fp16", "fp32")),
    "timesformer": Key("mapping", "TimeSformer's arguments", other=ANY),
    "image_question_matching_model": Key("mapping", "part of PNP-VQA", other=ANY),
    "image_captioning_model": Key("mapping", "part of PNP-VQA", other=ANY),
    "question_answering_model": Key("mapping", "part of PNP-VQA", other=ANY),
    "question_generation_moodel": Key("mapping", "part of Img2Prompt-VQA, spelt so", other=ANY),
}  # fmt: skip

# Only for models that load with our loader, see `lavis_mafa.models.traits`.
MODEL_MAFA = {
    "tokenizer": Key("str", "vocab.txt, folder or name on the hub; null: the arch's own", OURS,
                     nullable=True, path="path or name"),
    "vit": Key("mapping", "a ViT of any size", OURS, nullable=True, keys={
        "patch_size": Key("int", "patch side in pixels", OURS, low=1),
        "width": Key("int", "width, a multiple of heads", OURS, low=1),
        "depth": Key("int", "layers", OURS, low=1),
        "heads": Key("int", "attention heads", OURS, low=1),
    }),
    "mafa": Key("mapping", "the training step", "MAFA 4", default={}, keys=MAFA),
}  # fmt: skip

# Only for archs in whose default YAML they stand.
MODEL_PARTS = {
    "vit_weights": Key("str", "weights of the image encoder; null: random", OURS, nullable=True,
                       path="file or URL", words=("published",)),
    "bert_weights": Key("str", "BERT that the Q-Former or text encoder begins with; null: random",
                        OURS, nullable=True, path="path or name"),
    "q_former_config": Key("str", "JSON of the Q-Former's sizes; null: BERT-base's", OURS,
                           nullable=True, path="library file"),
    "llm_precision": Key("str", "number format of OPT; a CPU uses fp32", OURS,
                         choices=("fp16", "bf16", "fp32")),
}  # fmt: skip

# Keys that stand in the default YAML of one model or data set alone, by their names: what that YAML
# has as an example would let pass more than the model or builder takes.
_FILES = Key("mapping", "a file", OURS, keys={
    "storage": Key("strs", "where it lies; null: there is none", OURS, nullable=True),
})  # fmt: skip
KEYS_OF_ONE_YAML = {
    # fne_retrieval
    "negatives": Key("str", "how negatives are found", "FNE", choices=("posterior", "hardest")),
    "margin": Key("float", "of the triplet loss and of the cut-down", "FNE", low=0),
    "plain_epochs": Key("int", "epochs with negatives of the mini-batch alone", "FNE", low=0),
    "plain_negatives": Key("str", "negatives of these epochs", "FNE",
                           choices=("hardest", "random")),
    "memory_size": Key("int", "pairs remembered", "FNE", low=0),
    "posterior": Key("mapping", "of the posterior that a negative is false", "FNE", keys={
        "prior": Key("float", "probability that a random pair matches", "FNE", low=0, high=0.5,
                     above=True),
        "minimum": Key("int", "positives observed before it is used", "FNE", low=0),
        "beginning": Key("str", "negatives until then", "FNE", choices=("sampled", "hardest")),
        "each_epoch": Key("bool", "distributions begin anew in every epoch", "FNE"),
    }),
    "bert_config": Key("str", "JSON of the text encoder's sizes; null: BERT-base's", OURS,
                       nullable=True, path="library file"),
    # albef_nlvr_pretrain_mafa
    "ta_negatives": Key("str", "other images that a text meets", "ALBEF",
                        choices=("similar", "random")),
    # data sets of files
    "image_key": Key("str", "column of the image path; null: the usual names", OURS, nullable=True),
    "caption_key": Key("str", "column of the caption; null: the usual names", OURS, nullable=True),
    "cache_dir": Key("str", "where converted data lie; null: the user's cache", OURS,
                     nullable=True),
    "drop_empty": Key("bool", "leave empty captions out", OURS),
    # the toy world
    "preset": Key("str", "which world", OURS, nullable=True, choices=("dense", "sparse")),
    "statement_types": Key("list", "kinds of statements; null: all", OURS, nullable=True,
                           items=Key("str", choices=("both", "one", "none", "side", "more",
                                                     "same"))),
    "detections": _FILES, "references": _FILES, "instances": _FILES,
}  # fmt: skip

# Arguments of processors, by their names.
ARGUMENTS = {
    "image_size": Key("int", "image side in pixels", low=1),
    "max_words": Key("int", "words after which a caption is cut", low=1),
    "min_scale": Key("float", "smallest share of a picture that is cropped", low=0, high=1,
                     above=True),
    "max_scale": Key("float", "largest share of a picture that is cropped", low=0, high=1,
                     above=True),
    "prompt": Key("str", "text before every caption", blank=True),
    "mean": Key("list", "of the colours; null: CLIP's", nullable=True, items=Key("float")),
    "std": Key("list", "of the colours; null: CLIP's", nullable=True,
               items=Key("float", low=0, above=True)),
}  # fmt: skip

_PROCESSOR = Key("mapping", "one processor", nullable=True, other=ANY, keys={
    "name": Key("str", "registered name; further keys are its parameters", registered="processor",
                needed=ALWAYS),
})  # fmt: skip
_PROCESSORS = {"train": _PROCESSOR, "eval": _PROCESSOR}
_ANNOTATIONS = Key("mapping", "annotation files of one split", nullable=True, keys={
    "url": Key("strs", "where it is downloaded or copied from", nullable=True),
    "md5": Key("strs", "checksum of the download", nullable=True),
    "storage": Key("strs", "where it lies", needed=ALWAYS),
})  # fmt: skip
_STORAGE = Key("mapping", "folder", keys={"storage": Key("strs", "where the files lie")})

# The keys of `datasets.<builder>`; those of the builder's default YAML are added.
DATASET = {
    "type": Key("str", "which default YAML of the builder"),
    "data_type": Key("str", "kind of visual input", choices=("images", "videos", "features")),
    "data_dir": Key("str", "not read by LAVIS's builders", nullable=True, blank=True),
    "dataset_card": Key("str", "description of the dataset", nullable=True, blank=True),
    "sample_ratio": Key("float", "share of this dataset in training", low=0),
    "vis_processor": Key("mapping", "image or video processors", keys=_PROCESSORS),
    "text_processor": Key("mapping", "text processors", keys=_PROCESSORS),
    "build_info": Key("mapping", "the files", keys={
        "annotations": Key("mapping", "annotation files by split",
                           keys=dict.fromkeys(SPLITS, _ANNOTATIONS)),
        "images": _STORAGE, "videos": _STORAGE, "features": _STORAGE,
    }),
}  # fmt: skip

SCHEMA = Key("mapping", "a config file", keys={
    "run": Key("mapping", "what to run and how", needed=ALWAYS, keys=RUN),
    "model": Key("mapping", "the model", needed=ALWAYS,
                 keys={**MODEL, **MODEL_MAFA, **MODEL_PARTS}),
    "datasets": Key("mapping", "datasets by registered builder", needed=ALWAYS,
                    other=Key("mapping", "one dataset", nullable=True, keys=DATASET)),
})  # fmt: skip
