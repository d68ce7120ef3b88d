"""What LAVIS imports and hardly ever uses is imported when it is used."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys

import pytest
from fresh import fresh_python

from lavis_mafa.compat import deferred

NAME = "a_heavy_module"


@pytest.fixture
def heavy(tmp_path, monkeypatch):
    """A package to be deferred and a module that needs it; returns how often it was imported."""
    count = tmp_path / "imports"
    package = tmp_path / NAME
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(count)!r}, 'a').write('x')\nanswer = 42\n")
    (package / "inner.py").write_text("answer = 43\n")
    (tmp_path / "its_importer.py").write_text(
        f"import {NAME} as heavy\ndef answer():\n    return heavy.answer\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(deferred, "SELDOM_USED", (NAME, "no_such_module_at_all"))
    yield lambda: len(count.read_text()) if count.exists() else 0
    for name in (NAME, f"{NAME}.inner", "its_importer"):
        sys.modules.pop(name, None)


def importer():
    with deferred.deferred_modules():
        return importlib.import_module("its_importer")


def test_a_deferred_module_is_imported_at_its_first_use(heavy):
    user = importer()
    assert heavy() == 0 and NAME not in sys.modules
    assert user.answer() == 42 == user.answer()
    assert heavy() == 1 and user.answer() is importlib.import_module(NAME).answer


def test_a_use_during_the_import_finds_the_module(heavy):
    with deferred.deferred_modules():
        user = importlib.import_module("its_importer")
        assert "__init__.py" in str(importlib.util.find_spec(NAME))
        inspect.stack()  # looks for the file of every module
        assert heavy() == 0
        assert importlib.import_module(f"{NAME}.inner").answer == 43
        assert user.answer() == 42 and heavy() == 1
    assert vars(sys.modules[NAME])["answer"] == 42


@pytest.mark.slow
def test_lavis_uses_the_modules_themselves():
    lines = [
        "import sys, lavis_mafa",
        "from lavis_mafa.compat.deferred import SELDOM_USED",
        "lavis_mafa.register()",
        "assert not set(SELDOM_USED) & set(sys.modules), set(SELDOM_USED) & set(sys.modules)",
        "from lavis.common import utils",
        "from lavis.models.img2prompt_models import img2prompt_vqa",
        "frame = utils.pd.DataFrame({'a': [1]})",
        "import pandas, spacy",
        "assert type(frame) is pandas.DataFrame",
        "assert img2prompt_vqa.spacy.load is spacy.load",
    ]
    fresh_python("-c", "\n".join(lines))
