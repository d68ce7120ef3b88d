"""Studies: reading files, rows and runs, the shipped files, results, and resuming."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
import yaml
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lavis_mafa.algorithm.settings import StepSettings
from lavis_mafa.config import load_config
from lavis_mafa.studies import command, engine
from lavis_mafa.studies import plan as plan_module
from lavis_mafa.studies.engine import Request, prepare
from lavis_mafa.studies.parts import StudyError
from lavis_mafa.studies.plan import RESUME, check, make_plan, narrowed
from lavis_mafa.studies.read import read_study
from lavis_mafa.studies.results import figures_of, write_all
from lavis_mafa.studies.runs import shown_command

STUDIES = ROOT / "projects/mafa/studies"
TABLES = sorted(STUDIES.glob("table_*.yaml"))
TOY = "projects/mafa/train/albef_toy.yaml"
MASKED, SPACE = "model.mlm_mask_prob", "run.grit.search_space"

BASE = {
    "seeds": [3, 5],
    "options": {"run.valid_splits": [], "run.test_splits": ["test"]},
    "settings": {
        "random": {"run.grit.enabled": False, "model.mafa.negatives": "sampled"},
        "con_d": {
            "model.mafa.con_d.arch": "albef_mafa",
            "model.mafa.con_d.model_type": "tiny",
            "model.mafa.con_d.checkpoint": "{con_d}",
        },
    },
    "shared": {
        "start": {
            "module": "lavis_mafa.toyworld.image_start",
            "arguments": ["--seed", "{seed}", "--output", "{folder}/start.pth"],
            "writes": "start.pth",
        },
        "con_d": {
            "config": TOY,
            "uses": ["random"],
            "options": {"model.load_pretrained": True, "model.pretrained": "{start}"},
        },
        "unused": {"config": TOY},
    },
    "stages": {
        "train": {"config": TOY},
        "test": {
            "script": "evaluate.py",
            "config": "projects/mafa/eval/retrieval_toy.yaml",
            "options": {"model.finetuned": "{train}"},
        },
    },
    "columns": {
        "tr1": {"title": "TR@1", "key": "txt_r1"},
        "loss": {"key": ["loss_itc", "loss_itm"], "stage": "train", "kind": "epoch", "scale": 10},
    },
}
OWN = {
    "title": "A title",
    "source": "Table 0",
    "rows": [
        {"name": "plain", "marks": {"Con-D": False}, "uses": ["random"]},
        {"name": "mined", "marks": {"Con-D": True}, "uses": ["con_d"], "options": {MASKED: 0.2}},
    ],
    "vary": {SPACE: [128, 256]},
    "titles": {SPACE: "M"},
    "figure": {"x": SPACE, "y": ["tr1"]},
    "paper": {
        "about": "Large",
        "columns": ["TR", "IR"],
        "rows": [[76.6, 59.6], [1.25, None], [], [77, 60.2]],
    },
}


def write_study(tmp_path, base=BASE, **changes):
    """Write a study file and its base ``small``; return its path."""
    (tmp_path / "base_small.yaml").write_text(yaml.safe_dump(base, sort_keys=False))
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({**OWN, **changes}, sort_keys=False))
    return path


def read_small_study(tmp_path, base=BASE, **changes):
    return read_study(write_study(tmp_path, base, **changes), "small")


loaded = functools.cache(functools.partial(load_config, machine=False))


def config_of(job):
    only = ["run.evaluate=True"] if job.script == "evaluate.py" else []
    return loaded(job.config, (*job.options, *only))


# From a file to its rows


def test_rows_of_a_study(tmp_path):
    study = read_small_study(tmp_path)
    assert [row.name for row in study.rows] == [
        *("plain, M=128", "plain, M=256", "mined, M=128", "mined, M=256")
    ]
    assert study.rows[0].cells == {"row": "plain", "Con-D": "✗", "M": "128"}
    assert study.rows[3].cells == {"row": "mined", "Con-D": "✓", "M": "256"}
    assert study.rows[3].options == {**BASE["settings"]["con_d"], MASKED: 0.2, SPACE: 256}
    assert study.rows[0].values == {SPACE: 128} and study.seeds == [3, 5]


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([MASKED, SPACE, "run.max_epoch"]),
        st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True),
        min_size=1,
    )
)
def test_vary_gives_the_full_product(tmp_path_factory, vary):
    changes = {"vary": vary, "titles": {}, "figure": {}, "paper": None}
    rows = read_small_study(tmp_path_factory.mktemp("product"), **changes).rows
    expected = [
        dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())
    ]
    for base in ("plain", "mined"):
        rows_of_base = [row for row in rows if row.base == base]
        assert [row.values for row in rows_of_base] == expected
        assert all(row.options.items() >= row.values.items() for row in rows_of_base)
    assert len({row.name for row in rows}) == len(rows) == 2 * len(expected)


def test_precedence_of_options(tmp_path):
    rows = [{"name": "a", "uses": ["random"], "options": {"run.grit.enabled": True, SPACE: 1}}]
    (row,) = read_small_study(tmp_path, rows=rows, vary={SPACE: [64]}, paper=None).rows
    assert row.options == {
        **{"run.grit.enabled": True, "model.mafa.negatives": "sampled", SPACE: 64}
    }


def test_section_of_a_scale_overrides_file_and_base(tmp_path):
    section = {"vary": {SPACE: [64]}, "seeds": [1], "columns": {"tr1": {"title": "other"}}}
    study = read_small_study(tmp_path, at={"small": section, "large": {"vary": {SPACE: [99]}}})
    assert [row.name for row in study.rows] == ["plain, M=64", "mined, M=64"]
    assert study.seeds == [1]
    assert (study.columns[0].title, study.columns[0].keys) == ("other", ("txt_r1",))
    # The paper's numbers stay with the paper's rows.
    assert [cells["M"] for cells in study.paper.cells] == ["128", "256", "128", "256"]


def test_file_without_a_base(tmp_path):
    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump({**BASE, **OWN}, sort_keys=False))
    assert len(read_study(path).rows) == 4 and read_study(path).at == ""


def test_paper_numbers_by_row_names(tmp_path):
    numbers = {"mined, M=128": [5.0, 6.0]}
    paper = read_small_study(tmp_path, paper={"columns": ["TR", "IR"], "rows": numbers}).paper
    assert paper.rows == [[], [], [5.0, 6.0], []]


# From rows to runs


def test_placeholders_become_paths(tmp_path):
    study = read_small_study(tmp_path)
    plan = make_plan(study, tmp_path / "out", [3, 5])
    check(plan)
    for row, seed in itertools.product(("plain, M=128", "mined, M=256"), (3, 5)):
        train, test = (plan.of[row][seed][stage] for stage in ("train", "test"))
        cfg = config_of(train)
        assert cfg.run_cfg.seed == config_of(test).run_cfg.seed == seed
        assert config_of(test).model_cfg.finetuned == str(train.checkpoint)
        assert test.needs == {train.name} and train.folder.parent.name == f"seed_{seed}"
        assert (train.command[-1] == RESUME, test.command[-1] == RESUME) == (True, False)
    con_d = tmp_path / f"out/shared/seed_{seed}/con_d/checkpoint_last.pth"
    assert cfg.model_cfg.mafa.con_d.checkpoint == str(con_d)
    start = plan.jobs["start/5"]
    assert start.command[1:] == [
        *("lavis_mafa.toyworld.image_start", "--seed", "5", "--output"),
        str(tmp_path / "out/shared/seed_5/start/start.pth"),
    ]
    assert config_of(plan.jobs["con_d/5"]).model_cfg.pretrained == start.command[-1]
    assert plan.jobs["con_d/5"].needs == {"start/5"}
    assert "unused/5" not in plan.jobs and len(plan.jobs) == 2 * (2 + 4 * 2)
    # Every run is listed after its dependencies.
    done = set()
    for name, job in plan.jobs.items():
        assert job.needs <= done
        done.add(name)


def test_equal_rows_are_run_once(tmp_path):
    """Within a table and across tables; any difference, also in the starting weights, is another
    run.
    """
    first = make_plan(read_small_study(tmp_path), tmp_path / "out", [3])
    rows = [{"name": "renamed", "options": {MASKED: 0.2}, "uses": ["con_d"]}]
    second = make_plan(read_small_study(tmp_path, rows=rows, paper=None), tmp_path / "out", [3])
    for stage in ("train", "test"):
        job, other_plan = first.of["mined, M=256"][3][stage], second.of["renamed, M=256"][3][stage]
        assert (job.folder, job.command) == (other_plan.folder, other_plan.command)
    longer = OmegaConf.to_container(OmegaConf.create(BASE))
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
    assert job.command[:4] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4")
    ]
    assert config_of(job).run_cfg.seed == 3


# Errors


def test_all_problems_of_a_file_are_reported_together(tmp_path):
    base = OmegaConf.to_container(OmegaConf.create(BASE))
    base["shared"]["con_d"]["options"]["model.pretrained"] = "{strat}"
    base["stages"]["test"]["script"] = "test.py"
    base["colums"] = {}
    with pytest.raises(StudyError) as caught:
        read_small_study(
            tmp_path,
            base=base,
            rows=[
                {"name": "a", "option": {}, "uses": ["randon"]},
                {"name": "a", "options": {"model.pretrained": "{test}", "run.grit": {}}},
                {"marks": {}},
            ],
            shows=["tr", "loss"],
            seeds=["x"],
            at_once=0,
            figure={"x": "run.lr", "y": ["tr1"]},
            at={"large": {"row": []}},
            reference={"row": "a", "columns": ["tr1"], "after": "Recall"},
            vary={SPACE: 3},
            settings={"random": 3},
        )
    expected = [
        *("base_small.yaml.colums: unknown; did you mean columns?", "row: unknown"),
        *("{strat} is not an earlier run; did you mean start?", "test.py, expected train.py"),
        *("rows.0.option: unknown; did you mean options?", "no setting randon"),
        *("there are two called 'a'", "{test} is not an earlier run", "rows.2.name: missing"),
        *("options.run.grit: is a mapping", "shows: no column tr;", "tr1 is not among the"),
        *("seeds: are ['x']", "at_once: is 0", "figure.x: run.lr does not vary"),
        "reference.after: no table Recall",
        *("search_space: is 3, expected a list", "settings.random: is 3, expected a mapping"),
    ]
    for text in expected:
        assert any(text in problem for problem in caught.value.problems), text
    assert str(caught.value).startswith(f"{len(caught.value.problems)} problems in the study")
    assert len(caught.value.problems) == len(expected)


@pytest.mark.parametrize(
    "paper, problem",
    [
        ({"columns": ["a"], "rows": [[1], [2]]}, "2 rows for the 4 of the file"),
        ({"columns": ["a"], "rows": [[1], [2], [3, 4], [5]]}, "mined, M=128 has [3, 4]"),
        ({"columns": ["a"], "rows": {"mined, M=12": [3]}}, "did you mean mined, M=128?"),
        ({"column": ["a"], "rows": [[], [], [], []]}, "did you mean columns?"),
    ],
)
def test_paper_numbers_that_do_not_fit_are_rejected(tmp_path, paper, problem):
    with pytest.raises(StudyError) as caught:
        read_small_study(tmp_path, paper=paper)
    assert problem in str(caught.value) and len(caught.value.problems) == 1


def test_unreadable_files_are_rejected(tmp_path):
    for content, problem in (("[1]", "is no mapping"), ("a: [", "is not YAML")):
        (tmp_path / "own.yaml").write_text(content)
        with pytest.raises(StudyError, match=problem):
            read_study(tmp_path / "own.yaml")
    with pytest.raises(StudyError, match="cannot be read"):
        read_study(tmp_path / "not.yaml")
    with pytest.raises(StudyError, match="no base_papers.yaml; did you mean paper?"):
        read_study(TABLES[0], "papers")
    with pytest.raises(StudyError, match="does not fit its base"):
        read_small_study(tmp_path, settings={"random": ["a"]}, columns={"tr1": {"key": {"a": 1}}})


def test_all_problems_of_configs_are_reported_together_and_once(tmp_path):
    base = OmegaConf.to_container(OmegaConf.create(BASE))
    base["options"] = {"run.test_splits": []}
    base["stages"]["test"]["config"] = "projects/not_there.yaml"
    base["columns"]["other"] = {"key": "txt_r5", "stage": "train"}
    changes = {"vary": {SPACE: [128, 256], "model.mafa.alhpa": [1]}, "paper": None}
    plan = make_plan(read_small_study(tmp_path, base=base, **changes), tmp_path / "out", [3, 5])
    with pytest.raises(StudyError) as caught:
        check(plan)
    problems = caught.value.problems
    assert len(problems) == 2 and all(" and 3 more: " in problem for problem in problems)
    assert "model.mafa.alhpa: unknown" in problems[0] and "not_there.yaml" in problems[1]
    del base["stages"]["test"], base["columns"]["tr1"]
    study = read_small_study(tmp_path, base=base, paper=None, figure={})
    with pytest.raises(StudyError, match=r"plain, M=128 and 3 more: column other reads split test"):
        check(make_plan(study, tmp_path / "out", [3]))


# Shipped files


def test_shipped_studies():
    mafa = {f"table_{number}" for number in (4, 5, 6, 13, 14, 15, 16, 18)}
    assert {path.stem for path in TABLES} == {*mafa, *(f"table_grit_vlp_{n}" for n in (1, 4, 5))}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """The plans of every shipped file with both bases, with checked configs."""
    plans_by_file, output = {}, tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        read_once = lambda path, options, machine: loaded(path, tuple(options))  # noqa: E731
        patch.setattr(plan_module, "load_config", read_once)
        for path, at in itertools.product(TABLES, ("toy", "paper")):
            study = read_study(path, at)
            plan = plans_by_file[path.stem, at] = make_plan(study, output / at, [7])
            check(plan)
    return plans_by_file


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_shipped_file_is_valid_with_both_bases(plans, path):
    toy, paper = (plans[path.stem, at].study for at in ("toy", "paper"))
    assert f"lavis-mafa study {path.relative_to(ROOT)}" in path.read_text()
    assert len(paper.paper.rows) == len(paper.rows) and all(paper.paper.rows)
    assert [row.cells for row in paper.rows] == paper.paper.cells == toy.paper.cells
    assert {column.name for column in paper.columns} >= {"tr1", "ir1"} <= {*toy.y, "tr1"}
    for at in ("toy", "paper"):
        jobs = [job for job in plans[path.stem, at].jobs.values() if job.config]
        configs_of = [config_of(job) for job in {job.form: job for job in reversed(jobs)}.values()]
        assert {cfg.model_cfg.model_type == "tiny" for cfg in configs_of} == {at == "toy"}
        assert {cfg.run_cfg.device for cfg in configs_of} == {"cpu" if at == "toy" else "cuda"}
        assert all(job.steps > 0 for job in jobs) or at == "paper"


@pytest.mark.parametrize(("at", "stage"), [("toy", "train"), ("paper", "pretrain")])
def test_hard_negatives_without_itc_are_picked_by_encoders_of_itc_alone(plans, at, stage):
    """GRIT-VLP, Table 1: "MLM + ITMhard"."""
    plan = plans["table_grit_vlp_1", at]
    rows = [row for row in plan.study.rows if row.name.startswith("MLM + ITMhard")]
    itc = plan.jobs["itc/7"]
    weights = config_of(itc).model_cfg.mafa.loss_weights
    assert (weights.itc, weights.itm, weights.lm) == (1, 0, 0) and len(rows) == 2
    for row in rows:
        job = plan.of[row.name][7][stage]
        mafa = config_of(job).model_cfg.mafa
        assert mafa.negatives_encoder.checkpoint == str(itc.checkpoint) and "itc/7" in job.needs
        assert mafa.loss_weights.itc == 0 and mafa.negatives == "sampled" and mafa.con_d is None


@pytest.mark.parametrize(("at", "stage"), [("toy", "train"), ("paper", "pretrain")])
def test_rows_of_grit_vlps_first_table_are_those_of_the_paper(plans, at, stage):
    plan = plans["table_grit_vlp_1", at]
    rows = {}
    for row in plan.study.rows:
        cfg = config_of(plan.of[row.name][7][stage])
        mafa = cfg.model_cfg.mafa
        assert cfg.model_cfg.mlm_mask_prob == 0.15 and mafa.soft_labels.type == "one_hot"
        assert not cfg.run_cfg.grit.enabled and mafa.con_d is None
        weights = mafa.loss_weights
        assert (weights.itm, weights.lm) == (1, 1)
        rows[row.name.split(",")[0]] = (mafa.negatives, weights.itc)
    assert rows == {
        "MLM + ITMrand": ("uniform", 0),
        "MLM + ITMrand + ITC": ("uniform", 1),
        "MLM + ITMhard": ("sampled", 0),
        "ALBEF-base": ("sampled", 1),
    }


def settings_of_step(job):
    """Return what a row sets in the training step, independent of its size."""
    cfg = config_of(job)
    step = StepSettings.from_config(OmegaConf.to_container(cfg.model_cfg.mafa))
    con_d = cfg.model_cfg.mafa.con_d
    judge = {"albef_mafa": "own", "albef_retrieval": "own"}.get(con_d and con_d.arch, "oracle")
    grit = cfg.run_cfg.grit.enabled
    return [
        *(grit, step.negatives, step.soft_labels, step.connections, step.loss_weights),
        *(cfg.model_cfg.mlm_mask_prob, judge if con_d else None),
        # The first grouped epoch is the second one, given by the file or by the option.
        *(cfg.run_cfg.grit.start_epoch, step.soft_labels.active(1, grouped=grit)),
    ]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_row_has_the_same_settings_with_both_bases(plans, path):
    toy, paper = plans[path.stem, "toy"], plans[path.stem, "paper"]
    distinct_rows = []
    for plan, stage in ((toy, "train"), (paper, "pretrain")):
        distinct_rows.append([])
        for row in plan.study.rows:
            row_settings = settings_of_step(plan.of[row.name][7][stage])
            if (row.base, row_settings) not in distinct_rows[-1]:
                distinct_rows[-1].append((row.base, row_settings))
    assert distinct_rows[0] == distinct_rows[1]
    same_rows = len(toy.study.rows) == len(paper.study.rows)
    sizes = {"run.max_epoch", "run.batch_size_train", SPACE}
    assert same_rows or sizes & {*toy.study.rows[0].values}


@pytest.mark.parametrize(
    "table, row, system",
    [
        ("table_4", "GRIT-VLP", "grit"),
        ("table_4", "ECM", "ecm"),
        ("table_4", "S-ITC", "s_itc"),
        ("table_4", "MAFA", "mafa"),
        ("table_5", "ALBEF-base", "base"),
        ("table_5", "ALBEF-base + ECM", "random_ecm"),
        ("table_6", "ALBEF-base + momentum", "momentum"),
        ("table_6", "ALBEF-base + S-ITC", "random_s_itc"),
    ],
)
def test_toy_rows_mean_the_same_as_the_systems_of_the_comparison(
    plans, tmp_path, table, row, system
):
    """They differ in data, sizes and start, but not in the method."""
    compared = prepare(Request("compare.yaml", seeds=[7], output=tmp_path, rows=[system]))
    check(compared)
    methods = []
    for job in (plans[table, "toy"].of[row][7]["train"], compared.jobs[f"{system}/7"]):
        cfg = config_of(job)
        step = StepSettings.from_config(OmegaConf.to_container(cfg.model_cfg.mafa))
        con_d = cfg.model_cfg.mafa.con_d
        methods.append(
            [
                *(cfg.run_cfg.grit.enabled, step.negatives, step.soft_labels.type),
                *(step.connections, step.loss_weights, con_d and con_d.arch),
            ]
        )
    assert methods[0] == methods[1]


@pytest.mark.parametrize("at", ["toy", "paper"])
def test_tables_share_equal_rows(plans, at):
    stage = {"toy": "train", "paper": "pretrain"}[at]
    space, high = (", M=1280", "") if at == "toy" else (", M=4800", "")
    mafa = [("table_4", "MAFA"), ("table_5", "MAFA"), ("table_16", "MAFA")]
    mafa += [("table_13", f"MAFA{space}"), ("table_15", f"MAFA, τ=0.8{high}")]
    grit = [(table, "GRIT-VLP") for table in ("table_4", "table_5", "table_6", "table_14")]
    grit += [("table_16", "GRIT-VLP"), ("table_13", f"GRIT-VLP{space}")]
    for rows in (mafa, grit, [("table_4", "ECM"), ("table_14", "ECM")]):
        names = {plans[table, at].of[row][7][stage].folder.name for table, row in rows}
        assert len(names) == 1
    assert {plan.study.at for plan in plans.values()} == {"toy", "paper"}


def test_search_spaces_thresholds_and_alphas_of_the_paper(plans):
    def configs_of(table):
        jobs_of = plans[table, "paper"].of
        return [config_of(by_seed[7]["pretrain"]) for by_seed in jobs_of.values()]

    assert [c.run_cfg.grit.search_space for c in configs_of("table_13")] == 2 * [960, 4800, 48000]
    rules = [c.model_cfg.mafa.connections for c in configs_of("table_15")]
    assert [(rule.low, rule.high) for rule in rules] == [(0.5, 0.5), (0.5, 0.8)]
    alphas = [
        (c.model_cfg.mafa.soft_labels.alpha, c.run_cfg.max_epoch) for c in configs_of("table_18")
    ]
    assert alphas == [(alpha, 10) for alpha in (0.1, 0.3, 0.5, 0.7, 0.9)]
    uses = [list(c.model_cfg.mafa.connections.use_in) for c in configs_of("table_14")[1:]]
    assert uses == [["itc"], ["itm"], ["lm"], ["itc", "itm", "lm"]]
    assert configs_of("table_4")[0].run_cfg.max_epoch == 20
    con_d = configs_of("table_16")[2].model_cfg.mafa.con_d
    assert (con_d.arch, con_d.model_type, con_d.checkpoint) == ("blip_retrieval", "coco", None)


def test_paper_numbers_are_consistent(plans):
    """The same system has the same COCO recall in all tables, and averages are correct."""
    recall_of = {}
    for table in ("table_4", "table_5", "table_6", "table_13", "table_14", "table_16"):
        study = plans[table, "paper"].study
        columns = list(study.paper.columns)
        places = [[c for c in columns if kind in c][0] for kind in ("TR", "IR")]
        for row, numbers in zip(study.rows, study.paper.rows, strict=True):
            if row.values.get(SPACE, 4800) == 4800:
                recalls = tuple(numbers[columns.index(place)] for place in places)
                assert recall_of.setdefault(row.base, recalls) == recalls
            if columns[-1] == "Avg":
                assert numbers[-1] == pytest.approx(statistics.fmean(numbers[:6]), abs=0.06)
    assert recall_of["GRIT-VLP"] == (76.6, 59.6) and recall_of["MAFA"] == (78.0, 61.2)


# Results


def write_job_log(job, *records, done=True):
    job.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (job.folder / "log.jsonl").write_text("".join(lines))
    if done:
        (job.folder / "done").touch()


def study_with_results(tmp_path):
    """Return a plan with results of three of the four rows: two seeds, one seed, and one
    unfinished.
    """
    plan = make_plan(read_small_study(tmp_path), tmp_path / "out", [3, 5])
    plan.command = "lavis-mafa study own.yaml"
    for row, seed, value in (
        ("plain, M=128", 3, 10.0),
        ("plain, M=128", 5, 13.0),
        ("mined, M=256", 5, 42.0),
    ):
        jobs = plan.of[row][seed]
        epochs = [{"kind": "epoch", "loss_itc": k, "loss_itm": k + 1.0} for k in (9.0, value)]
        write_job_log(jobs["train"], *epochs)
        records = [
            *({"kind": "eval", "split": "test", "txt_r1": k} for k in (99.0, value)),
            {"kind": "eval", "split": "val", "txt_r1": 98.0},
        ]
        write_job_log(jobs["test"], *records)
    half = plan.of["mined, M=128"][3]
    write_job_log(half["train"], {"kind": "epoch", "loss_itc": 1.0})
    write_job_log(half["test"], {"kind": "eval", "split": "test", "txt_r1": 1.0}, done=False)
    return plan


def test_written_results_equal_the_logs(tmp_path):
    plan = study_with_results(tmp_path)
    figures, problems = figures_of(plan)
    assert not problems
    path = write_all(plan, figures)
    text, content = path.read_text(), json.loads(path.with_suffix(".json").read_text())
    assert path == tmp_path / "out/own/results.md"
    ours, theirs = re.findall(r"\n\n(\| row.*?)\n\n", text, re.S)[:2]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ours.splitlines()]
    assert cells[0] == ["row", "Con-D", "M", "n", "TR@1", "loss"]
    assert cells[2:] == [
        ["plain", "✗", "128", "2", "11.5 ± 2.1", "120.0 ± 21.2"],
        ["plain", "✗", "256", "0", "–", "–"],
        ["mined", "✓", "128", "1", "–", "10.0"],
        ["mined", "✓", "256", "1", "42.0", "425.0"],
    ]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in theirs.splitlines()]
    assert cells[0] == ["row", "Con-D", "M", "TR", "IR"]
    assert cells[2:] == [
        ["plain", "✗", "128", "76.60", "59.6"],
        ["plain", "✗", "256", "1.25", "–"],
        ["mined", "✓", "128", "–", "–"],
        ["mined", "✓", "256", "77.00", "60.2"],
    ]
    assert (
        "76.6" not in ours and "|\n\nLarge\n" in text.split("The paper's numbers: Table 0\n\n|")[1]
    )
    row = content["rows"]["plain, M=128"]
    assert row["seeds"] == {"3": {"tr1": 10.0, "loss": 105.0}, "5": {"tr1": 13.0, "loss": 135.0}}
    assert row["spread"]["tr1"] == {"mean": 11.5, "sd": pytest.approx(2.1213, abs=1e-4), "n": 2}
    assert (tmp_path / "out" / row["folders"]["5"]["test"] / "log.jsonl").is_file()
    assert content["paper"]["rows"][0] == [76.6, 59.6]
    page = (path.parent / "report.html").read_text()
    assert "11.5 ± 2.1" in page and "76.60" in page and "<svg" in page


def self_check(auc, own, random, problems=()):
    """Return a record as a run logs it; shares are those above the highest threshold, .8."""
    above = [
        {"threshold": 0.5, "own": 1.0, "random": 0.5},
        {"threshold": 0.8, "own": own, "random": random},
    ]
    record = {"name": "albef_mafa", "pairs": 256, "auc": auc, "above": above}
    return {**record, "problems": list(problems)}


def test_results_show_the_self_checks_of_con_d(tmp_path):
    """Plain rows have no Con-D; of a restarted run the last check counts."""
    plan = study_with_results(tmp_path)
    poor = "only 1.0% of own pairs are above 0.8"
    checks = {
        ("mined, M=128", 3): self_check(0.5, 0.5, 0.5, ["not complete: not shown"]),
        ("mined, M=128", 5): self_check(0.7, 0.01, 0.0, [poor]),
        ("mined, M=256", 3): self_check(0.9, 0.25, 0.0),
        ("mined, M=256", 5): self_check(0.7, 0.01, 0.125, [poor]),
    }
    for (row, seed), found in checks.items():
        line = {"kind": "con_d_self_check", "time": 1, **found}
        write_job_log(plan.of[row][seed]["train"], {**line, "auc": 0.1}, line)
    (plan.of["mined, M=128"][3]["train"].folder / "done").unlink()
    path = write_all(plan, figures_of(plan)[0])
    text, page = path.read_text(), (path.parent / "report.html").read_text()
    section = text.split("## Con-D self-check")[1].split("## The rows")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == [
        *("row", "n", "AUC", "threshold", "own above %", "random above %", "verdict")
    ]
    assert cells[2:] == [
        ["mined, M=128", "1", "0.700", "0.8", "1.0", "0.0", "fails"],
        [
            *("mined, M=256", "2", "0.800 ± 0.141", "0.8", "13.0 ± 17.0", "6.2 ± 8.8"),
            "fails with seed 5",
        ],
    ]
    warning = (
        "Warning: Con-D of mined, M=128 and mined, M=256 fails its self-check: "
        f"with seed 5, {poor}."
    )
    assert warning in section and section.count("Warning") == 1
    assert warning in page and "0.800 ± 0.141" in page
    rows = json.loads(path.with_suffix(".json").read_text())["rows"]
    assert rows["plain, M=128"]["self_check"] == {} and rows["mined, M=128"][
        "self_check"
    ].keys() == {"5"}
    for seed in (3, 5):
        assert rows["mined, M=256"]["self_check"][str(seed)] == checks["mined, M=256", seed]


def test_self_checks_that_pass_have_no_warning(tmp_path):
    plan = study_with_results(tmp_path)
    path = write_all(plan, figures_of(plan)[0])
    assert "self-check" not in path.read_text(), "no run has a Con-D"
    write_job_log(
        plan.of["mined, M=256"][5]["train"],
        {"kind": "con_d_self_check", "time": 1, **self_check(0.99, 0.5, 0.0)},
    )
    text = write_all(plan, figures_of(plan)[0]).read_text()
    assert "| 0.990 | 0.8       | 50.0        | 0.0            | passed  |" in text
    assert "Warning" not in text


def test_figure_has_a_line_per_row(tmp_path):
    """A line for each row, a point for each value; no numbers of the paper; reproducible."""
    plan = study_with_results(tmp_path)
    folder = write_all(plan, figures_of(plan)[0]).parent
    picture = (folder / "figure.svg").read_text()
    texts = [node.text for node in ElementTree.fromstring(picture).iter() if node.text]
    texts = {text.strip() for text in texts}
    assert {"plain", "mined", "M", "TR@1"} <= texts and not {"76.6", "76.60"} & texts
    assert "![A title](figure.svg)" in (folder / "results.md").read_text()
    write_all(plan, figures_of(plan)[0])
    assert (folder / "figure.svg").read_text() == picture


def test_figure_over_rows(tmp_path):
    changes = {"vary": {}, "figure": {"x": "row", "y": ["tr1", "loss"]}, "paper": None}
    plan = make_plan(read_small_study(tmp_path, **changes), tmp_path / "out", [3])
    empty = write_all(plan, figures_of(plan)[0])
    assert "figure.svg" not in empty.read_text() and not (empty.parent / "figure.svg").exists()
    write_job_log(plan.of["plain"][3]["test"], {"kind": "eval", "split": "test", "txt_r1": 5.0})
    folder = write_all(plan, figures_of(plan)[0]).parent
    root = ElementTree.fromstring((folder / "figure.svg").read_text())
    texts = {node.text.strip() for node in root.iter() if node.text}
    assert {"plain", "mined", "TR@1"} <= texts and "loss" not in texts, "it has no values"


def test_missing_log_key_is_reported(tmp_path):
    plan = study_with_results(tmp_path)
    for jobs in (
        plan.of["plain, M=128"][3],
        plan.of["plain, M=128"][5],
        plan.of["mined, M=256"][5],
    ):
        write_job_log(jobs["test"], {"kind": "eval", "split": "test", "txt_r5": 1.0})
    _, problems = figures_of(plan)
    assert len(problems) == 1 and "column tr1: no log of stage test has txt_r1" in problems[0]


# The command


def run_small_study(tmp_path, *options, **changes):
    path = write_study(tmp_path, **changes)
    argv = [str(path), "--at", "small", "--output", str(tmp_path / "out"), "--seeds", "3"]
    return run_command([*argv, *options])


def run_command(argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(argv))


@pytest.fixture
def fake_runs(monkeypatch):
    """Replace runs by log writers; return the started titles and the set ``fails`` of failing
    titles.
    """
    started, fails = [], set()

    def run_all(jobs, at_once, after):
        failed = {}
        for name, job in jobs.items():
            if job.done:
                continue
            failed_dependencies = job.needs & failed.keys()
            if failed_dependencies or job.title in fails:
                failed[name] = "no luck"
                continue
            started.append(job.title)
            write_job_log(job, {"kind": "eval", "split": "test", "txt_r1": 5.0, "loss_itc": 1.0})
            (job.folder / "command.txt").write_text(f"{shown_command(job)}\n")
        return failed

    monkeypatch.setattr(engine, "run_all", run_all)
    return started, fails


def test_finished_rows_are_skipped_and_failures_reported(tmp_path, fake_runs, capsys):
    started, fails = fake_runs
    fails.add("mined, M=128, train, seed 3")
    shows = {"shows": ["tr1"]}
    assert run_small_study(tmp_path, **shows) == 1
    output = capsys.readouterr().out
    assert (
        "10 runs, 10 to do" in output and "FAILED: mined, M=128, train, seed 3: no luck" in output
    )
    assert "FAILED: mined, M=128, test" in output and "| mined | ✓     | 256 | 1 | 5.0  |" in output
    assert len(started) == 8
    fails.clear()
    assert run_small_study(tmp_path, **shows) == 0
    assert started[8:] == ["mined, M=128, train, seed 3", "mined, M=128, test, seed 3"]
    assert "10 runs, 2 to do" in capsys.readouterr().out


def test_other_command_in_the_same_folder_is_rejected(tmp_path, fake_runs, capsys):
    started, _ = fake_runs
    assert run_small_study(tmp_path, shows=["tr1"]) == 0
    before = list(started)
    longer = OmegaConf.to_container(OmegaConf.create(BASE))
    longer["shared"]["con_d"]["options"]["run.max_epoch"] = 30
    assert run_small_study(tmp_path, base=longer, shows=["tr1"]) == 2 and started == before
    assert "con_d holds a run of another command" in capsys.readouterr().out


def test_list_and_dry_run_start_nothing(tmp_path, fake_runs, capsys):
    assert run_small_study(tmp_path, "--list") == 0
    output = capsys.readouterr().out
    assert (
        "A title (Table 0)" in output and "  mined, M=256\n" in output and "  loss: loss" in output
    )
    assert run_small_study(tmp_path, "--dry-run", "--rows", "plain, M=128") == 0
    output = capsys.readouterr().out
    assert (
        "plain, M=128, train, seed 3 (to do)\n  python " in output and "2 runs, 2 to do" in output
    )
    assert not fake_runs[0] and not (tmp_path / "out").exists()


def test_invalid_studies_are_rejected_before_any_run(tmp_path, fake_runs, capsys):
    assert (
        run_small_study(tmp_path, vary={"run.grit.serach_space": [1]}, figure={}, paper=None) == 2
    )
    assert "did you mean run.grit.search_space?" in capsys.readouterr().out
    assert run_small_study(tmp_path, "--given", "con_d=not/there.pth") == 2
    assert "there is no " in capsys.readouterr().out
    assert not fake_runs[0] and not (tmp_path / "out").exists()


def test_results_contain_a_command_that_reproduces_them(tmp_path, fake_runs):
    path = str(TABLES[0])
    options = ["--at", "toy", "--seeds", "1", "--columns", "tr1"]
    assert run_command([path, *options, "--output", str(tmp_path)]) == 0
    text = (tmp_path / TABLES[0].stem / "results.md").read_text()
    command_line = next(line for line in text.splitlines() if line.startswith("lavis-mafa "))
    assert command_line.split()[2:] == [str(TABLES[0].relative_to(ROOT)), *options]
    assert str(tmp_path) not in text


# End to end

TINY = {
    "options": {
        "run.test_splits": ["test"],
        "run.valid_splits": [],
        "run.max_epoch": 2,
        "run.batch_size_train": 16,
        "run.warmup_steps": 2,
        "run.log_freq": 1,
        "run.grit.start_epoch": 1,
        "run.grit.queue_size": 96,
        SPACE: 48,
        "datasets.toy_scenes.build_info.train_size": 300,
        "datasets.toy_scenes.build_info.test_size": 30,
    },
    "settings": {"consistency": {"model.mafa.soft_labels.type": "consistency"}},
    "shared": {
        "start": {
            **BASE["shared"]["start"],
            "arguments": [*BASE["shared"]["start"]["arguments"], "--steps", "3"],
        },
        "warm_up": {
            "config": TOY,
            "options": {
                "run.max_epoch": 1,
                "run.grit.enabled": False,
                "model.mafa.negatives": "sampled",
                "model.mafa.soft_labels.type": "one_hot",
                "model.load_pretrained": True,
                "model.pretrained": "{start}",
            },
        },
    },
    "stages": {
        "train": {
            "config": TOY,
            "options": {"model.load_pretrained": True, "model.pretrained": "{warm_up}"},
        }
    },
    "columns": {
        "tr1": {"title": "TR@1", "key": "txt_r1"},
        "mean": {"title": "Avg", "key": "r_mean"},
        "false": {"key": "false_negative_rate_in_itm_i2t", "kind": "epoch", "scale": 100},
    },
}
TWO = {
    "title": "Two rows",
    "source": "MAFA, Table 16",
    "rows": [
        {"name": "GRIT-VLP", "uses": ["consistency"]},
        {"name": "MAFA (oracle)", "options": {"model.mafa.con_d.arch": "oracle"}},
    ],
    "figure": {"x": "row", "y": ["tr1", "mean"]},
    "paper": {"about": "ViT-B/16", "columns": ["TR"], "rows": [[76.6], [78.5]]},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_study_is_resumed_to_the_same_table(tmp_path):
    """Kill during the second epoch of the second row, then rerun the command."""
    (tmp_path / "base_tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(TWO, sort_keys=False))
    output = tmp_path / "out"

    def start():
        words = [sys.executable, "-m", "lavis_mafa", "study", str(tmp_path / "two.yaml")]
        return subprocess.Popen(
            [*words, "--at", "tiny", "--seeds", "0", "--output", str(output)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    plan = make_plan(
        read_study(tmp_path / "two.yaml", str(tmp_path / "base_tiny.yaml")), output, [0]
    )
    mafa = plan.of["MAFA (oracle)"][0]["train"]
    logged, process = mafa.folder / "log.jsonl", start()
    deadline = time.time() + 400
    while not (logged.is_file() and '"epoch": 1, "step": 2,' in logged.read_text()):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert mafa.checkpoint.is_file() and not mafa.done
    finished = {path: path.stat().st_mtime_ns for path in output.glob("*/*/*/done")}
    assert len(finished) == 3  # start, warm-up, GRIT-VLP

    rerun = start()
    output_text, _ = rerun.communicate(timeout=300)
    assert rerun.returncode == 0, output_text[-3000:]
    assert "4 runs, 1 to do" in output_text and "| MAFA (oracle) | 1 |" in output_text
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    starts = [line for line in logged.read_text().splitlines() if '"kind": "config"' in line]
    assert len(starts) == 2
    epochs = [json.loads(line) for line in logged.read_text().splitlines()]
    assert [record["epoch"] for record in epochs if record["kind"] == "epoch"] == [0, 1]
    content = json.loads((output / "two/results.json").read_text())
    for row, by_seed in plan.of.items():
        evals = [json.loads(line) for line in open(by_seed[0]["train"].folder / "log.jsonl")]
        (logged_eval,) = [record for record in evals if record["kind"] == "eval"]
        assert content["rows"][row]["seeds"]["0"]["tr1"] == logged_eval["txt_r1"]
        assert content["rows"][row]["seeds"]["0"]["false"] >= 0.0
    assert content["rows"]["MAFA (oracle)"]["seeds"]["0"]["false"] == 0.0, "the oracle finds all"
    assert (output / "two/figure.svg").is_file() and (output / "two/report.html").is_file()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{epochs}", 5),
        ("{epochs*2}", 10),
        ("{epochs/2}", 2),
        ("{epochs/8}", 1),
        ("{epochs-1}", 4),
        ("{epochs-9}", 1),
        ("for {epochs-1} epochs", "for 4 epochs"),
        ("${epochs-1}", "${epochs-1}"),
        ("{other-1}", "{other-1}"),
    ],
)
def test_parameters_are_computed_with(tmp_path, text, value):
    path = tmp_path / "study.yaml"
    rows = [{"name": "one", "options": {"run.max_epoch": text}}]
    stages, columns = {"train": {"config": TOY}}, {"loss": {"kind": "epoch"}}
    given = {"rows": rows, "stages": stages, "columns": columns, "parameters": {"epochs": 5}}
    path.write_text(yaml.safe_dump(given))
    assert read_study(path).rows[0].options["run.max_epoch"] == value
