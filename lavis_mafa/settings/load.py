"""Load a config: merge file, options and default YAMLs, check it and fill in the defaults.

Precedence: ``--options``, then the file, then the default YAMLs of the model type and of every
dataset's type (chosen after the options are merged), then the schema's defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from lavis_mafa.io.plugins import PluginError, load_plugins
from lavis_mafa.io.problems import ConfigError
from lavis_mafa.io.project_files import PROJECTS, check_yaml, check_yaml_file, config_named
from lavis_mafa.judges.frozen import FROZEN_MODELS
from lavis_mafa.settings.check import Report, filled, section_of
from lavis_mafa.settings.config_of_run import LOG, is_run, is_trusted, recorded_config
from lavis_mafa.settings.contradictions import ask_all
from lavis_mafa.settings.foreign import usable
from lavis_mafa.settings.registered import keys_for, mafa_key, merge, names_of

logger = logging.getLogger(__name__)


class MafaConfig(Config):
    """Extend LAVIS's `Config` by checks that run before anything is built.

    It has all attributes that LAVIS's code reads (``run_cfg``, ``model_cfg``, ``datasets_cfg``,
    ``config``, ``to_dict()``, ``pretty_print()``, ``args``) and is registered like LAVIS's. The
    schema's defaults are filled in, so that ``cfg.run_cfg.grit.queue_size`` can be read directly.

    Args:
        args: has ``cfg_path`` and ``options``, as ``train.py`` parses them.
        machine: also check that files and devices exist.
        named: the file that names the config; None: the user does.
        data_only: only the data are built, see `usable`.

    Attributes:
        notes: on what is not used of a config that a file names.

    Raises:
        ConfigError: lists every problem found.
    """

    def __init__(
        self, args: Any, machine: bool = True, named: Named | None = None, data_only: bool = False
    ) -> None:
        self.args = args
        cfg_path, options = str(args.cfg_path), list(getattr(args, "options", None) or [])
        typed: dict[str, str] = {}
        user, problems, unused = _read(cfg_path, options, named, data_only, typed)
        if user is None:
            raise ConfigError(cfg_path, problems)
        problems += _load_plugins(user)
        config, found = complete(_resolved(user), machine, typed)
        if problems or found:
            raise ConfigError(cfg_path, [*problems, *found, *(unused if found else [])])
        self.notes = unused
        self.config = OmegaConf.create(config)
        self._unresolved = user
        registry.register("configuration", self)

    def unresolved(self) -> dict[str, Any]:
        """Return the whole config as plain data to record: values that the environment gives, such
        as ``${oc.env:TOKEN}``, stay as they are written."""
        return _as_written(self.to_dict(), self._unresolved)


def _as_written(value: Any, written: Any) -> Any:
    """Return a resolved value with the resolvers that are written in it."""
    if isinstance(value, dict) and isinstance(written, dict):
        return {name: _as_written(one, written.get(name)) for name, one in value.items()}
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_as_written(one, other) for one, other in zip(value, written, strict=True)]
    # A text may also stand elsewhere in the config, where the environment gives it.
    is_text = isinstance(value, str) and isinstance(written, str)
    return written if is_text and "${" in written else value


def _resolved(user: Any) -> Any:
    return OmegaConf.to_container(OmegaConf.create(user), resolve=True)


@dataclass(frozen=True)
class Named:
    """A file that names a config and options of it.

    Attributes:
        file: such as ``judged.npz``.
        options: that it names; the user's override them.
    """

    file: Path
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
            the folder of a run, which has recorded its config, see `lavis_mafa.settings.foreign`.
        options: ``["run.seed=7", ...]``.
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
    """Return the whole config as YAML, ``run`` first, with resolvers as they are written."""
    plain = cfg.unresolved()
    parts = {name: plain[name] for name in ("run", "model", "datasets")}
    return OmegaConf.to_yaml(OmegaConf.create(parts))


def _load_plugins(user: Any) -> list[str]:
    """Import the plugins in ``run.plugins``, so that their keys are known; return the problems."""
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
    cfg_path: str,
    options: list[str],
    named: Named | None,
    data_only: bool,
    typed: dict[str, str],
) -> tuple[Any, list[str], list[str]]:
    """Merge file and options into plain data, without what a stranger may not choose.

    Args:
        typed: to which the texts of options are added, see `read_options`.

    Returns:
        The unresolved config, None if it cannot be used; the problems; notes on what is not used.
    """
    problems: list[str] = []
    layers: list[tuple[Any, Path | None]] = []
    if named is not None and named.options:
        recorded = read_options(named.options, problems, typed)
        layers.append((recorded, None if is_trusted(named.file) else named.file))
    layers.append((read_options(options, problems, typed), None))
    try:
        layers.insert(0, _base_of(cfg_path, named))
        user: Any = {}
        given: dict[str, Any] = {}  # by the user
        notes: list[str] = []
        for layer, origin in layers:
            user = merge(user, layer)
            given = given if origin else merge(given, layer)
        user = _without_frozen(user)
        stranger = next((origin for _, origin in layers if origin), None)
        if stranger is not None:
            found, notes = usable(user, stranger, given, data_only)
            if found:  # not resolved and checked: its values are a stranger's
                return None, problems + found, notes
        _resolved(user)
        return user, problems, notes
    except OSError as error:
        problems.append(f"{cfg_path}: cannot be read ({error.strerror or error})")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(f"{cfg_path}: is not YAML ({_one_line(error)})")
    except OmegaConfBaseException as error:
        problems.append(f"{error.full_key or cfg_path}: {str(error).splitlines()[0]}")
    except ValueError as error:
        problems.append(str(error))
    return None, problems, []


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
    if named is None or is_trusted(named.file) or is_trusted(cfg_path):
        return plain, None
    shipped = Path(cfg_path).resolve().is_relative_to(PROJECTS)
    return plain, None if shipped else named.file


def read_options(
    options: Sequence[str], problems: list[str], typed: dict[str, str], flag: str = "--options"
) -> dict[str, Any]:
    """Parse options ``key=value`` into nested mappings; see `_value_of`.

    Args:
        problems: to which those of the options are added.
        typed: to which the texts of values that are not texts are added, by key.
        flag: the argument that they are given by, for messages.
    """
    merged = OmegaConf.create()
    for option in options:
        key, equals, text = option.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            problems.append(f"{flag}: {option!r} is not of the form key=value")
            continue
        nested = _value_of(text)
        typed.pop(key, None)
        if nested is not None and not isinstance(nested, str):
            typed[key] = text
        for name in reversed(path):
            nested = {name: nested}
        try:
            # One by one, so that a bad option does not hide what is wrong with the others.
            merged.merge_with(OmegaConf.create(nested))
        except OmegaConfBaseException as error:
            problems.append(f"{key}: {option!r} cannot be read ({_one_line(error)})")
    plain: Any = OmegaConf.to_container(merged)
    return dict(plain)


def _value_of(text: str) -> Any:
    """Return the value of an option: its text as it was typed, unless it means something else.

    YAML would drop what follows " #", and blanks at the end. Only a number, True, False, null, and
    a list or mapping in brackets are read as YAML. Quotation marks around a whole text are removed.
    """
    try:
        check_yaml(text)
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore
    except (yaml.YAMLError, OmegaConfBaseException):
        return text
    plain = text.strip()
    if isinstance(value, str):
        is_meant = text[0] in "'\"" and plain[-1] == text[0]
    elif isinstance(value, list | dict):
        is_meant = plain[0] in "[{"
    elif value is None:  # to YAML, a comment or an anchor, too
        is_meant = plain.lower() in ("", "~", "null")
    else:  # to YAML, 0123 is octal and 12:30 is of base 60
        is_meant = not re.search(r"^[-+]?0\d|[_:]", plain)
    return value if is_meant else text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def complete(
    user: Mapping[str, Any], machine: bool = True, typed: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Check a config given as plain data and add all defaults.

    Args:
        machine: also check that files and devices exist.
        typed: texts of options by key: the values of keys that take a text.

    Returns:
        The whole config, and the problems (empty if it is valid).
    """
    user, keys, shipped, wrong_names = keys_for(_without_frozen(user))
    report = Report(keys, _active(user.get("run")), machine, typed)
    report.bad |= {one.key for one in wrong_names}  # reported once, at the end
    # Values of the default YAMLs that the user did not change are not checked.
    trusted = {name: shipped[name] for name in ("model", "datasets") if name in shipped}
    config = filled(merge(trusted, user), keys, report, shipped=trusted)
    report.take(wrong_names)
    ask_all(config, report)
    if "preprocess" in shipped:
        config["preprocess"] = shipped["preprocess"]
    return config, report.problems


def check_con_d(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check a Con-D config given without a run, with the keys of ``model.mafa.con_d``.

    Returns:
        The config with all defaults, and the problems (empty if it is valid).
    """
    con_d = dataclasses.replace((mafa_key(given).keys or {})["con_d"], annotation=dict)
    # Put where it stands in a whole config: problems then name its keys by their full path.
    keys = {"model": section_of({"mafa": section_of({"con_d": con_d})})}
    report = Report(keys)
    config: Any = filled({"model": {"mafa": {"con_d": dict(given)}}}, keys, report)
    return config["model"]["mafa"]["con_d"], report.problems


def _without_frozen(user: Any) -> Any:
    """Disable the frozen models of an evaluation-only config, which only training uses."""
    if not isinstance(user, Mapping):
        return user
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
