"""Print the size and structure of the project beside limits and goals; exit with 1 above a limit.

    python3 run_scripts/budget.py               # what can be counted in the files
    python3 run_scripts/budget.py --training    # also the lines that a tiny training executes

Only the standard library is needed. Code is lines without blanks, comments and docstrings. Public
names are functions, classes and their methods that do not start with an underscore. A room imports
only rooms below it in `FLOORS`; imports inside functions are not counted. Golf is a literal that is
splatted into a call or a display, and a string or list multiplied by anything but a number.
"""

from __future__ import annotations

import argparse
import ast
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
from functools import cache
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lavis_mafa"

# Rooms from the top down, with the largest number of code lines of each: a limit rounded up to the
# next hundred, so that packing a line never meets it, and the goal.
FLOORS = {
    "commands": (800, 650),
    "tools": (2_900, 1_900),
    "downstream": (2_300, 2_000),
    "training": (2_500, 2_400),
    "settings": (1_500, 900),
    "toyworld": (800, 650),
    "tasks": (500, 700),
    "families": (2_000, 2_000),
    "judges": (1_200, 1_050),
    "checkpoints": (1_200, 1_150),
    "data": (3_100, 1_700),
    "integrations": (1_300, 900),
    "compat": (500, 500),
    "algorithm": (4_200, 3_600),
    "io": (800, 500),
}
# Limits and goals of the whole.
LIMITS = {
    "rooms": (15, 15),
    "package": (22_900, 19_000),
    "research": (4_000, 3_000),
    "test code": (31_300, 30_000),
    "public names": (1_100, 1_000),
    "config keys": (170, 170),
    "commands": (10, 10),
    "words of docs": (28_000, 28_000),
    "lines of README": (120, 120),
    "YAML files": (119, 119),
    "doubled file names": (0, 0),
    "circles": (0, 0),
    "upward imports": (0, 0),
    "golf": (0, 0),
    "lines executed": (4_200, 4_200),
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py")) if folder.is_dir() else []


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS):
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
    return lines - docstring_lines(parsed(file))


def code_of(files: Iterable[Path]) -> int:
    return sum(len(code_lines(file)) for file in files)


def public_names(file: Path) -> int:
    count = 0
    for node in parsed(file).body:
        if not isinstance(node, FUNCTIONS | ast.ClassDef) or node.name.startswith("_"):
            continue
        count += 1
        if isinstance(node, ast.ClassDef):
            methods = [one.name for one in node.body if isinstance(one, FUNCTIONS)]
            count += sum(not name.startswith("_") for name in methods)
    return count


def modules() -> dict[str, Path]:
    """Return the modules of the package by dotted name, a room's `__init__` by the room's."""
    found = {}
    for file in python_files(PACKAGE):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported_modules(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that are imported when a file is; not by its functions."""
    waiting: list[ast.AST] = [parsed(file)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            found: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [name if name in known else node.module for name in names]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif not isinstance(node, FUNCTIONS | ast.Lambda):
                waiting.append(node)
            yield from (name for name in found if name in known)


def circles() -> list[str]:
    """Return the sets of modules that import each other, type-checking imports included."""
    known = modules()
    # A room's `__init__` collects its modules, and so imports what imports it.
    inner = {name for name, file in known.items() if file.name != "__init__.py"}
    reached = {name: {*imported_modules(known[name], known)} & inner for name in inner}
    changed = True
    while changed:
        changed = False
        for name, found in reached.items():
            further = set().union(found, *(reached[one] for one in found))
            if further != found:
                reached[name], changed = further, True
    found_circles = {
        ", ".join(sorted(one for one in reached[name] if name in reached[one]))
        for name in reached
        if name in reached[name]
    }
    return sorted(found_circles)


def upward_imports() -> list[str]:
    """Return the imports of a room above the file's own, and those of a room that has no floor."""
    known, floors = modules(), list(FLOORS)
    found = []
    for name, file in known.items():
        parts = file.relative_to(PACKAGE).parts
        if len(parts) == 1:  # `cli.py` and the lazy package stand above all rooms
            continue
        for other in imported_modules(file, known):
            room = other.split(".")[1] if other.count(".") else ""
            if room == parts[0] or room == "_version":
                continue
            if room not in floors or parts[0] not in floors:
                found.append(f"{name} imports {other}, which is on no floor")
            elif floors.index(room) < floors.index(parts[0]):
                found.append(f"{name} imports {other}")
    return sorted(found)


def is_golf(node: ast.AST) -> bool:
    """Return whether an expression only serves to pack lines."""
    if isinstance(node, ast.Starred):
        return isinstance(node.value, ast.Tuple | ast.List)
    if isinstance(node, ast.Call):
        return any(one.arg is None and isinstance(one.value, ast.Dict) for one in node.keywords)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return any(key is None and isinstance(value, ast.Dict) for key, value in pairs)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        numbers = [isinstance(one, ast.Constant) and isinstance(one.value, int) for one in sides]
        texts = [
            isinstance(one, ast.List | ast.Tuple | ast.JoinedStr)
            or (isinstance(one, ast.Constant) and isinstance(one.value, str))
            for one in sides
        ]
        return any(texts) and not any(numbers)
    return False


def golf() -> list[str]:
    files = [*python_files(PACKAGE), *python_files(ROOT / "research")]
    return [
        f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for file in files
        for node in ast.walk(parsed(file))
        if is_golf(node)
    ]


def commands() -> int:
    """Return the number of commands of the program: the entries of `COMMANDS` in `cli.py`."""
    for node in parsed(PACKAGE / "cli.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            if [one.id for one in node.targets if isinstance(one, ast.Name)] == ["COMMANDS"]:
                return len(node.value.keys)
    raise ValueError("lavis_mafa/cli.py has no table COMMANDS")


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


def rooms(package: Path) -> dict[str, int]:
    """Return the code lines of every room, and of the files of no room under `.`."""
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
    listed = {
        "doubled file names": sorted(name for name, count in names.items() if count > 1),
        "circles": circles(),
        "upward imports": upward_imports(),
        "golf": golf(),
    }
    of_rooms = rooms(PACKAGE)
    figures = {
        "rooms": len(of_rooms) - ("." in of_rooms),
        "package": sum(of_rooms.values()) - of_rooms.get("downstream", 0),
        "research": code_of(python_files(ROOT / "research")),
        "test code": code_of(python_files(ROOT / "tests")),
        "public names": sum(map(public_names, python_files(PACKAGE))),
        "config keys": config_keys(),
        "commands": commands(),
        "words of docs": sum(
            len(page.read_text("utf-8").split()) for page in pages if page.exists()
        ),
        "lines of README": len(pages[0].read_text(encoding="utf-8").splitlines()),
        "YAML files": sum(1 for top in (PACKAGE, ROOT / "projects") for _ in top.rglob("*.yaml")),
        **{name: len(found) for name, found in listed.items()},
    }
    if args.training:
        figures["lines executed"] = executed_lines()
    exceeded = 0
    print(f"{'':20} {'now':>8} {'limit':>8} {'goal':>8}")
    rows = [(name, of_rooms.get(name, 0), *limits) for name, limits in FLOORS.items()]
    rows += [(name, figure, *LIMITS[name]) for name, figure in figures.items()]
    for name, figure, limit, goal in rows:
        exceeded += figure > limit
        above = "  ABOVE ITS LIMIT" if figure > limit else ""
        print(f"{name:20} {figure:8,} {limit:8,} {goal:8,}{above}")
    for name, found in listed.items():
        for one in found:
            print(f"{name}: {one}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trace"]:
        trace(sys.argv[2:])
    else:
        sys.exit(main())
