"""kill -9 at any moment, also while saving: the resumed run equals an uninterrupted run bit for
bit, and no partial files remain.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import CASES, RANDOM_AUGMENTATION, bits_differing, samples_lost, state
from runs import finish, launcher, spawn

SCRIPT = Path(__file__).with_name("stopped_run.py")
CHANGES = {
    "run__save_every_steps": 1,
    "run__resume_ckpt_path": "auto",
    "run__valid_splits": '["val"]',
}
WITHOUT_WORKERS = {**CASES["albef, GRIT"], **CHANGES, "run__num_workers": 0}
WITH_WORKERS = {
    **CASES["albef, GRIT"],
    **RANDOM_AUGMENTATION,
    **CHANGES,
    "run__num_workers": 2,
}
AIMS = ("anywhere", "saving", "in training", "saving the best", "in validation")
# Runs with workers come first, so that their workers have time to end while the others run.
SHORT = {"run__max_epoch": 2}
QUICKLY = [
    {**WITH_WORKERS, **SHORT, "seed": 1, "aims": ["in training", "saving", "saving the best"]},
]
THOROUGHLY = [
    {**WITH_WORKERS, "seed": 3, "aims": AIMS * 6},
    {**WITHOUT_WORKERS, "seed": 4, "aims": AIMS * 6},
]


def kill_runs(folder: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Let the script kill runs; return its results."""
    (folder / "cases.json").write_text(json.dumps(cases))
    finish(spawn(folder, [*launcher(), SCRIPT, "kill", folder]), seconds=900)
    return json.loads((folder / "told.json").read_text())


def trained_steps(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the last record of each step that a run trained, and the number of all records."""
    records = [json.loads(line) for line in open(folder / "read.jsonl")]
    last = {(r["epoch"], r["step"]): r for r in records}
    return [last[position] for position in sorted(last)], len(records)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("cases", [QUICKLY, pytest.param(THOROUGHLY, marks=pytest.mark.faults)])
def test_killed_run_resumes(tmp_path, injected, cases):
    results, problems = kill_runs(tmp_path, cases), []
    for number, rounds in enumerate(results["cases"]):
        workers = cases[number]["run__num_workers"]
        full = tmp_path / str(number) / "whole"
        expected, _ = trained_steps(full)
        observed: Counter[str] = Counter()
        for round_number, kills in enumerate(rounds):
            folder = tmp_path / str(number) / str(round_number)
            steps, times = trained_steps(folder)
            lost = samples_lost(steps, expected)
            bits = bits_differing(steps, expected)
            for name in ("checkpoint_last.pth", "checkpoint_best.pth"):
                bits += bits_differing(state(folder, name), state(full, name))
            problems_of_round = [
                f"round {round_number}, {k['aim']}: {what}" for k in kills for what in k["wrong"]
            ]
            if times - len(expected) > len(kills):
                problems_of_round.append(
                    f"round {round_number}: {times - len(expected)} steps were done again"
                )
            if list(folder.glob("job/.*.tmp")):
                problems_of_round.append(f"round {round_number}: halves of files are left")
            if lost or bits:
                problems_of_round.append(
                    f"round {round_number}: {lost} samples lost, {bits} bits differ"
                )
            for aim, count in Counter(k["aim"] for k in kills).items():
                fault = f"kill -9 {aim}; {workers} workers"
                injected(fault, 0 if problems_of_round else count, lost, bits, count)
            observed.update("half" for k in kills if k["halves"])
            observed.update("orphans" for k in kills if k["orphans"])
            problems += problems_of_round
        assert observed["half"] > 0, "no kill happened while saving"
        assert observed["orphans"] > 0 or not workers, "no kill orphaned workers"
    assert problems == []
    assert results["still there"] == [], "workers outlived their run"
