"""Check that importing is cheap and registers with LAVIS in either import order."""

from __future__ import annotations

import ast
import pkgutil
from importlib.metadata import version
from pathlib import Path

import pytest
from fresh import fresh_python
from packaging.version import Version

import lavis_mafa
from lavis_mafa.cli import COMMANDS

REGISTERED = """
from lavis.common.registry import registry
from lavis.models import model_zoo
from lavis_mafa.families import AlbefMafa
assert registry.get_model_class("albef_mafa") is AlbefMafa
assert registry.get_runner_class("runner_mafa") and registry.get_task_class("mafa_pretrain")
assert registry.get_builder_class("toy_scenes")
assert "albef_mafa" in dict(model_zoo.model_zoo)
"""
LIGHT = """
import sys
heavy = {"lavis", "torch", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
# What a plain training has no use for, though LAVIS or what it imports may have.
UNUSED = (
    "datasets",
    "matplotlib",
    "mlflow",
    "pandas",
    "sentence_transformers",
    "spacy",
    "wandb",
)


# What LAVIS imports is imported once, before the forks.
IN_FORKS = """
import sys
import cv2, fairscale, omegaconf, pandas, timm, torch, torchvision
from transformers.models.bert import modeling_bert
from in_forks import failures
sys.exit(bool(failures(sys.argv[1:])))
"""


def in_forks(*codes: str) -> None:
    """Run each code in a process of its own."""
    fresh_python("-c", IN_FORKS, *codes)


def run_lines(*lines: str) -> None:
    fresh_python("-c", "\n".join(lines))


# Ways to begin: importing the package or LAVIS first, as a whole or by one module.
FIRST = {
    "import lavis_mafa; from lavis.models import load_model; load_model('albef_mafa', 'tiny')",
    "import lavis_mafa.settings",
    "from lavis_mafa.toyworld import ToyScenesBuilder",
    "from lavis_mafa import load_model; load_model('albef_mafa', 'tiny')",
    "import lavis_mafa; lavis_mafa.register(); lavis_mafa.register()",
}
if Version(version("transformers")) < Version("4.53"):  # LAVIS alone cannot be imported since
    FIRST.add(
        "from lavis.models import load_model; import lavis_mafa; load_model('albef_mafa', 'tiny')"
    )


def test_package_registers_with_lavis():
    in_forks(*(f"{lines}\n{REGISTERED}" for lines in sorted(FIRST)))


def test_a_plain_training_imports_no_package_that_it_does_not_use(tmp_path):
    size = {"train_size": 64, "val_size": 32, "test_size": 32}
    options = [
        *(f"datasets.toy_scenes.build_info.{key}={value}" for key, value in size.items()),
        "run.max_epoch=2",
        "run.batch_size_train=32",
        "run.grit.start_epoch=1",
        "run.grit.queue_size=64",
        "run.grit.search_space=64",
        f"run.output_dir={tmp_path}",
    ]
    run_lines(
        "import sys",
        "from lavis_mafa.cli import main",
        f"assert not main(['train', '--cfg-path', 'albef_toy', '--options', *{options}])",
        f"unused = set({UNUSED}) & set(sys.modules)",
        "assert not unused, unused",
    )
    assert list(tmp_path.glob("*/checkpoint_last.pth"))


def test_importing_the_package_imports_neither_lavis_nor_torch():
    run_lines("import lavis_mafa, lavis_mafa.cli, lavis_mafa.io.files", LIGHT)


def test_type_checking_block_declares_every_name():
    """Compare the block under TYPE_CHECKING with the names that `__getattr__` resolves."""
    tree = ast.parse(Path(lavis_mafa.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: str(node.module) for node in imports for alias in node.names}
    expected = {name for name in lavis_mafa.__all__ if name not in ("__version__", "register")}
    assert names.keys() == expected
    assert {name: names[name] for name in lavis_mafa.algorithm.EXPORTS} == {
        **lavis_mafa.algorithm.EXPORTS
    }


def test_every_public_name_exists():
    assert all(getattr(lavis_mafa, name) is not None for name in lavis_mafa.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lavis_mafa.no_such_name  # type: ignore[attr-defined]


def module_names() -> list[str]:
    found = pkgutil.walk_packages(lavis_mafa.__path__, "lavis_mafa.")
    return [one.name for one in found if not one.name.endswith("__main__")]


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    """Check that no circular import is hidden by the order of registration."""
    code = """
import sys
from lavis_mafa import registration
registration._finder.registered = True  # so that nothing is registered
import lavis.runners
sys.modules["lavis"].__spec__._initializing = True
for name in [one for one in sys.modules if one.split(".")[0] == "lavis_mafa"]:
    del sys.modules[name]
import lavis_mafa
from in_forks import failures
sys.exit(bool(failures(f"import {name}" for name in sys.argv[1:])))
"""
    names = module_names()
    assert len(names) > 100
    fresh_python("-c", code, *names)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_neither_lavis_nor_torch(command):
    code = [
        "from lavis_mafa.cli import main",
        f"try:\n    main({[command] if command else []} + ['--help'])",
        "except SystemExit as error:\n    assert not error.code",
        LIGHT,
    ]
    printed = fresh_python("-c", "\n".join(code))
    assert f"usage: lavis-mafa {command}".rstrip() in printed and len(printed.split()) > 40
