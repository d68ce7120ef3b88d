"""docs/config.md equals the page generated from the keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_page import COMMAND, PAGE, is_ours, page, plain
from conftest import ROOT
from lavis.common.registry import registry

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


def test_every_line_describes_its_key(generated):
    lines = [line for line in generated.splitlines() if re.match(r" *- `", line)]
    assert len(lines) > 200
    empty = [line for line in lines if not re.search(r": \S", line)]
    assert all("`detections.storage`" in line for line in empty)


def test_a_mapping_that_repeats_another_refers_to_it(generated):
    encoder = next(line for line in generated.splitlines() if "`negatives_encoder`" in line)
    assert encoder.endswith("further keys as in `model.mafa.con_d`")
    assert "negatives_encoder.checkpoint" not in generated


def test_every_model_and_data_set_links_its_default_yaml(generated):
    for table in ("model", "builder"):
        for name, cls in registry.mapping[f"{table}_name_mapping"].items():
            if is_ours(cls):
                line = re.search(rf"^- `{name}`: (.*)$", generated, re.MULTILINE)[1]
                types = getattr(cls, "PRETRAINED_MODEL_CONFIG_DICT", None)
                links = re.findall(r"\[([^\]]+)\]\(\.\./([^)]+)\)", line)
                assert [kind for kind, _ in links] == list(types or cls.DATASET_CONFIG_DICT)
                assert all((ROOT / path).is_file() for _, path in links)


def test_page_contains_nothing_specific_to_this_machine(generated):
    assert str(ROOT) not in generated and str(Path.home()) not in generated


def test_defaults_that_differ_by_task_are_shown(generated):
    assert "- `enabled` (bool, `False`, `True` for `mafa_pretrain`):" in generated


@pytest.mark.parametrize(
    "value, written",
    [(None, "null"), (True, "True"), (0.0001, "0.0001"), (1e-6, "1e-06"), (5.0, "5.0"), ("", '""')]
    + [("a picture of ", '"a picture of "'), (["itc", "itm"], '["itc", "itm"]'), ({}, "{}")],
)
def test_values_are_written_as_in_yaml(value, written):
    assert plain(value) == written
