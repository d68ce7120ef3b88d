"""What pyproject.toml cannot say: the configs of ``projects/`` in wheels, and the description."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithProjects(build_py):
    """Copy the configs of ``projects/`` into the package, for wheels.

    An editable installation and a checkout read them in place (`lavis_mafa.io.project_files`).
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for file in sorted((ROOT / "projects").rglob("*.yaml")):
            if file.parent.name == "studies":  # research/ runs them, which is not in wheels
                continue
            target = Path(self.build_lib, "lavis_mafa", file.relative_to(ROOT))
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))


def description() -> str:
    """Return the README without pictures and links to files, which are not beside a wheel."""
    file = ROOT / "README.md"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return re.sub(r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithProjects},
    long_description=description(),
    long_description_content_type="text/markdown",
)
