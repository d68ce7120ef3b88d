"""The list of shipped configs, the printed config, and wrong arguments."""

from __future__ import annotations

import subprocess
import sys

import yaml
from conftest import ROOT

from lavis_mafa.cli import main


def test_shipped_configs_are_listed(capsys):
    assert main(["train", "--list"]) == 0
    assert "mafa/train/albef_toy" in capsys.readouterr().out.splitlines()


def test_a_closed_pipe_is_not_an_error():
    """As with ``| head -1``: no traceback, and the status that a shell gives to SIGPIPE."""
    command = [sys.executable, "-m", "lavis_mafa", "train", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        told = process.stderr.read().decode()
    assert (process.returncode, told) == (141, "")


def test_config_is_printed_with_all_defaults(capsys):
    options = ["--options", "run.max_epoch=3"]
    assert main(["train", "--cfg-path", "albef_toy", "--print-config", *options]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["run"]["max_epoch"] == 3 and "grit" in printed["run"]


WRONG = """
train                                      | one of the arguments --cfg-path --data --list is req
train --data train.py --cfg-path a.yaml    | argument --cfg-path: a.yaml: cannot be read
train --cfg-path albef_toi                 | did you mean mafa/train/albef_14m or
train --cfg-path retrieval_ft_toy          | is the name of several shipped files
train --data none.json                     | argument --data: none.json does not exist in
train --data train.py --images none        | argument --images: none does not exist
evaluate                                   | one of the arguments --cfg-path --run is required
evaluate --run tests                       | tests is not the folder of a run
evaluate --run train.py                    | train.py is not the folder of a run
count --run none --output x                | argument --run: none does not exist in
count --batch-sizes 8 1                    | argument --batch-sizes: 1: expected
count --search-spaces 0                    | argument --search-spaces: 0: expected
count --search-spaces some                 | argument --search-spaces: some: expected
count --seed -1                            | argument --seed: -1: expected
mine --seed -1                             | argument --seed: -1: expected
label page train.py --seed -1              | argument --seed: -1: expected
features train.py --batch-size -1          | argument --batch-size: -1: expected
features train.py --image-size 0           | argument --image-size: 0: expected
count --threshold 50                       | argument --threshold: 50: expected
count --threshold nan                      | argument --threshold: nan: expected
mine --threshold 1.5                       | argument --threshold: 1.5: expected
mine --top-k 0                             | argument --top-k: 0: expected
mine --output train.py --run tests         | is a file, expected a folder
check-data none.json                       | argument FILES: none.json does not exist
check-data train.py --images none          | argument --images: none does not exist
label quality none                         | argument JUDGED: none does not exist
report none                                | argument FOLDER: none does not exist
export none x --to hf                      | argument checkpoint: none does not exist
lable quality x                            | no command is called lable; did you mean label?
xyz                                        | no command is called xyz; expected one of train,
check-data train.py --imgaes train.py      | unrecognized argument --imgaes; did you mean --images?
check-data train.py --frobnicate=3         | unrecognized argument --frobnicate
"""
AT_ONCE = """
import contextlib, io, sys
from lavis_mafa.cli import main
for line in sys.argv[1].strip().splitlines():
    command, message = map(str.strip, line.split("|", 1))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            print(command, main(command.split()))
        except SystemExit as stop:
            assert stop.code == 2, stop
    assert message in printed.getvalue(), (command, printed.getvalue())
heavy = {"lavis", "torch", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_wrong_arguments_are_refused_before_anything_is_imported():
    command = [sys.executable, "-c", AT_ONCE, WRONG]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)
