"""Config checks of models that train by the step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lavis.common.registry import registry

from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SOFT_LABELS
from lavis_mafa.algorithm.mining import ALL, MiningRule
from lavis_mafa.algorithm.pickers import PICKERS
from lavis_mafa.algorithm.registry import LOSSES, Registry
from lavis_mafa.algorithm.rules import RULES
from lavis_mafa.algorithm.scores import CON_D, SCORES, is_probability
from lavis_mafa.models.con_d.discriminators import DISCRIMINATORS
from lavis_mafa.models.traits import traits_of
from lavis_mafa.problems import ConfigView, Problem, problems_of_entry

_SOFT, _RULE, _WEIGHTS = (
    f"model.mafa.{name}" for name in ("soft_labels", "connections", "loss_weights")
)


def problems_of_step(cls: Any, cfg: ConfigView) -> Iterator[Problem]:
    """Yield contradictions between ``model.mafa`` and the keys that it depends on."""
    arch, training = cfg["model.arch"], cfg.training
    yield from _soft_labels(cls, cfg)
    yield from _form_of_itc(cfg)
    weights = cfg[_WEIGHTS] or {}
    if training and weights and not any(cfg[f"{_WEIGHTS}.{name}"] != 0 for name in weights):
        yield Problem(_WEIGHTS, "all are 0: nothing to train; set one of them to 1")
    yield from _warm_up(cfg)
    temp = cfg["model.temp"]
    if traits_of(cls).trains_by_step and temp and not 0.001 <= temp <= 0.5:
        yield Problem(
            "model.temp", f"{temp} is out of range; the temperature is clamped to [0.001, 0.5]"
        )
    if training and cfg[f"{_WEIGHTS}.itm"] == 0 and cfg["run.k_test"]:
        why = "re-ranks by an ITM head that loss_weights.itm: 0 does not train; 0: ITC only"
        yield Problem("run.k_test", why, is_note=True)
    yield from _refused_rule(cfg)
    yield from _verdicts(cfg)
    yield from _of_named(cfg)
    used = [one for one in cfg[f"{_RULE}.use_in"] or () if cfg[f"{_WEIGHTS}.{one}"] != 0]
    excused = f"{_RULE}.use_in" in cfg.wrong or cfg[f"{_RULE}.action"] == "keep"
    judged = cfg["model.mafa.con_d"] or cfg[f"{_RULE}.score"] in SCORES
    if judged and training and not used and not excused:
        why = "no loss with a weight uses connections; name one, or set action: keep"
        yield Problem(f"{_RULE}.use_in", why)
    if cfg["model.mlm_mask_prob"] == 0 and cfg[f"{_WEIGHTS}.lm"] and training:
        why = "0 hides no token: nothing to predict; use 0.15, or loss_weights.lm: 0"
        yield Problem("model.mlm_mask_prob", why)
    task = registry.get_task_class(cfg["run.task"] or "")
    for key in ("model.mafa.con_d.arch", "model.mafa.con_d.first"):
        knows = hasattr(DISCRIMINATORS.get(cfg[key] or ""), "know")
        if knows and not hasattr(task, "before_training"):
            why = f"{cfg[key]} needs run.task: mafa_pretrain, which gives it the training data"
            yield Problem(key, why)
    if cfg[f"{_WEIGHTS}.lmi"] and not traits_of(cls).keeps_word_states:
        why = f"needs hidden states of words, which {arch} does not keep; use albef_mafa"
        yield Problem(f"{_WEIGHTS}.lmi", why)


def _refused_rule(cfg: ConfigView) -> Iterator[Problem]:
    """Yield what `MiningRule` says of its values; its message begins with the key in question."""
    given = cfg[_RULE] or {}
    wrong = {path.partition("[")[0] for path in cfg.wrong}  # of an item: the whole list
    known = {name: value for name, value in given.items() if f"{_RULE}.{name}" not in wrong}
    try:
        MiningRule(**known)
    except ValueError as error:
        words = re.findall(r"\w+", str(error))
        name = next((f".{word}" for word in words if word in known), "")
        yield Problem(f"{_RULE}{name}", str(error))


def _verdicts(cfg: ConfigView) -> Iterator[Problem]:
    """Yield contradictions between the judge of hard negatives and how its scores are used."""
    score, rule, con_d = cfg[f"{_RULE}.score"], cfg[f"{_RULE}.rule"], cfg["model.mafa.con_d"]
    by_score = score in SCORES
    traits = RULES.entry(rule).traits if rule in RULES else None
    if by_score and con_d:
        why = f"{score} judges in Con-D's place; remove model.mafa.con_d, or use score: {CON_D}"
        yield Problem(f"{_RULE}.score", why)
    if con_d is None and not by_score:
        usual = MiningRule()
        given = [
            name
            for name in ("top_k", "labels", "rule")
            if cfg[f"{_RULE}.{name}"] not in (None, getattr(usual, name))
        ]
        if given:
            why = "top_k and labels have no effect without model.mafa.con_d"
            if "rule" in given:
                why = f"rule: {rule} has no effect without model.mafa.con_d or another score"
            yield Problem(_RULE, why, is_note=True)
    if con_d and cfg[f"{_RULE}.top_k"] == ALL and not by_score:
        why = "0: Con-D judges every pair of every mini-batch; give a number, or another score"
        yield Problem(f"{_RULE}.top_k", why, is_note=True)
    if traits is not None and traits.needs_all and not by_score:
        why = f"{rule} needs scores of all candidates; use connections.score: similarity"
        yield Problem(f"{_RULE}.rule", why)
    limits = (cfg[f"{_RULE}.low"], cfg[f"{_RULE}.high"])
    if by_score and traits is not None and traits.uses_thresholds:
        if not is_probability(score) and limits == (MiningRule.low, MiningRule.high):
            why = f"are those of Con-D's probabilities; {score} has another scale: set both to fit"
            yield Problem(f"{_RULE}.high", f"low and high {why}", is_note=True)
    if traits is not None and not traits.uses_thresholds and cfg[f"{_RULE}.calibration"]:
        why = f"calibrates low and high, which rule: {rule} does not use; remove it"
        yield Problem(f"{_RULE}.calibration", why)
    by, pickers = cfg["model.mafa.negatives_by"], cfg["model.mafa.negatives"]
    if by in SCORES and pickers == "posterior" and not SCORES.entry(by).traits.compares_own:
        why = f"{by}: posterior needs similarities of own pairs, which are all 1 by it"
        yield Problem("model.mafa.negatives_by", f"{why}; use another picker, or similarity")


def _of_named(cfg: ConfigView) -> Iterator[Problem]:
    """Yield what the registered entries that the step is to use say of the config."""
    named: list[tuple[Registry[Any], str]] = [
        (PICKERS, "model.mafa.negatives"),
        (SOFT_LABELS, f"{_SOFT}.type"),
        (ITC_LOSSES, "model.mafa.itc_loss"),
        (SCORES, "model.mafa.negatives_by"),
        (SCORES, f"{_RULE}.score"),
        (RULES, f"{_RULE}.rule"),
    ]
    entries = [known.entries().get(cfg[key] or "") for known, key in named]
    entries += [LOSSES.entry(name) for name in LOSSES if cfg[f"{_WEIGHTS}.{name}"]]
    for entry in {id(one): one for one in entries}.values():
        yield from problems_of_entry(entry, cfg)


def _warm_up(cfg: ConfigView) -> Iterator[Problem]:
    """Yield contradictions between the pickers of the first epochs and of the later ones."""
    key = "model.mafa.warm_up_epochs"
    name, epochs, end = cfg["model.mafa.warm_up_negatives"], cfg[key], cfg["run.max_epoch"]
    if name and epochs == 0:
        why = f"is 0, but warm_up_negatives is {name}; give the number of first epochs that use it"
        yield Problem(key, f"{why}, or remove it")
    elif epochs and name is None and "model.mafa.warm_up_negatives" not in cfg.wrong:
        why = f"is {epochs}, but no warm_up_negatives is named; name a picker, such as uniform"
        yield Problem(key, why)
    elif epochs and name == cfg["model.mafa.negatives"]:
        yield Problem(key, f"has no effect: negatives is {name} as well", is_note=True)
    elif cfg.training and None not in (epochs, end) and epochs >= end > 0:
        why = f"{epochs} is not below max_epoch: no epoch uses model.mafa.negatives"
        yield Problem(key, why, is_note=True)


def _form_of_itc(cfg: ConfigView) -> Iterator[Problem]:
    """Yield contradictions between the form of ITC, its labels and the temperature."""
    key = "model.mafa.itc_loss"
    form, kind = cfg[key], cfg[f"{_SOFT}.type"]
    if form not in ITC_LOSSES:
        return
    if cfg[f"{_WEIGHTS}.itc"] == 0:
        if form != "softmax":
            yield Problem(key, "has no effect: loss_weights.itc is 0", is_note=True)
        return
    traits = ITC_LOSSES.entry(form).traits
    with_momentum = kind in SOFT_LABELS and SOFT_LABELS.entry(kind).traits.needs_momentum
    if with_momentum and not traits.queue and cfg["model.queue_size"]:
        why = f"{form} cannot use the candidates of the momentum queue, which {_SOFT}.type: {kind}"
        yield Problem(key, f"{why} has; use softmax, other labels, or model.queue_size: 0")
    smoothing = kind == "one_hot" and cfg[f"{_SOFT}.label_smoothing"]
    if not traits.soft_labels and (kind not in (None, "one_hot") or smoothing):
        given = (
            f"{_SOFT}.label_smoothing is {smoothing}" if smoothing else f"{_SOFT}.type is {kind}"
        )
        why = f"{form} ignores soft labels, but {given}; use type: one_hot without label_smoothing"
        yield Problem(key, why)
    if traits.fixed_temperature and cfg.training:
        if cfg["model.mafa.learn_temperature"] is not False:
            why = f"must be False with itc_loss: {form}, which has no best temperature"
            yield Problem("model.mafa.learn_temperature", why)


def _soft_labels(cls: Any, cfg: ConfigView) -> Iterator[Problem]:
    kind = cfg[f"{_SOFT}.type"]
    with_momentum = kind in SOFT_LABELS and SOFT_LABELS.entry(kind).traits.needs_momentum
    if with_momentum and cfg["model.queue_size"] is None:
        why = f"{cfg['model.arch']} has no momentum encoders; use smoothed or one_hot"
        yield Problem(f"{_SOFT}.type", f"{kind}: {why}")
    for name in ("imc", "lmi"):
        if cfg[f"{_WEIGHTS}.{name}"] and not with_momentum:
            why = f"needs momentum encoders; {_SOFT}.type is {kind}, use momentum"
            yield Problem(f"{_WEIGHTS}.{name}", why)
    random = cfg.training and cfg["run.grit.enabled"] is False
    soft = kind in SOFT_LABELS and kind != "one_hot" and not with_momentum
    if random and soft and cfg[f"{_SOFT}.start_epoch"] is None:
        why = "first grouped epoch, and run.grit.enabled is False: labels stay one-hot; use 0"
        yield Problem(f"{_SOFT}.start_epoch", why, is_note=True)
