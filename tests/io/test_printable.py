"""What files name is shown on a terminal, and not obeyed by it."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from lavis_mafa.cli import main
from lavis_mafa.io.terminal import PrintableFormatter, _PrintableStream, printable
from lavis_mafa.tools.charts import one_line

EVIL = "\x1b]0;owned\x07\x9b31m\u202etxt.\u2066\udcff"
SHOWN = "\\x1b]0;owned\\x07\\x9b31m\\u202etxt.\\u2066\\udcff"


def test_what_a_terminal_would_obey_is_shown():
    assert printable(EVIL) == SHOWN and printable(SHOWN) == SHOWN
    assert printable("a\rb\x00") == "a\\rb\\x00"
    plain = "ä 漢字 🐈 עברית\tb\n–"
    assert printable(plain) == plain
    assert one_line(f"a\n {EVIL}") == f"a {SHOWN}"
    record = logging.LogRecord("a", logging.INFO, "", 1, "%s\n%s", (EVIL, "b"), None)
    assert PrintableFormatter("%(message)s").format(record) == f"{SHOWN}\nb"


def test_progress_bars_move():
    output = io.StringIO()
    stream = _PrintableStream(output)
    for text in ("\r 10% \x1b]", "\n\n\x1b[A\x1b[A", "a\x1b[A"):
        assert stream.write(text) == len(text)
    assert output.getvalue() == "\r 10% \\x1b]\n\n\x1b[A\x1b[Aa\\x1b[A"
    assert not stream.isatty()


EVIL_CONFIG = {"run": {f"seed{EVIL}": EVIL, "task": EVIL}, "model": {"arch": EVIL}, "datasets": {}}


@pytest.fixture
def files(tmp_path):
    """Files of every kind that have escapes in them, by what is in capitals below."""
    rows = [{"image": f"{EVIL}{k}.png", "caption": f"{EVIL} {k}"} for k in range(3)]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, {"image": 3, EVIL: EVIL}]))
    (tmp_path / "config.yaml").write_text(json.dumps(EVIL_CONFIG))
    return {"ROWS": tmp_path / "rows.json", "CONFIG": tmp_path / "config.yaml", "FOLDER": tmp_path}


@pytest.mark.parametrize(
    "command",
    [
        ["check-data", "ROWS", "--images", "FOLDER"],
        ["train", "--cfg-path", "CONFIG"],
        ["train", "--cfg-path", "albef_toy", "--options", f"run.{EVIL}={EVIL}", "a"],
        ["report", EVIL],
        ["label", "page", EVIL],
        ["count", "--cfg-path", "albef_toy", "--output", "a", f"--{EVIL}"],
    ],
    ids=lambda command: command[0],
)
def test_commands_print_no_escapes(files, command, capfd, caplog, monkeypatch):
    """Options, keys, values, names of images and columns; in messages, tables and errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    try:
        assert main([str(files.get(word, word)) for word in command]) != 0
    except SystemExit as error:
        assert error.code
    output = "".join(capfd.readouterr())
    assert "\\x1b]0;owned" in output and printable(output) == output


def test_an_error_that_nobody_expects_is_shown(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"from lavis_mafa import cli\ndef fail(*_):\n    raise RuntimeError({EVIL!r})\n"
        "cli._prepare = fail\ncli.main(['train'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert f"RuntimeError: {SHOWN}" in done.stderr
    assert printable(done.stderr) == done.stderr
