"""Load a config: merge file, options and default YAMLs, check it and fill in the defaults.

Precedence: ``--options``, then the file, then the default YAMLs of the model type and of every
dataset's type (chosen after the options are merged), then the schema's defaults.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lavis.common.config import Config
from lavis.common.registry import registry
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic.fields import FieldInfo

from lavis_mafa.config.check import Report, check_together, key_at, validated, value_at
from lavis_mafa.config.con_d import check_frozen
from lavis_mafa.config.config_of_run import (
    INTERPOLATION,
    LOG,
    config_to_record,
    is_run,
    is_trusted,
    recorded_config,
)
from lavis_mafa.config.data import check_data, take_features
from lavis_mafa.config.defaults import merge
from lavis_mafa.config.foreign import usable
from lavis_mafa.config.key import UNSET, Keys, kind_of
from lavis_mafa.config.registered import FILE, datasets_key, model_key, names_of, run_key
from lavis_mafa.config.run import check_run
from lavis_mafa.config.thresholds import take_thresholds
from lavis_mafa.config.weights import check_weight_files
from lavis_mafa.io.files import flat
from lavis_mafa.io.project_files import PROJECTS, config_named
from lavis_mafa.io.yaml_files import check_yaml, check_yaml_file
from lavis_mafa.models.con_d.frozen import FROZEN_MODELS
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
        named: what a file names of the config; None: nothing.
        data_only: only the data are built, see `usable`.

    Attributes:
        notes: warnings about a config that works.
        unresolved: the user's config, plain, with its interpolations.

    Raises:
        ConfigError: lists every problem found.
    """

    def __init__(
        self, args: Any, machine: bool = True, named: Named | None = None, data_only: bool = False
    ) -> None:
        self.args = args
        options = list(getattr(args, "options", None) or [])
        given = str(args.cfg_path), options, named, data_only
        user, problems, unused, self.unresolved = _read(*given, FILE)
        if user is None:
            raise ConfigError(str(args.cfg_path), problems)
        plugins = _load_plugins(user)
        if options or named:  # again: the keys of data sets and plugins say which are texts
            keys = keys_for(user, Report(FILE))[1]
            user, problems, unused, self.unresolved = _read(*given, keys)
        config, found, self.notes = complete(user, machine)
        if problems or plugins or found:
            raise ConfigError(
                str(args.cfg_path), [*problems, *plugins, *found, *(unused if found else [])]
            )
        self.notes += unused
        self.config = OmegaConf.create(config)
        registry.register("configuration", self)

    def recorded(self) -> dict[str, Any]:
        """Return the whole config as it is written into records; see `config_to_record`."""
        recorded: dict[str, Any] = config_to_record(self.to_dict(), self.unresolved)
        return recorded


@dataclass(frozen=True)
class Named:
    """What a file names of a config, and not the user.

    Attributes:
        file: such as ``judged.npz``.
        cfg_path: whether it names the config.
        options: that it names; the user's override them.
    """

    file: Path
    cfg_path: bool
    options: tuple[str, ...]


def load_config(
    cfg_path: str | Path,
    options: Sequence[str] | None = None,
    machine: bool = True,
    named: Named | None = None,
    data_only: bool = False,
) -> MafaConfig:
    """Load and check a config.

    Args:
        cfg_path: YAML file with ``run``, ``model`` and ``datasets``, the name of a shipped one, or
            the folder of a run, which has recorded its config, see `lavis_mafa.config.foreign`.
        options: ``["run.seed=7", ...]``, or LAVIS's older ``["run.seed", "7", ...]``.
        machine, named, data_only: see `MafaConfig`.

    Raises:
        ConfigError: lists every problem found, one a line.
    """
    try:
        found = config_named(cfg_path)
    except ValueError as error:
        raise ConfigError(str(cfg_path), [str(error)]) from None
    args = argparse.Namespace(cfg_path=found, options=list(options or []))
    config = MafaConfig(args, machine, named, data_only)
    for note in config.notes:
        logger.warning("%s", note)
    return config


def format_config(cfg: MafaConfig) -> str:
    """Return the whole config as YAML, ``run`` first, with its interpolations."""
    plain = cfg.recorded()
    parts = {name: plain[name] for name in ("run", "model", "datasets")}
    return OmegaConf.to_yaml(OmegaConf.create(parts))


def _load_plugins(user: Any) -> list[str]:
    """Import installed plugins and those in ``run.plugins``, so that their keys are known; return
    the problems."""
    run = user.get("run")
    names = run.get("plugins") if isinstance(run, dict) else None
    try:
        # The check reports a value that is not a list of strings.
        given = names if isinstance(names, list) else []
        load_plugins(name for name in given if isinstance(name, str))
    except PluginError as error:
        return [f"run.plugins: {error}"]
    return []


def _read(
    cfg_path: str, options: list[str], named: Named | None, data_only: bool, keys: Keys
) -> tuple[Any, list[str], list[str], Any]:
    """Merge file and options into plain data, without what the user may not want of them.

    Returns:
        The config, None if it cannot be read; the problems; notes on what is not used; the config
        with its interpolations.
    """
    problems: list[str] = []
    chosen = OmegaConf.to_container(_read_options(options, problems, keys))
    recorded: Any = {}
    foreign = False  # whether there are recorded options, of a file that is not trusted
    if named is not None:
        recorded = OmegaConf.to_container(_read_options(named.options, problems, keys))
        foreign = bool(recorded) and not is_trusted(named.file)
    try:
        base, file = _base_of(cfg_path, named)
        merged = merge(merge(base, recorded), chosen)
        source = file or (named.file if named is not None and foreign else None)
        if source is not None:
            live = [(key, text) for key, text in flat(merged) if INTERPOLATION in str(text)]
            problems += [
                f"{key}: {text!r} is named by {source}, not by you: the environment is not read; "
                f"give --options {key}=..., or trust its folder: --trust {source.parent}"
                for key, text in live
            ]
            if live:
                return None, problems, [], None
        user: Any = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
        own = merge(merge({} if file else base, {} if foreign else recorded), chosen)
        file = source
        if file is None:
            return user, problems, [], merged

        def is_given(path: Sequence[str]) -> bool:
            value = value_at(own, path)
            return value is not UNSET and value == value_at(merged, path)

        user = _without_frozen(user)
        known = keys_for(user, Report(FILE))[1]
        found, notes = usable(user, known, file, is_given, data_only)
        return user, problems + found, notes, merged
    except OSError as error:
        problems.append(f"{cfg_path}: cannot be read ({error.strerror or error})")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(f"{cfg_path}: is not YAML ({_one_line(error)})")
    except OmegaConfBaseException as error:
        problems.append(f"{error.full_key or cfg_path}: {str(error).splitlines()[0]}")
    except ValueError as error:
        problems.append(str(error))
    return None, problems, [], None


def _base_of(cfg_path: str, named: Named | None) -> tuple[dict[str, Any], Path | None]:
    """Return the config in a file or the folder of a run, and what names it; None if the user does,
    or trusts what does, or it is shipped."""
    if is_run(cfg_path):
        log = Path(cfg_path) / LOG
        return recorded_config(cfg_path), None if is_trusted(log) else log
    check_yaml_file(cfg_path)
    loaded = OmegaConf.load(cfg_path)
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"{cfg_path}: is not a mapping of run, model and datasets")
    plain: Any = OmegaConf.to_container(loaded)
    if named is None or not named.cfg_path or is_trusted(named.file) or is_trusted(cfg_path):
        return plain, None
    shipped = Path(cfg_path).resolve().is_relative_to(PROJECTS)
    return plain, None if shipped else named.file


def _read_options(
    options: Sequence[str], problems: list[str], keys: Keys = FILE, flag: str = "--options"
) -> DictConfig:
    """Parse options ``key=value``, or LAVIS's older ``key value``; see `_value_of`.

    Args:
        problems: to which those of the options are added.
        keys: of the config.
        flag: the argument that they are given by, for messages.
    """
    merged = OmegaConf.create()
    rest = iter(options)
    for option in rest:
        key, equals, text = option.partition("=")
        if not equals:
            value = next(rest, None)
            if value is None:
                problems.append(f"{flag}: {option!r} has no value; write key=value")
                break
            text = value
        path = key.split(".")
        if not all(path):
            problems.append(f"{flag}: {option!r} is not of the form key=value")
            continue
        nested = _value_of(text, key_at(keys, path))
        for name in reversed(path):
            nested = {name: nested}
        try:
            # One by one, so that a bad option does not hide what is wrong with the others.
            merged.merge_with(OmegaConf.create(nested))
        except OmegaConfBaseException as error:
            problems.append(f"{key}: {option!r} cannot be read ({_one_line(error)})")
    return merged


def plain_options(options: Sequence[str], keys: Keys, flag: str = "--options") -> dict[str, Any]:
    """Parse options of other keys than those of a config, as `_read_options` does.

    Raises:
        ValueError: with all problems.
    """
    problems: list[str] = []
    found: Any = OmegaConf.to_container(_read_options(options, problems, keys, flag), resolve=True)
    if problems:
        raise ValueError("\n".join(problems))
    return dict(found)


def _value_of(text: str, key: FieldInfo | None) -> Any:
    """Return the value of an option: its text as it was typed, unless it means something else.

    YAML would drop what follows " #", and blanks at the end. A number, True, False, null, and a
    list or mapping in brackets are read as YAML where the key does not take a text. Quotation marks
    around a whole text are removed.

    Args:
        key: that the option sets; None if it is unknown.
    """
    try:
        check_yaml(text)
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore
    except (yaml.YAMLError, OmegaConfBaseException):
        return text
    kind = "any" if key is None else kind_of(key).name
    if value is None:
        return None
    if isinstance(value, str):
        return value if text[:1] in "'\"" and text.strip()[-1] == text[0] else text
    if kind == "str" or (kind == "strs" and not isinstance(value, list)):
        return text
    if isinstance(value, list | dict):
        return value if text.lstrip()[0] in "[{" else text
    if isinstance(value, bool) and kind != "bool":
        return value if text.strip().lower() in ("true", "false") else text
    # To YAML, 0123 is octal and 12:30 is of base 60.
    return text if re.search(r"^[-+]?0\d|[_:]", text.strip()) else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def complete(
    user: Mapping[str, Any], machine: bool = True
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Check a config given as plain data and add all defaults.

    Returns:
        The whole config, the problems (empty if it is valid) and the notes.
    """
    early = Report(FILE)  # problems of the names that determine the keys, such as model.arch
    user, keys, shipped = keys_for(user, early)
    report = Report(keys, _active(user.get("run")), machine)
    # A wrong name is reported once, not again by each check that depends on it.
    report.bad |= early.bad
    # Values of the default YAMLs that the user did not change are not checked.
    trusted: dict[str, Any] = {n: shipped[n] for n in ("model", "datasets") if n in shipped}
    config = validated(merge(trusted, user), report, trusted)
    take_thresholds(config, report)
    take_features(config, report)
    check_together(config, report)
    check_run(config, report)
    check_data(config, report)
    check_weight_files(config, report)
    check_frozen(config, report)
    if "preprocess" in shipped:
        config["preprocess"] = shipped["preprocess"]
    return config, [*early.problems, *report.problems], report.notes


def keys_for(
    user: Mapping[str, Any], report: Report
) -> tuple[dict[str, Any], Keys, dict[str, Any]]:
    """Return the config to check, the keys of its model and datasets, and their default YAMLs.

    Problems of the names that determine the keys, such as ``model.arch``, go into ``report``.
    """
    # A key that looks like a number is one to YAML.
    user = _without_frozen({str(name): value for name, value in user.items()})
    shipped: dict[str, Any] = {}
    keys = {**FILE, "run": run_key(user.get("run"))}
    if isinstance(user.get("model"), dict):
        model, keys["model"] = model_key(user["model"], report)
        shipped.update(model)
    if isinstance(user.get("datasets"), dict):
        user["datasets"] = {str(name): value or {} for name, value in user["datasets"].items()}
        shipped["datasets"], keys["datasets"] = datasets_key(user["datasets"], report)
        if not user["datasets"]:
            report.add("datasets", "is empty; name at least one builder")
    return user, keys, shipped


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
    """Return the conditions under which keys are required; see `Report`."""
    if not isinstance(run, dict):
        return ["always"]
    training = ["training", *names_of("runner", run.get("runner"))]
    if run.get("evaluate") is True:
        training = []
    return ["always", *training, *names_of("task", run.get("task"))]
