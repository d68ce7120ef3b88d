"""python -m lavis_mafa.studies.demo.compare: many systems, several seeds, on the toy world.

Every seed has an image encoder's start, a warm-up and a Con-D of its own; all its systems begin
with that warm-up. What is finished stays: called again, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from lavis_mafa.config import ConfigError, load_config
from lavis_mafa.io.files import ROOT, write_json
from lavis_mafa.runners.run_log import read_log
from lavis_mafa.studies.demo.branches import Branch, make_branches
from lavis_mafa.studies.demo.families import FAMILIES
from lavis_mafa.studies.demo.measure import measure, negatives_of, toy_world
from lavis_mafa.studies.demo.results import write_page, write_results
from lavis_mafa.studies.demo.systems import WARM_UP, System, systems_of
from lavis_mafa.studies.runs import Run, alone_in, refuse_other_commands, run_all

FAMILY = FAMILIES["albef"]
FIGURES = "figures.json"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="those alone (--list)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=6, help="of every compared system")
    parser.add_argument("--warm-up-epochs", type=int, default=8, help="of the shared warm-up")
    parser.add_argument("--train-size", type=int, default=4000, help="training pairs")
    parser.add_argument("--test-size", type=int, default=500, help="test images")
    parser.add_argument("--start-steps", type=int, default=400, help="of the image encoder's start")
    parser.add_argument(
        "--at-once",
        type=int,
        default=min(2, os.cpu_count() or 1),
        help="runs beside each other, one thread each",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/compare"), help="runs, report.html"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="Markdown file to write, JSON beside it (compare_toy.md in --output)",
    )
    parser.add_argument("--list", action="store_true", help="tell the systems and end")
    args = parser.parse_args(argv)
    known = systems_of(FAMILY, args.epochs, args.warm_up_epochs)
    args.systems = list(dict.fromkeys(args.systems or known))
    unknown = [name for name in args.systems if name not in known]
    if unknown:
        parser.error(f"--systems: no {', '.join(unknown)}; there are {', '.join(known)}")
    args.seeds = list(dict.fromkeys(args.seeds))
    args.output = args.output.resolve()
    args.results = (args.results or args.output / "compare_toy.md").resolve()
    args.family = FAMILY.name
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    systems = systems_of(FAMILY, args.epochs, args.warm_up_epochs)
    systems = {name: systems[name] for name in systems if name in args.systems}
    if args.list:
        print("\n".join(told(system) for system in systems.values()))
        return 0
    if not (ROOT / FAMILY.config).is_file():
        print(f"the comparison needs a checkout of the repository: {FAMILY.config} is not there")
        return 2
    # Killed politely, it stops its runs as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs = make_runs(args)
    try:
        refuse_other_commands(runs.values())
        for run in runs.values():
            if isinstance(run, Branch) and run.name.endswith(f"/{args.seeds[0]}"):
                load_config(run.command[2], run.command[4:], machine=False)
    except (ConfigError, ValueError) as error:
        print(error)
        return 2
    with alone_in(args.output):
        left = sum(not run.done for run in runs.values())
        print(f"1/2 {len(runs)} runs, {left} to do, {args.at_once} beside each other", flush=True)
        failed = run_all(runs, args.at_once, keep_going=True)
        print("2/2 evaluation on the test images", flush=True)
        torch.set_num_threads(1)  # two wait for each other longer than they help so small a model
        figures = measure_all(args, systems, runs)
        folders = {
            name: [runs[name_of(name, seed)].folder for seed in own]
            for name, own in figures.items()
        }
        write_results(args, systems, figures)
        write_page(args, systems, figures, folders)
    print(args.results.read_text(encoding="utf-8"))
    print(f"written: {args.results}, {args.output / 'report.html'}")
    for name, why in failed.items():
        print(f"\nFAILED: {name}: {why}")
    return 1 if failed else 0


def told(system: System) -> str:
    """A system and its settings, for people."""
    options = [f"{key}={value}" for key, value in system.options.items()]
    lines = [f"{system.name}: {system.title}" + (f" ({system.source})" if system.source else "")]
    con_d = f", Con-D: {system.con_d}" if system.con_d else ""
    lines += [f"    {system.epochs} epochs from {system.start or 'image_start'}{con_d}"]
    return "\n".join([*lines, "    " + " ".join(options)])


def args_of(args: argparse.Namespace, seed: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "seed": seed})


def name_of(system: str, seed: int) -> str:
    return f"{system}/{seed}"


def make_runs(args: argparse.Namespace) -> dict[str, Run]:
    """All runs of all seeds by ``system/seed``, the first seed's first."""
    runs: dict[str, Run] = {}
    for seed in args.seeds:
        folder = args.output / f"seed_{seed}"
        start = _image_start(args, seed, folder / "image_start")
        runs[start.name] = start
        weights = start.folder / "image_start.pth"
        branches = make_branches(args_of(args, seed), folder, weights, [*args.systems, WARM_UP])
        for system, branch in branches.items():
            name = name_of(system, seed)
            needs = {start.name} | {name_of(other, seed) for other in branch.needs}
            runs[name] = dataclasses.replace(
                branch,
                name=name,
                title=f"{branch.title}, seed {seed}",
                command=[*branch.command, "run.resume_ckpt_path=auto"],
                needs=frozenset(needs),
            )
    return runs


def _image_start(args: argparse.Namespace, seed: int, folder: Path) -> Run:
    command = ["-m", "lavis_mafa.toyworld.image_start", "--arch", FAMILY.arch, "--seed", str(seed)]
    command += ["--steps", str(args.start_steps), "--output", str(folder / "image_start.pth")]
    title = f"start of the image encoder, seed {seed}"
    return Run(name_of("image_start", seed), title, command, folder)


def measure_all(
    args: argparse.Namespace, systems: dict[str, System], runs: dict[str, Run]
) -> dict[str, dict[int, dict[str, Any]]]:
    """Figures by system and seed of all that is done, from a file where it was measured before."""
    figures: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in systems}
    ready = [
        (name, seed) for seed in args.seeds for name in systems if runs[name_of(name, seed)].done
    ]
    began, measured, test = time.time(), 0, None
    for count, (name, seed) in enumerate(ready, 1):
        run, warm_up = runs[name_of(name, seed)], runs[name_of(WARM_UP, seed)]
        path = run.folder / FIGURES
        if not path.is_file():
            assert isinstance(run, Branch) and isinstance(warm_up, Branch)
            test = test or toy_world(args.train_size, args.test_size)["test"]
            with redirect_stderr(io.StringIO()):  # bars within bars
                found = measure([run], test, run.folder, judges=[warm_up])[run.name]
            write_json(path, {**found, **negatives_of(run), **_temperature(run)})
            measured += 1
            pace = (time.time() - began) / measured
            left = pace * (len(ready) - count)
            text = (
                f"  {count}/{len(ready)} {run.name}: {pace:.1f} s each, at most {left:.0f} s left"
            )
            print(text, flush=True)
        figures[name][seed] = json.loads(path.read_text(encoding="utf-8"))
    return {name: by_seed for name, by_seed in figures.items() if by_seed}


def _temperature(run: Run) -> dict[str, float]:
    steps = read_log(run.folder, "step")
    return {"temperature": steps[-1]["temperature"]} if steps else {}


if __name__ == "__main__":
    sys.exit(main())
