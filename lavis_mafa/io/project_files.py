"""The YAML files of ``projects/`` and of the package, in a checkout or installed.

YAML that grows without limit when it is read, by anchors or by its depth, is refused.
"""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lavis_mafa.io.files import ROOT, require_regular

# A wheel carries ``projects/`` inside the package; a checkout has it at its root.
PROJECTS = next(
    (
        folder
        for folder in (Path(__file__).resolve().parents[1] / "projects", ROOT / "projects")
        if folder.is_dir()
    ),
    ROOT / "projects",
)
_MOST_NODES = 10_000  # keys and values with every alias written out; our largest file has 600
# Default YAMLs of models and data sets.
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def _base_folder() -> Path:
    """Return the folder that relative paths start from: a checkout's root, else the current one."""
    return ROOT if PROJECTS.parent == ROOT else Path.cwd()


def project_file(name: str | Path) -> Path:
    """Return the path of a config or study: a file of the user, or a shipped one.

    Args:
        name: the path of an existing file; or the end of a shipped file's path, with or without
            ``.yaml``: ``projects/mafa/train/albef_toy.yaml``, ``train/albef_toy``, ``albef_toy``.

    Returns:
        The absolute path; that of ``name`` below `_base_folder` if there is no such file.

    Raises:
        ValueError: if several shipped files end so; the message lists them.
    """
    path = Path(name)
    if path.is_file():
        return path.resolve()
    parts = path.parts[1:] if path.parts[:1] == ("projects",) else path.parts
    if not parts or path.is_absolute():
        return _base_folder() / path
    end = (*parts[:-1], parts[-1].removesuffix(".yaml"))
    found = [one for one in shipped_names() if tuple(one.split("/")[-len(end) :]) == end]
    if len(found) > 1:
        raise ValueError(f"{name} is the name of several shipped files: {', '.join(found)}")
    return PROJECTS / f"{found[0]}.yaml" if found else _base_folder() / path


def shipped_names() -> list[str]:
    """Return the names of all shipped files, such as ``mafa/train/albef_toy``, sorted."""
    files = PROJECTS.rglob("*.yaml")
    return sorted(file.relative_to(PROJECTS).with_suffix("").as_posix() for file in files)


def config_named(name: str | Path) -> str:
    """Return the path of a config, or of the folder of a run, by its path or a shipped name.

    Raises:
        ValueError: if there is none, or there are several.
    """
    if os.path.lexists(name):
        return str(name)
    found = project_file(name)
    if found.is_file():
        return str(found)
    near = " or ".join(_near_names(name))
    cure = f"did you mean {near}?" if near else "`lavis-mafa train --list` shows all names"
    raise ValueError(f"{name}: cannot be read: no such file or shipped config; {cure}")


def _near_names(name: str | Path) -> list[str]:
    """Return the shipped names whose last part resembles the last part of an unknown name."""
    stem = Path(name).name.removesuffix(".yaml")
    last = {one.rsplit("/", 1)[-1] for one in shipped_names()}
    near = get_close_matches(stem, sorted(last), n=3)
    return [one for one in shipped_names() if one.rsplit("/", 1)[-1] in near]


def model_yamls(arch: str, *types: str, folder: Path = CONFIGS) -> dict[str, str]:
    """Return the `PRETRAINED_MODEL_CONFIG_DICT` of a model: one YAML for each model type."""
    return {name: str(folder / "models" / f"{arch}_{name}.yaml") for name in types}


def dataset_yamls(builder: str, folder: Path = CONFIGS) -> dict[str, str]:
    """Return the `DATASET_CONFIG_DICT` of a builder that has one YAML."""
    return {"default": str(folder / "datasets" / builder / "default.yaml")}


def find_config(path: str) -> str:
    """Return the path of a model's config file, looked up in this package, as a path, in LAVIS."""
    from lavis.common.utils import get_abs_path

    for candidate in (CONFIGS / "models" / path, Path(path), Path(get_abs_path(path))):
        if candidate.is_file():
            return str(candidate.resolve())
    raise FileNotFoundError(
        f"{path} is not a file of lavis_mafa ({CONFIGS / 'models'}), of LAVIS, or relative to "
        f"{os.getcwd()}"
    )


def read_config(path: str) -> dict[str, Any]:
    """Return the content of a model's JSON config; {} if it cannot be found or read."""
    try:
        content = json.loads(Path(find_config(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def check_yaml_file(path: str | os.PathLike[str]) -> None:
    """Refuse a file as `check_yaml` does.

    Raises:
        OSError: if it cannot be read.
        UnicodeDecodeError: if it is not UTF-8.
        ValueError: if it is a pipe or device.
        yaml.YAMLError: as `check_yaml`.
    """
    require_regular(path)
    check_yaml(Path(path).read_text(encoding="utf-8"))


def check_yaml(text: str) -> None:
    """Refuse YAML whose aliases contain themselves or, written out, make it very large.

    OmegaConf writes every alias out: nine lines of ten aliases each would fill the memory.

    Raises:
        yaml.YAMLError: saying which, or that the text is not YAML.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = _size(root, {}, set())
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    if count > _MOST_NODES:
        raise yaml.YAMLError(
            f"with its aliases written out it has {count} values, expected at most {_MOST_NODES}"
        )


def _size(node: yaml.Node | None, known: dict[int, int], above: set[int]) -> int:
    """Return the number of nodes below a node, with every alias counted anew."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    own = id(node)
    if own in above:
        raise yaml.YAMLError(f"an alias contains itself, line {node.start_mark.line + 1}")
    if own not in known:
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        known[own] = 1 + sum(_size(part, known, above | {own}) for part in parts)
    return known[own]
