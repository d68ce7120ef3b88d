"""The YAML files of ``projects/`` and of the package, in a checkout or installed.

YAML that grows without limit when it is read, by anchors or by its depth, is refused.
"""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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
_DEEPEST = 100  # mappings and lists in each other
_MOST_ALIASES = 20  # nested, they repeat a value at most some 1,500 times
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
    """Refuse YAML that grows without limit when it is read: OmegaConf writes every alias out.

    Raises:
        yaml.YAMLError: saying which, or that the text is not YAML.
    """
    import yaml  # here, as the paths above are found without it

    around: list[str | None] = []  # anchors of the mappings and lists around an event
    aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            around.pop()
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if event.anchor in around:
                raise yaml.YAMLError(f"*{event.anchor} contains itself")
        if len(around) > _DEEPEST:
            raise yaml.YAMLError("it is nested too deeply")
    if aliases > _MOST_ALIASES:
        raise yaml.YAMLError(f"it has {aliases} aliases, expected at most {_MOST_ALIASES}")
