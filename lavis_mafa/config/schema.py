"""Keys of a config file: LAVIS's, and those of ours that are not in a settings class.

``check.py`` checks a config against `SCHEMA`; ``registered.py`` adds the settings of registered
entries. Keys of a single model or dataset are derived from its default YAML and from the settings
class that it declares (``model_options``, ``build_options``).
"""

from __future__ import annotations

from dataclasses import replace

from lavis_mafa.algorithm.grit.settings import GritSettings
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.config.key import ALWAYS, Key, keys_of
from lavis_mafa.loggers import LOGGERS
from lavis_mafa.metrics import MetricNames
from lavis_mafa.models.con_d.settings import ConDSettings, FrozenSettings
from lavis_mafa.models.parts.vit import STEMS

OURS = "lavis_mafa"
SPLITS = ("train", "val", "test")
ANY = Key("any", "passed on unchanged")
TRAINING = ("training",)
GENERATION = ("captioning", "mafa_captioning", "dialogue")


def _splits(doc: str, choices: tuple[str, ...] = ()) -> Key:
    return Key("list", doc, default=[], items=Key("str", choices=choices))


GRIT = keys_of(GritSettings)

RUN = {
    # LAVIS: what to run
    "task": Key("str", "what to train or evaluate", registered="task", needed=ALWAYS),
    "runner": Key("str", "the training loop (runner_mafa if absent)", registered="runner"),
    "evaluate": Key("bool", "evaluate only, no training", default=False),
    "train_splits": _splits("splits to train on", SPLITS),
    "valid_splits": _splits("splits evaluated after every epoch"),
    "test_splits": _splits("splits evaluated at the end"),
    "output_dir": Key("str", "folder of checkpoints, logs and results", needed=ALWAYS,
                      also=("out_dir", "save_dir")),
    "seed": Key("int", "random seed", default=42, low=0, also=("random_seed",)),
    "resume_ckpt_path": Key("str", "checkpoint to resume; auto: the newest in output_dir",
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
    "log_freq": Key("int", "steps between points of the loggers", default=50, low=1),
    # LAVIS: tasks
    "report_metric": Key("bool", "score the generated texts (default True)"),
    "annotation_file": Key("any", "reference captions, JSON in COCO's format: a path, or a "
                           "path for each split; null: those of the dataset", nullable=True,
                           also=("gt_file", "coco_gt_file")),
    "k_test": Key("int", "candidates re-ranked with ITM in retrieval; 0: ITC only", low=0),
    "num_beams": Key("int", "beams of generation", low=1, needed=GENERATION),
    "max_len": Key("int", "maximum length of generated texts, in tokens", low=1, needed=GENERATION),
    "min_len": Key("int", "minimum length of generated texts, in tokens", low=0, needed=GENERATION),
    "inference_method": Key("str", "how VQA answers are found", choices=("rank", "generate")),
    "num_ans_candidates": Key("int", "answers ranked in VQA", low=1),
    "prompt": Key("str", "prompt around a question, or before a caption",
                  blank=True),
    "length_penalty": Key("float", "exponent of the length in beam search; < 0: shorter texts"),
    "block_num": Key("int", "layer of GradCAM (PNP-VQA, mafa_grounding), from 0; null: the third "
                     "with cross-attention", nullable=True, low=0),
    "num_captions": Key("int", "captions per image (PNP-VQA)", low=1),
    "num_captions_fid": Key("int", "captions per answer (PNP-VQA)", low=1),
    "num_patches": Key("int", "patches kept (PNP-VQA)", low=1),
    "cap_max_length": Key("int", "maximum caption length (PNP-VQA)", low=1),
    "cap_min_length": Key("int", "minimum caption length (PNP-VQA)", low=0),
    "internal_bsz_fid": Key("int", "mini-batch inside the reader (PNP-VQA)", low=1),
    "top_k": Key("int", "top-k of caption sampling (PNP-VQA)", low=0),
    "top_p": Key("float", "top-p of caption sampling (PNP-VQA; mafa_captioning: replaces beam "
                 "search)", low=0, high=1),
    "repetition_penalty": Key("float", "penalty on repeated tokens in captions", low=0),
    # ours
    "plugins": Key("list", "Python files or modules with your own code, imported before the "
                   "config is checked", OURS, default=[], items=Key("str")),
    "retrieval_metrics": Key("list", "mafa_retrieval: further registered metrics to report", OURS,
                             default=[], items=Key("str", choices=MetricNames("retrieval"))),
    "metrics": Key("list", "caption metrics; null: the standard ones whose tools are installed",
                   OURS, nullable=True, items=Key("str", choices=MetricNames("caption"))),
    "gradcam_tokens": Key("str", "mafa_grounding: tokens over which a heat map is averaged",
                          "ALBEF 6.4", choices=("all", "words")),
    "save_scores": Key("bool", "retrieval: write scores_<split>.npz into the result folder", OURS),
    "truth_file": Key("str", "retrieval: JSON list of valid [image, caption] pairs beyond the "
                      "original ones; null: none", OURS, nullable=True, path="file"),
    "save_maps": Key("int", "mafa_grounding: number of heat maps to write as images", OURS,
                     low=0),
    "reduce_jpegs": Key("bool", "decode JPEGs of training at 1/2, 1/4 or 1/8 of their size where "
                        "every crop still has the model's image size", OURS, default=False),
    "amp_dtype": Key("str", "number format of amp", OURS, default="fp16", choices=("fp16", "bf16")),
    "max_grad_norm": Key("float", "clip gradients to this norm; null: no clipping", OURS,
                         default=None, nullable=True, low=0, above=True, also=("clip_grad",)),
    "warmup_share": Key("float", "longest warm-up as a share of all steps, for data of any size; "
                        "null: warmup_steps alone counts", OURS, default=None, nullable=True,
                        low=0, high=1),
    "lr_horizon": Key("int", "epochs that the cosine spans; null: max_epoch", "GRIT-VLP 5.1",
                      default=None, nullable=True, low=1),
    "max_steps": Key("int", "stop after this many steps of the whole run", OURS, default=None,
                     nullable=True, low=1),
    "save_every_steps": Key("int", "steps between checkpoints inside an epoch", OURS,
                            default=None, nullable=True, low=1),
    "keep_every_epochs": Key("int", "epochs between checkpoints that are kept", OURS,
                             default=None, nullable=True, low=1),
    "job_id": Key("str", "folder under output_dir; null: a time stamp; '': output_dir itself",
                  OURS, default=None, nullable=True, blank=True),
    "max_failed_saves": Key("int", "maximum number of consecutive failed checkpoint writes before "
                            "training stops; 0: stop at the first", OURS, default=3, low=0),
    "skip_bad_steps": Key("int", "maximum number of steps with a non-finite loss or gradient to "
                          "skip in the whole run; the next one stops the run", OURS,
                          default=0, low=0),
    "max_unreadable": Key("float", "maximum share of samples with an unreadable image or caption, "
                          "by rank and epoch", OURS, default=0.01, low=0, high=1),
    "log_connections": Key("int", "number of mined connections to log per epoch", OURS,
                           default=64, low=0),
    "loggers": Key("list", "where figures and pictures go besides log.jsonl", OURS,
                   default=["tensorboard"], items=Key("str", choices=LOGGERS)),
    "logger_options": Key("mapping", "settings of loggers, by their names", OURS, default={}),
    "tensorboard": Key("bool", "False: no TensorBoard, whatever run.loggers names", OURS,
                       default=True),
    "dist_timeout_minutes": Key("float", "how long ranks wait for each other", OURS,
                                default=30.0, low=0, high=1e6, above=True),
    "find_unused_parameters": Key("bool", "passed to DDP; null: chosen by the model", OURS,
                                  default=None, nullable=True),
    "rerank_by": Key("str", "retrieval: order the k_test candidates by the sum of ITC similarity "
                     "and ITM logit, or by the ITM logit alone", "LAVIS, MAFA F", default="sum",
                     choices=("sum", "itm")),
    "retrieval_max_txt_len": Key("int", "retrieval: tokens at which captions are cut in evaluation",
                                 "LAVIS", default=35, low=2),
    "pairs_per_pass": Key("int", "pairs in one forward pass of re-ranking; null: set by the device",
                          OURS, default=None, nullable=True, low=1),
    "compile": Key("bool", "torch.compile the image encoders: minutes at the start, then fewer "
                   "kernels on a GPU; not with activation checkpointing", OURS, default=False),
    "fsdp": Key("str", "frozen: divide the blocks of frozen image encoders and language models "
                "over the ranks (FSDP2); null: every rank holds all weights", OURS, default=None,
                nullable=True, choices=("frozen",), also=("shard", "shard_frozen", "zero")),
    "cached_batch": Key("int", "pairs whose activations are stored at a time, below "
                        "batch_size_train; the others are recomputed in the backward pass; null: "
                        "all are stored", "GradCache", default=None, nullable=True, low=1,
                        also=("grad_cache", "gc_chunk_size", "mini_batch_size")),
    "grit": Key("mapping", "grouped mini-batch sampling", "GRIT-VLP 4.1", default={}, keys=GRIT),
}  # fmt: skip

_CON_D = keys_of(ConDSettings)
CON_D = {**_CON_D, "arch": replace(_CON_D["arch"], registered="model")}
_ENCODER = keys_of(FrozenSettings)
NEGATIVES_ENCODER = {**_ENCODER, "arch": replace(_ENCODER["arch"], registered="model")}

MAFA = {
    **keys_of(StepSettings),
    "learn_temperature": Key("bool", "False: the temperature stays at model.temp (0.07) and is not "
                             "saved in checkpoints", OURS, default=True),
    "con_d": Key("mapping", "connection discriminator; null: no mining", "MAFA 4.1", default=None,
                 nullable=True, keys=CON_D),
    "negatives_encoder": Key("mapping", "frozen model by whose similarities negatives are picked "
                             "and mini-batches grouped; null: the model in training",
                             "GRIT-VLP Table 1", default=None, nullable=True,
                             keys=NEGATIVES_ENCODER),
}  # fmt: skip

MODEL = {
    "arch": Key("str", "registered name of the model", registered="model", needed=ALWAYS),
    "model_type": Key("str", "name of the arch's default YAML", needed=ALWAYS),
    "load_pretrained": Key("bool", "start from `pretrained`"),
    "pretrained": Key("str", "pre-trained checkpoint: file, URL, or folder of transformers",
                      nullable=True, blank=True),
    "load_finetuned": Key("bool", "start from `finetuned`"),
    "finetuned": Key("str", "fine-tuned checkpoint: file, URL, or folder of transformers",
                      nullable=True, blank=True),
    "image_size": Key("int", "image side in pixels", low=1, also=("img_size", "resolution")),
    "vit_type": Key("str", "size of the ViT", choices=("base", "large")),
    "vit_ckpt_layer": Key("int", "layers with activation checkpointing", low=0),
    "vit_drop_path_rate": Key("float", "stochastic depth rate of the ViT", low=0, high=0.99),
    "vit_layer_norm_epsilon": Key("float", "epsilon of layer norm; -1: the ViT's default", low=-1),
    "vit_grad_ckpt": Key("bool", "activation checkpointing in the ViT"),
    "use_grad_checkpoint": Key("bool", "activation checkpointing"),
    "med_config_path": Key("str", "JSON config of the text encoder", path="library file"),
    "embed_dim": Key("int", "width of the ITC features", low=1),
    "momentum": Key("float", "momentum of the momentum encoders", low=0, high=1),
    "alpha": Key("float", "weight of momentum distillation", low=0, high=1),
    "ramp_epochs": Key("float", "epochs over which this weight grows from 0: ALBEF's pre-training "
                       "1, LAVIS and BLIP 2; 0: none", "ALBEF, LAVIS", low=0),
    "temp": Key("float", "initial ITC temperature", low=0, above=True, also=("temperature",)),
    "max_txt_len": Key("int", "maximum caption length in tokens", low=3, also=("max_words",)),
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
    "num_query_token": Key("int", "number of queries of the Q-Former", low=1),
    "cross_attention_freq": Key("int", "layers from one cross-attention to the next", low=1),
    "drop_path_rate": Key("float", "stochastic depth rate of BLIP-2's ViT", low=0, high=0.99),
    "opt_model": Key("str", "OPT: a name on the hub or a folder", path="path or name"),
    "t5_model": Key("str", "T5: a name on the hub or a folder", path="path or name"),
    "apply_lemmatizer": Key("bool", "lemmatise VQA answers"),
    "precision": Key("str", "number format of CLIP", choices=("fp16", "fp32")),
    "timesformer": Key("mapping", "TimeSformer's arguments", other=ANY),
    "image_question_matching_model": Key("mapping", "part of PNP-VQA", other=ANY),
    "image_captioning_model": Key("mapping", "part of PNP-VQA", other=ANY),
    "question_answering_model": Key("mapping", "part of PNP-VQA", other=ANY),
    "question_generation_moodel": Key("mapping", "part of Img2Prompt-VQA (sic)", other=ANY),
}  # fmt: skip

# Only for models that load with our loader, see `lavis_mafa.models.traits`.
MODEL_MAFA = {
    "tokenizer": Key("str", "vocab.txt, folder or name on the hub; null: the arch's default", OURS,
                     nullable=True, path="path or name"),
    "vit": Key("mapping", "a ViT of any size", OURS, nullable=True, keys={
        "patch_size": Key("int", "patch side in pixels", OURS, low=1),
        "width": Key("int", "width, a multiple of heads", OURS, low=1),
        "depth": Key("int", "layers", OURS, low=1),
        "heads": Key("int", "attention heads", OURS, low=1),
        "stem": Key("str", "how patches become tokens; conv: by small convolutions",
                    "Xiao et al. 2021", default="patch", choices=STEMS),
    }),
    "mafa": Key("mapping", "the training step", "MAFA 4", default={}, keys=MAFA),
}  # fmt: skip

# Only for archs that have the key in their default YAML.
MODEL_PARTS = {
    "vit_weights": Key("str", "weights of the image encoder; null: random", OURS, nullable=True,
                       path="checkpoint or timm name", words=("published",)),
    "bert_weights": Key("str", "BERT to initialise the Q-Former or text encoder from; null: random",
                        OURS, nullable=True, path="path or name"),
    "q_former_config": Key("str", "JSON of the Q-Former's sizes; null: BERT-base's", OURS,
                           nullable=True, path="library file"),
    "llm_precision": Key("str", "number format of OPT; a CPU uses fp32", OURS,
                         choices=("fp16", "bf16", "fp32")),
}  # fmt: skip

# Arguments of processors, by their names.
ARGUMENTS = {
    "image_size": Key("int", "image side in pixels", low=1),
    "max_words": Key("int", "maximum number of words of a caption; the rest is cut", low=1),
    "min_scale": Key("float", "minimum share of the image's area that a crop covers", low=0, high=1,
                     above=True),
    "max_scale": Key("float", "maximum share of the image's area that a crop covers", low=0, high=1,
                     above=True),
    "crop": Key("bool", "False: images are resized to a square, not cropped", OURS),
    "prompt": Key("str", "text before every caption", blank=True),
    "mean": Key("list", "mean of the colours; null: CLIP's", nullable=True, items=Key("float")),
    "std": Key("list", "standard deviation of the colours; null: CLIP's", nullable=True,
               items=Key("float", low=0, above=True)),
}  # fmt: skip

_PROCESSOR = Key("mapping", "one processor", nullable=True, other=ANY, keys={
    "name": Key("str", "registered name; further keys are its parameters", registered="processor",
                needed=ALWAYS),
})  # fmt: skip
_PROCESSORS = {"train": _PROCESSOR, "eval": _PROCESSOR}
_ANNOTATIONS = Key("mapping", "annotation files of one split", nullable=True, keys={
    "url": Key("strs", "source to download or copy from", nullable=True),
    "md5": Key("strs", "checksum of the download", nullable=True),
    "storage": Key("strs", "path of the file", needed=ALWAYS),
})  # fmt: skip
_STORAGE = Key("mapping", "folder", keys={"storage": Key("strs", "path of the folder")})

# The keys of `datasets.<builder>`; those of the builder's default YAML are added.
DATASET = {
    "type": Key("str", "name of the builder's default YAML"),
    "data_type": Key("str", "kind of visual input", choices=("images", "videos", "features")),
    "data_dir": Key("str", "not used by LAVIS's builders", nullable=True, blank=True),
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
    "datasets": Key("mapping", "datasets, by registered builder", needed=ALWAYS,
                    other=Key("mapping", "one dataset", nullable=True, keys=DATASET)),
})  # fmt: skip
