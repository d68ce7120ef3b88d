"""docs/config.md equals the page generated from the keys."""

from __future__ import annotations

import pytest
from config_page import COMMAND, PAGE, page

from lavis_mafa.settings.registered import LISTED, MODEL, RUN
from lavis_mafa.settings.schema import OURS, PARTS


@pytest.fixture(scope="module")
def generated():
    return page()


def test_page_is_up_to_date(generated):
    assert PAGE.read_text(encoding="utf-8") == generated, f"docs/config.md is old: run `{COMMAND}`"


def test_every_key_is_named(generated):
    of_ours = OURS["mafa"].keys
    names = [*RUN, *RUN["grit"].keys, *MODEL, *OURS, *PARTS, *of_ours]
    names += [*of_ours["connections"].keys, *of_ours["con_d"].keys, "linear.start"]
    names += [name for keys in LISTED for name in keys]
    missing = {name for name in names if f"`{name}`" not in generated}
    assert missing == {"connections", "grit", "mafa"}  # which have sections of their own


def test_defaults_that_differ_by_task_are_shown(generated):
    assert "- `enabled` (bool, `False`, `True` for `mafa_pretrain`):" in generated
