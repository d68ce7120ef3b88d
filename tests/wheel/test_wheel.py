"""Check the wheel in an environment outside the checkout: its program, its configs, a demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# What a wheel is built from; without build/, which setuptools reuses.
SOURCES = (
    "lavis_mafa",
    "projects",
    "research",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
)
BUILDERS = {
    "coco_caption": ("train", "val", "test"),
    "vg_caption": ("train",),
    "sbu_caption": ("train",),
    "conceptual_caption_3m": ("train",),
}
SIZE = 32


def run(folder: Path, *command: object) -> str:
    """Run a command in a folder, without the checkout on its path, and require success."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**variables, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, f"{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
    return process.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return `lavis-mafa` of an environment with the wheel and the packages installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    run(folder, sys.executable, *build)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", symlinks=True, with_pip=False)
    python = folder / "env/bin/python"
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    # .pth files in the linked folder, such as an editable installation's, are not processed.
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    run(folder, python, *install)
    module_file = run(folder, python, "-c", "import lavis_mafa; print(lavis_mafa.__file__)")
    assert Path(module_file.strip()).is_relative_to(folder)
    return folder / "env/bin/lavis-mafa"


def test_dry_run_by_config_name(program, tmp_path):
    """Run the shipped config of BLIP-2's stage 1 on generated files with a tiny model."""
    images = tmp_path / "images"
    images.mkdir()
    rows = []
    for number in range(8):
        Image.new("RGB", (40, 40), (number * 30, 0, 0)).save(images / f"{number}.png")
        caption = f"a square of shade {number}"
        rows.append({"image": f"{number}.png", "caption": caption, "image_id": str(number)})
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(rows))
    options = ["model.model_type=tiny", f"model.image_size={SIZE}", "run.device=cpu"]
    options += ["run.amp=False", "run.batch_size_train=4", "run.num_workers=0"]
    options += ["run.grit.queue_size=16", "run.grit.search_space=8", "model.freeze_vit=False"]
    options += ["model.mafa.con_d=null"]  # its published weights cannot be loaded offline
    for builder, splits in BUILDERS.items():
        info = f"datasets.{builder}.build_info"
        options += [f"{info}.images.storage={images}"]
        options += [f"{info}.annotations.{split}.url={file}" for split in splits]
        options += [f"{info}.annotations.{split}.storage={file}" for split in splits]
        options += [f"datasets.{builder}.vis_processor.train.image_size={SIZE}"]
    command = (program, "train", "--cfg-path", "blip2_stage1", "--dry-run", "--options", *options)
    output = run(tmp_path, *command)
    assert "dry run: nothing is trained" in output and "one mini-batch:" in output


def test_demo_says_where_it_is(program, tmp_path):
    """The wheel has neither ``research/`` nor the study files that need it."""
    done = subprocess.run([program, "demo", "--epochs=2"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2 and b"clone the repository" in done.stderr
    python = program.with_name("python")
    code = "import importlib.util, lavis_mafa; print(importlib.util.find_spec('research'))"
    assert run(tmp_path, python, "-c", code).strip() == "None"
    assert "studies" not in run(tmp_path, program, "train", "--list")
