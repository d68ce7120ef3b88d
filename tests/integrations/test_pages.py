"""The scripts of the pages run as they are printed, with tiny random models."""

from __future__ import annotations

import json
import re
import sys

import pytest
from conftest import ROOT
from runs import finish, spawn


def script_of(page, number=0):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code: str = re.findall(r"```python\n(.*?)```", text, re.S)[number]
    return code


@pytest.mark.parametrize(
    "number, told",
    [
        (0, r"last mini-batch: \d+ of \d\d+ judged hard negatives match"),
        (1, r"\d+ of 160 rows have two negatives; \d+ pairs were missing"),
    ],
)
def test_sentence_transformers(tmp_path, number, told):
    pytest.importorskip("accelerate")
    pytest.importorskip("sentence_transformers", minversion="6")
    from tiny_sentences import cross_encoder, encoder, pairs

    encoder(tmp_path).save_pretrained(str(tmp_path / "my-model"))
    cross_encoder(tmp_path).save_pretrained(str(tmp_path / "my-cross-encoder"))
    rows = [json.dumps({"anchor": r["anchor"], "positive": r["positive"]}) for r in pairs(160)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    command = [sys.executable, "-c", script_of("with_sentence_transformers.md", number)]
    printed = finish(spawn(tmp_path, command, HF_HUB_OFFLINE="1"))
    assert re.search(told, printed), printed
    assert (tmp_path / ("mined.jsonl" if number else "output")).exists()


TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
DATA = """
import open_clip, torch
open_clip.add_model_config("my-model.json")
torch.manual_seed(0)
dataset = [(torch.rand(3, 32, 32), f"picture {k % 9}") for k in range(40)]
"""


def test_open_clip(tmp_path):
    pytest.importorskip("open_clip")
    (tmp_path / "my-model.json").write_text(json.dumps(TINY))
    code = DATA + script_of("with_open_clip.md")
    assert len(script_of("with_open_clip.md").splitlines()) <= 40
    printed = finish(spawn(tmp_path, [sys.executable, "-c", code]))
    assert re.search(r"false negatives in the last mini-batch: \[\d+", printed), printed


@pytest.mark.parametrize("page", ["with_open_clip.md", "with_sentence_transformers.md"])
def test_features_name_tests_that_exist(page):
    tests = "".join(file.read_text() for file in (ROOT / "tests/integrations").glob("test_*.py"))
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"\| `(\w+)` \|$", text, re.M)
    assert len(named) > 9
    for name in named:
        assert f"\ndef test_{name.removeprefix('test_')}(" in tests, name
