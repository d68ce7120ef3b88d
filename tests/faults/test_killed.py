"""kill -9 at any moment, also during a checkpoint: the resumed run equals one that was never killed
bit for bit, and no partial files stay."""

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
ALONE = {**CASES["albef, GRIT"], **CHANGES, "run__num_workers": 0}
WITH_WORKERS = {
    **CASES["albef, GRIT"],
    **RANDOM_AUGMENTATION,
    **CHANGES,
    "run__num_workers": 2,
}
AIMS = ("anywhere", "saving", "in training", "saving the best", "in validation")
# Those with workers first: these have time to end while the others run.
SHORT = {"run__max_epoch": 2}
QUICKLY = [
    {**WITH_WORKERS, **SHORT, "seed": 1, "aims": ["in training", "saving", "anywhere", "saving"]},
    {**ALONE, **SHORT, "seed": 2, "aims": ["in training", "saving the best", "in validation"]},
]
THOROUGHLY = [
    {**WITH_WORKERS, "seed": 3, "aims": AIMS * 6},
    {**ALONE, "seed": 4, "aims": AIMS * 6},
]


def kill(folder: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Let the script kill runs; return its results."""
    (folder / "cases.json").write_text(json.dumps(cases))
    finish(spawn(folder, [*launcher(), SCRIPT, "kill", folder]), seconds=900)
    return json.loads((folder / "told.json").read_text())


def trained(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the last record of each step that a run trained, and all records."""
    records = [json.loads(line) for line in open(folder / "read.jsonl")]
    last = {(r["epoch"], r["step"]): r for r in records}
    return [last[place] for place in sorted(last)], len(records)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("cases", [QUICKLY, pytest.param(THOROUGHLY, marks=pytest.mark.faults)])
def test_killed_run_resumes(tmp_path, injected, cases):
    told, wrong = kill(tmp_path, cases), []
    for number, rounds in enumerate(told["cases"]):
        workers = cases[number]["run__num_workers"]
        whole = tmp_path / str(number) / "whole"
        expected, _ = trained(whole)
        seen: Counter[str] = Counter()
        for place, kills in enumerate(rounds):
            folder = tmp_path / str(number) / str(place)
            read, times = trained(folder)
            lost = samples_lost(read, expected)
            bits = bits_differing(read, expected)
            for name in ("checkpoint_last.pth", "checkpoint_best.pth"):
                bits += bits_differing(state(folder, name), state(whole, name))
            here = [f"round {place}, {k['aim']}: {what}" for k in kills for what in k["wrong"]]
            if times - len(expected) > len(kills):
                here.append(f"round {place}: {times - len(expected)} steps were done again")
            if list(folder.glob("job/.*.tmp")):
                here.append(f"round {place}: halves of files are left")
            if lost or bits:
                here.append(f"round {place}: {lost} samples lost, {bits} bits differ")
            for aim, count in Counter(k["aim"] for k in kills).items():
                fault = f"kill -9 {aim}; {workers} workers"
                injected(fault, 0 if here else count, lost, bits, count)
            seen.update("half" for k in kills if k["halves"])
            seen.update("orphans" for k in kills if k["orphans"])
            wrong += here
        assert seen["half"] > 0, "no kill fell into saving"
        assert seen["orphans"] > 0 or not workers, "no kill left workers alone"
    assert wrong == []
    assert told["still there"] == [], "workers outlived their run"
