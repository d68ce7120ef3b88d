"""Load a config: merge file, options and default YAMLs, check it and fill in the defaults.

Precedence: ``--options``, then the file, then the default YAMLs of the model type and of every
dataset's type (chosen after the options are merged), then the schema's defaults.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from lavis.common.config import Config
from lavis.common.registry import registry
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lavis_mafa.config.calibration import take_thresholds
from lavis_mafa.config.check import Report, check_together, suggest, walk
from lavis_mafa.config.con_d import BUILD_KEYS, check_kept_images, check_weights
from lavis_mafa.config.data import check_data
from lavis_mafa.config.defaults import default_or_report, default_yaml, fill
from lavis_mafa.config.key import Key
from lavis_mafa.config.recorded import is_run, recorded_config
from lavis_mafa.config.registered import dataset_keys, mafa_key, names_of, options_of_class, run_key
from lavis_mafa.config.run import check_run
from lavis_mafa.config.schema import ANY, ARGUMENTS, MODEL, MODEL_MAFA, MODEL_PARTS, SCHEMA
from lavis_mafa.config.weights import check_weight_files
from lavis_mafa.io.project_files import near_names, project_file
from lavis_mafa.io.yaml_files import check_yaml, check_yaml_file
from lavis_mafa.models.con_d.frozen import FROZEN_MODELS
from lavis_mafa.models.traits import traits_of
from lavis_mafa.plugins import PluginError, load_plugins
from lavis_mafa.problems import ConfigError

logger = logging.getLogger(__name__)


class MafaConfig(Config):
    """Extend LAVIS's `Config` by checks that run before anything is built.

    It has all attributes that LAVIS's code reads (``run_cfg``, ``model_cfg``, ``datasets_cfg``,
    ``config``, ``to_dict()``, ``pretty_print()``, ``args``) and is registered like LAVIS's. The
    schema's defaults are filled in, so that ``cfg.run_cfg.grit.queue_size`` can be read directly.

    Args:
        args: has ``cfg_path`` and ``options``, as ``train.py`` parses them.
        machine: also check that files and devices exist.

    Attributes:
        notes: warnings about a config that works.

    Raises:
        ConfigError: lists every problem found.
    """

    def __init__(self, args: Any, machine: bool = True) -> None:
        self.args = args
        self.notes: list[str] = []
        problems: list[str] = []
        user = _read(str(args.cfg_path), getattr(args, "options", None), problems)
        if user is None:
            raise ConfigError(str(args.cfg_path), problems)
        _load_plugins(user, problems)
        config, found, self.notes = complete(user, machine)
        if problems or found:
            raise ConfigError(str(args.cfg_path), [*problems, *found])
        self.config = OmegaConf.create(config)
        registry.register("configuration", self)


def load_config(
    cfg_path: str | Path, options: Sequence[str] | None = None, machine: bool = True
) -> MafaConfig:
    """Load and check a config.

    Args:
        cfg_path: YAML file with ``run``, ``model`` and ``datasets``, the name of a shipped one, or
            the folder of a run, which has recorded its config.
        options: ``["run.seed=7", ...]``, or LAVIS's older ``["run.seed", "7", ...]``.
        machine: also check that files and devices exist.

    Raises:
        ConfigError: lists every problem found, one a line.
    """
    args = argparse.Namespace(cfg_path=_find(cfg_path), options=list(options or []))
    config = MafaConfig(args, machine)
    for note in config.notes:
        logger.warning("%s", note)
    return config


def format_config(cfg: Config) -> str:
    """Return the whole config as YAML, ``run`` first."""
    plain = cfg.to_dict()
    parts = {name: plain[name] for name in ("run", "model", "datasets")}
    return OmegaConf.to_yaml(OmegaConf.create(parts))


def _find(cfg_path: str | Path) -> str:
    """Return the path of a config given by path or by the name of a shipped one."""
    if os.path.lexists(cfg_path):
        return str(cfg_path)
    try:
        found = project_file(cfg_path)
    except ValueError as error:
        raise ConfigError(str(cfg_path), [str(error)]) from None
    if found.is_file():
        return str(found)
    near = near_names(cfg_path)
    cure = (
        f"; did you mean {' or '.join(near)}?"
        if near
        else "; `lavis-mafa train --list` shows all names"
    )
    problem = f"{cfg_path}: cannot be read: no such file or shipped config{cure}"
    raise ConfigError(str(cfg_path), [problem])


def _load_plugins(user: Any, problems: list[str]) -> None:
    """Import installed plugins and those in ``run.plugins``, so that their keys are known."""
    run = user.get("run")
    names = run.get("plugins") if isinstance(run, dict) else None
    try:
        # The check reports a value that is not a list of strings.
        given = names if isinstance(names, list) else []
        load_plugins(name for name in given if isinstance(name, str))
    except PluginError as error:
        problems.append(f"run.plugins: {error}")


def _read(cfg_path: str, options: Sequence[str] | None, problems: list[str]) -> Any:
    """Merge file and options into plain data; return None if they cannot be read."""
    chosen = _read_options(list(options or []), problems)
    try:
        if is_run(cfg_path):
            return _merge(recorded_config(cfg_path), OmegaConf.to_container(chosen, resolve=True))
        check_yaml_file(cfg_path)
        loaded = OmegaConf.load(cfg_path)
        if not isinstance(loaded, DictConfig):
            problems.append(f"{cfg_path}: is not a mapping of run, model and datasets")
            return None
        merged = _merge(OmegaConf.to_container(loaded), OmegaConf.to_container(chosen))
        return OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except OSError as error:
        problems.append(f"{cfg_path}: cannot be read ({error.strerror or error})")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(f"{cfg_path}: is not YAML ({_one_line(error)})")
    except OmegaConfBaseException as error:
        problems.append(f"{error.full_key or cfg_path}: {str(error).splitlines()[0]}")
    except ValueError as error:
        problems.append(str(error))
    return None


def _read_options(options: list[str], problems: list[str]) -> DictConfig:
    """Parse options ``key=value``, or LAVIS's older ``key value``."""
    merged = OmegaConf.create()
    rest = iter(options)
    for option in rest:
        if "=" not in option:
            value = next(rest, None)
            if value is None:
                problems.append(f"--options: {option!r} has no value; write key=value")
                break
            option = f"{option}={value}"
        key = option.partition("=")[0]
        if not all(key.split(".")):
            problems.append(f"--options: {option!r} is not of the form key=value")
            continue
        try:
            check_yaml(option.partition("=")[2])
            # One by one, so that a bad option does not hide what is wrong with the others.
            merged.merge_with(OmegaConf.from_dotlist([option]))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(f"{key}: {option!r} cannot be read ({_one_line(error)})")
    return merged


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def complete(
    user: Mapping[str, Any], machine: bool = True
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Check a config given as plain data and add all defaults.

    Returns:
        The whole config, the problems (empty if it is valid) and the notes.
    """
    early = Report(SCHEMA)  # problems of the names that determine the schema, such as model.arch
    user, schema, shipped = schema_of(user, early)
    report = Report(schema, _active(user.get("run")), machine)
    # A wrong name is reported once, not again by each check that depends on it.
    report.bad |= early.bad
    # Values of the default YAMLs that the user did not change are not checked.
    trusted = {name: shipped[name] for name in ("model", "datasets") if name in shipped}
    config = walk(_merge(trusted, user), schema, "", report, trusted)
    take_thresholds(config, report)
    run = config.get("run")
    fill(config, schema, names_of("task", run.get("task")) if isinstance(run, dict) else [])
    check_together(config, report)
    check_run(config, report)
    check_data(config, report)
    check_weight_files(config, report)
    check_weights(config, report)
    check_kept_images(config, report)
    if "preprocess" in shipped:
        config["preprocess"] = shipped["preprocess"]
    return config, [*early.problems, *report.problems], report.notes


def schema_of(
    user: Mapping[str, Any], report: Report
) -> tuple[dict[str, Any], Key, dict[str, Any]]:
    """Return the config to check, the schema of its model and datasets, and their default YAMLs.

    Problems of the names that determine the schema, such as ``model.arch``, go into ``report``.
    """
    # A key that looks like a number is one to YAML.
    user = {str(name): value for name, value in user.items()}
    user = _without_frozen(user)
    shipped: dict[str, Any] = {}
    keys = {**SCHEMA.keys, "run": run_key(user.get("run"))}
    if isinstance(user.get("model"), dict):
        model, keys["model"] = _model_keys(user["model"], report)
        shipped.update(model)
    if isinstance(user.get("datasets"), dict):
        user["datasets"] = {str(name): value or {} for name, value in user["datasets"].items()}
        shipped["datasets"], keys["datasets"] = _datasets_keys(user["datasets"], report)
        if not user["datasets"]:
            report.add("datasets", "is empty; name at least one builder")
    return user, replace(SCHEMA, keys=keys), shipped


def _without_frozen(user: dict[str, Any]) -> dict[str, Any]:
    """Disable the frozen models of an evaluation-only config, which only training uses."""
    run, model = user.get("run"), user.get("model")
    mafa = model.get("mafa") if isinstance(model, dict) else None
    only_evaluates = isinstance(run, dict) and run.get("evaluate") is True
    if not only_evaluates or not isinstance(mafa, dict):
        return user
    off = {name: None for name in FROZEN_MODELS if mafa.get(name)}
    return {**user, "model": {**user["model"], "mafa": {**mafa, **off}}} if off else user


def _active(run: Any) -> list[str]:
    """Return the conditions under which keys are required; see `Key.needed`."""
    if not isinstance(run, dict):
        return ["always"]
    training = ["training", *names_of("runner", run.get("runner"))]
    if run.get("evaluate") is True:
        training = []
    return ["always", *training, *names_of("task", run.get("task"))]


def _model_keys(user: dict[str, Any], report: Report) -> tuple[dict[str, Any], Key]:
    """Return the default YAML of the model and the keys that its arch accepts."""
    arch, model_type = user.get("arch"), user.get("model_type")
    mafa = user.get("mafa")
    con_d = mafa.get("con_d") if isinstance(mafa, dict) else None
    ours = {**MODEL_MAFA, "mafa": mafa_key(con_d), **MODEL_PARTS}
    key = replace(SCHEMA.keys["model"], keys={**MODEL, **ours})
    cls = registry.get_model_class(arch) if isinstance(arch, str) else None
    if cls is None:
        return {}, key  # `walk` reports the arch
    shipped: dict[str, Any] = {}
    if model_type is None:
        types = getattr(cls, "PRETRAINED_MODEL_CONFIG_DICT", {})
        report.add("model.model_type", f"missing; {arch} has {', '.join(types)}; use one of them")
    else:
        shipped = default_or_report("model.model_type", cls, model_type, report)
    # If the model type is wrong, the keys of the first type are accepted instead.
    names = shipped or default_or_report("", cls, None, Report(SCHEMA))
    traits = traits_of(cls)
    if not traits.loads_with_our_loader:
        # `_extend` adds the keys of its default YAML below.
        key = replace(key, keys=dict(MODEL))
        for name in ours:
            if name in user and name not in names.get("model", {}):
                why = f"not read by {arch}; only models of lavis_mafa and their subclasses read it"
                report.add(f"model.{name}", f"{why}; remove it")
                key = replace(key, keys={**key.keys, name: ANY})
    else:
        # Keys that only LAVIS's other models read would have no effect here, so reject them.
        read = {*MODEL_MAFA, *BUILD_KEYS, *names.get("model", {})}
        for other in getattr(cls, "PRETRAINED_MODEL_CONFIG_DICT", {}):
            read |= default_yaml(cls, other).get("model", {}).keys()
        key = replace(key, keys={name: one for name, one in key.keys.items() if name in read})
        if not traits.trains_by_step:
            left = {name: one for name, one in key.keys.items() if name != "mafa"}
            if "mafa" in user:
                why = f"has no effect: {arch} does not train by the step of lavis_mafa"
                report.add("model.mafa", f"{why}; remove it")
                left["mafa"] = ANY
            key = replace(key, keys=left)
    key = replace(key, keys={**key.keys, **options_of_class(cls, "model_options")})
    return shipped, _extend(key, names.get("model", {}))


def _datasets_keys(user: dict[str, Any], report: Report) -> tuple[dict[str, Any], Key]:
    """Return the default YAMLs of the datasets, by builder, and the keys that they accept."""
    shipped: dict[str, Any] = {}
    keys: dict[str, Key] = {}
    for name, given in user.items():
        builder = registry.get_builder_class(name)
        if builder is None:
            known = registry.list_datasets()
            report.add(f"datasets.{name}", f"no such builder; {suggest(name, known)}")
            keys[name] = ANY
            continue
        which = given.get("type", "default") if isinstance(given, dict) else "default"
        found = default_or_report(f"datasets.{name}.type", builder, which, report).get(
            "datasets", {}
        )
        # In LAVIS's default YAMLs the dataset's name may differ from the builder's.
        shipped[name] = next(iter(found.values()), {})
        key = _extend(Key("mapping", "one dataset", keys=dataset_keys(builder)), shipped[name])
        keys[name] = _with_processors(key, _merge(shipped[name], given))
    return shipped, replace(SCHEMA.keys["datasets"], keys=keys, other=None)


def _with_processors(key: Key, dataset: Any) -> Key:
    """Add the constructor arguments of the chosen processors as keys."""
    keys = dict(key.keys)
    for kind in ("vis_processor", "text_processor"):
        chosen = dataset.get(kind) if isinstance(dataset, dict) else None
        phases = dict(keys[kind].keys)
        for phase, given in chosen.items() if isinstance(chosen, dict) else ():
            name = given.get("name") if isinstance(given, dict) else None
            cls = registry.get_processor_class(name) if isinstance(name, str) else None
            if cls is None or phase not in phases:
                continue
            arguments = list(inspect.signature(cls.__init__).parameters.values())[1:]
            takes_any = any(argument.kind == argument.VAR_KEYWORD for argument in arguments)
            named = {
                a.name: ARGUMENTS.get(a.name) or _like(a.default)
                for a in arguments
                if a.kind != a.VAR_KEYWORD
            }
            phases[phase] = replace(
                phases[phase],
                keys={**phases[phase].keys, **named},
                other=ANY if takes_any else None,
            )
        keys[kind] = replace(keys[kind], keys=phases)
    return replace(key, keys=keys)


def _extend(key: Key, shipped: Mapping[str, Any]) -> Key:
    """Add the keys of a default YAML; our own mappings are complete in the schema already."""
    keys = dict(key.keys)
    for name, value in shipped.items():
        if name not in keys:
            keys[name] = _like(value)
        elif keys[name].kind == "mapping" and isinstance(value, dict):
            keys[name] = _extend(keys[name], value) if keys[name].source == "LAVIS" else keys[name]
    return replace(key, keys=keys)


def _like(value: Any) -> Key:
    """Return a key that accepts values of the type of ``value``."""
    if isinstance(value, bool):
        return Key("bool", "see the default YAML", nullable=True)
    if isinstance(value, (int, float)):
        return Key("number", "see the default YAML", nullable=True)
    if isinstance(value, dict):
        keys = {str(name): _like(child) for name, child in value.items()}
        return Key("mapping", "see the default YAML", nullable=True, keys=keys)
    return ANY


def _merge(below: Any, above: Any) -> Any:
    """Merge ``above`` over ``below``: mappings key by key; other values are replaced."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return copy.deepcopy(above)
    merged = copy.deepcopy(dict(below))
    for name, value in above.items():
        merged[name] = _merge(below[name], value) if name in below else copy.deepcopy(value)
    return merged
