"""How many threads and workers a run uses, and how its threads wait."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from lavis_mafa.io.launcher import _cpu_quota, usable_cores


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


@pytest.mark.parametrize(
    "groups, folder, files, cores",
    [
        ("0::/a/b\n", "a/b", {"cpu__max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", "a", {"cpu__max": "50000 100000\n"}, 0.5),  # of the parent
        ("0::/\n", ".", {"cpu__max": "max 100000\n"}, float("inf")),
        (
            "3:memory:/x\n2:cpu,cpuacct:/docker/1\n",  # a container sees its own group at the root
            "cpu,cpuacct",
            {"cpu__cfs_quota_us": "300000\n", "cpu__cfs_period_us": "100000\n"},
            3.0,
        ),
        (
            "2:cpu:/job\n",
            "cpu/job",
            {"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"},
            float("inf"),
        ),
    ],
)
def test_quota_of_control_groups(tmp_path, groups, folder, files, cores):
    write(tmp_path, groups=groups)
    write(tmp_path / "root" / folder, **files)
    assert _cpu_quota(str(tmp_path / "groups"), str(tmp_path / "root")) == cores


def train(folder, command=(), plugin="", **variables):
    """Build a run in a new process; return its threads, workers and cores as its log says."""
    ours = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    own = folder / "own.py"
    own.write_text(f"import json, os, pathlib, torch\n{plugin}\n")
    arguments = [sys.executable, "train.py", "--cfg-path", "albef_toy", "--plugin", str(own)]
    options = [f"run.output_dir={folder}", "run.num_workers=2", "model.mafa.con_d.arch=oracle"]
    done = subprocess.run(
        [*command, *arguments, "--dry-run", "--options", *options],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"CPU: (\d+) thread.*? and (\d+) data-loader .* on (\d+) usable", done.stderr)
    assert found, done.stderr
    return tuple(map(int, found.groups()))


def test_threads_of_a_run(tmp_path):
    """A small model takes one thread; what the user has set stays; one core has no workers."""
    cores = usable_cores()
    written = tmp_path / "policy.json"
    plugin = f"pathlib.Path({str(written)!r}).write_text(json.dumps(dict(os.environ)))"
    assert train(tmp_path, plugin=plugin) == (1, min(cores, 2) if cores > 1 else 0, cores)
    assert json.loads(written.read_text())["OMP_WAIT_POLICY"] == "passive"
    assert train(tmp_path, OMP_NUM_THREADS="2")[0] == min(cores, 2)
    one_core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    assert train(tmp_path, one_core, plugin="torch.set_num_threads(5)") == (5, 0, 1)
