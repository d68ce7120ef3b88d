"""The shipped study files: their configs are valid, and their rows differ as they say."""

from __future__ import annotations

import pytest
from small_study import config_of, plan_for

from research.studies.plan import check
from research.studies.study_file import STUDIES

TABLES = sorted(path.stem for path in STUDIES.glob("table_*.yaml"))
CON_D, START = "model.mafa.con_d", {"model.pretrained", "run.max_epoch"}
SOFT = {"model.mafa.soft_labels.type", "model.mafa.soft_labels.start_epoch"}


@pytest.mark.research
@pytest.mark.timeout(900)
@pytest.mark.parametrize("at", ["toy", "paper"])
@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_valid_with_both_bases(name, at, tmp_path):
    given = [] if at == "toy" else ["--given", "con_d=con_d.pth"]
    plan = plan_for(name, "--at", at, "--seeds", 7, "--output", tmp_path, *given)
    check(plan)
    jobs = [job for job in plan.jobs.values() if job.config]
    configs = [config_of(job) for job in {job.form: job for job in reversed(jobs)}.values()]
    assert {cfg.model_cfg.model_type == "tiny" for cfg in configs} == {at == "toy"}
    assert {cfg.run_cfg.device for cfg in configs} == {"cpu" if at == "toy" else "cuda"}
    if at == "paper":  # the paper's table has our rows
        paper = [list(map(str, row)) for row in plan.study.file.paper.rows]
        ours = [list(row.cells.values()) for row in plan.study.rows]
        assert [row[: len(cells)] for row, cells in zip(paper, ours, strict=True)] == ours


@pytest.mark.research
@pytest.mark.timeout(600)
@pytest.mark.parametrize("at", ["", "dense", "sparse", "blip", "blip2"])
@pytest.mark.parametrize("name", ["compare", "methods"])
def test_every_comparison_is_valid(name, at, tmp_path):
    if name == "methods" and at not in ("", "dense"):
        pytest.skip("this study is of ALBEF in two worlds")
    words = [*(["--at", at] if at else []), "--seeds", 3, "--output", tmp_path]
    if at in ("blip", "blip2"):
        words += ["--rows", "base", "grit", "ecm", "mafa"]
    check(plan_for(name, *words))


def differing_paths(one, other, path=""):
    """Return the paths at which two nested dictionaries differ."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {path}
    names = one.keys() | other.keys()
    parts = (differing_paths(one.get(n), other.get(n), f"{path}.{n}".strip(".")) for n in names)
    return set().union(*parts)


@pytest.mark.parametrize(
    "one, other, keys",
    [
        ("GRIT-VLP", "S-ITC", {"model.mafa.soft_labels.type"}),
        ("GRIT-VLP", "ECM", {CON_D}),
        ("S-ITC", "MAFA", {CON_D}),
        ("MAFA", "MAFA with ECM-E", {"model.mafa.connections.action"}),
        ("MAFA", "MAFA, three candidates judged", {"model.mafa.connections.top_k"}),
        ("GRIT-VLP", "GRIT-VLP, M = train / 8", {"run.grit.search_space"}),
        ("GRIT-VLP", "GRIT-VLP, from the warm-up", START),
        ("ALBEF-base", "ALBEF-base + ECM", {CON_D}),
        ("ALBEF-base", "ALBEF-base + S-ITC", SOFT),
    ],
)
def test_systems_differ_only_in_the_named_setting(tmp_path, one, other, keys):
    """Two systems that a table compares are equal in all other keys."""
    plan = plan_for("compare", "--seeds", 3, "--output", tmp_path, "--rows", one, other)
    found = [config_of(plan.of[name][3][""]).to_dict() for name in (one, other)]
    for config in found:
        del config["run"]["job_id"], config["run"]["output_dir"]
    assert differing_paths(*found) == keys
