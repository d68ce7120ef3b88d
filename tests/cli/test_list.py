"""`lavis-mafa list` names what a config can name."""

from __future__ import annotations

import pytest

from lavis_mafa.cli import main


def listed(capsys, *arguments: str) -> dict[str, list[str]]:
    """By kind, the printed names."""
    assert main(["list", *arguments]) == 0
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if not line.startswith(" "):
            found[line.rstrip(":")] = names = []
        else:
            names.append(line.split()[0])
    return found


def test_all_kinds(capsys):
    found = listed(capsys)
    assert "albef_mafa" in found["models"] and "albef_pretrain" not in found["models"]
    assert {"hardest", "sampled"} <= set(found["pickers"])
    assert {"one_hot", "smoothed"} <= set(found["soft-labels"])
    assert "toy_scenes" in found["datasets"] and "runner_mafa" in found["runners"]
    assert "mafa/train/albef_toy" in found["configs"]


def test_chosen_kinds_and_lavis_own(capsys):
    found = listed(capsys, "models", "losses", "--all")
    assert list(found) == ["models", "losses"]
    assert {"albef_mafa", "albef_pretrain"} <= set(found["models"])
    assert {"itc", "itm", "lm"} <= set(found["losses"])


def test_an_unknown_kind(capsys):
    with pytest.raises(SystemExit):
        main(["list", "loses"])
    assert "loses" in capsys.readouterr().err
