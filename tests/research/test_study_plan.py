"""From rows to runs: what is run, what it needs, and the check of its config."""

from __future__ import annotations

import copy
import itertools

import pytest
from small_study import BASE, MASKED, SPACE, config_of, plan_for, read_small_study

from research.studies.plan import RESUME, check, make_plan, narrowed
from research.studies.study_parts import StudyError


def test_placeholders_become_paths(tmp_path):
    plan = make_plan(read_small_study(tmp_path), tmp_path / "out", [3, 5])
    check(plan)
    for row, seed in itertools.product(("plain, M=128", "mined, M=256"), (3, 5)):
        train, test = (plan.of[row][seed][stage] for stage in ("train", "test"))
        cfg = config_of(train)
        assert cfg.run_cfg.seed == config_of(test).run_cfg.seed == seed
        assert config_of(test).model_cfg.pretrained == str(train.checkpoint)
        assert test.needs == {train.name} and train.folder.parent.name == f"seed_{seed}"
        assert train.command[-1] == RESUME
    con_d = tmp_path / f"out/shared/seed_{seed}/con_d/checkpoint_last.pth"
    assert cfg.model_cfg.mafa.con_d.checkpoint == str(con_d)
    start = plan.jobs["start/5"]
    assert start.command[1:] == [
        "research.toy_start",
        "--seed",
        "5",
        "--output",
        str(tmp_path / "out/shared/seed_5/start/start.pth"),
    ]
    assert config_of(plan.jobs["con_d/5"]).model_cfg.pretrained == start.command[-1]
    assert plan.jobs["con_d/5"].needs == {"start/5"}
    assert "unused/5" not in plan.jobs and len(plan.jobs) == 2 * (2 + 4 * 2)
    # Every run is listed after its dependencies, and the first seed before the second.
    done = set()
    for name, job in plan.jobs.items():
        assert job.needs <= done
        done.add(name)
    assert [name.endswith("/3") for name in plan.jobs] == 10 * [True] + 10 * [False]


def test_equal_rows_are_run_once(tmp_path):
    """Within a table and across tables; any difference, also in the starting weights, is another
    run.
    """
    first = make_plan(read_small_study(tmp_path), tmp_path / "out", [3])
    rows = [{"name": "renamed", "options": {MASKED: 0.2}, "uses": ["con_d"]}]
    second = make_plan(read_small_study(tmp_path, rows=rows), tmp_path / "out", [3])
    for stage in ("train", "test"):
        job, other_plan = first.of["mined, M=256"][3][stage], second.of["renamed, M=256"][3][stage]
        assert (job.folder, job.command) == (other_plan.folder, other_plan.command)
    longer = copy.deepcopy(BASE)
    longer["shared"]["con_d"]["options"]["run.max_epoch"] = 30
    other_plan = make_plan(read_small_study(tmp_path, base=longer), tmp_path / "out", [3])
    for row, equal in (("plain, M=128", True), ("mined, M=128", False)):
        folders = [plan.of[row][3]["test"].folder for plan in (first, other_plan)]
        assert (folders[0] == folders[1]) is equal


def test_plan_is_restricted_to_the_requested_rows_and_columns(tmp_path):
    study = read_small_study(tmp_path, shows=["tr1"])  # not the requested column
    study = narrowed(study, ["mined, M=128"], ["loss"], {"con_d": "/there.pth"})
    plan = make_plan(study, tmp_path / "out", [3])
    (job,) = plan.jobs.values()
    assert job.title.startswith("mined, M=128, train")
    assert config_of(job).model_cfg.mafa.con_d.checkpoint == "/there.pth"
    assert plan.given == {"con_d": "/there.pth"}
    with pytest.raises(StudyError) as found:
        narrowed(study, ["mine"], ["los"], {"cond": "x"})
    assert len(found.value.problems) == 3 and "did you mean loss?" in str(found.value)


def test_processes_are_started_by_the_launcher(tmp_path):
    study = read_small_study(tmp_path, processes=4)
    job = make_plan(study, tmp_path / "out", [3]).of["plain, M=128"][3]["train"]
    assert job.command[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    assert config_of(job).run_cfg.seed == 3


def test_a_row_that_changes_a_shared_run_has_a_run_of_its_own(tmp_path):
    rows = ["grit", "GRIT-VLP, M = train / 8"]
    plan = plan_for("compare", "--output", tmp_path, "--seeds", 3, "--rows", *rows)
    own, shared = plan.of["GRIT-VLP, M = train / 8"][3][""], plan.of["GRIT-VLP"][3][""]
    assert shared.folder == tmp_path / "seed_3/grit" and own.folder.parent.parent.name == "runs"
    assert config_of(own).run_cfg.grit.search_space == 4096 // 8
    assert {row.name for row in plan.study.rows} == {"GRIT-VLP", "GRIT-VLP, M = train / 8"}
    # Con-D is where they start, and runs are measured with the shortlist of the warm-up.
    assert {name.split("-")[0] for name in plan.jobs} == {
        "image_start/3",
        "warm_up/3",
        "con_d/3",
        "grit/3",
        "grit",
    }


def test_all_problems_of_configs_are_reported_together_and_once(tmp_path):
    base = copy.deepcopy(BASE)
    base["options"] = {"run.test_splits": []}
    base["stages"]["test"]["config"] = "projects/not_there.yaml"
    base["columns"]["other"] = {"key": "txt_r5", "stage": "train"}
    changes = {"vary": {SPACE: [128, 256], "model.mafa.alhpa": [1]}}
    plan = make_plan(read_small_study(tmp_path, base=base, **changes), tmp_path / "out", [3, 5])
    with pytest.raises(StudyError) as caught:
        check(plan)
    problems = caught.value.problems
    assert len(problems) == 2 and all(" and 3 more: " in problem for problem in problems)
    assert "model.mafa.alhpa: unknown" in problems[0] and "not_there.yaml" in problems[1]
    del base["stages"]["test"], base["columns"]["tr1"]
    study = read_small_study(tmp_path, base=base)
    with pytest.raises(StudyError, match=r"plain, M=128 and 3 more: column other reads split test"):
        check(make_plan(study, tmp_path / "out", [3]))
