"""The studies that compare methods: their rows, what they set, and the cost of their steps."""

from __future__ import annotations

import pytest
from conftest import ROOT

from lavis_mafa.algorithm.grit.hardness import HARDNESS
from lavis_mafa.algorithm.itc_forms import ITC_LOSSES
from lavis_mafa.algorithm.labels import SOFT_LABELS
from lavis_mafa.algorithm.rules import RULES
from lavis_mafa.config import load_config
from lavis_mafa.studies.engine import Request, prepare

STUDIES = {
    "methods.yaml": {},
    "methods_ucm.yaml": {"parameters": {"data": "pictures"}},
}
# Systems that the study of methods leaves to others: it compares steps without momentum encoders.
ELSEWHERE = {"momentum", "cosine", "constant"}


@pytest.fixture(scope="module", params=STUDIES)
def plan(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    return prepare(Request(request.param, output=folder, seeds=[0], **STUDIES[request.param]))


def settings_of(plan, row):
    (job,) = plan.of[row.name][0].values()
    found = load_config(job.config, job.options, machine=False).to_dict()
    for name in ("job_id", "output_dir"):
        del found["run"][name]
    return found


def test_every_row_is_accepted_and_differs_from_the_others(plan):
    seen = []
    for row in plan.study.rows:
        found = settings_of(plan, row)
        assert found not in seen, row.name
        seen.append(found)


def test_rows_have_the_same_start_and_the_same_number_of_epochs(plan):
    """What differs must be the method; controls say in their names what else they change."""
    own = {
        row.name: settings_of(plan, row) for row in plan.study.rows if row.run not in NOT_COMPARED
    }
    starts = {found["model"]["pretrained"] for found in own.values()}
    assert len(starts) == 1
    for name, found in own.items():
        expected = plan.study.parameters["epochs"] * (2 if "twice the epochs" in name else 1)
        assert found["run"]["max_epoch"] == expected, name


NOT_COMPARED = ("warm_up", "con_d")


def test_every_registered_method_has_a_row(tmp_path):
    plan = prepare(Request("methods.yaml", output=tmp_path, seeds=[0]))
    used = set()
    for row in plan.study.rows:
        found = settings_of(plan, row)
        mafa, grit = found["model"]["mafa"], found["run"]["grit"]
        used |= {mafa["itc_loss"], mafa["soft_labels"]["type"], mafa["connections"]["rule"]}
        used.add(grit["schedule"])
    for registry in (ITC_LOSSES, SOFT_LABELS, RULES, HARDNESS):
        ours = {
            name
            for name, entry in registry.entries().items()
            if entry.value.__module__.startswith("lavis_mafa.")
        }
        assert ours - ELSEWHERE <= used, f"{registry.kind}: {ours - ELSEWHERE - used}"


def test_benchmark_measures_every_step_of_the_study_once():
    from benchmarks.methods import REFERENCE, settings_of_study

    steps = dict(settings_of_study())
    assert next(iter(steps)) == REFERENCE
    assert "sigmoid ITC" in steps and "ECM" in steps and "MAFA" in steps
    assert "FALCON" not in steps, "its step is GRIT-VLP's, and its reward is measured elsewhere"
    values = list(steps.values())
    assert all(one not in values[:place] for place, one in enumerate(values))


def test_script_runs_all_worlds():
    text = (ROOT / "run_scripts/compare_methods.sh").read_text()
    assert text.count("lavis_mafa study methods") == 3 and "--at dense" in text
