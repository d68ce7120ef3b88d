"""docs/config.md equals the page generated from the keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_page import COMMAND, PAGE, page
from conftest import ROOT

from lavis_mafa.algorithm.grit import HARDNESS
from lavis_mafa.settings.registered import LISTED, MODEL, OURS, PARTS, RUN


@pytest.fixture(scope="module")
def generated():
    return page()


def rows(text, title):
    """Return the keys of the list below a heading."""
    part = text.split(f"\n{title}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^- `([^`]+)` \(", part, flags=re.MULTILINE)


def test_page_is_up_to_date(generated):
    assert PAGE.read_text(encoding="utf-8") == generated, f"docs/config.md is old: run `{COMMAND}`"


def test_every_key_has_a_line(generated):
    of_lavis = {name for keys in LISTED for name in keys}
    assert all(f"`{name}`" in generated for name in of_lavis)
    assert set(RUN) - of_lavis == {*rows(generated, "## `run`"), "grit"}
    of_grit = rows(generated, "## `run.grit`")
    assert set(RUN["grit"].keys) == {
        row for row in of_grit if row.partition(".")[0] not in HARDNESS
    }
    assert "linear.start" in of_grit
    assert rows(generated, "## `model`") == [name for name in MODEL if name not in of_lavis]
    of_ours = rows(generated, "## `model`, of this package")
    assert {*OURS, *PARTS} - {"mafa"} == {name for name in of_ours if "." not in name}
    mafa = OURS["mafa"].keys
    of_mafa = rows(generated, "## `model.mafa`")
    assert {*mafa} - {"con_d", "connections"} <= set(of_mafa)
    assert {"sigmoid", "softclip", "soft_labels.alpha", "negatives_encoder.arch"} < set(of_mafa)
    for name in ("connections", "con_d"):
        assert set(mafa[name].keys) <= set(rows(generated, f"## `model.mafa.{name}`"))
    assert "yes_no.question" in rows(generated, "## `model.mafa.con_d`")


def test_page_contains_nothing_specific_to_this_machine(generated):
    assert str(ROOT) not in generated and str(Path.home()) not in generated


def test_defaults_that_differ_by_task_are_shown(generated):
    assert "- `enabled` (bool, `False`, `True` for `mafa_pretrain`):" in generated
