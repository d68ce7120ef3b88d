"""docs/config.md equals the page generated from the schema and the default YAMLs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.algorithm.registry import MAFA as STEP
from lavis_mafa.cli import main
from lavis_mafa.config.page import COMMAND, comments, ours, page, plain
from lavis_mafa.config.registered import own_keys
from lavis_mafa.config.schema import CON_D, GRIT, MAFA, MODEL, MODEL_MAFA, MODEL_PARTS, RUN
from lavis_mafa.models.con_d.discriminator import DISCRIMINATORS

PAGE = ROOT / "docs" / "config.md"


@pytest.fixture(scope="module")
def generated():
    return page()


def rows(text, title):
    """Return the first cells of the table below a heading."""
    part = text.split(f"\n{title}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", part, flags=re.MULTILINE)


def test_page_is_up_to_date(generated):
    assert PAGE.read_text(encoding="utf-8") == generated, f"docs/config.md is old: run `{COMMAND}`"


def test_every_key_of_the_schema_has_a_row(generated):
    assert rows(generated, "## `run`") == list(RUN)
    of_grit = rows(generated, "## `run.grit`")
    assert [row for row in of_grit if row.partition(".")[0] not in HARDNESS] == list(GRIT)
    assert {"linear.start", "cosine.epochs"} < set(of_grit)
    assert rows(generated, "## `model`") == list(MODEL)
    of_mafa = rows(generated, "## `model.mafa`")
    registered = {name for one in STEP.registries for name in own_keys(one)} - MAFA.keys()
    assert [row for row in of_mafa if row not in registered] == list(MAFA)
    assert {"sigmoid", "softclip"} < registered <= set(of_mafa)
    of_this_package = rows(generated, "## `model`, of this package")
    assert {*MODEL_MAFA, *MODEL_PARTS} == {name for name in of_this_package if "." not in name}
    for name, key in MAFA.items():
        if key.keys:
            found = rows(generated, f"## `model.mafa.{name}`")
            own = [row for row in found if row.partition(".")[0] in DISCRIMINATORS]
            assert [row for row in found if row not in own] == list(key.keys)
            assert ("yes_no.question" in own) == (name == "con_d")
    assert rows(generated, "## `model.mafa.con_d`")[: len(CON_D)] == list(CON_D)


def test_every_row_describes_its_key(generated):
    empty = [line for line in generated.splitlines() if re.search(r"\|\s*\|$", line)]
    assert empty == []


def test_rows_of_a_table_have_equally_many_cells(generated):
    blocks = re.findall(r"(?:^\|.*\n)+", generated, flags=re.MULTILINE)
    assert len(blocks) > 20
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_every_model_and_data_set_links_its_default_yaml(generated):
    for table in ("model", "builder"):
        for name, cls in ours(table):
            part = generated.split(f"\n### `{name}`\n", 1)[1].split("\n#", 1)[0]
            types = getattr(cls, "PRETRAINED_MODEL_CONFIG_DICT", None) or cls.DATASET_CONFIG_DICT
            links = re.findall(r"\[([^\]]+)\]\(\.\./([^)]+)\)", part)
            assert [kind for kinds, _ in links for kind in kinds.split(", ")] == list(types)
            assert all((ROOT / path).is_file() for _, path in links)


def test_page_contains_nothing_specific_to_this_machine(generated):
    assert str(ROOT) not in generated and str(Path.home()) not in generated
    assert "albef_retrieval" in con_d_section(generated) and "pnp_vqa" not in generated


def con_d_section(text):
    return text.split("\n## `model.mafa.con_d`\n", 1)[1].split("\n#", 1)[0]


def test_defaults_that_differ_by_task_are_shown(generated):
    assert "| `False`; `True` for task `mafa_pretrain` |" in generated


def test_comments_of_a_yaml_are_assigned_to_keys():
    text = "\n".join(
        [
            "# head",
            "a:",
            "  b: 1 # behind",
            "  # above,",
            "  # two lines",
            '  c: "x"',
            "  d:",
            "    e: # of a mapping",
            "      f: 2",
            "  g: 3",
        ]
    )
    assert comments(text) == {
        "a": "head",
        "a.b": "behind",
        "a.c": "above, two lines",
        "a.d": "",
        "a.d.e": "of a mapping",
        "a.d.e.f": "",
        "a.g": "",
    }


@pytest.mark.parametrize(
    "value, written",
    [(None, "null"), (True, "True"), (0.0001, "0.0001"), (1e-6, "1e-06"), (5.0, "5.0"), ("", '""')]
    + [("a picture of ", '"a picture of "'), (["itc", "itm"], '["itc", "itm"]'), ({}, "{}")],
)
def test_values_are_written_as_in_yaml(value, written):
    assert plain(value) == written


def test_command_prints_or_writes_the_page(generated, tmp_path, capsys):
    assert main(["config"]) == 0
    assert capsys.readouterr().out == generated
    assert main(["config", "--write", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == generated
