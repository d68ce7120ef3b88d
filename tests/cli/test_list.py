"""`lavis-mafa list` names what a config can name."""

from __future__ import annotations

import pytest

from lavis_mafa.algorithm.registry import first_sentence
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


def test_lines_are_whole_sentences_without_markup(capsys):
    assert main(["list", "datasets"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "`" not in "".join(lines[name] for name in ("refcoco_plus", "toy_nlvr", "toy_scenes"))
    assert lines["refcoco_plus"].endswith(
        "Build the splits that build_info.annotations names: GroundingTrain for train, "
        "GroundingEval for val and test"
    )


def test_first_sentence():
    assert first_sentence("Smooth labels (eq. 5)\n    by ``alpha``. Then rest.") == (
        "Smooth labels (eq. 5) by alpha"
    )
    assert first_sentence(None) == ""


def test_an_unknown_kind(capsys):
    with pytest.raises(SystemExit):
        main(["list", "loses"])
    assert "loses" in capsys.readouterr().err
