"""Reading study files: rows, precedence, bases, and all problems at once."""

from __future__ import annotations

import copy

import pytest
import yaml
from small_study import BASE, MASKED, SPACE, TOY, read_small_study

from research.studies.study_file import StudyError, read_study


def test_rows_of_a_study(tmp_path):
    study = read_small_study(tmp_path)
    assert [row.name for row in study.rows] == [
        "plain, M=128",
        "plain, M=256",
        "mined, M=128",
        "mined, M=256",
    ]
    assert study.rows[0].cells == {"row": "plain", "Con-D": "✗", "M": "128"}
    assert study.rows[3].cells == {"row": "mined", "Con-D": "✓", "M": "256"}
    assert study.rows[3].options == {**BASE["settings"]["con_d"], MASKED: 0.2, SPACE: 256}
    assert study.file.seeds == [3, 5]


def test_precedence_of_options(tmp_path):
    rows = [{"name": "a", "uses": ["random"], "options": {"run.grit.enabled": True, SPACE: 1}}]
    (row,) = read_small_study(tmp_path, rows=rows, vary={SPACE: [64]}).rows
    assert row.options == {"run.grit.enabled": True, "model.mafa.negatives": "sampled", SPACE: 64}


def test_section_of_a_scale_overrides_file_and_base(tmp_path):
    section = {"vary": {SPACE: [64]}, "seeds": [1], "columns": {"tr1": {"title": "other"}}}
    study = read_small_study(tmp_path, at={"small": section, "large": {"vary": {SPACE: [99]}}})
    assert [row.name for row in study.rows] == ["plain, M=64", "mined, M=64"]
    assert study.file.seeds == [1]
    assert (study.columns[0].title, study.columns[0].keys) == ("other", ["txt_r1"])


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
    with pytest.raises(StudyError, match="there is no epoch; did you mean epochs"):
        read_study(path, parameters={"epoch": 3})


def problems_of(tmp_path, **changes):
    with pytest.raises(StudyError) as caught:
        read_small_study(tmp_path, **changes)
    problems = caught.value.problems
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the study"
    assert str(caught.value).startswith(count)
    return problems


def expect(problems, expected):
    for text in expected:
        assert any(text in problem for problem in problems), (text, problems)
    assert len(problems) == len(expected)


def test_keys_and_types_that_are_wrong_are_reported_together(tmp_path):
    base = copy.deepcopy(BASE)
    base["stages"]["test"]["script"] = "train.py"
    base["colums"] = {}
    problems = problems_of(
        tmp_path,
        base=base,
        rows=[{"name": "a", "option": {}}, {"options": {"run.grit": {}}}],
        seeds=["x"],
        at_once=0,
        at={"small": {"row": []}},
        vary={SPACE: 3},
        settings={"random": 3},
        paper={"columns": ["row", "TR"], "rows": [[1]]},
        shared={"start": {"config": TOY}},
    )
    expected = [
        "colums: Extra inputs are not permitted",
        "row: Extra inputs",
        "stages.test.script: Extra inputs",
        "paper: Value error, [1]: expected 2 cells",
        "rows.0.option: Extra inputs",
        "run.grit is a mapping",
        "rows.1.name: Field required",
        "seeds.0",
        "at_once: Input should be greater than 0",
        f"vary.{SPACE}",
        "settings.random",
        "shared.start: Value error, expected one of config, module and checkpoint",
    ]
    expect(problems, expected)


def test_names_that_do_not_exist_are_reported_together(tmp_path):
    problems = problems_of(
        tmp_path,
        rows=[{"name": "a", "uses": ["randon"]}, {"name": "a"}],
        shows=["tr", "loss"],
        claims=[{"claim": "c", "row": "a", "than": "b", "column": "loss"}],
        vary={},
    )
    expected = [
        "no setting randon; did you mean random?",
        "there are two called 'a'",
        "shows: no column tr;",
        "claims.0: no row b",
    ]
    expect(problems, expected)
