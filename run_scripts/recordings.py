"""Compare what two checkouts compute: losses, weights, configs, counts and mined pairs.

    python run_scripts/recordings.py REVISION      # this checkout against a revision of git
    python run_scripts/recordings.py FOLDER        # against another checkout

Both are run with the same Python, one after the other, by the commands that users type. Equal means
equal to the last bit: every figure of every step, every weight of the last checkpoint, every mined
pair, every completed config. Exits with 1 if something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "datasets.toy_scenes.type=dense",
    "datasets.toy_scenes.build_info.train_size=48",
    "datasets.toy_scenes.build_info.val_size=8",
    "datasets.toy_scenes.build_info.test_size=8",
    "run.batch_size_train=8",
    "run.max_epoch=2",
    "run.log_freq=1",
    "run.k_test=4",
    "run.job_id=run",
]
GROUPED = ["run.grit.queue_size=32", "run.grit.search_space=16", "run.grit.start_epoch=1"]
ORACLE = ["model.mafa.con_d.arch=oracle"]
BY_SIMILARITY = ["model.mafa.connections.score=similarity", "model.mafa.connections.top_k=0"]
ONE_HOT = ["model.mafa.soft_labels.type=one_hot"]
# By name: the toy config of a family and the options of a method.
TRAININGS: dict[str, tuple[str, list[str]]] = {
    "albef": ("albef_toy", []),
    "mafa": ("albef_toy", ORACLE),
    "blip": ("blip_toy", []),
    "blip_mafa": ("blip_toy", ORACLE),
    "blip2": ("blip2_toy", []),
    "blip2_mafa": ("blip2_toy", ORACLE),
    "fne": ("fne_toy", ["model.plain_epochs=1", "model.memory_size=32"]),
    "albef_base": (
        "albef_toy",
        [*ONE_HOT, "run.grit.enabled=False", "model.mafa.negatives=sampled"],
    ),
    "grit_vlp": (
        "albef_toy",
        ["model.mafa.soft_labels.type=consistency", "model.mafa.soft_labels.start_epoch=0"],
    ),
    "momentum": ("albef_toy", ["model.mafa.soft_labels.type=momentum", "model.queue_size=16"]),
    "tcl": (
        "albef_toy",
        [
            "model.mafa.soft_labels.type=momentum",
            "model.mafa.negatives=sampled",
            "model.mafa.loss_weights.imc=0.5",
            "model.mafa.loss_weights.lmi=0.5",
        ],
    ),
    "posterior": ("albef_toy", [*ONE_HOT, "model.mafa.negatives=posterior"]),
    "top_k": ("albef_toy", [*ORACLE, "model.mafa.connections.top_k=3"]),
    "drop": ("albef_toy", [*ORACLE, "model.mafa.connections.action=drop"]),
    "margin": (
        "albef_toy",
        [*BY_SIMILARITY, "model.mafa.connections.rule=margin", "model.mafa.margin.margin=0.0"],
    ),
    "global_threshold": (
        "albef_toy",
        [
            *BY_SIMILARITY,
            "model.mafa.connections.rule=global_threshold",
            "model.mafa.connections.action=drop",
        ],
    ),
    "sigmoid": ("albef_toy", [*ONE_HOT, "model.mafa.itc_loss=sigmoid"]),
    "intra_modal": (
        "albef_toy",
        [
            *ONE_HOT,
            "model.mafa.itc_loss=sigmoid",
            "model.mafa.connections.score=intra_modal",
            "model.mafa.connections.top_k=0",
        ],
    ),
    "debiased": ("albef_toy", [*ONE_HOT, "model.mafa.itc_loss=debiased"]),
    "rince": (
        "albef_toy",
        [*ONE_HOT, "model.mafa.itc_loss=rince", "model.mafa.learn_temperature=False"],
    ),
    "pseudo_positives": ("albef_toy", ["model.mafa.soft_labels.type=pseudo_positives"]),
    "softclip": ("albef_toy", ["model.mafa.soft_labels.type=softclip"]),
    "hardness": ("albef_toy", ["run.grit.hardness=0.9", "run.grit.skip=2"]),
    "hardening": ("albef_toy", ["run.grit.schedule=linear", "run.grit.linear.start=0.8"]),
    "regions": ("albef_toy", ["run.grit.regions=True"]),
    "cached_batch": ("albef_toy", ["run.cached_batch=4"]),
}


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def weights(file: Path) -> dict[str, str]:
    """Return a hash of every weight in a checkpoint."""
    import torch

    state = torch.load(file, map_location="cpu", weights_only=True)["model"]
    return {
        name: digest((str(one.dtype), tuple(one.shape), one.float().numpy().tobytes()))
        for name, one in state.items()
    }


def figures(log: Path) -> list[Any]:
    """Return the figures of steps, epochs and evaluations in a run's log, without the clock's."""
    rows = map(json.loads, log.read_text().splitlines())
    return [
        {name: value for name, value in row.items() if name != "time"}
        for row in rows
        if row["kind"] in ("step", "epoch", "eval")
    ]


def main_of(arguments: list[str]) -> str:
    """Run a command of the program in this process and return what it printed."""
    from lavis_mafa.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        status = main(arguments)
    if status:
        raise RuntimeError(f"{' '.join(arguments)} ended with status {status}")
    return printed.getvalue()


def train(folder: Path, config: str, options: list[str]) -> Path:
    chosen = [*SMALL, *([] if config == "fne_toy" else GROUPED), *options]
    command = ["train", "--cfg-path", f"projects/mafa/train/{config}.yaml", "--options", *chosen]
    main_of([*command, f"run.output_dir={folder}"])
    return folder / "run"


def probes(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the result of everything that is recorded."""
    import yaml

    sys.path.insert(0, str(ROOT / "tests"))
    # The second folder has them in revisions whose rooms had other names.
    sys.path[:0] = [str(ROOT / "tests/settings"), str(ROOT / "tests/config")]
    for name, (config, options) in TRAININGS.items():
        run = train(folder / name, config, options)
        yield f"{name}: figures", figures(run / "log.jsonl")
        yield f"{name}: weights", weights(run / "checkpoint_last.pth")
    run = folder / "albef/run"
    con_d = f"own.checkpoint={run}/checkpoint_last.pth"
    judged = ["--run", str(run), "--con-d", "own.arch=albef_mafa", "own.model_type=tiny", con_d]
    main_of(["count", *judged, "--output", str(folder / "count")])
    yield "counts.json", json.loads((folder / "count/counts.json").read_text())
    main_of(["mine", *judged, "--threshold", "0.0", "--output", str(folder / "mine")])
    yield "mined.json", json.loads((folder / "mine/mined.json").read_text())
    mining = [
        "model.mafa.con_d.arch=albef_mafa",
        "model.mafa.con_d.model_type=tiny",
        f"model.mafa.con_d.checkpoint={run}/checkpoint_last.pth",
        "model.mafa.connections.high=0.4",
        "model.mafa.connections.low=0.38",
    ]
    for name in ("albef", "blip2"):
        mined = train(folder / f"{name}_mining", f"{name}_toy", mining)
        yield f"{name}_mining: figures", figures(mined / "log.jsonl")
        yield f"{name}_mining: weights", weights(mined / "checkpoint_last.pth")
    ranks = folder / "ranks"
    chosen = [*SMALL, *GROUPED, *mining, f"run.output_dir={ranks}", "run.valid_splits=[]"]
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command = ["train.py", "--cfg-path", "projects/mafa/train/albef_toy.yaml", "--options"]
    given = [*launcher, "--master_port=29617", *command, *chosen, "run.test_splits=[]"]
    subprocess.run(given, check=True, capture_output=True)
    yield "two ranks: figures", figures(ranks / "run/log.jsonl")
    yield "two ranks: weights", weights(ranks / "run/checkpoint_last.pth")
    stopped = ["run.resume_ckpt_path=auto", "run.save_every_steps=3"]
    for steps in (8, 12):
        resumed = train(folder / "resumed", "albef_toy", [*stopped, f"run.max_steps={steps}"])
    yield "resumed: weights", weights(resumed / "checkpoint_last.pth")
    import shipped

    for file in shipped.SHIPPED:
        options = shipped.required_options(file)
        given = ["--options", *options] if options else []
        command = ["train", "--cfg-path", str(file), "--print-config", *given]
        yield str(file.relative_to(ROOT)), yaml.safe_load(main_of(command))


def record(output: Path) -> None:
    """Write what this checkout computes, by name, into a JSON file."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, value in probes(Path(folder)):
            text = json.dumps(value, sort_keys=True, default=str).replace(folder, "FOLDER")
            found[name] = json.loads(text.replace(str(ROOT), "ROOT"))
            print(f"\r{len(found):4}  {name:60}", end="", file=sys.stderr, flush=True)
            output.write_text(json.dumps(found))
    print(file=sys.stderr)


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield the places at which two recorded values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            if name not in old or name not in new:
                yield f"{path}.{name}: only {'before' if name in old else 'after'}"
            else:
                yield from differences(old[name], new[name], f"{path}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif old != new:
        yield f"{path}: {str(old)[:80]} before, {str(new)[:80]} after"


def recorded(checkout: Path, file: Path) -> dict[str, Any]:
    script = checkout / "run_scripts/recordings.py"
    own = Path(__file__).read_text()
    if not script.exists():  # a revision before this script
        script.write_text(own)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-W", "ignore", str(script), "--record", str(file)]
    if subprocess.run(command, cwd=checkout, env=environment).returncode:
        print(f"{checkout}: stopped before its end; what it has is compared")
    return dict(json.loads(file.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", help="revision or folder to compare this checkout with")
    args = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(args.other)
        if other.is_file():
            old = json.loads(other.read_text())
        else:
            if not other.is_dir():
                other = Path(folder) / "checkout"
                git = ["git", "-C", str(ROOT), "worktree"]
                subprocess.run([*git, "add", "--detach", str(other), args.other], check=True)
            old = recorded(other, Path(folder) / "old.json")
        new = recorded(ROOT, Path(folder) / "new.json")
        if not Path(args.other).exists():
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    found = [line for name in old for line in differences(old[name], new.get(name), name)]
    print("\n".join(found[:200]))
    print(f"{len(old)} recorded, {len(found)} differences, {time.monotonic() - start:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(Path(sys.argv[2]))
    else:
        sys.exit(main())
