"""Files of ``projects/``: in a checkout, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

from lavis_mafa.io.files import ROOT

# A wheel carries ``projects/`` inside the package.
FOLDERS = (Path(__file__).resolve().parents[1] / "projects", ROOT / "projects")


def project_file(name: str | Path) -> Path:
    """Return the absolute path of a project's YAML file.

    Args:
        name: an existing path; or a path that starts with ``projects/``, such as
            ``projects/mafa/train/albef_toy.yaml``, of a checkout or of the installed package.

    Returns:
        The file's path, or ``name`` below the checkout if there is no such file.
    """
    path = Path(name)
    if path.is_file():
        return path.resolve()
    below = path.parts[1:] if path.parts[:1] == ("projects",) else path.parts
    found = [folder.joinpath(*below) for folder in FOLDERS]
    return next((one for one in found if one.is_file()), (ROOT / path))
