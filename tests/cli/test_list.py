"""Check that `lavis-mafa list` shows the names that a config can use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lavis_mafa.algorithm.registry import first_sentence
from lavis_mafa.cli import main


def listed_names(capsys, *arguments: str) -> dict[str, list[str]]:
    """Return the printed names by kind."""
    assert main(["list", *arguments]) == 0
    by_kind: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if not line.startswith(" "):
            by_kind[line.rstrip(":")] = names = []
        else:
            names.append(line.split()[0])
    return by_kind


def test_all_kinds_are_listed(capsys):
    names = listed_names(capsys)
    assert "albef_mafa" in names["models"] and "albef_pretrain" not in names["models"]
    assert {"hardest", "sampled"} <= set(names["pickers"])
    assert {"one_hot", "smoothed"} <= set(names["soft-labels"])
    assert "toy_scenes" in names["datasets"] and "runner_mafa" in names["runners"]
    assert "mafa/train/albef_toy" in names["configs"]


def test_selected_kinds_with_lavis_names(capsys):
    names = listed_names(capsys, "models", "losses", "--all")
    assert list(names) == ["models", "losses"]
    assert {"albef_mafa", "albef_pretrain"} <= set(names["models"])
    assert {"itc", "itm", "lm"} <= set(names["losses"])


def test_lines_are_complete_sentences_without_markup(capsys):
    assert main(["list", "datasets"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "`" not in "".join(lines[name] for name in ("image_text_json", "toy_scenes"))
    assert not lines["toy_scenes"].endswith(".")


def test_first_sentence():
    assert first_sentence("Smooth labels (eq. 5)\n    by ``alpha``. Then rest.") == (
        "Smooth labels (eq. 5) by alpha"
    )
    assert first_sentence(None) == ""


def test_unknown_kind_is_rejected(capsys):
    with pytest.raises(SystemExit):
        main(["list", "loses"])
    assert "loses" in capsys.readouterr().err


def test_reader_that_leaves_early_is_no_error():
    """As with ``| head -1``: no traceback, and the status that a shell gives to SIGPIPE."""
    command = [sys.executable, "-m", "lavis_mafa", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        told = process.stderr.read().decode()
    assert (process.returncode, told) == (141, "")
