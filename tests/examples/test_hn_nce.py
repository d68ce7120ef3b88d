"""examples/hn_nce.py: the loss of a further paper, added by one file outside the package."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys

import pytest
import torch
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import run_python

from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import ItcSide, labels_from_positives, smooth

FILE = ROOT / "examples/hn_nce.py"


@pytest.fixture(scope="module")
def added():
    """The file's module; what it registers is removed afterwards."""
    before = ITC_LOSSES._entries
    ITC_LOSSES._entries = ITC_LOSSES.entries()
    spec = importlib.util.spec_from_file_location("hn_nce_example", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    yield module
    ITC_LOSSES._entries = before
    del sys.modules[spec.name]


def side_of(seed, with_dropped):
    generator = torch.Generator().manual_seed(seed)
    sim = (torch.randn(5, 7, generator=generator) * 3).requires_grad_()
    positives = torch.eye(5, 7, dtype=torch.bool)
    positives[1, 3] = positives[2, 6] = True
    dropped = torch.zeros_like(positives)
    dropped[0, 5] = dropped[2, 3] = with_dropped
    return ItcSide(sim, sim, positives, dropped if with_dropped else None)


def slow(sim, label, keep, alpha, beta):
    """The paper's equation, candidate by candidate."""
    degree = [one / max(label) for one in label]
    kept = [k for k in range(len(sim)) if keep[k]]
    count = sum(1 - degree[k] for k in kept)
    total = sum((1 - degree[k]) * math.exp(beta * sim[k]) for k in kept)
    harder = sum(
        (1 - degree[k]) * count * math.exp(beta * sim[k]) / total * math.exp(sim[k]) for k in kept
    )
    return sum(
        -label[p] * math.log(math.exp(sim[p]) / (alpha * math.exp(sim[p]) + harder)) for p in kept
    )


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_it_equals_the_loop_of_its_equation(added, seed, with_dropped, alpha_of_labels):
    side = side_of(seed, with_dropped)
    labels = smooth(labels_from_positives(side.positives), alpha_of_labels, side.dropped)
    found = added.hn_nce(side, labels, added.HnNceRule(alpha=0.7, beta=0.4))
    keep = torch.ones_like(side.positives) if side.dropped is None else ~side.dropped
    rows = zip(side.sim.tolist(), labels.tolist(), keep.tolist(), strict=True)
    expected = sum(slow(*row, 0.7, 0.4) for row in rows) / 5
    assert found.item() == pytest.approx(expected, rel=1e-4)
    found.backward()
    assert side.sim.grad.isfinite().all()


# Several commands in one process: importing LAVIS takes longest.
TRAIN = """
import json, sys
from lavis_mafa.cli import main
print("==", [main(arguments) for arguments in json.loads(sys.argv[1])])
"""


def test_nothing_but_its_file_is_needed_to_train_with_it(tmp_path):
    """Of a copy elsewhere, settings are checked, and a run that is stopped resumes with it."""
    file = tmp_path / "next_paper.py"
    file.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    small = {
        "run": {"max_epoch": 2, "batch_size_train": 8, "num_workers": 0, "test_splits": []},
        "datasets.toy_scenes.build_info": {"train_size": 16, "val_size": 8, "test_size": 8},
    }
    given = [f"{path}.{key}={value}" for path, some in small.items() for key, value in some.items()]
    given += ["run.device=cpu", "run.valid_splits=[]", "run.output_dir=output", "run.job_id=run"]
    given += ["run.resume_ckpt_path=auto", "model.mafa.itc_loss=hn_nce"]
    config = ROOT / "projects/mafa/train/albef_toy.yaml"
    runs = [["model.mafa.hn_nce.bta=1"]]  # misspelt
    runs += [["model.mafa.hn_nce.beta=1", *more] for more in (["run.max_steps=1"], [])]
    common = ["train", "--cfg-path", str(config), "--plugin", str(file), "--options", *given]
    status, printed = run_python(
        tmp_path, "-c", TRAIN, json.dumps([common + one for one in runs]), fresh=True
    )
    assert status == 0 and "did you mean model.mafa.hn_nce.beta?" in printed, printed
    assert "== [2, 0, 0]" in printed, printed
    log = [json.loads(line) for line in open(tmp_path / "output/run/log.jsonl", encoding="utf-8")]
    losses = [one["loss_itc"] for one in log if one["kind"] == "step"]
    assert len(losses) == 4 and all(math.isfinite(one) for one in losses)


@pytest.mark.slow
def test_the_study_of_the_documentation_compares_it(tmp_path):
    """Its YAML is that of docs/extend.md, with the path of the file."""
    page = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
    (text,) = (one for one in re.findall(r"```yaml\n(.*?)```", page, re.S) if "HN-NCE" in one)
    study = tmp_path / "mine.yaml"
    study.write_text(text.replace("examples/hn_nce.py", str(FILE)), encoding="utf-8")
    status, printed = run_python(
        tmp_path, "-m", "research", "study", study, "--dry-run", fresh=True
    )
    assert status == 0 and "HN-NCE" in printed, printed
