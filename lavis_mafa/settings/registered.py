"""Keys of one config: those of its model, task and data sets, and of registered entries.

Entries may come from this package and from users' files.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from lavis.common.registry import registry
from omegaconf import OmegaConf

from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.options import Option, suggest
from lavis_mafa.algorithm.registry import MAFA, Registry
from lavis_mafa.compat.traits import traits_of
from lavis_mafa.io.problems import Problem, Registered
from lavis_mafa.judges.discriminators import DISCRIMINATORS
from lavis_mafa.settings.check import UNSET, Key, Keys, keys_of, section_of
from lavis_mafa.settings.schema import (
    BLANK,
    DATASET,
    FILE,
    LAVIS_DEFAULTS,
    LAVIS_MODEL,
    LAVIS_RUN,
    OURS,
    OWN_MODEL,
    OWN_RUN,
    PARTS,
)


def _lavis_keys(listed: Mapping[Any, tuple[str, ...]]) -> dict[str, Key]:
    """Return the keys of a table of LAVIS's."""
    option = Option("see LAVIS", "LAVIS", words=BLANK)
    of_type = [(one, name) for one, names in listed.items() for name in names]
    return {name: Key(one, option, LAVIS_DEFAULTS.get(name, UNSET)) for one, name in of_type}


LISTED = [*map(_lavis_keys, (LAVIS_RUN, LAVIS_MODEL)), DATASET]
RUN = {**OWN_RUN, **LISTED[0]}
MODEL = {**OWN_MODEL, **LISTED[1]}
BUILD_KEYS = ("arch", "model_type", "load_pretrained", "pretrained", "load_finetuned", "finetuned")
_ANY = Key(Any, Option("passed on unchanged", "LAVIS"))

# Class attributes of LAVIS's tasks, which we cannot edit. `asks_of_model` is the method of a model
# that evaluation calls, None: no particular one; `requires_k_test`: whether ``run.k_test`` must be
# given for models that re-rank. A task may also have `run_options`, a settings class whose fields
# are further keys of ``run``; a builder `splits`, the names of the splits that a run may evaluate.
_LAVIS_TASKS: Mapping[str, Mapping[str, Any]] = {
    "captioning": {"asks_of_model": "generate"},
    "vqa": {"asks_of_model": "predict_answers"},
    "gqa": {"asks_of_model": "predict_answers"},
    "aok_vqa": {"asks_of_model": None},
    "retrieval": {"requires_k_test": True},
    "multimodal_classification": {"asks_of_model": "predict"},
}


def declared(kind: str, name: Any, attribute: str, default: Any = None) -> Any:
    """Return an attribute that a registered class declares or inherits, see `_LAVIS_TASKS`.

    Args:
        kind: ``task`` or ``builder``, a table of LAVIS's registry.
        name: the class's registered name.
    """
    known: Mapping[str, Any] = registry.mapping[f"{kind}_name_mapping"]
    cls = known.get(name) if isinstance(name, str) else None
    of_lavis = {known.get(one): values for one, values in _LAVIS_TASKS.items()}
    for base in () if cls is None else cls.__mro__:
        for values in (vars(base), of_lavis.get(base, {})):
            if attribute in values:
                return values[attribute]
    return default


def keys_for(
    user: Mapping[str, Any],
) -> tuple[dict[str, Any], Keys, dict[str, Any], list[Problem]]:
    """Return the config to check, its keys, and the default YAMLs of its model and datasets.

    The problems are those of the names that determine the keys, such as ``model.arch``.
    """
    # A key that looks like a number is one to YAML.
    user = {str(name): value for name, value in user.items()}
    keys = {**FILE, "run": _run_key(user.get("run"))}
    shipped: dict[str, Any] = {}
    problems: list[Problem] = []
    if isinstance(user.get("model"), dict):
        shipped, keys["model"], problems = _model_key(user["model"])
    if isinstance(user.get("datasets"), dict):
        user["datasets"] = {str(name): value or {} for name, value in user["datasets"].items()}
        found = {name: _dataset_key(name, one) for name, one in user["datasets"].items()}
        shipped["datasets"] = {name: one[0] for name, one in found.items()}
        keys["datasets"] = section_of({name: one[1] for name, one in found.items()})
        problems += [problem for one in found.values() for problem in one[2]]
        if not found:
            problems.append(Problem("datasets", "is empty; name at least one builder"))
    return user, keys, shipped, problems


def own_keys(one: Registry[Any], chosen: Any = ...) -> dict[str, Key]:
    """Return a section with the settings of each registered entry, by the entry's name.

    Args:
        chosen: name of the only entry whose settings are filled in, as those of the others would
            be recorded for nothing; ``...``: all.
    """
    return {
        name: section_of(
            keys_of(entry.settings),
            f"settings of the {one.kind} {name}",
            entry.source,
            {} if chosen in (..., name) else UNSET,
        )
        for name, entry in one.entries().items()
        if entry.settings is not None
    }


def _run_key(run: Any) -> Key:
    """Return the key ``run`` with the options of its task and of all hardness schedules."""
    run = run if isinstance(run, Mapping) else {}
    schedule = run["grit"].get("schedule") if isinstance(run.get("grit"), Mapping) else None
    options = declared("task", run.get("task"), "run_options")
    keys = {} if options is None else keys_of(options)
    keys |= {**RUN, "grit": RUN["grit"].having(own_keys(HARDNESS, schedule))}
    return dataclasses.replace(FILE["run"], keys=keys)


def mafa_key(con_d_given: Any = None) -> Key:
    """Return the key ``model.mafa`` with the settings of all entries registered so far.

    Args:
        con_d_given: the section ``con_d`` as the user wrote it.
    """
    keys: Any = OURS["mafa"].keys
    weights, con_d = keys["loss_weights"], keys["con_d"]
    further = {
        name: Key(float, Option(f"weight of {name}; 0: off", entry.source, low=0), 0.0)
        for name, entry in LOSSES.entries().items()
        if name not in weights.keys
    }
    chosen = con_d_given.get("arch") if isinstance(con_d_given, Mapping) else None
    chosen = chosen if isinstance(chosen, str) else None
    path = getattr(DISCRIMINATORS.get(chosen or ""), "checkpoint_path", "file, folder or URL")
    of_con_d = {
        **own_keys(DISCRIMINATORS, chosen),
        "arch": con_d.keys["arch"].about(choices=Registered("model", DISCRIMINATORS)),
        "checkpoint": con_d.keys["checkpoint"].about(path=path),
    }
    own = {name: key for one in MAFA.registries for name, key in own_keys(one).items()}
    own["loss_weights"] = weights.having(further)
    own["con_d"] = con_d.having(of_con_d)
    return OURS["mafa"].having(own)


def _model_key(user: Mapping[str, Any]) -> tuple[dict[str, Any], Key, list[Problem]]:
    """Return the default YAML of the model, the key ``model`` that its arch accepts, and what is
    wrong with the name of its type."""
    arch, model_type, mafa = user.get("arch"), user.get("model_type"), user.get("mafa")
    con_d = mafa.get("con_d") if isinstance(mafa, dict) else None
    ours = {**OURS, **PARTS, "mafa": mafa_key(con_d)}
    cls = registry.get_model_class(arch) if isinstance(arch, str) else None
    if cls is None:  # the arch is reported when it is checked
        return {}, FILE["model"].having({**MODEL, **ours}), []
    types, traits = types_of(cls), traits_of(cls)
    shipped, problems = default_or_none("model.model_type", cls, model_type)
    if model_type is None:
        why = f"missing; {arch} has {', '.join(types)}; use one of them"
        problems = [Problem("model.model_type", why)]
    # If the model type is wrong, the keys of the first type are accepted instead.
    names = (shipped or default_or_none("", cls, None)[0]).get("model", {})
    keys = dict(MODEL)
    if traits.loads_with_our_loader:
        # Keys that only LAVIS's other models read would have no effect here, so reject them.
        read = {*OURS, *BUILD_KEYS, *names}
        for other in types:
            read |= default_yaml(cls, other).get("model", {}).keys()
        keys = {name: key for name, key in {**MODEL, **ours}.items() if name in read}
        if not traits.trains_by_step:
            del keys["mafa"]
    if hasattr(cls, "model_options"):
        keys |= keys_of(cls.model_options)
    return shipped, section_of(_extended(keys, names), "the model"), problems


def _dataset_key(name: str, given: Any) -> tuple[dict[str, Any], Key, list[Problem]]:
    """Return the default YAML of one dataset, its key, and what is wrong with its names."""
    path, builder = f"datasets.{name}", registry.get_builder_class(name)
    if builder is None:
        why = f"no such builder; {suggest(name, registry.list_datasets())}"
        return {}, _ANY, [Problem(path, why)]
    which = given.get("type", "default") if isinstance(given, dict) else "default"
    found, problems = default_or_none(f"{path}.type", builder, which)
    # In LAVIS's default YAMLs the dataset's name may differ from the builder's.
    shipped: dict[str, Any] = next(iter(found.get("datasets", {}).values()), {})
    options = getattr(builder, "build_options", None)
    info = DATASET["build_info"].having({} if options is None else keys_of(options))
    keys = _extended({**DATASET, "build_info": info}, shipped)
    keys |= dict(_processors(keys, merge(shipped, given)))
    return shipped, section_of(keys, "one dataset"), problems


def _processors(keys: Keys, dataset: Any) -> Iterator[tuple[str, Key]]:
    """Yield the processors of a dataset with the constructor arguments of the chosen ones."""
    for kind in ("vis_processor", "text_processor"):
        chosen = dataset.get(kind) if isinstance(dataset, dict) else None
        phases = dict(keys[kind].keys or {})
        for phase, key in phases.items():
            given = chosen.get(phase) if isinstance(chosen, dict) else None
            name = given.get("name") if isinstance(given, dict) else None
            cls = registry.get_processor_class(name) if isinstance(name, str) else None
            arguments = [*inspect.signature(cls.__init__).parameters.values()][1:] if cls else []
            named = [one for one in arguments if one.kind != one.VAR_KEYWORD]
            further = {one.name: _like(one.default) for one in named}
            further |= {"image_size": MODEL["image_size"]} if "image_size" in further else {}
            phases[phase] = key.having(further, is_open=cls is None or len(named) < len(arguments))
        yield kind, keys[kind].having(phases)


def _extended(keys: Keys, shipped: Mapping[str, Any]) -> dict[str, Key]:
    """Return keys and those of a default YAML; our own sections are complete already."""
    keys = dict(keys)
    for name, value in shipped.items():
        if name not in keys:
            keys[name] = _like(value)
        elif isinstance(value, dict) and keys[name].option.source == "LAVIS":
            if keys[name].keys is not None:
                keys[name] = keys[name].having(_extended(keys[name].keys or {}, value))
    return keys


def _like(value: Any) -> Key:
    """Return a key that accepts values of the type of ``value``."""
    option = Option("see the default YAML", "LAVIS", words=BLANK)
    if isinstance(value, dict):
        keys = {str(name): _like(child) for name, child in value.items()}
        return Key(dict | None, option, UNSET, keys)
    types = {bool: bool | None, int: int | float | None, float: int | float | None}
    return Key(types.get(type(value), Any), option)


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


# Defaults from the YAMLs shipped with models and builders


def types_of(cls: Any) -> Mapping[str, str]:
    """Return the files of the default YAMLs of a model or builder class, by type."""
    of_model = getattr(cls, "PRETRAINED_MODEL_CONFIG_DICT", None)
    return of_model or getattr(cls, "DATASET_CONFIG_DICT", {})


def default_yaml(cls: Any, which: str | None) -> dict[str, Any]:
    """Return the default YAML of a model or builder class as plain data.

    Args:
        which: type of the YAML; None: the first one listed.

    Raises:
        LookupError: the class has no such type; the message lists its types.
        OSError: the YAML cannot be read.
    """
    table = types_of(cls)
    which = next(iter(table), "") if which is None else which
    if which not in table:
        raise LookupError(
            f"{which!r} is not a type of {cls.__name__}; {suggest(str(which), table)}"
        )
    path = cls.default_config_path(which)
    return copy.deepcopy(_read(path, os.stat(path).st_mtime_ns))


@functools.lru_cache(maxsize=256)  # parsing takes most of the time of a check
def _read(path: str, changed: int) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return plain if isinstance(plain, dict) else {}


def default_or_none(path: str, cls: Any, which: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Return the default YAML of ``cls``, or {} and the problem of the key ``path``."""
    try:
        # A type that looks like a number, such as 224, is one to YAML.
        return default_yaml(cls, which if which is None else str(which)), []
    except (LookupError, OSError) as error:
        return {}, [Problem(path, str(error))]


def merge(below: Any, above: Any) -> Any:
    """Merge ``above`` over ``below``: mappings key by key; other values are replaced."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return copy.deepcopy(above)
    merged = copy.deepcopy(dict(below))
    for name, value in above.items():
        merged[name] = merge(below[name], value) if name in below else copy.deepcopy(value)
    return merged
