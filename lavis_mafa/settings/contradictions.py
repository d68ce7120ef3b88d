"""Contradictions between keys that are valid one by one, before anything is built.

Each rule is a mistake that someone made, and that would otherwise end a run after its start, or
train something else than the config says. What a class alone knows, it checks itself by
`problems_of`, see `lavis_mafa.io.problems`. Settings that contradict each other inside one settings
class are refused by the class, when it is constructed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lavis.common.optims  # noqa: F401  registers the learning rate schedules
import lavis.runners  # noqa: F401  registers the runners
import torch
from lavis.common.registry import registry
from lavis.models.base_model import SharedQueueMixin
from lavis.tasks.image_text_pretrain import ImageTextPretrainTask

from lavis_mafa.algorithm.grit import HARDNESS, GritSettings
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SOFT_LABELS
from lavis_mafa.algorithm.pickers import PICKERS
from lavis_mafa.algorithm.registry import LOSSES, Registry
from lavis_mafa.algorithm.rules import RULES
from lavis_mafa.algorithm.scores import CON_D, SCORES
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.compat.traits import Traits, judges, negatives_encoders, traits_of
from lavis_mafa.io.problems import ConfigView, Problem
from lavis_mafa.io.project_files import read_config
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.judges.frozen import FROZEN_MODELS
from lavis_mafa.settings.check import Report, listed, suggest
from lavis_mafa.settings.defaults import default_or_none
from lavis_mafa.settings.key import is_url
from lavis_mafa.settings.lavis_classes import declared
from lavis_mafa.settings.loggers import LOGGERS, names_of_loggers
from lavis_mafa.settings.registered import BUILD_KEYS
from lavis_mafa.settings.schema import SPLITS

Problems = Iterator[Problem]
MAFA, GRIT, RULE = "model.mafa", "run.grit", "model.mafa.connections"
WEIGHTS, SOFT = f"{MAFA}.loss_weights", f"{MAFA}.soft_labels"
# (key, the key that it may not exceed)
_NOT_ABOVE = (
    ("run.min_lr", "run.init_lr"),
    ("run.max_epoch", "run.lr_horizon"),
    ("run.min_len", "run.max_len"),
)
# (key, the key that it is a multiple of)
_MULTIPLES = (
    ("model.vit.width", "model.vit.heads"),
    ("model.image_size", "model.vit.patch_size"),
)
# Keys that cannot both be set: activations of compiled blocks cannot be recomputed, and sharded
# blocks gather their weights in hooks, which compiled blocks break, and only once a pass.
_NOT_BOTH = (
    ("run.compile", "model.vit_grad_ckpt"),
    ("run.compile", "model.use_grad_checkpoint"),
    ("run.compile", "run.cached_batch"),
    ("run.fsdp", "run.compile"),
    ("run.fsdp", "run.cached_batch"),
)
_PHASES = {"train": "train", "val": "eval", "test": "eval"}  # split to phase of its processors


def ask_all(config: Mapping[str, Any], report: Report) -> None:
    """Report the contradictions in a config, and what its classes find."""
    cfg = ConfigView(config, report.bad, machine=report.machine)
    for rule in _RULES:
        report.take(rule(cfg))
    for section, owner in _owners(cfg):
        ask = getattr(owner, "problems_of", None)
        if ask is not None:
            report.take(ask(ConfigView(config, report.bad, section, report.machine)))


def _owners(cfg: ConfigView) -> Iterator[tuple[str, Any]]:
    """Yield the classes, and settings classes, that a config names, with the section of each."""
    yield "run", _runner_of(cfg)
    yield "run", registry.get_task_class(cfg["run.task"] or "")
    run = cfg["run"]
    if isinstance(run, Mapping) and "run.loggers" not in cfg.wrong:
        yield from (("run", LOGGERS.get(name)) for name in names_of_loggers(run))
    yield "model", registry.get_model_class(cfg["model.arch"] or "")
    yield "model", DISCRIMINATORS.get(cfg[f"{MAFA}.con_d.arch"] or "")
    for name in cfg["datasets"] or {}:
        yield f"datasets.{name}", registry.get_builder_class(name)
    named: list[tuple[Registry[Any], Any]] = [
        (HARDNESS, cfg[f"{GRIT}.schedule"] if cfg.training and cfg[f"{GRIT}.enabled"] else None)
    ]
    if _traits(cfg).trains_by_step:
        named += [
            (PICKERS, cfg[f"{MAFA}.negatives"]),
            (SOFT_LABELS, cfg[f"{SOFT}.type"]),
            (ITC_LOSSES, cfg[f"{MAFA}.itc_loss"]),
            (SCORES, cfg[f"{MAFA}.negatives_by"]),
            (SCORES, cfg[f"{RULE}.score"]),
            (RULES, cfg[f"{RULE}.rule"]),
        ]
        named += [(LOSSES, name) for name in LOSSES if cfg[f"{WEIGHTS}.{name}"]]
    entries = [known.entries().get(name or "") for known, name in named]
    for entry in {id(one): one for one in entries if one is not None}.values():
        yield from (("model", entry.value), ("model", entry.settings))


def _traits(cfg: ConfigView) -> Traits:
    return traits_of(cfg["model.arch"] or "")


def _runner_of(cfg: ConfigView) -> Any:
    return registry.get_runner_class(cfg["run.runner"] or "runner_mafa")


def _evaluates(cfg: ConfigView) -> bool:
    return bool(cfg["run.valid_splits"] or cfg["run.test_splits"])


def _evaluates_nothing(task: str | None) -> bool:
    evaluation = getattr(registry.get_task_class(task or ""), "evaluation", None)
    return evaluation is ImageTextPretrainTask.evaluation


# 1. Numbers


def _numbers(cfg: ConfigView) -> Problems:
    for key, limit in _NOT_ABOVE:
        yield from _not_above(cfg, key, limit)
    for key, other in _MULTIPLES:
        size, part = cfg[key], cfg[other]
        if size and part and size % part:
            yield Problem(key, f"{size} is not a multiple of {other} {part}")
    size, patch = cfg["model.image_size"], _traits(cfg).patch_size
    if _traits(cfg).trains_by_step and size and not cfg["model.vit"] and size % patch:
        why = f"{size} is not a multiple of the ViT's patch size {patch}"
        yield Problem("model.image_size", why)


def _not_above(cfg: ConfigView, key: str, limit: str) -> Problems:
    value, most = cfg[key], cfg[limit]
    if None not in (value, most) and value > most:
        yield Problem(key, f"{value} is more than {limit} {most}; use at most {most}")


# 2. Devices and number formats


def _devices(cfg: ConfigView) -> Problems:
    if cfg["run.device"] == "cuda" and cfg.machine and not torch.cuda.is_available():
        why = "cuda is not available on this machine; use run.device: cpu"
        yield Problem("run.device", why)
    if cfg["run.device"] == "cpu" and cfg["run.amp"] and cfg["run.amp_dtype"] == "fp16":
        why = "fp16 is not supported on cpu; use run.amp_dtype: bf16 or run.amp: False"
        yield Problem("run.amp", why)
    if cfg["model.vit_precision"] == "fp16" and cfg["model.freeze_vit"] is False:
        why = "fp16 requires a frozen ViT; to train it use fp32 with run.amp: True"
        yield Problem("model.vit_precision", why)


# 3. Options of one technique that exclude each other


def _exclusive(cfg: ConfigView) -> Problems:
    for key, other in _NOT_BOTH:
        if cfg[key] and cfg[other]:
            why = f"is not supported together with {other}; switch one off"
            yield Problem(key, why)
    unused = {"run.evaluate": "only evaluates", "run.distributed": "is not distributed"}
    for key, why in unused.items():
        if cfg["run.fsdp"] and cfg[key] is (key == "run.evaluate"):
            yield Problem("run.fsdp", f"has no effect: the run {why} ({key})", is_note=True)
    if cfg.training and cfg["run.cached_batch"] and not _by_step(cfg):
        why = "does not train by the step that can recompute; set it to null"
        yield Problem("run.cached_batch", f"{cfg['model.arch']} {why}")


def _by_step(cfg: ConfigView) -> bool:
    return not cfg["model.arch"] or _traits(cfg).trains_by_step


# 4. Grouped mini-batches


def _grouping(cfg: ConfigView) -> Problems:
    if not cfg.training or not cfg[f"{GRIT}.enabled"]:
        return
    if not _by_step(cfg):
        why = f"is True, but {cfg['model.arch']} provides no features for grouping; set it to False"
        yield Problem(f"{GRIT}.enabled", why)
    runner = _runner_of(cfg)
    if runner and not getattr(runner, "groups_mini_batches", False):
        why = "cannot group mini-batches; use runner_mafa, or set run.grit.enabled: False"
        yield Problem("run.runner", f"{cfg['run.runner']} {why}")
    yield from _not_above(cfg, f"{GRIT}.search_space", f"{GRIT}.queue_size")
    skip, search = cfg[f"{GRIT}.skip"], cfg[f"{GRIT}.search_space"]
    if None not in (skip, search) and skip >= search:
        why = f"{skip} is not below run.grit.search_space {search}: every pair would be skipped"
        yield Problem(f"{GRIT}.skip", f"{why}; use a small number, such as 30")
    if cfg[f"{GRIT}.start_epoch"] == 0 and not cfg[f"{GRIT}.naive"]:
        why = "is 0, but epoch 0 has no features to group by; use 1 or naive: True"
        yield Problem(f"{GRIT}.start_epoch", why)
    if search and search == cfg["run.batch_size_train"]:
        why = "equals run.batch_size_train: nothing is grouped"
        yield Problem(f"{GRIT}.search_space", why, is_note=True)


# 5. Length of a run


def _schedule(cfg: ConfigView) -> Problems:
    by_steps = cfg["run.runner"] == "runner_iter" and cfg["run.max_iters"] is not None
    if cfg.training and cfg["run.max_epoch"] is None and not by_steps:
        why = "expected a whole number >= 1 (epochs to train)"
        yield Problem("run.max_epoch", why, is_missing=True)
    if cfg["run.lr_sched"] == "linear_warmup_step_lr" and cfg["run.lr_decay_rate"] is None:
        why = "linear_warmup_step_lr needs it; use for example 0.9"
        yield Problem("run.lr_decay_rate", why, is_missing=True)


# 6. The folder of a run


def _job(cfg: ConfigView) -> Problems:
    job = cfg["run.job_id"]
    if job and (job in (".", "..") or {"/", "\\", "\0"} & set(job) or len(job.encode()) > 255):
        why = f"{job!r:.80} is not the name of one folder; put its parents into run.output_dir"
        yield Problem("run.job_id", why)


# 7. Weights that would not be loaded


def _weights(cfg: ConfigView) -> Problems:
    if cfg["run.evaluate"] and cfg["run.resume_ckpt_path"]:
        why = "has no effect with run.evaluate: True; use model.finetuned"
        yield Problem("run.resume_ckpt_path", f"{why} and model.load_finetuned: True")
    traits = _traits(cfg)
    if not traits.pretrained_is_file:
        return
    ours, both = traits.loads_with_our_loader, cfg["model.load_finetuned"] is True
    for name in ("pretrained", "finetuned"):
        key, path, wanted = f"model.{name}", cfg[f"model.{name}"], cfg[f"model.load_{name}"]
        # If both are to be loaded, our models read only `finetuned`.
        optional = name == "pretrained" and (traits.starts_from_parts or (ours and both))
        if wanted and not path and not optional and key not in cfg.wrong:
            yield Problem(key, f"is empty; name a file or URL, or set model.load_{name}: False")
        elif path and wanted is False and ours and not is_url(path):
            yield Problem(key, f"is given, but model.load_{name} is False: nothing is loaded")
    if cfg["run.evaluate"] and ours and not both and not cfg["model.load_pretrained"]:
        why = "is False and so is load_pretrained: random weights are evaluated"
        yield Problem("model.load_finetuned", why, is_note=True)


# 8. Sizes of the text encoder and of LAVIS's queues


def _encoders(cfg: ConfigView) -> Problems:
    names = ("med_config_path", "q_former_config", "bert_config")
    key = next((f"model.{name}" for name in names if cfg[f"model.{name}"]), None)
    longest = cfg["model.max_txt_len"]
    most = (read_config(cfg[key]) if key else {}).get("max_position_embeddings")
    if longest and most and longest > most and _traits(cfg).llm_key is None:
        why = f"{longest} is more than the {most} positions of the text encoder in {key}"
        yield Problem("model.max_txt_len", f"{why}; use at most {most}")
    if cfg["model.vit.stem"] == "conv" and not _traits(cfg).takes_conv_stem:
        why = f"{cfg['model.arch']} has no convolutional stem; use patch"
        yield Problem("model.vit.stem", why)
    arch = registry.get_model_class(cfg["model.arch"] or "") or object
    queue, batch = cfg["model.queue_size"], cfg["run.batch_size_train"]
    # LAVIS's models with a momentum queue assert it at the first step.
    if cfg.training and issubclass(arch, SharedQueueMixin) and queue is not None and batch:
        if queue == 0 or queue % batch:
            why = f"{queue} is not a positive multiple of run.batch_size_train {batch}"
            yield Problem("model.queue_size", f"{why}, which {cfg['model.arch']} needs")


# 9. The task and what it needs of the model


def _task(cfg: ConfigView) -> Problems:
    task, name = cfg["run.task"], cfg["model.arch"]
    arch = registry.get_model_class(name or "")
    method = declared("task", task, "asks_of_model")
    if arch and _evaluates(cfg) and method and not hasattr(arch, method):
        able = [one for one in registry.list_models() if _can(one, method)]
        why = f"{task} evaluates by {method}(), which {name} lacks; models that have it: "
        yield Problem("run.task", why + ", ".join(able))
    if cfg["run.evaluate"] and _evaluates_nothing(task):
        why = "evaluates nothing; name a task that does, such as mafa_retrieval"
        yield Problem("run.task", f"{task} {why}")
    traits = _traits(cfg)
    if cfg["run.k_test"] is None and traits.reranks and declared("task", task, "requires_k_test"):
        why = f"task {task} needs it; use for example 128"
        yield Problem("run.k_test", why, is_missing=True)
    if cfg["run.k_test"] == 0 and not traits.ranks_without_itm:
        why = f"0 (ITC only) is supported by models of lavis_mafa; {name} needs >= 1"
        yield Problem("run.k_test", why)


def _can(arch: str, method: str) -> bool:
    cls = registry.get_model_class(arch)
    return traits_of(cls).loads_with_our_loader and hasattr(cls, method)


# 10. Splits


def _splits(cfg: ConfigView) -> Problems:
    chosen = _chosen_splits(cfg)
    if cfg.training and cfg["run.train_splits"] == []:
        why = "is empty; name one (train), or set run.evaluate: True"
        yield Problem("run.train_splits", why)
    if cfg["run.evaluate"] and not any(chosen.values()):
        why = "is empty and so is run.valid_splits; name a split to evaluate"
        yield Problem("run.test_splits", why)
    # Builders may have further splits, such as other captions of the test images.
    known = list(SPLITS)
    available: set[str] | None = set()
    for name in cfg["datasets"] or {}:
        known += declared("builder", name, "splits", ())
        own = _splits_of(name, cfg)
        # Without any, the builder creates its splits without naming them in the config.
        available = available | set(own) if own and available is not None else None
    for key, splits in chosen.items():
        for i, split in enumerate(splits):
            if isinstance(split, str) and split not in known:
                why = f"{split!r} is not one of {', '.join(known)}; {suggest(split, known)}"
                yield Problem(f"run.{key}[{i}]", why)
            elif available and split in SPLITS and split not in available:
                have = ", ".join(sorted(available))
                why = f"no dataset has a split {split!r}; they have {have}"
                yield Problem(f"run.{key}[{i}]", why)


def used_splits(get: Callable[[str], Any]) -> set[str]:
    """Return the splits that a run reads; ``get`` returns a key of ``run``, or None."""
    names = [*([] if get("evaluate") else ["train_splits"]), "valid_splits", "test_splits"]
    return {split for name in names for split in get(name) or () if isinstance(split, str)}


def _chosen_splits(cfg: ConfigView) -> dict[str, list[Any]]:
    names = [*([] if cfg["run.evaluate"] else ["train_splits"]), "valid_splits", "test_splits"]
    return {name: cfg[f"run.{name}"] or [] for name in names}


def _splits_of(name: str, cfg: ConfigView) -> list[str]:
    """Return the splits in a dataset's config; none if the builder creates them otherwise."""
    info = f"datasets.{name}.build_info"
    splits = [split for split, files in (cfg[f"{info}.annotations"] or {}).items() if files]
    return [str(one) for one in splits + listed(cfg[f"{info}.splits"])]


# 11. Samples of the data that the task and the model cannot use


def _samples(cfg: ConfigView) -> Problems:
    task, image = cfg["run.task"], cfg["model.image_size"]
    for name in cfg["datasets"] or {}:
        path = f"datasets.{name}"
        holds, needed = declared("builder", name, "holds"), declared("task", task, "needs")
        if holds and needed and holds != needed:
            known = registry.list_datasets()
            able = [one for one in known if declared("builder", one, "holds") == needed]
            why = f"holds {holds}, and task {task} needs {needed}; use one of {', '.join(able)}"
            yield Problem(path, why)
        for phase in ("train", "eval") if _traits(cfg).loads_with_our_loader else ():
            key = f"{path}.vis_processor.{phase}.image_size"
            size = cfg[key]
            if image and size and size != image and (phase == "eval" or cfg.training):
                if cfg["model.image_encoder"] != "features":
                    yield Problem(key, f"{size} differs from model.image_size {image}")


# 12. Processors that the run needs


def _processors(cfg: ConfigView) -> Problems:
    used = {split for splits in _chosen_splits(cfg).values() for split in splits}
    for name in cfg["datasets"] or {}:
        path = f"datasets.{name}"
        pictures = cfg[f"{path}.data_type"] == "images" and cfg[f"{path}.build_info.images"]
        if pictures is None or pictures is False or registry.get_builder_class(name) is None:
            continue
        phases = {_PHASES[one] for one in used & set(_splits_of(name, cfg)) & set(_PHASES)}
        if _evaluates_nothing(cfg["run.task"]):
            phases.discard("eval")
        for phase in sorted(phases):
            for kind, example in (("vis", f"blip_image_{phase}"), ("text", "blip_caption")):
                key = f"{path}.{kind}_processor"
                # LAVIS leaves texts unprocessed if no text processor is named at all.
                lacks = cfg[f"{key}.{phase}"] is None and (kind == "vis" or cfg[key] is not None)
                reads = kind == "vis" or declared("task", cfg["run.task"], "reads_texts", True)
                if lacks and reads and not any(bad.startswith(key) for bad in cfg.wrong):
                    why = f"the run reads splits of {name} that need this processor; name one"
                    why = f"{why}, such as {{name: {example}}}"
                    yield Problem(f"{key}.{phase}", why, is_missing=True)


# 13. The losses and the settings of the step


def _losses(cfg: ConfigView) -> Problems:
    weights, kind = cfg[WEIGHTS] or {}, cfg[f"{SOFT}.type"]
    if cfg.training and weights and not any(cfg[f"{WEIGHTS}.{name}"] != 0 for name in weights):
        yield Problem(WEIGHTS, "all are 0: nothing to train; set one of them to 1")
    if cfg.training and cfg["model.mlm_mask_prob"] == 0 and cfg[f"{WEIGHTS}.lm"]:
        why = "0 hides no token: nothing to predict; use 0.15, or loss_weights.lm: 0"
        yield Problem("model.mlm_mask_prob", why)
    with_momentum = kind in SOFT_LABELS and SOFT_LABELS.entry(kind).traits.needs_momentum
    if with_momentum and cfg["model.queue_size"] is None:
        why = f"{cfg['model.arch']} has no momentum encoders; use smoothed or one_hot"
        yield Problem(f"{SOFT}.type", f"{kind}: {why}")
    for name in ("imc", "lmi"):
        if cfg[f"{WEIGHTS}.{name}"] and not with_momentum:
            why = f"needs momentum encoders; {SOFT}.type is {kind}, use momentum"
            yield Problem(f"{WEIGHTS}.{name}", why)
    if cfg[f"{WEIGHTS}.lmi"] and not _traits(cfg).keeps_word_states:
        why = f"needs hidden states of words, which {cfg['model.arch']} does not keep"
        yield Problem(f"{WEIGHTS}.lmi", f"{why}; use albef_mafa")


# 14. The form of ITC, its labels and the temperature


def form_of_itc(cfg: ConfigView) -> Problems:
    """Yield what the chosen form of ITC cannot be combined with."""
    key = f"{MAFA}.itc_loss"
    form, kind = cfg[key], cfg[f"{SOFT}.type"]
    if form not in ITC_LOSSES or cfg[f"{WEIGHTS}.itc"] == 0:
        return
    traits = ITC_LOSSES.entry(form).traits
    with_momentum = kind in SOFT_LABELS and SOFT_LABELS.entry(kind).traits.needs_momentum
    if with_momentum and not traits.queue and cfg["model.queue_size"]:
        why = f"{form} cannot use the candidates of the momentum queue, which {SOFT}.type: {kind}"
        yield Problem(key, f"{why} has; use softmax, other labels, or model.queue_size: 0")
    smoothing = kind == "one_hot" and cfg[f"{SOFT}.label_smoothing"]
    if not traits.soft_labels and (kind not in (None, "one_hot") or smoothing):
        given = f"label_smoothing is {smoothing}" if smoothing else f"type is {kind}"
        why = f"{form} ignores soft labels, but {SOFT}.{given}"
        yield Problem(key, f"{why}; use type: one_hot without label_smoothing")
    if traits.fixed_temperature and cfg.training:
        if cfg[f"{MAFA}.learn_temperature"] is not False:
            why = f"must be False with itc_loss: {form}, which has no best temperature"
            yield Problem(f"{MAFA}.learn_temperature", why)


# 15. Settings that their own class refuses together


def _constructed(cfg: ConfigView) -> Problems:
    for section, settings in ((MAFA, StepSettings), (GRIT, GritSettings)):
        given = cfg[section]
        if isinstance(given, Mapping) and not any(bad.startswith(section) for bad in cfg.wrong):
            try:
                settings.from_config(given)
            except ValueError as error:
                yield Problem(section, str(error))


# 16. What judges hard negatives, and what uses its verdicts


def _verdicts(cfg: ConfigView) -> Problems:
    score, rule, con_d = cfg[f"{RULE}.score"], cfg[f"{RULE}.rule"], cfg[f"{MAFA}.con_d"]
    by_score = score in SCORES
    if by_score and con_d:
        why = f"{score} judges in Con-D's place; remove model.mafa.con_d, or use score: {CON_D}"
        yield Problem(f"{RULE}.score", why)
    traits = RULES.entry(rule).traits if rule in RULES else None
    if traits is not None and traits.needs_all and not by_score:
        why = f"{rule} needs scores of all candidates; use connections.score: similarity"
        yield Problem(f"{RULE}.rule", why)
    used = [one for one in cfg[f"{RULE}.use_in"] or () if cfg[f"{WEIGHTS}.{one}"] != 0]
    excused = f"{RULE}.use_in" in cfg.wrong or cfg[f"{RULE}.action"] == "keep"
    if (con_d or by_score) and cfg.training and not used and not excused:
        why = "no loss with a weight uses connections; name one, or set action: keep"
        yield Problem(f"{RULE}.use_in", why)


# 17. What a discriminator needs of the task and of the one before it


def judges_of_pairs(cfg: ConfigView) -> Problems:
    """Yield what Con-D, and the discriminator before it, cannot work without."""
    arch, first = cfg[f"{MAFA}.con_d.arch"], cfg[f"{MAFA}.con_d.first"]
    task = registry.get_task_class(cfg["run.task"] or "")
    for key, name in (("arch", arch), ("first", first)):
        knows = hasattr(DISCRIMINATORS.get(name or ""), "know")
        if cfg["run"] and knows and not hasattr(task, "before_training"):
            why = f"{name} needs run.task: mafa_pretrain, which gives it the training data"
            yield Problem(f"{MAFA}.con_d.{key}", why)
    by_number = [hasattr(DISCRIMINATORS.get(one or ""), "probability") for one in (first, arch)]
    if first is not None and by_number != [True, False]:
        why = "expected one without pictures, such as captions, then a model"
        yield Problem(f"{MAFA}.con_d.first", f"{first} before {arch}; {why}")


# 18. Frozen models: what they can do, and their weights


def frozen_models(cfg: ConfigView) -> Problems:
    """Yield what is wrong with Con-D and the encoder of hard negatives."""
    for name in FROZEN_MODELS:
        yield from _frozen(f"{MAFA}.{name}", judges if name == "con_d" else negatives_encoders, cfg)


def _frozen(path: str, usable: Callable[[], Iterator[str]], cfg: ConfigView) -> Problems:
    arch, model_type = cfg[f"{path}.arch"], cfg[f"{path}.model_type"]
    if arch is None or arch in DISCRIMINATORS or f"{path}.model_type" in cfg.wrong:
        return
    traits = traits_of(arch)
    # None: a user's class, which can only be checked once it is built; see `backbone_of`.
    if traits.can_judge is False or (usable is negatives_encoders and not traits.has_temperature):
        why = "cannot judge pairs"
        if usable is negatives_encoders:
            lacks = "features" if traits.can_judge is False else "temperature"
            why = f"has no {lacks} of ITC"
        yield Problem(f"{path}.arch", f"{arch} {why}; use one of {', '.join(usable())}")
        return
    cls = registry.get_model_class(arch)
    shipped, problems = default_or_none(f"{path}.model_type", cls, model_type)
    yield from problems
    model = shipped.get("model", {})
    for name in cfg[f"{path}.model"] or {}:
        known = [*model, *BUILD_KEYS]
        if name not in known:
            why = f"{arch} has no such key; {suggest(name, known)}"
            yield Problem(f"{path}.model.{name}", why)
    weights = [model.get(n) for n in ("finetuned", "pretrained") if model.get(f"load_{n}", True)]
    published = any(is_url(url or "") for url in weights)
    if shipped and not cfg[f"{path}.checkpoint"] and not published:
        what = "a Con-D" if usable is judges else "a model that was trained with ITC"
        why = f"{arch} has no published weights of that type; name the checkpoint of {what}"
        yield Problem(f"{path}.checkpoint", why, is_missing=True)


_RULES = (
    _numbers,
    _devices,
    _exclusive,
    _grouping,
    _schedule,
    _job,
    _weights,
    _encoders,
    _task,
    _splits,
    _samples,
    _processors,
    _losses,
    form_of_itc,
    _constructed,
    _verdicts,
    frozen_models,
    judges_of_pairs,
)
