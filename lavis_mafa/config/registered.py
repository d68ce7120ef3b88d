"""Keys of one config: those of its model, task and data sets, and of registered entries.

Entries may come from this package, from installed plugins and from users' files.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lavis.common.registry import registry
from pydantic.fields import FieldInfo

from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.options import Option
from lavis_mafa.algorithm.registry import MAFA, Registry
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.config.check import Report, suggest
from lavis_mafa.config.defaults import default_or_report, default_yaml, merge
from lavis_mafa.config.key import (
    UNSET,
    Keys,
    changed,
    keys_in,
    keys_of,
    kind_of,
    make_key,
    number_key,
    option_of,
    section_of,
    with_keys,
)
from lavis_mafa.config.lavis_classes import declared
from lavis_mafa.config.schema import (
    DatasetOptions,
    FileOptions,
    ModelOptions,
    ModelParts,
    OurModelOptions,
    ProcessorArguments,
    RunOptions,
)
from lavis_mafa.loggers import LOGGERS
from lavis_mafa.models.con_d.discriminators import DISCRIMINATORS
from lavis_mafa.models.traits import traits_of
from lavis_mafa.problems import Registered

FILE, RUN, MODEL, DATASET = map(keys_of, (FileOptions, RunOptions, ModelOptions, DatasetOptions))
OURS, PARTS, ARGUMENTS = map(keys_of, (OurModelOptions, ModelParts, ProcessorArguments))
BUILD_KEYS = ("arch", "model_type", "load_pretrained", "pretrained", "load_finetuned", "finetuned")
_MODELS, _JUDGES = Registered("model"), Registered("model", DISCRIMINATORS)
ANY = make_key(Any, Option("passed on unchanged", "LAVIS"))


def own_keys(one: Registry[Any], chosen: Any = ...) -> dict[str, FieldInfo]:
    """Return a mapping with the settings of each registered entry, by the entry's name.

    Args:
        chosen: name of the only entry whose settings are filled in, as those of the others would
            be recorded for nothing; ``...``: all.
    """
    return {
        name: section_of(
            keys_of(entry.settings),
            f"settings of the {one.kind} {name}",
            entry.source,
            default={} if chosen in (..., name) else UNSET,
        )
        for name, entry in one.entries().items()
        if entry.settings is not None
    }


def run_key(run: Any) -> FieldInfo:
    """Return the key ``run`` with the options of the config's task, of all loggers and of all
    hardness schedules."""
    run = run if isinstance(run, Mapping) else {}
    grit = run.get("grit")
    schedule = grit.get("schedule") if isinstance(grit, Mapping) else None
    options = declared("task", run.get("task"), "run_options")
    doc = "settings of loggers, by their names"
    keys = {
        **({} if options is None else keys_of(options)),
        **RUN,
        "logger_options": section_of(own_keys(LOGGERS, None), doc, default={}),
        "grit": with_keys(RUN["grit"], own_keys(HARDNESS, schedule)),
    }
    return with_keys(FILE["run"], keys)


def mafa_key(con_d_given: Any = None) -> FieldInfo:
    """Return the key ``model.mafa`` with the settings of all entries registered so far.

    Args:
        con_d_given: the section ``con_d`` as the user wrote it.
    """
    mafa = OURS["mafa"]
    keys = keys_in(mafa)
    weights, con_d = keys["loss_weights"], keys["con_d"]
    further = {
        name: make_key(float, Option(f"weight of {name}; 0: off", entry.source, low=0), 0.0)
        for name, entry in LOSSES.entries().items()
        if name not in keys_in(weights)
    }
    arch, checkpoint = keys_in(con_d)["arch"], keys_in(con_d)["checkpoint"]
    chosen = con_d_given.get("arch") if isinstance(con_d_given, Mapping) else None
    chosen = chosen if isinstance(chosen, str) else None
    path = getattr(DISCRIMINATORS.get(chosen or ""), "checkpoint_path", "checkpoint")
    of_con_d = {
        **own_keys(DISCRIMINATORS, chosen),
        "arch": changed(arch, choices=_JUDGES),
        "checkpoint": changed(checkpoint, path=path),
    }
    # `posterior` is a registered label and also a field of the step's settings.
    built_in = {field.name for field in fields(StepSettings)}
    own = {name: key for one in MAFA.registries for name, key in own_keys(one).items()}
    encoder = keys["negatives_encoder"]
    arch = changed(keys_in(encoder)["arch"], choices=_MODELS)
    keys = {
        "loss_weights": with_keys(weights, further),
        "con_d": with_keys(con_d, of_con_d),
        "negatives_encoder": with_keys(encoder, {"arch": arch}),
        **{name: key for name, key in own.items() if name not in built_in},
    }
    return with_keys(mafa, keys)


def model_key(user: Mapping[str, Any], report: Report) -> tuple[dict[str, Any], FieldInfo]:
    """Return the default YAML of the model and the key ``model`` that its arch accepts."""
    arch, model_type, mafa = user.get("arch"), user.get("model_type"), user.get("mafa")
    con_d = mafa.get("con_d") if isinstance(mafa, dict) else None
    ours = {**OURS, **PARTS, "mafa": mafa_key(con_d)}
    cls = registry.get_model_class(arch) if isinstance(arch, str) else None
    if cls is None:  # the arch is reported when it is checked
        return {}, with_keys(FILE["model"], ours)
    shipped: dict[str, Any] = {}
    types = getattr(cls, "PRETRAINED_MODEL_CONFIG_DICT", {})
    if model_type is None:
        report.add("model.model_type", f"missing; {arch} has {', '.join(types)}; use one of them")
    else:
        shipped = default_or_report("model.model_type", cls, model_type, report)
    # If the model type is wrong, the keys of the first type are accepted instead.
    names = shipped or default_or_report("", cls, None, Report({}))
    traits, keys = traits_of(cls), dict(MODEL)
    if not traits.loads_with_our_loader:
        for name in ours:
            if name in user and name not in names.get("model", {}):
                why = f"not read by {arch}; only models of lavis_mafa and their subclasses read it"
                report.add(f"model.{name}", f"{why}; remove it")
                keys[name] = ANY
    else:
        # Keys that only LAVIS's other models read would have no effect here, so reject them.
        read = {*OURS, *BUILD_KEYS, *names.get("model", {})}
        for other in types:
            read |= default_yaml(cls, other).get("model", {}).keys()
        keys = {name: key for name, key in {**MODEL, **ours}.items() if name in read}
        if not traits.trains_by_step:
            del keys["mafa"]
            if "mafa" in user:
                why = f"has no effect: {arch} does not train by the step of lavis_mafa"
                report.add("model.mafa", f"{why}; remove it")
                keys["mafa"] = ANY
    if hasattr(cls, "model_options"):
        keys |= keys_of(cls.model_options)
    return shipped, section_of(extended(keys, names.get("model", {})), "the model")


def datasets_key(user: Mapping[str, Any], report: Report) -> tuple[dict[str, Any], FieldInfo]:
    """Return the default YAMLs of the datasets, by builder, and the key ``datasets``."""
    shipped: dict[str, Any] = {}
    keys: dict[str, FieldInfo] = {}
    for name, given in user.items():
        builder = registry.get_builder_class(name)
        if builder is None:
            known = registry.list_datasets()
            report.add(f"datasets.{name}", f"no such builder; {suggest(name, known)}")
            keys[name] = ANY
            continue
        path = f"datasets.{name}"
        which = given.get("type", "default") if isinstance(given, dict) else "default"
        found = default_or_report(f"{path}.type", builder, which, report).get("datasets", {})
        # In LAVIS's default YAMLs the dataset's name may differ from the builder's.
        shipped[name] = next(iter(found.values()), {})
        of_builder = extended(_dataset_keys(builder), shipped[name])
        of_builder |= _processors(of_builder, merge(shipped[name], given))
        keys[name] = section_of(of_builder, "one dataset")
    return shipped, section_of(keys, "datasets, by registered builder")


def _dataset_keys(builder: Any) -> dict[str, FieldInfo]:
    """Return the keys of ``datasets.<builder>``, with the options of the builder."""
    options = getattr(builder, "build_options", None)
    added = {} if options is None else keys_of(options)
    return {**DATASET, "build_info": with_keys(DATASET["build_info"], added)}


def _processors(keys: Keys, dataset: Any) -> dict[str, FieldInfo]:
    """Return the processors of a dataset with the constructor arguments of the chosen ones."""
    found = {}
    for kind in ("vis_processor", "text_processor"):
        chosen = dataset.get(kind) if isinstance(dataset, dict) else None
        phases = keys_in(keys[kind])
        for phase, key in phases.items():
            given = chosen.get(phase) if isinstance(chosen, dict) else None
            name = given.get("name") if isinstance(given, dict) else None
            cls = registry.get_processor_class(name) if isinstance(name, str) else None
            arguments = [*inspect.signature(cls.__init__).parameters.values()][1:] if cls else []
            takes_any = cls is None or any(one.kind == one.VAR_KEYWORD for one in arguments)
            named = {
                one.name: ARGUMENTS.get(one.name) or _like(one.default)
                for one in arguments
                if one.kind != one.VAR_KEYWORD
            }
            phases[phase] = with_keys(key, named, is_open=takes_any)
        found[kind] = with_keys(keys[kind], phases)
    return found


def extended(keys: Keys, shipped: Mapping[str, Any]) -> dict[str, FieldInfo]:
    """Return keys and those of a default YAML; our own mappings are complete already."""
    keys = dict(keys)
    for name, value in shipped.items():
        if name not in keys:
            keys[name] = _like(value)
        elif isinstance(value, dict) and option_of(keys[name]).source == "LAVIS":
            if kind_of(keys[name]).keys is not None:
                keys[name] = with_keys(keys[name], extended(keys_in(keys[name]), value))
    return keys


def _like(value: Any) -> FieldInfo:
    """Return a key that accepts values of the type of ``value``."""
    doc = "see the default YAML"
    if isinstance(value, bool):
        return make_key(bool | None, Option(doc, "LAVIS"))
    if isinstance(value, int | float):
        return number_key(Option(doc, "LAVIS"))
    if isinstance(value, dict):
        keys = {str(name): _like(child) for name, child in value.items()}
        return section_of(keys, doc, "LAVIS", nullable=True)
    return ANY


def names_of(kind: str, name: Any) -> list[str]:
    """Return a registered name and the registered names of its class's base classes.

    Args:
        kind: table of LAVIS's registry, such as ``task``.
    """
    table: Mapping[str, type] = registry.mapping[f"{kind}_name_mapping"]
    cls = table.get(name) if isinstance(name, str) else None
    bases = () if cls is None else cls.__mro__
    others = [other for base in bases for other, known in table.items() if known is base]
    return list(dict.fromkeys([str(name), *others]))
