"""Check frozen models, Con-D and the encoder of negatives: what they can do, and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavis.common.registry import registry

from lavis_mafa.config.check import Report, Settings, ask_class, suggest, validated
from lavis_mafa.config.defaults import default_or_report
from lavis_mafa.config.key import is_url, keys_in, section_of, with_keys
from lavis_mafa.config.registered import BUILD_KEYS, mafa_key
from lavis_mafa.config.weights import CON_D, FROZEN, check_frozen_files
from lavis_mafa.models.con_d.discriminators import DISCRIMINATORS
from lavis_mafa.models.traits import judges, negatives_encoders, traits_of


def check_con_d(
    given: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Check a Con-D config given without a run, with the keys of ``model.mafa.con_d``.

    Args:
        known: the ``model`` config of the command. A file that the checkpoint records is used only
            if this config names it too.

    Returns:
        The config with all defaults, and the problems (empty if it is valid).
    """
    mafa = mafa_key(given)
    con_d = with_keys(keys_in(mafa)["con_d"], {}, nullable=False)
    # Put where it stands in a whole config: problems then name its keys by their full path.
    keys = {"model": section_of({"mafa": section_of({"con_d": con_d})})}
    report = Report(keys)
    config: dict[str, Any] = {"model": {"mafa": {"con_d": dict(given)}}}
    config = validated(config, report, {})
    config["model"] = {**(known or {}), **config["model"]}
    check_frozen(config, report)
    return config["model"]["mafa"]["con_d"], report.problems


def check_frozen(config: Mapping[str, Any], report: Report) -> None:
    """Check that frozen models have weights, a checkpoint or published ones of their type, and
    what they can do."""
    s = Settings(config, report)
    for path in FROZEN:
        _check_weights(path, s, report)
    arch = s[f"{CON_D}.arch"]
    if arch in DISCRIMINATORS:
        ask_class(DISCRIMINATORS[arch], "model", config, report)
    first = s[f"{CON_D}.first"]
    by_number = [hasattr(DISCRIMINATORS.get(one or ""), "probability") for one in (first, arch)]
    if first is not None and by_number != [True, False]:
        why = (
            f"{first} before {arch}; expected one without pictures, such as captions, then a model"
        )
        report.add(f"{CON_D}.first", why)
    for path in FROZEN:
        check_frozen_files(path, s, report)


def _check_weights(path: str, s: Settings, report: Report) -> None:
    arch, model_type = s[f"{path}.arch"], s[f"{path}.model_type"]
    if arch is None or arch in DISCRIMINATORS or f"{path}.model_type" in report.bad:
        return
    usable = judges if path == CON_D else negatives_encoders
    # None: a user's class, which can only be checked once it is built; see `backbone_of`.
    if traits_of(arch).can_judge is False:
        why = "cannot judge pairs" if path == CON_D else "has no features of ITC that we can use"
        report.add(f"{path}.arch", f"{arch} {why}; use one of {', '.join(usable())}")
        return
    if path != CON_D and not traits_of(arch).has_temperature:
        why = "has no temperature of ITC"
        report.add(f"{path}.arch", f"{arch} {why}; use one of {', '.join(usable())}")
        return
    shipped = default_or_report(
        f"{path}.model_type", registry.get_model_class(arch), model_type, report
    )
    model = shipped.get("model", {})
    weights = [model.get(n) for n in ("finetuned", "pretrained") if model.get(f"load_{n}", True)]
    downloads = any(is_url(url or "") for url in weights)
    for name in s[f"{path}.model"] or {}:
        known = [*model, *BUILD_KEYS]
        if name not in known:
            report.add(f"{path}.model.{name}", f"{arch} has no such key; {suggest(name, known)}")
    size = s[f"{path}.image_size"]
    patch = (model.get("vit") or {}).get("patch_size") or traits_of(arch).patch_size
    if size and size % patch:
        report.add(
            f"{path}.image_size", f"{size} is not a multiple of its ViT's patch size {patch}"
        )
    if shipped and not s[f"{path}.checkpoint"] and not downloads:
        what = "a Con-D" if path == CON_D else "a model that was trained with ITC"
        why = f"{arch} has no published weights of that type; name the checkpoint of {what}"
        report.missing(f"{path}.checkpoint", why)
