"""Keys of registered entries: of this package, of installed plugins and of users' files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from lavis.common.registry import registry

from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.algorithm.losses import LOSSES
from lavis_mafa.algorithm.registry import MAFA, Registry
from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.config.key import UNSET, Key, keys_of
from lavis_mafa.config.schema import DATASET, RUN, SCHEMA
from lavis_mafa.loggers import LOGGERS
from lavis_mafa.models.con_d.discriminator import DISCRIMINATORS


def mafa_key(con_d_given: Any = None) -> Key:
    """Return the key ``model.mafa`` with the settings of all entries registered so far.

    Args:
        con_d_given: the section ``con_d`` as the user wrote it.
    """
    mafa = SCHEMA.keys["model"].keys["mafa"]
    weights, con_d = mafa.keys["loss_weights"], mafa.keys["con_d"]
    further = {
        name: Key("float", f"weight of {name}; 0: off", entry.source, default=0.0, low=0)
        for name, entry in LOSSES.entries().items()
        if name not in weights.keys
    }
    arch = replace(con_d.keys["arch"], words=tuple(DISCRIMINATORS))
    checkpoint = con_d.keys["checkpoint"]
    chosen = con_d_given.get("arch") if isinstance(con_d_given, Mapping) else None
    if isinstance(chosen, str) and chosen in DISCRIMINATORS:
        path = getattr(DISCRIMINATORS[chosen], "checkpoint_path", checkpoint.path)
        checkpoint = replace(checkpoint, path=path)
    # The settings of other discriminators are not filled in: they would be recorded for nothing.
    settings = {
        name: key if name == chosen else replace(key, default=UNSET)
        for name, key in own_keys(DISCRIMINATORS).items()
    }
    of_con_d = {**con_d.keys, **settings, "arch": arch, "checkpoint": checkpoint}
    keys = {
        **mafa.keys,
        "loss_weights": replace(weights, keys={**weights.keys, **further}),
        "con_d": replace(con_d, keys=of_con_d),
    }
    # `posterior` is a registered label and also a field of the step's settings.
    built_in = {field.name for field in fields(StepSettings)}
    for one in sorted(MAFA.registries, key=lambda one: one.kind):
        keys.update({name: key for name, key in own_keys(one).items() if name not in built_in})
    return replace(mafa, keys=keys)


def own_keys(one: Registry[Any]) -> dict[str, Key]:
    """Return a mapping key with the settings of each registered entry, by the entry's name."""
    return {
        name: Key(
            "mapping",
            f"settings of the {one.kind} {name}",
            entry.source,
            default={},
            keys=keys_of(entry.settings),
        )
        for name, entry in one.entries().items()
        if entry.settings is not None
    }


def options_of_class(cls: Any, attribute: str) -> dict[str, Key]:
    """Return the keys of the settings class that a class declares as ``attribute``.

    Args:
        attribute: ``model_options`` (keys of ``model``), ``build_options`` (of ``build_info``) or
            ``run_options`` (of ``run``).
    """
    settings = getattr(cls, attribute, None)
    return {} if settings is None else keys_of(settings)


def dataset_keys(builder: Any) -> dict[str, Key]:
    """Return the keys of ``datasets.<builder>``, with the options of the builder."""
    info = DATASET["build_info"]
    info = replace(info, keys={**info.keys, **options_of_class(builder, "build_options")})
    return {**DATASET, "build_info": info}


def run_key(run: Any) -> Key:
    """Return the key ``run`` with the options of the config's task, of all loggers and of all
    hardness schedules."""
    task = run.get("task") if isinstance(run, Mapping) else None
    cls = registry.get_task_class(task) if isinstance(task, str) else None
    # Not filled in: every config would list the settings of loggers that it does not name.
    of_loggers = {name: replace(key, default=UNSET) for name, key in own_keys(LOGGERS).items()}
    options = replace(RUN["logger_options"], keys=of_loggers)
    keys = {
        **options_of_class(cls, "run_options"),
        **RUN,
        "logger_options": options,
        "grit": grit_key(run.get("grit") if isinstance(run, Mapping) else None),
    }
    return replace(SCHEMA.keys["run"], keys=keys)


def grit_key(given: Any = None) -> Key:
    """Return the key ``run.grit`` with the settings of all registered hardness schedules.

    Args:
        given: the section as the user wrote it.
    """
    chosen = given.get("schedule") if isinstance(given, Mapping) else None
    # The settings of other schedules are not filled in: they would be recorded for nothing.
    settings = {
        name: key if name == chosen else replace(key, default=UNSET)
        for name, key in own_keys(HARDNESS).items()
    }
    return replace(RUN["grit"], keys={**RUN["grit"].keys, **settings})


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
