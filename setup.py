"""Installation of lavis_mafa.

Three sets of packages are supported (README, "Install"):

- *today*: `run_scripts/requirements/today.txt`, the newest versions, Python 3.11 to 3.14.
- *modern*: `run_scripts/requirements/modern.txt`, older ones, Python 3.10 to 3.13.
- *strict*: what plain `pip install .` resolves from here, with the pins LAVIS itself makes. Those
  pins have no wheels above Python 3.11, so it exists for Python 3.10 and 3.11.

LAVIS and this package are installed with `--no-deps` into the first two.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
STRICT_PYTHONS = ((3, 10), (3, 11))

REQUIREMENTS = [
    # What the plugin builds on. LAVIS pins fairscale and, by `transformers<4.27`, an old release;
    # `lavis_mafa.compat.versions` states what works.
    "salesforce-lavis==1.0.2",
    "torch>=2.0",
    "transformers>=4.25,<6",
    "timm>=0.4.12",
    "omegaconf>=2.1,<3",
    "fairscale>=0.4.4",
    # What the code imports besides, and what LAVIS imports without listing it.
    "braceexpand",
    "eccv_caption==0.1.0",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "numpy",
    "opencv-python-headless",
    "packaging",
    "pillow>=9.4",
    "pyarrow>=15",
    "pycocoevalcap",
    "pycocotools",
    "pydantic>=2",
    "pyyaml",
    "regex",
    "requests",
    "safetensors",
    "scipy",
    "tensorboard>=2.14",
    "tokenizers",
    "torchvision>=0.15",
    "tqdm",
    "webdataset",
]

# Optional packages, by what they are for. `pip install ".[wandb]"` resolves LAVIS's pins; in the
# other sets install the package itself, as the program's messages say.
EXTRAS = {
    "wandb": ["wandb>=0.19.10"],
    "mlflow": ["mlflow>=2.16"],
    "cross-encoder": ["sentence-transformers>=6"],
    "sentence-transformers": ["sentence-transformers[train]>=6"],
    "open-clip": ["open_clip_torch>=3"],
    "docs": ["mkdocs-material>=9.7", "mkdocstrings-python>=2.0"],
}
EXTRAS["all"] = sorted({package for packages in EXTRAS.values() for package in packages})

STRICT_SET_ERROR = """
lavis_mafa: `pip install` with dependencies works on Python 3.10 and 3.11 only.
LAVIS 1.0.2 pins packages (transformers < 4.27, opencv 4.5.5.64) that Python {python} does not have.
Use the today set of packages (Python 3.11 to 3.14), from the root of this repository:
    bash run_scripts/setup_env.sh          # makes .venv with everything in it
or, into your own environment:
    pip install -r run_scripts/requirements/today.txt
    pip install --no-deps salesforce-lavis==1.0.2
    pip install --no-deps .
"""


def resolves_dependencies() -> bool:
    """Return whether this file is run by an installation that also resolves `install_requires`.

    A build does not know whether `--no-deps` was given, so the command line of the calling pip (or
    uv) is read. Without /proc the answer is no, and LAVIS's own pins fail instead.
    """
    if os.environ.get("PIP_NO_DEPS"):
        return False
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return "install" in command and not {"--no-deps", "--no-dependencies"} & set(command)


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


def version() -> str:
    names: dict[str, str] = {}
    exec((ROOT / "lavis_mafa" / "_version.py").read_text(encoding="utf-8"), names)
    return names["__version__"]


if sys.version_info[:2] not in STRICT_PYTHONS and resolves_dependencies():
    sys.exit(STRICT_SET_ERROR.format(python=".".join(map(str, sys.version_info[:2]))))

readme = ROOT / "README.md"

setup(
    name="lavis-mafa",
    version=version(),
    description="False negatives in vision-language pre-training, managed: a plugin for LAVIS",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author="the lavis_mafa authors",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    packages=find_packages(include=["lavis_mafa", "lavis_mafa.*"]),
    package_data={
        "lavis_mafa": ["**/*.yaml", "**/*.json", "**/*.txt", "**/*.html"],
    },
    cmdclass={"build_py": BuildWithProjects},
    entry_points={"console_scripts": ["lavis-mafa = lavis_mafa.cli:main"]},
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
