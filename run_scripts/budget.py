"""Print the size of the project beside its limits; exit with 1 if a limit is exceeded.

    bash run_scripts/budget.sh                  # what can be counted in the files
    bash run_scripts/budget.sh --training       # also the lines that a tiny training executes

Code is lines without blanks, comments and docstrings. Public names are functions, classes and their
methods that do not start with an underscore. Lower a limit when a change makes its figure smaller.
A goal is what a figure should come to; where it is above, the reason says what the lines are for.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lavis_mafa"

LIMITS = {
    "package": 27_923,
    "downstream": 2_440,
    "research": 4_177,
    "test code": 40_108,
    "public names": 1_511,
    "config keys": 268,
    "commands": 10,
    "words of docs": 40_000,
    "lines of README": 150,
    "doubled file names": 0,
    "circles of imports": 0,
    "YAML files": 115,
    "lines executed": 4_200,
}
# Where a line goes only if no user misses what it is for.
GOALS = {
    "datasets": (
        2_300,
        "everyday files (quotes, dialects, hub folders, shards), judgements, features",
    ),
    "models": (3_300, "checkpoints of other tools, judges of other libraries, kept images"),
    "algorithm": (
        3_400,
        "every method of docs/false_negatives.md; ITC on features of any encoder",
    ),
    "mining": (
        3_000,
        "bounds and checks that advice rests on, pairs of a whole corpus, judgements",
    ),
    "runners": (2_300, "guards, each with its fault test; resume on another number of ranks"),
    "config": (1_200, "checks before a start, of LAVIS's keys too; recorded configs of others"),
    "io": (1_000, "complete or absent files, locks, downloads, archives without pickle"),
    "commands": (600, "arguments of ten commands, one's own data without a config"),
    "package": (20_000, "the rooms above their goals, integrations and the toy world"),
    "downstream": (2_000, "seven tasks with their data and metrics"),
    "research": (3_000, "studies of photographs, and benchmarks with the claim that each has"),
    "test code": (26_000, "slow loops, faults and real processes; none goes before its code"),
    "public names": (
        1_100,
        "what users' own classes may override, and the doors of other libraries",
    ),
    "config keys": (200, "over 100 are LAVIS's; each method and each judge has its own"),
}


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py")) if folder.is_dir() else []


def docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return lines


def code_lines(file: Path) -> set[int]:
    """Return the numbers of the lines that are code."""
    source = file.read_text(encoding="utf-8")
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(ast.parse(source))


def code_of(files: Iterable[Path]) -> int:
    return sum(len(code_lines(file)) for file in files)


def public_names(file: Path) -> int:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    count = 0
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, functions | ast.ClassDef) or node.name.startswith("_"):
            continue
        count += 1
        if isinstance(node, ast.ClassDef):
            methods = [one.name for one in node.body if isinstance(one, functions)]
            count += sum(not name.startswith("_") for name in methods)
    return count


def imported_modules(file: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that are imported when a file is; not by its functions."""
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in modules else node.module for name in names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            else:
                waiting.append(node)


def circles() -> list[list[str]]:
    """Return the sets of modules that import each other, type-checking imports included."""
    modules = {}
    for file in python_files(PACKAGE):
        parts = file.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    # A room's `__init__` collects its modules, and so imports what imports it.
    inner = {name: file for name, file in modules.items() if file.name != "__init__.py"}
    reached = {
        name: {one for one in imported_modules(file, modules) if one in inner}
        for name, file in inner.items()
    }
    changed = True
    while changed:
        changed = False
        for name, found in reached.items():
            further = set().union(found, *(reached[one] for one in found))
            if further != found:
                reached[name], changed = further, True
    found_circles = {
        tuple(sorted(one for one in reached[name] if name in reached[one]))
        for name in reached
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(found_circles)]


def commands() -> tuple[int, int]:
    """Return the number of commands of the program and of their arguments."""
    sys.path.insert(0, str(ROOT))
    table = importlib.import_module("lavis_mafa.cli").COMMANDS
    arguments = 0
    for module_name, _ in table.values():
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(module_name).add_arguments(parser)
        arguments += len(parser._actions)
    return len(table), arguments


def config_keys() -> int:
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    return len(re.findall(r"^- `", page.split("\n## Default YAMLs")[0], flags=re.M))


def executed_lines() -> int:
    """Return how many code lines of functions a tiny training with a real Con-D executes."""
    config = str(ROOT / "projects/mafa/train/albef_toy.yaml")
    with tempfile.TemporaryDirectory() as folder:
        small = [
            "datasets.toy_scenes.build_info.train_size=64",
            "datasets.toy_scenes.build_info.val_size=8",
            "run.batch_size_train=8",
            "run.max_epoch=2",
            "run.grit.queue_size=32",
            "run.grit.search_space=16",
            "run.grit.start_epoch=1",
            "run.test_splits=[]",
            "run.k_test=4",
            f"run.output_dir={folder}",
        ]
        con_d = [
            "model.mafa.con_d.arch=albef_mafa",
            "model.mafa.con_d.model_type=tiny",
            f"model.mafa.con_d.checkpoint={folder}/con_d/checkpoint_last.pth",
        ]
        command = [sys.executable, "-W", "ignore", str(Path(__file__)), "--trace"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        for options in (["run.job_id=con_d"], ["run.job_id=mafa", *con_d]):
            printed = subprocess.run(
                [*command, "train", "--cfg-path", config, "--options", *small, *options],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
            ).stdout
    return int(printed.splitlines()[-1])


def trace(arguments: list[str]) -> None:
    """Run the program and print how many code lines of functions were executed."""
    monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # Python 3.12
    seen: set[tuple[str, int]] = set()

    def note(code: CodeType, line: int) -> object:
        in_function = code.co_flags & inspect.CO_OPTIMIZED  # bodies of modules and classes are not
        if in_function and code.co_filename.startswith(str(PACKAGE)):
            seen.add((code.co_filename, line))
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "budget")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, note)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
    from lavis_mafa.cli import main

    status = main(arguments)
    if status:
        sys.exit(status)
    print(f"\n{len(seen)}")


def reason(name: str, figure: int) -> str:
    """Return the goal that a figure is above, and why it is; "" if it is not."""
    goal, why = GOALS.get(name, (figure, ""))
    return f"  goal {goal:,}: {why}" if figure > goal else ""


def rooms(package: Path) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for file in python_files(package):
        parts = file.relative_to(package).parts
        counts[parts[0] if len(parts) > 1 else "."] += len(code_lines(file))
    return dict(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--training", action="store_true", help="also trace a tiny training")
    args = parser.parse_args()
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    pages += sorted((ROOT / "docs").glob("*.md"))
    names = Counter(file.name for file in python_files(PACKAGE) if not file.name.startswith("__"))
    doubled = sorted(name for name, count in names.items() if count > 1)
    in_circles = circles()
    of_rooms = rooms(PACKAGE)
    research = python_files(ROOT / "research")
    listed, arguments = commands()
    figures = {
        "package": sum(of_rooms.values()) - of_rooms.get("downstream", 0),
        "downstream": of_rooms.get("downstream", 0),
        "research": code_of(research),
        "test code": code_of(python_files(ROOT / "tests")),
        "public names": sum(map(public_names, python_files(PACKAGE))),
        "config keys": config_keys(),
        "commands": listed,
        "words of docs": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "lines of README": len(pages[0].read_text(encoding="utf-8").splitlines()),
        "doubled file names": len(doubled),
        "circles of imports": len(in_circles),
        "YAML files": sum(1 for top in (PACKAGE, ROOT / "projects") for _ in top.rglob("*.yaml")),
    }
    if args.training:
        figures["lines executed"] = executed_lines()
    for room, count in sorted(of_rooms.items(), key=lambda one: -one[1]):
        print(f"  {count:6,}  {room:12}{reason(room, count)}")
    print(f"  {arguments:6,}  arguments of commands")
    if doubled:
        print("  doubled file names:", ", ".join(doubled))
    for circle in in_circles:
        print("  circle of imports:", ", ".join(circle))
    exceeded = 0
    print(f"\n{'':20} {'now':>8} {'limit':>8}")
    for name, figure in figures.items():
        above = figure > LIMITS[name]
        exceeded += above
        why = "  ABOVE ITS LIMIT" if above else reason(name, figure)
        print(f"{name:20} {figure:8,} {LIMITS[name]:8,}{why}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trace"]:
        trace(sys.argv[2:])
    else:
        sys.exit(main())
